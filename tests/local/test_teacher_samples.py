"""Answers that the teacher samples: whose they are, and what they train."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from prime_composer.backends.protocols import Limits, Rollout, SamplingParams
from prime_composer.local.collect import Collector
from prime_composer.local.engine import Engine
from prime_composer.local.opening import open_engine
from prime_composer.local.preflight import preflight
from prime_composer.local.tokenized_problems import TokenizedProblems
from prime_composer.local.tracker import read_metrics
from prime_composer.losses import LOSS_TYPES
from prime_composer.problems.config import Problem
from prime_composer.problems.loading import ProblemSet, load_problem_set
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.routing import Routing, TeacherId
from prime_composer.recipe.schema import RolloutConfig
from prime_composer.step.mismatch import METRIC
from prime_composer.teachers.compatibility import PreflightError
from prime_composer.teachers.mixture import Teachers
from tests.conftest import TINY_RECIPE, changed
from tests.local.helpers import run, tiny_models

Raw = Callable[..., dict[str, Any]]
STUDENT, SUMS, CHAINS = 100, 200, 300
"""Tokens that only one model writes."""


class Writer:
    """A sampler and scorer that always writes its own token after the prompt."""

    limits = Limits()
    gives_any_ids = True

    def __init__(self, token: int):
        self.token = token
        self.sampler = self

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[Rollout]:
        return [
            Rollout(
                torch.tensor([*prompt, self.token]),
                torch.tensor([False, True]),
                torch.tensor([math.nan, -0.5]),
                "stop",
                index,
            )
            for index, prompt in enumerate(prompts)
            for _ in range(params.n)
        ]

    def score(self, *_: Any) -> Any: ...

    def update_weights(self, model: nn.Module) -> None: ...

    def close(self) -> None: ...


class Head(nn.Module):
    """A model that is a head alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 1000, bias=False)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def writers(
    problems: Sequence[Problem],
    shares: dict[str, dict[TeacherId, float]],
) -> Engine:
    """Return an engine whose models are writers. A prompt is the problem's number."""
    tokenized = TokenizedProblems(
        ProblemSet([], [], {}), None, {problem: [int(problem.question)] for problem in problems}
    )
    teachers = Teachers(
        {TeacherId("sums"): Writer(SUMS), TeacherId("chains"): Writer(CHAINS)},
        Routing({}, shares),
    )
    loss = LOSS_TYPES["topk_forward_kl"]()
    return Engine(tokenized, loss, Head(), Writer(STUDENT), teachers)


def numbered(count: int, environment: Callable[[int], str]) -> list[Problem]:
    return [Problem(str(i), "#### 1", environment=environment(i)) for i in range(count)]


OWN = {"sums": {TeacherId("sums"): 1.0}, "chains": {TeacherId("chains"): 1.0}}


def answers(engine: Engine, problems: Sequence[Problem], **rollout: Any) -> list[Rollout]:
    """Return the answers of a step with a recipe's ``[rollout]``."""
    settings = RolloutConfig(**{"other_source": "teacher", "student_fraction": 0.5, **rollout})
    recipe = parse_recipe(TINY_RECIPE).model_copy(update={"rollout": settings})
    return Collector(engine, recipe).answers(problems, 1)


def test_teacher_samples_what_the_student_does_not() -> None:
    """Each other sequence is of the problem's own teacher, without a log mu."""
    problems = numbered(200, lambda i: "sums" if i % 2 else "chains")
    engine = writers(problems, OWN)
    rollouts = answers(engine, problems, group_size=2)
    assert [one.prompt_index for one in rollouts] == [i // 2 for i in range(400)]
    for one in rollouts:
        number, token = one.token_ids.tolist()
        assert number == one.prompt_index
        if one.by_teacher:
            assert token == (SUMS if number % 2 else CHAINS)
            assert one.inference_logprobs.isnan().all()
        else:
            assert token == STUDENT and one.inference_logprobs[1] == -0.5
    assert 160 < sum(one.by_teacher for one in rollouts) < 240  # 4 standard deviations
    again = answers(engine, problems, group_size=2)
    assert [a.by_teacher for a in again] == [b.by_teacher for b in rollouts]


def test_mixture_samples_with_one_teacher_by_weight() -> None:
    """Of a mixture each answer is of one teacher, drawn by its weight."""
    shares = {"both": {TeacherId("sums"): 0.25, TeacherId("chains"): 0.75}}
    problems = numbered(400, lambda i: "both")
    rollouts = answers(writers(problems, shares), problems, student_fraction=0.0)
    assert all(one.by_teacher for one in rollouts) and len(rollouts) == 400
    assert 65 < sum(int(one.token_ids[1]) == SUMS for one in rollouts) < 135


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": {"type": "generalized_jsd", "k": 8}},
        {"loss": {"type": "sft"}, "rollout__student_fraction": 0.0},
    ],
    ids=["gkd", "sft"],
)
def test_train_on_the_teachers_answers(
    changes: dict[str, Any], tiny_recipe: Raw, tmp_path: Path
) -> None:
    """Steps train, and the sampler's check leaves the teacher's answers out."""
    raw = tiny_recipe(
        trainer__steps=2,
        rollout__other_source="teacher",
        rollout__student_fraction=0.5,
        rollout__group_size=2,
        eval__every=0,
    )
    raw = changed(raw, **changes)
    run(raw, tmp_path / "run")
    first, *steps = read_metrics(tmp_path / "run")
    assert first["eval/reverse_kl"] > 0  # the teacher is asked, whatever the loss reads
    assert all(math.isfinite(step["loss"]) and step["grad_norm"] > 0 for step in steps)
    mismatches = [step.get(METRIC) for step in steps]
    if raw["loss"]["type"] == "sft":
        assert mismatches == [None, None]
    else:
        assert all(0 <= kl < 1e-9 for kl in mismatches)


def test_preflight_of_a_teacher_that_samples_reads_no_solution(tiny_recipe: Raw) -> None:
    """The data's solutions may be longer than the window: nobody trains on them."""
    raw = tiny_recipe(loss={"type": "generalized_jsd", "k": 8}, rollout__student_fraction=0.5)
    paths = tiny_models(raw)
    for source, passes in (("teacher", True), ("data", False)):
        raw["rollout"]["other_source"] = source
        recipe = parse_recipe(raw)
        problems = load_problem_set(recipe.sources)
        for index, problem in enumerate(problems.practice):
            problems.practice[index] = Problem(problem.question, "2 " * 300 + problem.answer)
        with open_engine(recipe, problems, paths, lambda text: None) as engine:
            if passes:
                preflight(engine, recipe, lambda text: None)
            else:
                words = "longest solution of the data has .* and the teacher's scorer takes 127"
                with pytest.raises(PreflightError, match=words):
                    preflight(engine, recipe, lambda text: None)
