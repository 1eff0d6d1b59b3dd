"""Several teachers and environments in one run: who scores, what is measured, what is refused."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prime_composer.local import evaluate as evaluate_module
from prime_composer.local import tokenized_problems
from prime_composer.local.engine import Engine
from prime_composer.local.evaluate import Evaluator, Graded
from prime_composer.local.preflight import preflight
from prime_composer.local.tracker import read_metrics
from prime_composer.problems.config import Problem
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.routing import TeacherId
from prime_composer.recipe.schema import Recipe, RecipeError
from prime_composer.teachers.compatibility import PreflightError
from tests.conftest import TINY_MODEL
from tests.local.helpers import open_run, run

SHORT, LONG = TeacherId("short"), TeacherId("long")


def raw(**changes: Any) -> dict[str, Any]:
    """Return the tables of a recipe with two teachers, with ``section__key=value`` changes."""
    table: dict[str, Any] = {
        "student": {"prepare": {**TINY_MODEL, "sft_steps": 5, "seed": 2}},
        "teachers": {
            "short": {"prepare": {**TINY_MODEL, "environments": ["sums"]}, "weight": 1.0},
            "long": {"prepare": {**TINY_MODEL, "environments": ["chains"]}, "weight": 3.0},
        },
        "environments": {
            "sums": {"size": 40, "operations": [1], "teacher": "short"},
            "chains": {
                "size": 40,
                "operations": [2, 3],
                "teacher": "long",
                "prompt_template": "Q: {question}\nA:",
            },
        },
        "loss": {"type": "topk_reverse_kl", "k": 8},
        "rollout": {"backend": "transformers", "max_tokens": 8, "max_model_len": 128},
        "trainer": {"steps": 2, "batch_size": 6, "lr": 1e-3},
        "eval": {"every": 1, "size": 8, "kl_size": 6},
        "logging": {"tensorboard": False},
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        inner = table
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return table


@pytest.fixture(scope="module")
def opened() -> Iterator[tuple[Recipe, Engine]]:
    """The recipe with its engine open."""
    recipe, engine = open_run(raw())
    with engine:
        yield recipe, engine


def test_two_teachers_of_two_environments_train_one_student(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer is checked as its own environment says, and every mean is also given for each."""
    checked = set()

    def judge(text: str, problem: Problem, config: Any, budget: Any) -> float:
        checked.add((problem.environment, config.prompt_template))
        budget.timeouts += 1
        return float(problem.environment == "sums")

    monkeypatch.setattr(tokenized_problems, "reward", judge)
    table = raw(environments__sums__metric="math_verify")
    outcome = run(table, tmp_path)
    environments = parse_recipe(table).environments
    assert checked == {(name, data.prompt_template) for name, data in environments.items()}
    first = outcome.evaluations[0]
    for name in ("eval/accuracy", "eval/reverse_kl", "teacher/accuracy"):
        assert {f"{name}/{environment}" for environment in environments} <= first.keys()
    assert {"teacher/short/accuracy", "teacher/long/accuracy"} <= first.keys()
    names = ("eval/accuracy", "eval/accuracy/sums", "eval/accuracy/chains")
    assert [first[name] for name in names] == [0.5, 1.0, 0.0]
    step = next(record for record in read_metrics(tmp_path) if "loss" in record)
    names = ("rollout/reward", "rollout/reward/sums", "rollout/reward/chains")
    assert [step[name] for name in names] == [0.5, 1.0, 0.0]
    assert step["rollout/answer_timeouts"] == 6.0  # of one budget


def test_teacher_accuracy_is_over_the_problems_of_its_share(
    opened: tuple[Recipe, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each teacher answers what it has a share in; a mixture has no accuracy of its own."""
    recipe, engine = opened
    problems = engine.problems.problem_set.held_out[:3]
    assert [problem.environment for problem in problems] == ["sums", "chains", "sums"]
    correct = {problems[0].question}
    answered = []

    def answers(self: Evaluator, sampler: Any, asked: list[Problem]) -> Any:
        answered.append([problem.question for problem in asked])
        return [Graded(problem, float(problem.question in correct)) for problem in asked]

    monkeypatch.setattr(evaluate_module.Evaluator, "_greedy_answers", answers)
    small = recipe.eval.model_copy(update={"size": 3})
    evaluator = Evaluator(engine, recipe.model_copy(update={"eval": small}))
    assert evaluator.teachers() == {
        "teacher/short/accuracy": 0.5,
        "teacher/long/accuracy": 0.0,
        "teacher/accuracy": pytest.approx(1 / 3),
        "teacher/accuracy/sums": 0.5,
        "teacher/accuracy/chains": 0.0,
    }
    assert answered == [[problems[0].question, problems[2].question], [problems[1].question]]

    both = {SHORT: 0.5, LONG: 0.5}
    monkeypatch.setitem(engine.teachers.routing.shares, "chains", both)
    assert evaluator.teachers() == {
        "teacher/short/accuracy": pytest.approx(1 / 3),
        "teacher/long/accuracy": 0.0,
    }


def test_balanced_step_weights_its_environments_alike(tmp_path: Path) -> None:
    """Whatever their tokens. The other losses of the step stay those of the same rollouts."""
    small = {"trainer__steps": 1, "eval__every": 0, "environments__sums__ratio": 2.0}
    records = {}
    for name, balance in (("plain", None), ("balanced", {"weights": {"chains": 3.0}})):
        table = raw(**small)
        if balance is not None:
            table["loss"]["balance"] = balance
        (tmp_path / name).mkdir()
        run(table, tmp_path / name)
        records[name] = read_metrics(tmp_path / name)[1]
    plain, balanced = records["plain"], records["balanced"]
    shares = {name: plain[f"rollout/token_share/{name}"] for name in ("sums", "chains")}
    assert sum(shares.values()) == pytest.approx(1) and shares["sums"] > 0.4
    # Step 1 is the last one, which is evaluated.
    gradients = [plain[f"rollout/gradient_share/{name}"] for name in ("sums", "chains")]
    assert sum(gradients) == pytest.approx(1) and min(gradients) > 0
    assert balanced["rollout/weight_share/chains"] == pytest.approx(0.75)
    assert "rollout/weight_share/chains" not in plain
    assert balanced["distillation/kl/sums"] == plain["distillation/kl/sums"]
    assert balanced["loss"] != plain["loss"]


def test_reverse_kl_is_to_each_environments_own_teacher(opened: tuple[Recipe, Engine]) -> None:
    """One environment's KL under routing is that of a recipe whose only teacher is its own."""
    recipe, engine = opened
    routed = Evaluator(engine, recipe).student()
    recipe, engine = open_run(raw(environments__sums__teacher="long"))
    with engine:
        only_long = Evaluator(engine, recipe).student()
    assert routed["eval/reverse_kl/chains"] == only_long["eval/reverse_kl/chains"]
    assert abs(routed["eval/reverse_kl/sums"] - only_long["eval/reverse_kl/sums"]) > 0.02


def test_preflight_compares_a_teacher_with_its_own_problems() -> None:
    """Servers have contexts of their own: one is not refused for the problems of another."""
    loss = {"type": "generalized_jsd", "k": 8}
    recipe, engine = open_run(raw(rollout__student_fraction=0.5, loss=loss))
    tokenized = engine.problems

    def needed(environment: str) -> int:
        lengths = []
        for problem in tokenized.problem_set.practice:
            if problem.environment == environment:
                answer = tokenized.tokenizer.encode(f" {problem.answer}")
                completion = max(8, len(answer) + 1)
                lengths.append(len(tokenized.prompt(problem)) + completion)
        return max(lengths)

    assert needed("sums") < needed("chains")
    for problem in tokenized.problem_set.practice:
        start = "Q: " if problem.environment == "chains" else "Question: "
        assert tokenized.tokenizer.decode(tokenized.prompt(problem)).startswith(start)
    with engine:
        limit_context(engine, SHORT, needed("sums") + 1)
        preflight(engine, recipe, lambda text: None)
        limit_context(engine, LONG, needed("chains"))
        message = r"\[teachers.long\]: The longest (prompt|solution .* teacher's scorer takes)"
        with pytest.raises(PreflightError, match=message):
            preflight(engine, recipe, lambda text: None)


def limit_context(engine: Engine, teacher: TeacherId, max_model_len: int) -> None:
    """Give one teacher's scorer a context of its own."""
    scorer = engine.teachers.scorers[teacher]
    scorer.limits = replace(scorer.limits, max_model_len=max_model_len)


def test_rows_are_scored_by_the_teacher_that_they_name(tmp_path: Path) -> None:
    """A row's teacher comes before the environment's; an unknown name is an error."""
    path = tmp_path / "rows.jsonl"
    rows = [
        {"question": f"What is {i} + 1?", "answer": f"{i} + 1\n#### {i + 1}", "by": "long"}
        for i in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    table = raw(
        environments={
            "sums": {"source": "jsonl", "path": str(path), "teacher_key": "by", "teacher": "short"}
        },
        teachers={name: {"prepare": {**TINY_MODEL, "sft_steps": 2}} for name in ("short", "long")},
    )
    first = run(table, tmp_path / "run").evaluations[0]
    assert "teacher/long/accuracy" in first and "teacher/short/accuracy" not in first
    path.write_text(path.read_text().replace('"long"', '"nobody"', 1))
    with pytest.raises(RecipeError, match="names the teacher 'nobody'"):
        run(table, tmp_path / "other")
