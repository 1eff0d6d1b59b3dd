"""Ask teachers and sampler again, during the run, what they answered at its start.

Every single answer of a server is checked (``backends.answers``), and a server that serves another
model passes: its answers are those of a right model. It is seen by a question whose answer is
known.

A teacher's weights are fixed, so it scores the preflight's probe with the same numbers throughout.
The sampler's weights are the student's, so its log-probs of the tokens that it samples are those of
the student. It is asked at temperature 1 and top-p 1, for runs that sample in another way. In the
others every step compares its own tokens (``mismatch``), and the sampler is only asked before its
rollouts are evaluated or its policy is saved.

What a canary does not see: a fault that is gone when it is asked; a teacher that is wrong for some
sequences and right for the probe; and a model that scores the probe like the first one, within the
tolerance of the dtype.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from prime_composer.backends.protocols import Rollout, SamplingParams, Scorer, TeacherScores
from prime_composer.local.batch import Sample
from prime_composer.local.engine import BackendSpec, Engine
from prime_composer.local.mismatch import Mismatch, SamplerCheck
from prime_composer.local.preflight import (
    PROBE_TOKENS,
    TOLERANCES,
    Preflight,
    PreflightError,
    Probe,
)
from prime_composer.local.student_forward import autocast, student_inputs
from prime_composer.recipe.routing import TeacherId
from prime_composer.recipe.schema import Recipe
from prime_composer.recipe.urls import public_url

T = TypeVar("T")

COMPARED_IDS = 64
"""Largest number of ids per position that are compared, the most probable ones."""

SAMPLER_PROMPTS = 16
"""Prompts that the sampler continues by ``PROBE_TOKENS`` tokens each."""

CROWD = 16
"""Copies of the probe in one call, to see how far a server's numbers depend on its batches."""


class CanaryChanged(ValueError):
    """A teacher or the sampler no longer answers as at the start of the run.

    Attributes:
        safe_step: finished steps that are known to have had right answers. Later ones may not have.
    """

    def __init__(self, message: str, safe_step: int):
        super().__init__(message)
        self.safe_step = safe_step


@dataclass
class Canary:
    """The questions of a run, and their answers.

    Attributes:
        engine: the open models.
        every: steps between two questions; 0 asks only after a lost connection.
        probes: each teacher's probe with the scores of the run's start.
        tolerances: largest difference of a teacher's log-prob, in nats.
        check_of_sampler: how far the sampler may be from the student.
        asks_sampler: whether no step compares its own tokens, so that the sampler is asked.
        max_tokens: tokens that the sampler is asked for per prompt.
        safe_step: finished steps at the time of the last right answers of everyone.
    """

    engine: Engine
    every: int
    probes: dict[TeacherId, Probe]
    tolerances: Mapping[TeacherId, float]
    check_of_sampler: SamplerCheck
    asks_sampler: bool
    max_tokens: int
    safe_step: int = 0
    _reconnections: dict[TeacherId | None, int] = field(default_factory=dict)

    @classmethod
    def of_preflight(
        cls, engine: Engine, recipe: Recipe, result: Preflight, step: int = 0
    ) -> "Canary":
        """Return the canary of a run whose preflight has just passed.

        Args:
            engine: the open models.
            recipe: the recipe that they were opened from.
            result: has the probes.
            step: finished steps.

        Raises:
            PreflightError: a teacher gives several answers to one question.
        """
        canary = cls(
            engine,
            recipe.checks.every,
            dict(result.probes),
            {
                teacher: recipe.checks.tolerance or tolerance(engine, teacher, probe)
                for teacher, probe in result.probes.items()
            },
            SamplerCheck.of_completions(recipe),
            SamplerCheck.of_recipe(recipe) is None or recipe.rollout.student_fraction == 0,
            min(PROBE_TOKENS, recipe.rollout.max_tokens),
            step,
        )
        canary._lost_connections()
        return canary

    def check(self, step: int, due: bool, sampler: bool = False) -> None:
        """Ask everyone where it is due and was not done at this step, or whose connection was lost.

        A sampler whose server was restarted gets the student's weights first.

        Args:
            step: finished steps.
            due: whether the schedule says so.
            sampler: ask the sampler too, whatever the steps compare.

        Raises:
            CanaryChanged: an answer is another one.
        """
        lost = self._lost_connections()
        due = due and step > self.safe_step
        teachers = [teacher for teacher in self.probes if due or teacher in lost]
        for teacher in teachers:
            self._check_teacher(teacher)
        if None in lost:
            self._renew_sampler()
        elif due and (sampler or self.asks_sampler):
            self._check_sampler()
        everyone = len(teachers) == len(self.probes) and (None in lost or not self.asks_sampler)
        if due or (lost and everyone):
            self.safe_step = step

    def doubts(self, step: int) -> str:
        """Return a sentence about finished steps that are not verified; "" without any.

        Nobody asked about them where ``checks.every`` is 0. Teachers in this process are not
        exchanged, so that none of them is in doubt.

        Args:
            step: finished steps.
        """
        served = any(self.engine.teacher_specs[name].backend == "server" for name in self.probes)
        if self.every == 0 or step <= self.safe_step or not (served or self.asks_sampler):
            return ""
        first = self.safe_step + 1
        steps = f"step {step} is" if first == step else f"steps {first} to {step} are"
        return f"{steps} not verified, since teachers and sampler were not asked after that"

    def steadily(self, sample: Callable[[], T]) -> T:
        """Return what a function makes of the sampler's rollouts.

        A server that is restarted meanwhile samples from the weights that it was started with. It
        gets the student's, and the function is called again.

        Args:
            sample: calls the sampler. It may be called several times.

        Raises:
            CanaryChanged: the weights did not arrive.
        """
        result = sample()
        while self._sampler_was_lost() and self._renew_sampler():
            result = sample()
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the probes and their answers, as tensors and plain values for a checkpoint."""
        return {
            "safe_step": self.safe_step,
            "teachers": {
                teacher.table: {
                    "token_ids": probe.rollout.token_ids,
                    "start": probe.rollout.start,
                    "own": probe.scores.ref_logprobs,
                    "support_ids": probe.scores.token_ids[:, :COMPARED_IDS].clone(),
                    "support": probe.scores.teacher_logprobs[:, :COMPARED_IDS].clone(),
                }
                for teacher, probe in self.probes.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the probes of the run's start from a checkpoint, and ask them at once.

        Args:
            state: what ``state_dict`` returned; empty for a checkpoint that has none.

        Raises:
            CanaryChanged: a teacher is not the one that the run was started with.
        """
        stored = state.get("teachers", {})
        # A teacher that is right now may have been another one before the checkpoint.
        self.safe_step = state.get("safe_step", self.safe_step)
        for teacher in self.probes:
            if teacher.table in stored:
                self.probes[teacher] = stored_probe(stored[teacher.table])
                self._check_teacher(teacher)

    def _lost_connections(self) -> set[TeacherId | None]:
        """Return who was reconnected since the last call; None stands for the sampler."""
        counts: dict[TeacherId | None, int] = {None: reconnections(self.engine.sampler)}
        for teacher, scorer in self._scorers().items():
            counts[teacher] = reconnections(scorer)
        lost = {name for name, count in counts.items() if count > self._reconnections.get(name, 0)}
        self._reconnections = counts
        return lost

    def _sampler_was_lost(self) -> bool:
        before, now = self._reconnections.get(None, 0), reconnections(self.engine.sampler)
        self._reconnections[None] = now
        return now > before

    def _renew_sampler(self) -> bool:
        """Send the student's weights to a sampler that has others. Return whether it had."""
        if self._sampler_mismatch() <= self.check_of_sampler.limit:
            return False
        self.engine.sampler.update_weights(self.engine.model)
        self._check_sampler()
        return True

    @torch.no_grad()
    def _sampler_mismatch(self) -> float:
        """Return KL(sampler || student) on a few completions, in nats per token."""
        engine = self.engine
        problems = engine.problems.problem_set.practice[:SAMPLER_PROMPTS]
        # Without its first token a prompt shares no prefix with those of the run. A server that
        # caches prefixes would compute the run's own rollouts in other pieces.
        prompts = [ids[1:] or ids for ids in map(engine.problems.prompt, problems)]
        params = SamplingParams(max_tokens=self.max_tokens)
        rollouts = engine.sampler.generate(prompts, params, seed=0)
        samples = [Sample(one, problem) for one, problem in zip(rollouts, problems, strict=True)]
        mismatch = Mismatch(self.check_of_sampler)
        with autocast(engine.model, self.check_of_sampler.dtype):
            mismatch.add(student_inputs(engine.model, samples))
        return mismatch.capped_kl

    def _scorers(self) -> Mapping[TeacherId, Scorer]:
        return {} if self.engine.teachers is None else self.engine.teachers.scorers

    def _check_teacher(self, teacher: TeacherId) -> None:
        probe, limit = self.probes[teacher], self.tolerances[teacher]
        (scores,) = self._scorers()[teacher].score([probe.rollout], compared_ids(probe))
        difference = largest_difference(probe.scores, scores)
        if not difference <= limit:
            spec = self.engine.teacher_specs[teacher]
            half = spec.backend == "server" and limit < TOLERANCES["bfloat16"]
            dtype = "say so with `dtype` in that table if it computes in half precision, or "
            raise CanaryChanged(
                f"[{teacher.table}] {place(spec)} scores the tokens "
                f"of the run's start with other numbers than then: {difference:.2g} nat apart (at "
                f"most {limit:g}). It serves another model now, or in another way; "
                f"{self._doubt()}Start it as it was, or start a new run. Where it is the same "
                f"model on another machine or build, {dtype if half else ''}set checks.tolerance "
                "above that difference",
                self.safe_step,
            )

    def _check_sampler(self) -> None:
        kl, limit = self._sampler_mismatch(), self.check_of_sampler.limit
        if not kl <= limit:
            raise CanaryChanged(
                f"[rollout] the sampler's log-probs are not those of the student's weights: KL "
                f"{kl:.2g} nat per token (at most {limit:g}). It has other weights or caches than "
                f"the trainer; {self._doubt()}{self.check_of_sampler.remedy}",
                self.safe_step,
            )

    def _doubt(self) -> str:
        return (
            f"it was right at step {self.safe_step}, and later steps may have trained on wrong "
            "numbers. "
        )


def tolerance(engine: Engine, teacher: TeacherId, probe: Probe) -> float:
    """Return how far a teacher's answers may be apart, in nats.

    A server's dtype is only known where the recipe names it. Elsewhere the server shows it: one in
    float32 gives one answer to one question, and in half precision it depends on what else is in
    the batch.

    Raises:
        PreflightError: the answers differ by more than half precision explains.
    """
    assert engine.teachers is not None
    spec, config = engine.teacher_specs[teacher], engine.teachers.routing.teachers[teacher]
    if spec.backend != "server" or config.dtype is not None:
        return TOLERANCES[spec.dtype]
    crowd = engine.teachers.scorers[teacher].score([probe.rollout] * CROWD, compared_ids(probe))
    spread = float(torch.tensor([largest_difference(probe.scores, one) for one in crowd]).max())
    if spread <= TOLERANCES["float32"] / 10:
        return TOLERANCES["float32"]
    if not spread <= TOLERANCES["bfloat16"]:
        raise PreflightError(
            f"[{teacher.table}] {place(spec)} gives answers to one question that are {spread:.2g} "
            "nat apart; let one model answer there, not several behind one address."
        )
    return TOLERANCES["bfloat16"]


def compared_ids(probe: Probe) -> int:
    """Return the K of the question."""
    return min(probe.scores.token_ids.shape[1], COMPARED_IDS)


def reconnections(part: object) -> int:
    """Return how often the connection of a sampler or scorer came back; 0 in this process."""
    return getattr(part, "reconnections", 0)


def place(spec: BackendSpec) -> str:
    """Return where a teacher is: "at URL" without a password, or its model."""
    return f"({spec.model})" if spec.url is None else f"at {public_url(spec.url)}"


def stored_probe(stored: Mapping[str, Any]) -> Probe:
    """Return a probe from a checkpoint."""
    token_ids, start = stored["token_ids"], stored["start"]
    rollout = Rollout(
        token_ids=token_ids,
        loss_mask=torch.arange(len(token_ids)) >= start,
        inference_logprobs=torch.full(token_ids.shape, torch.nan),
        finish_reason="length",
        prompt_index=0,
    )
    return Probe(rollout, TeacherScores(stored["own"], stored["support_ids"], stored["support"]))


def largest_difference(one: TeacherScores, other: TeacherScores) -> float:
    """Return the largest distance between two scorings of the same tokens, in nats.

    Of each, at most ``COMPARED_IDS`` ids per position are compared. An id that the other one does
    not list is compared with the other's least probable entry, which bounds it.
    """
    if one.ref_logprobs.shape != other.ref_logprobs.shape:
        return float("inf")
    gaps = [(finite(one.ref_logprobs) - finite(other.ref_logprobs)).abs().flatten()]
    for a, b in ((one, other), (other, one)):
        ids, other_ids = a.token_ids[:, :COMPARED_IDS], b.token_ids[:, :COMPARED_IDS]
        if 0 in (ids.shape[1], other_ids.shape[1]):
            if ids.shape != other_ids.shape:
                return float("inf")
            continue
        logprobs = finite(a.teacher_logprobs[:, :COMPARED_IDS])
        other_logprobs = finite(b.teacher_logprobs[:, :COMPARED_IDS])
        same = ids.unsqueeze(2) == other_ids.unsqueeze(1)  # [n, k, k of the other]
        values = torch.where(same, other_logprobs.unsqueeze(1), 0.0).sum(dim=2)
        bound = other_logprobs.min(dim=1, keepdim=True).values
        gap = torch.where(
            same.any(dim=2), (logprobs - values).abs(), (logprobs - bound).clamp_min(0.0)
        )
        gaps.append(gap.flatten())
    # A tensor's maximum keeps a NaN, which is beyond every limit.
    return float(torch.cat(gaps).max())


def finite(logprobs: torch.Tensor) -> torch.Tensor:
    """Return log-probs in float64, with -1000 for less."""
    return logprobs.double().clamp_min(-1000.0)
