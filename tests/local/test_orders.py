"""The environment of recipes/agent_opd.toml: its tasks, rewards, and what models learn of it."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prime_composer.backends.hf_model import import_transformers
from prime_composer.backends.protocols import Rollout
from prime_composer.local.probe.report import ModelFacts
from prime_composer.local.probe.teacher import Target, equal_prompts
from prime_composer.local.sources import load_sources, problems_to_prepare
from prime_composer.local.tokenized_problems import TokenizedProblems
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.orders import Order, draw_orders
from prime_composer.recipe.environment import EnvironmentConfig
from prime_composer.recipe.loading import load_recipe, parse_recipe
from prime_composer.recipe.schema import RecipeError
from prime_composer.step.batch import Sample
from prime_composer.tiny_models.training import train_tokenizer
from prime_composer.tiny_models.transcripts import example_of
from tests.environments.kit import ENVIRONMENTS, WARNINGS

import_transformers()  # before verifiers, which would import it beside a broken torchvision
pytest.importorskip("verifiers.v1", reason="environments by id need verifiers: the extra [env]")

from prime_composer.environments.opening import open_environment  # noqa: E402

pytestmark = WARNINGS

REPO = Path(__file__).parents[2]
RECIPE = REPO / "recipes" / "agent_opd.toml"
ID = "prime-composer-orders"


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put the module where the wheel puts it, for this process and for the tools' server."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(REPO / "prime_composer" / "upstream" / "prime_composer_orders.py", folder)
    with pytest.MonkeyPatch.context() as patch:
        for path in (ENVIRONMENTS, folder):
            patch.syspath_prepend(str(path))
            patch.setenv("PYTHONPATH", str(path), prepend=":")
        yield


@pytest.fixture(scope="module")
def problems(installed: None) -> ProblemSet:
    """Return what the recipe trains and tests on."""
    return load_sources(load_recipe(RECIPE))


def test_prepare_reads_the_same_as_a_run(problems: ProblemSet) -> None:
    """`prepare` and `export` find the models that a run has built."""
    prepared = problems_to_prepare(load_recipe(RECIPE))
    assert prepared is not None and prepared.worked == problems.worked


@pytest.mark.parametrize(
    ("reply", "reward"), [(" {}\n", 1.0), ("{} coins", 0.0), ("1{}", 0.0), ("", 0.0)]
)
def test_reward_wants_the_cost_alone(reply: str, reward: float) -> None:
    """White space around it does not count."""
    environment = open_environment("orders", EnvironmentConfig(id=ID))
    order, task = draw_orders("train")[0], environment.tasks[0]
    trace = SimpleNamespace(last_reply=reply.format(order.answer))
    assert asyncio.run(task.correct(trace)) == reward


def test_renderer_writes_a_transcript_as_it_was_learned(
    problems: ProblemSet, tmp_path: Path
) -> None:
    """The library that renders the turns of a run gives the same tokens, at every turn.

    It parses the calls and answers of a transcript as the messages that they are.
    """
    from renderers import create_renderer
    from renderers.configs import DefaultRendererConfig

    tokenizer = train_tokenizer(problems, 415)
    renderer = create_renderer(tokenizer, DefaultRendererConfig(tool_parser="qwen3"))
    (end,) = renderer.get_stop_token_ids()
    for task in problems.worked[:10]:
        transcript = task.transcript or ""
        ids, learned = example_of(transcript, tokenizer)
        messages = json.loads(transcript)
        seen = 0
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = list(renderer.render(messages[:index], add_generation_prompt=True).token_ids)
            turn = ids[len(prompt) : ids.index(end, len(prompt)) + 1]
            assert ids[: len(prompt)] == prompt
            assert learned[seen : len(prompt)] == [False] * (len(prompt) - seen)
            assert learned[len(prompt) : len(prompt) + len(turn)] == [True] * len(turn)
            seen = len(prompt) + len(turn)
            parsed = renderer.parse_response(turn)
            assert (parsed.content or None) == message["content"]
            calls = [(call.name, call.arguments) for call in parsed.tool_calls or ()]
            assert calls == [
                (call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in message.get("tool_calls", ())
            ]
        assert seen == len(ids) == len(learned)


def test_probe_compares_the_prompts_of_tasks(problems: ProblemSet) -> None:
    """A teacher with another template writes other prompts."""
    own, other = (train_tokenizer(problems, 415) for _ in range(2))
    tokenized = TokenizedProblems(problems, own)
    rollout = Rollout(torch.tensor([0]), torch.tensor([True]), torch.tensor([0.0]), "stop", 0)
    samples = [Sample(rollout, task, "", 0.0) for task in problems.held_out[:3]]
    facts = ModelFacts("t", "transformers", "float32")
    other.chat_template = "{{ messages[0].content }}"
    same, differs = (
        equal_prompts(Target("teacher", facts, None, samples, 1.0, lambda: one), tokenized)  # noqa: B023
        for one in (own, other)
    )
    assert same and not differs


def prepared(**environments: Any) -> dict[str, Any]:
    """Return a recipe whose models are built from what the environments teach."""
    return {
        "student": {"prepare": {"layers": 1}},
        "teacher": {"model": "t"},
        "loss": {"type": "topk_reverse_kl", "k": 4},
        "environments": environments,
        "trainer": {"steps": 3},
    }


def test_load_sources_environment_without_solutions_is_refused() -> None:
    """Its tasks say nothing that a small model could learn from."""
    table = prepared(talk={"id": "tiny-talk"})
    with pytest.raises(RecipeError, match=r"\[environments\.talk\].*no method `solution`"):
        load_sources(parse_recipe(table))


def test_load_sources_solution_that_fails_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the environment and the error."""

    def fail(order: Order) -> None:
        raise KeyError("no price")

    monkeypatch.setattr(Order, "solution", fail)
    table = prepared(orders={"id": ID})
    with pytest.raises(RecipeError, match=r"\[environments\.orders\].*`solution` fails.*no price"):
        load_sources(parse_recipe(table))


def test_load_sources_models_of_other_environments_learn_from_them_alone() -> None:
    """Then the tasks are played and nothing of them is learned."""
    table = prepared(orders={"id": ID}, sums={"size": 40})
    table["student"]["prepare"]["environments"] = ["sums"]
    sources = load_sources(parse_recipe(table))
    assert {problem.environment for problem in sources.worked} == {"sums"}
    table["student"]["prepare"]["environments"] = ["orders"]
    sources = load_sources(parse_recipe(table))
    assert {problem.environment for problem in sources.worked} == {"sums", "orders"}
