"""Islands with open models: what they compare before the first step, and a run of one alone."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_composer.local.islands.island import Island, IslandRefused, plain
from prime_composer.local.islands.lighthouse import open_lighthouse
from prime_composer.local.opening import open_engine
from prime_composer.local.student import Student
from prime_composer.local.train import train
from prime_composer.local.watch import open_watch
from prime_composer.problems.loading import load_problem_set
from prime_composer.recipe.diloco import DilocoConfig
from prime_composer.recipe.loading import parse_recipe
from prime_composer.tiny_models.cache import prepare_models
from tests.islands.rig import tables, together
from tests.local.helpers import Silent, run, weights

pytest.importorskip("torchft")
pytestmark = pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated")  # torchft's


def test_one_island_that_takes_every_step_over_is_a_run_by_itself(tmp_path: Path) -> None:
    """With outer lr 1 and no momentum an outer step after each step changes nothing."""
    diloco = {"replicas": 1, "every": 1, "outer_lr": 1.0, "outer_momentum": 0.0, "wait": 20.0}
    raw = tables(diloco=diloco, trainer__steps=4)
    recipe = parse_recipe(raw)
    assert recipe.diloco is not None
    problems = load_problem_set(recipe.sources)
    paths = prepare_models(recipe, problems)
    (tmp_path / "one").mkdir()
    with (
        open_lighthouse(recipe.diloco, "127.0.0.1", 0) as url,
        Island(recipe.diloco, 0, url, print) as island,
    ):
        assert island.join(recipe.model_dump(mode="json"), [0]) == 0
        display = Silent()
        train(recipe, problems, paths, tmp_path / "one", display, island=island)
    assert display.steps == [1, 2, 3, 4]
    run({key: table for key, table in raw.items() if key != "diloco"}, tmp_path / "plain")
    mine, theirs = weights(tmp_path / "one"), weights(tmp_path / "plain")
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"teacher": 7}, "island 1 has another teacher than island 0"),
        ({"data__seed": 5}, "[data] the problems of island"),
        ({"student": 8}, "[student] the weights at the start of island"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_islands_compare_what_they_have_opened(
    changes: dict[str, Any], words: str | None, at_board: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second island's recipe has other values; the tables are the same at the join."""
    monkeypatch.setattr(Island, "_open_outer_steps", lambda self: None)
    other = tables(**{k: v for k, v in changes.items() if "__" in k})
    for name, seed in changes.items():
        if "__" not in name:
            other[name]["prepare"]["seed"] = seed
    recipes = [parse_recipe(tables()), parse_recipe(other)]
    with ExitStack() as opened:
        meetings = []
        for index, recipe in enumerate(recipes):
            problems = load_problem_set(recipe.sources)
            paths = prepare_models(recipe, problems)
            engine = opened.enter_context(open_engine(recipe, problems, paths, lambda text: None))
            watch = open_watch(engine, recipe, lambda text: None)
            island = Island(DilocoConfig(replicas=2, wait=20.0), index, at_board, lambda text: None)

            def meet(island=island, recipe=recipe, engine=engine, watch=watch) -> Any:
                with island:
                    island.join({}, [0])
                    island.meet(Student.of_recipe(recipe, engine), engine, watch)
                    return watch.state_dict()

            meetings.append(meet)
        found = together(*meetings)
    if words is None:
        assert plain(found[0]) == plain(found[1])
    else:
        assert all(isinstance(error, IslandRefused) for error in found), found
        assert any(words in str(error) for error in found), found


@pytest.mark.parametrize("index", [0, 1])
def test_late_island_with_another_teacher_is_refused(
    index: int, at_board: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its number: those that train have compared theirs before it came."""
    monkeypatch.setattr(Island, "_open_outer_steps", lambda self: None)
    facts: dict[int, Any] = {}
    for seed, number in ((7, 1 - index), (8, index)):
        raw = tables()
        raw["teacher"]["prepare"]["seed"] = seed
        recipe = parse_recipe(raw)
        problems = load_problem_set(recipe.sources)
        paths = prepare_models(recipe, problems)
        cards = {other: {"facts": own} for other, own in facts.items()}
        monkeypatch.setattr(Island, "_gather", lambda self, key, cards=cards: cards)
        with (
            open_engine(recipe, problems, paths, lambda text: None) as engine,
            Island(DilocoConfig(replicas=2), number, at_board, lambda text: None) as island,
        ):
            island.is_late = bool(cards)
            watch = open_watch(engine, recipe, lambda text: None)
            student = Student.of_recipe(recipe, engine)
            if cards:
                with pytest.raises(IslandRefused, match="has another teacher than island"):
                    island.meet(student, engine, watch)
            else:
                island.meet(student, engine, watch)
                facts[number] = island._seat._card["facts"]
