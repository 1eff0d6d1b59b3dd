"""Islands within this process: the join, what is compared, outer steps; and the commands."""

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from prime_composer.local.islands import join as join_module
from prime_composer.local.islands.island import Island
from prime_composer.local.islands.join import IslandRefused, open_lighthouse
from prime_composer.local.islands.outer import OuterSteps
from prime_composer.local.opening import open_engine
from prime_composer.local.student import Student
from prime_composer.local.train import train
from prime_composer.local.watch import open_watch
from prime_composer.problems.loading import load_problem_set
from prime_composer.recipe.loading import parse_recipe
from prime_composer.samplers.server import ServerSampler
from prime_composer.tiny_models.cache import prepare_models
from tests.islands.rig import tables, together
from tests.local.helpers import Silent, run, weights

pytest.importorskip("torchft")
pytestmark = pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated")  # torchft's
WAIT = {"diloco__wait": 20.0, "diloco__timeout": 10.0}


def test_outer_step_is_nesterov_on_the_mean_of_changes() -> None:
    """By hand: two islands go down by 1 and 2 a step, three steps each, outer lr .7, momentum .5.

    The mean of the pseudo-gradients is 4.5 each time. Outer step t moves by
    .7 (4.5 + .5 m_t), with m_t = 4.5 + .5 m_(t-1). What does not train is not averaged.
    """
    steps = {"trainer__steps": 9, "checkpoint__every": 3, "eval__every": 3}
    recipe = parse_recipe(tables(diloco__every=3, **steps, **WAIT))
    assert recipe.diloco is not None
    config = recipe.diloco

    def descend(index: int, url: str) -> list[float]:
        model = nn.Linear(3, 1)
        nn.init.ones_(model.weight)
        outer = OuterSteps(config, index, url, [model.weight], dict, lambda state: None)
        seen = []
        for _ in range(9):
            with torch.no_grad():
                model.weight -= index + 1.0
                model.bias.fill_(index)
            outer.count_step()
            seen.append(model.weight.detach()[0, 0].item())
        assert outer.manager.current_step() == 3 and model.bias.item() == index
        outer.close()
        return seen

    with open_lighthouse(recipe, "127.0.0.1", 0) as url:
        one, other = together(lambda: descend(0, url), lambda: descend(1, url))
    value, buffer = 1.0, 0.0
    for outer in range(3):
        buffer = 4.5 + 0.5 * buffer
        inner = [value - 2.0, value - 4.0]
        value -= 0.7 * (4.5 + 0.5 * buffer)
        assert other[3 * outer : 3 * outer + 3] == pytest.approx([*inner, value], rel=1e-6)
        assert one[3 * outer + 2] == other[3 * outer + 2]


def joined(*starts: list[int], **changes: Any) -> list[Any]:
    """Let islands join with steps to start from; ``changes`` are the last one's alone."""
    recipes = [parse_recipe(tables(diloco__replicas=len(starts), diloco__wait=9.0))] * len(starts)
    recipes[-1] = parse_recipe(tables(diloco__replicas=len(starts), diloco__wait=9.0, **changes))

    def one(index: int, url: str) -> int | None:
        with Island(recipes[index], index, url, lambda text: None) as island:
            return island.join(starts[index])

    with open_lighthouse(recipes[0], "127.0.0.1", 0) as url:
        return together(*(lambda i=i: one(i, url) for i in range(len(starts))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("starts", "changes", "words"),
    [
        (([20, 40, 60], [20, 40], [20, 40, 60]), {"output_dir": "there"}, ["40"]),
        (([20, 40], [0]), {}, ["'island 0': [20, 40]", "--resume on all"]),
        (([0], [0]), {"trainer__lr": 2.0}, ["the recipe of island", "--set"]),
        (([0], [0]), {"diloco__timeout": 2.0}, ["the recipe of island", "--set"]),
    ],
)
def test_islands_start_together_or_are_refused(
    starts: Any, changes: dict[str, Any], words: list[str]
) -> None:
    """From the newest step that all have. Where things are may differ. Others are refused."""
    found = joined(*starts, **changes)
    assert all(isinstance(one, int | IslandRefused) for one in found), found
    assert all(word in str(one) for word in words for one in found), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"teacher": 7}, "has another teacher than island"),
        ({"data__seed": 5}, "the problems of island"),
        ({"student": 8}, "the student's weights at the start of island"),
        ({"sampler": 1.5}, "have one sampler at their rollout.url"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_islands_compare_what_they_have_opened(
    changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second island's recipe has other values; the tables are the same at the join."""
    monkeypatch.setattr(join_module, "recipe_digest", lambda recipe: "same")
    raw = tables(**WAIT, **{key: value for key, value in changes.items() if "__" in key})
    for name in {"teacher", "student"} & changes.keys():
        raw[name]["prepare"]["seed"] = changes[name]
    recipes = [parse_recipe(tables(**WAIT)), parse_recipe(raw)]
    with ExitStack() as opened:
        url = opened.enter_context(open_lighthouse(recipes[0], "127.0.0.1", 0))
        meetings = []
        for index, recipe in enumerate(recipes):
            problems = load_problem_set(recipe.sources)
            paths = prepare_models(recipe, problems)
            engine = opened.enter_context(open_engine(recipe, problems, paths, lambda text: None))
            watch = open_watch(engine, recipe, lambda text: None)
            island = Island(recipe, index, url, lambda text: None)
            if "sampler" in changes:
                server = Mock(spec=ServerSampler, **{"started.return_value": "1.5"})
                engine = replace(engine, sampler=server)

            def meet(island=island, recipe=recipe, engine=engine, watch=watch) -> None:
                with island:
                    island.join([0])
                    island.meet(Student(recipe, engine), engine, watch)

            meetings.append(meet)
        found = together(*meetings)
    assert found == [None, None] if not words else all(words in str(one) for one in found), found


def test_island_that_left_is_outside_of_torchft() -> None:
    """A thread in there while Python ends aborts the process, after all its steps (seen)."""
    begun, ended = Event(), Event()

    def quorum(*_: object, **__: object) -> None:
        begun.set()
        time.sleep(0.5)
        ended.set()
        raise TimeoutError

    recipe = parse_recipe(tables())
    with open_lighthouse(recipe, "127.0.0.1", 0) as url, Island(recipe, 0, url, print) as island:
        island._join._client = Mock(quorum=quorum)
        assert begun.wait(10)
    assert ended.is_set()


@pytest.mark.slow
def test_island_alone_with_every_step_taken_over_is_a_run(tmp_path: Path) -> None:
    """With outer lr 1 and no momentum an outer step after each step changes nothing."""
    diloco = {"replicas": 1, "every": 1, "outer_lr": 1.0, "outer_momentum": 0.0, "wait": 20.0}
    raw = tables(diloco=diloco, trainer__steps=4)
    recipe = parse_recipe(raw)
    problems = load_problem_set(recipe.sources)
    paths, out = prepare_models(recipe, problems), tmp_path / "one"
    out.mkdir()
    with open_lighthouse(recipe, "127.0.0.1", 0) as url, Island(recipe, 0, url, print) as island:
        assert island.join([0]) == 0
        train(recipe, problems, paths, out, Silent(), island=island)
    run({key: table for key, table in raw.items() if key != "diloco"}, tmp_path / "plain")
    mine, theirs = weights(out), weights(tmp_path / "plain")
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-5, atol=1e-6)
