"""Whole runs with environments of verifiers, and how their rollouts are graded."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from prime_composer.backends.hf_model import import_transformers, load_model
from prime_composer.backends.protocols import Sampler, SamplingParams
from prime_composer.environments.episodes import EnvironmentFailed, Episode, Failure
from prime_composer.environments.tasks import Task
from prime_composer.local.checkpoint import list_checkpoints
from prime_composer.local.collect import Collector
from prime_composer.local.engine import Engine
from prime_composer.local.evaluate import Evaluator
from prime_composer.local.opening import open_engine
from prime_composer.local.sources import ProblemsAndTasks, load_sources
from prime_composer.local.tokenized_problems import TokenizedProblems
from prime_composer.local.train import train
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import RecipeError
from tests.command import numbers
from tests.conftest import TINY_RECIPE, changed
from tests.environments.kit import (
    SUMMARY,
    WARNINGS,
    Scripted,
    save_student,
)
from tests.faults.server import SpoilingServer
from tests.local.helpers import Silent, weights
from tests.local.helpers import rollout as a_rollout
from tests.local.test_ahead import BESIDE, one_after_the_other
from tests.vllm_process import VllmProcess

import_transformers()  # before verifiers, which would import it beside a broken torchvision
pytest.importorskip("verifiers.v1", reason="environments by id need verifiers: the extra [env]")

from prime_composer.environments.runner import Environments  # noqa: E402

pytestmark = WARNINGS

PARAMS = SamplingParams(max_tokens=200)


def test_play_failed_rollout_is_no_part_of_its_group() -> None:
    """The mean reward of a group is that of the rollouts that ended; the others are counted."""
    tasks = [Task("?", "", "talk", index=index) for index in range(2)]
    outcomes = [episode(3.0), Failure("broken"), episode(5.0), *[Failure("broken")] * 3]
    engine = engine_of(outcomes)
    collector = Collector(engine, parse_recipe(changed(TINY_RECIPE, rollout__group_size=3)))
    samples = collector.sample(tasks, step=1)
    assert [one.reward for one in samples] == [3.0, 5.0]
    assert [one.advantage for one in samples] == [-1.0, 1.0]
    assert collector.metrics["rollout/failed"] == pytest.approx(4 / 6)
    outcomes[:] = [Failure("broken")] * 6
    with pytest.raises(EnvironmentFailed, match=r"step 1: every rollout failed.*broken"):
        collector.sample(tasks, step=1)


def test_train_tool_that_writes_a_special_text_is_counted(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    """Words of an environment that `renderers` makes a special token are counted by rollout."""
    raw = copy.deepcopy(raw)
    raw["environments"]["talk"]["args"]["script"] = ["go <|im_end|> on"]
    assert [one["rollout/special_texts"] for one in run(raw, tmp_path / "run")[1:]] == [1, 1]


def test_student_evaluation_leaves_failed_rollouts_out() -> None:
    """The mean reward is that of the tasks that ended, and the share of the others is told."""
    tasks = [Task("?", "", "talk", index=index) for index in range(4)]
    outcomes = [episode(3.0), Failure("broken"), episode(5.0), Failure("broken")]
    engine = engine_of(outcomes)
    engine.problems = TokenizedProblems(ProblemsAndTasks([], tasks, {}), None)
    evaluator = Evaluator(engine, parse_recipe(TINY_RECIPE))
    measured = evaluator.student()
    counts = {"eval/turns": 1.0, "eval/tool_calls": 0.0}
    assert measured == {"eval/accuracy": 4.0, "eval/truncated": 0.0, "eval/failed": 0.5} | counts
    outcomes[:] = [Failure("broken")] * 4
    with pytest.raises(EnvironmentFailed, match="every task of the evaluation failed"):
        evaluator.student()


def engine_of(outcomes: list[Episode | Failure]) -> Any:
    """Return an engine whose environments give these outcomes, whatever they are asked."""
    return Mock(
        spec=Engine,
        sampler=Mock(spec=Sampler),
        teachers=None,
        problems=SimpleNamespace(tokenizer=None),
        environments=SimpleNamespace(run=lambda *args: outcomes),
    )


def episode(reward: float) -> Episode:
    return Episode([a_rollout(0)], reward, "text", 1, 0, False)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a recipe of two steps with a teacher, two turns, and problems beside them."""
    folder = tmp_path_factory.mktemp("models")
    recipe = copy.deepcopy(TINY_RECIPE)
    del recipe["data"]
    recipe["student"] = {"model": str(save_student(folder / "student", 1))}
    recipe["teacher"] = {"model": str(save_student(folder / "teacher", 2))}
    recipe["rollout"] |= {"max_model_len": 512, "group_size": 2}
    recipe["trainer"] |= {"steps": 2, "batch_size": 4}
    recipe["eval"] |= {"every": 0}
    recipe["checkpoint"] = {"every": 1}
    recipe["environments"] = {
        "talk": {"id": "tiny-talk", "args": {"script": ["go on"], "tasks": 3}}
    }
    return recipe


def run(
    raw: dict[str, Any], run_dir: Path, display: Silent | None = None, resume: bool = False
) -> list[dict[str, float]]:
    """Train, and return what was measured; ``resume`` continues the newest checkpoint."""
    run_dir.mkdir(exist_ok=True)
    recipe = parse_recipe(raw)
    checkpoint = list_checkpoints(run_dir)[-1] if resume else None
    train(recipe, load_sources(recipe), {}, run_dir, display or Silent(), resume=checkpoint)
    return numbers(run_dir)


def test_teacher_reads_its_own_prompt_of_each_turn(raw: dict[str, Any], tmp_path: Path) -> None:
    """Each answer is scored behind the messages before it as the teacher's template has them.

    The reference takes the messages from the student's text, and log q from transformers.
    """
    template = tmp_path / "teacher.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[me]{% endif %}"
    )
    prompt = {"chat_template": str(template), "system": "Be kind."}
    recipe = parse_recipe(raw | {"teacher": raw["teacher"] | {"prompt": prompt}})
    folder = raw["teacher"]["model"]
    teacher = load_model(folder, "float32", "cpu").double()
    with open_engine(recipe, load_sources(recipe), {}, lambda _: None) as engine:
        tokenizer = engine.problems.tokenizer
        tasks = engine.problems.problem_set.practice
        told = Scripted(tokenizer, lambda text: "two" if "go on" in text else "one", 512)
        outcomes = engine.environments.run(told, tasks, PARAMS, 3)
        rollouts = [one for outcome in outcomes for one in outcome.rollouts]
        of_rollout = [tasks[one.prompt_index] for one in rollouts]
        found = engine.teachers.score(rollouts, of_rollout, 8)
    assert any(len(one.turns) == 2 for one in rollouts), "two answers in one rollout"
    for rollout, scores in zip(rollouts, found, strict=True):
        ends = [*(turn.start for turn in rollout.turns), len(rollout.token_ids)]
        for start, after in zip(ends, ends[1:], strict=False):
            mask = rollout.loss_mask[start:after]
            answer = rollout.token_ids[start:after][mask]
            text = tokenizer.decode(rollout.token_ids[:start].tolist())
            read = "[system]Be kind.\n"
            for said in text.split("<|im_start|>")[1:-1]:
                role, _, content = said.partition("\n")
                read += f"[{role}]{content.partition('<|im_end|>')[0]}\n"
            before = tokenizer.encode(f"{read}[me]", add_special_tokens=False)
            with torch.no_grad():
                logits = teacher(torch.tensor([[*before, *answer.tolist()]])).logits[0]
            rows = logits[len(before) - 1 : -1].log_softmax(-1)
            own = scores.rows(slice(start - rollout.start, start - rollout.start + len(answer)))
            assert scores.scored is None or bool(scores.scored[start - rollout.start])
            expected = rows.gather(1, own.token_ids)
            torch.testing.assert_close(own.teacher_logprobs.double(), expected, atol=2e-5, rtol=0)


def test_train_two_turns_with_a_teacher(raw: dict[str, Any], tmp_path: Path) -> None:
    """A whole run: every turn is scored and trained on, and counts are in the metrics."""
    records = run(raw, tmp_path / "run")
    for record in records[1:]:
        assert record["rollout/turns"] == 2
        assert record["rollout/samples"] >= 1
        assert (record["rollout/failed"], record["rollout/special_texts"]) == (0, 0)
        assert record["topk_reverse_kl/kl"] > 0
        assert record["sampler/mismatch_kl"] < 1e-3
    assert records[0]["eval/failed"] == 0
    assert (records[0]["eval/turns"], records[0]["eval/tool_calls"]) == (2, 0)
    assert (records[0]["teacher/turns"], records[0]["teacher/tool_calls"]) == (2, 0)
    assert records[-1]["eval/reverse_kl"] > 0


def test_train_environment_resumes_to_the_same_numbers(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after two of four steps, a run ends with the numbers and weights of a whole one.

    The checkpoint's directory chooses no other renderer than the student's name did.
    """
    from prime_composer.environments import runner as environments

    models: list[str] = []
    init = Environments.__init__

    def keep_model(self: Any, opened: Any, model: str, *others: Any) -> None:
        models.append(model)
        init(self, opened, model, *others)

    monkeypatch.setattr(environments.Environments, "__init__", keep_model)
    longer = copy.deepcopy(raw)
    longer["trainer"] |= {"steps": 4, "lr": 1e-2}
    longer["eval"] |= {"every": 1}
    longer["environments"]["sums"] = {"source": "generated", "size": 40, "chat_template": True}
    whole = run(longer, tmp_path / "whole")
    assert {"eval/accuracy/talk", "eval/accuracy/sums"} <= whole[-1].keys()
    cut = run(longer, tmp_path / "cut", Silent(interrupt_at=3))
    assert [record["step"] for record in cut] == [0, 1, 2]
    assert run(longer, tmp_path / "cut", resume=True) == whole
    expected, resumed = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    assert models == [raw["student"]["model"]] * 3


def test_train_environment_ahead_is_as_stale_as_a_loop_in_one_thread(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    """Tasks and problems that are played two steps ahead, also after a resume."""
    own = copy.deepcopy(raw)
    own["rollout"] |= BESIDE | {"ahead": 2}
    own["teacher"]["backend"] = "transformers"
    own["trainer"] |= {"steps": 4, "lr": 1e-2, "batch_size": 8}
    own["eval"] |= {"every": 2}
    own["environments"]["sums"] = {"source": "generated", "size": 40, "chat_template": True}
    _, *records = run(own, tmp_path / "whole")
    rows, final = one_after_the_other(own, behind=2)
    for record, row in zip(records, rows, strict=True):
        assert {key: record[key] for key in row if key in record} == row
        assert {"loss", "rollout/turns", "rollout/reward/talk", "rollout/reward/sums"} <= row.keys()
    assert [record["rollout/staleness"] for record in records] == [0, 1, 2, 2]
    trained = weights(tmp_path / "whole")
    assert all(torch.equal(trained[name], value) for name, value in final.items())
    run(own, tmp_path / "cut", Silent(interrupt_at=3))
    _, *resumed = run(own, tmp_path / "cut", resume=True)
    rows, _ = one_after_the_other(own, behind=2, resumed=2)
    for record, row in zip(resumed, rows, strict=True):
        assert {key: record[key] for key in row if key in record} == row
    assert [record["rollout/staleness"] for record in resumed] == [0, 1, 0, 1]


def served(raw: dict[str, Any], server: SpoilingServer | VllmProcess) -> dict[str, Any]:
    """Return the recipe with rollouts of a server, and steps that move the weights."""
    recipe = copy.deepcopy(raw)
    recipe["rollout"] |= {"backend": "server", "url": server.url}
    recipe["teacher"]["backend"] = "transformers"
    recipe["trainer"] |= {"steps": 3, "lr": 1e-2}
    return recipe


def test_train_environment_with_a_served_student(raw: dict[str, Any], tmp_path: Path) -> None:
    """Turns of a server are sampled as token ids, with its log-probs and the newest weights.

    Its log mu is the trainer's log-prob of the same ids in every step, also after updates.
    """
    with SpoilingServer(raw["student"]["model"]) as server:
        _, *steps = run(served(raw, server), tmp_path / "run")
    assert server.requests["/collective_rpc"] >= 3
    assert server.requests["/v1/completions"] > 2 * 4 * 3
    assert_own_turns(steps, largest_mismatch=1e-6)


def assert_own_turns(steps: list[dict[str, float]], largest_mismatch: float) -> None:
    """Check that every rollout had its two turns, sampled with the weights of the trainer."""
    for record in steps:
        assert record["rollout/turns"] == 2
        assert (record["rollout/failed"], record["rollout/special_texts"]) == (0, 0)
        assert abs(record["sampler/mismatch_kl"]) < largest_mismatch


def test_train_conversation_fills_the_context_of_all_models(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last turn ends where the teacher's window does, one token before the student's."""
    from prime_composer.local import engine

    longest: list[int] = []
    score = engine.Teachers.score

    def keep_lengths(self: Any, rollouts: Any, *others: Any, **named: Any) -> Any:
        longest.append(max(len(rollout.token_ids) for rollout in rollouts))
        return score(self, rollouts, *others, **named)

    monkeypatch.setattr(engine.Teachers, "score", keep_lengths)
    full = copy.deepcopy(raw)
    full["rollout"] |= {"max_tokens": 40, "max_model_len": 140}
    full["environments"]["talk"]["args"]["script"] = SUMMARY
    full["trainer"]["steps"] = 1
    records = run(full, tmp_path / "run")
    assert max(longest) == 139
    assert records[-1]["rollout/truncated"] > 0


def test_train_environment_that_always_fails_ends_the_run(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    """No step is trained on nothing: the run ends with the environment and the reason."""
    broken = copy.deepcopy(raw)
    broken["environments"]["talk"]["args"] = {"script": [{"raise": "broken"}]}
    with pytest.raises(EnvironmentFailed, match="failed"):
        run(broken, tmp_path / "run")


def test_load_sources_use_decides_what_is_trained_on(raw: dict[str, Any]) -> None:
    """`eval` gives no task to train on, and `train` none to evaluate."""
    own = copy.deepcopy(raw)
    talk = own["environments"]["talk"]
    own["environments"] = {
        "learnt": {**talk, "use": "train"},
        "asked": {**talk, "use": "eval", "args": {"tasks": 2}},
    }
    sources = load_sources(parse_recipe(own))
    assert isinstance(sources, ProblemsAndTasks)
    assert [task.environment for task in sources.practice] == ["learnt"] * 3
    assert [task.environment for task in sources.held_out] == ["asked"] * 2


def test_load_sources_recipe_that_needs_problems_is_refused(raw: dict[str, Any]) -> None:
    of_teacher = {"student_fraction": 0.5, "other_source": "teacher", "group_size": 2}
    own = raw | {"loss": {"type": "generalized_jsd", "k": 4}}
    own["rollout"] = raw["rollout"] | of_teacher
    with pytest.raises(RecipeError, match="only the student"):
        load_sources(parse_recipe(own))
