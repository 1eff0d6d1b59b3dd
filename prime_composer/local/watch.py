"""Watch whether teachers and sampler are still those of the run's start.

A teacher's weights are fixed, so it scores the preflight's probe with the same numbers throughout.
The sampler's are the student's, so that its log-probs of the tokens that it samples are those of
that model. It is only asked where no step compares its own tokens (``step.mismatch``): for runs
that sample in another way than at temperature 1 and top-p 1, or ahead.

What this does not see: a fault that is gone when the probe is sent; a teacher that is wrong for
some sequences and right for the probe; and a model that scores the probe like the first one, within
the tolerance of the dtype.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from prime_composer.backends.protocols import SamplingParams, Scorer
from prime_composer.contract import InvalidAnswer, Scores, given
from prime_composer.local.engine import Engine
from prime_composer.local.preflight import TOLERANCES, preflight
from prime_composer.recipe.routing import TeacherId
from prime_composer.recipe.schema import Recipe
from prime_composer.recipe.urls import public_url
from prime_composer.samplers.registry import BackendSpec
from prime_composer.step.batch import Sample
from prime_composer.step.mismatch import Mismatch, SamplerCheck
from prime_composer.step.student_forward import autocast, student_inputs
from prime_composer.teachers.compatibility import PreflightError
from prime_composer.teachers.watch import (
    COMPARED_IDS,
    KnownRequest,
    known_rollout,
    largest_difference,
    server_starts,
)

SAMPLER_PROMPTS = 16  # Prompts that the sampler continues by ``PROBE_TOKENS`` tokens each

CROWD = 16  # Copies of the probe in one call: a server's numbers may depend on its batches


class WatchFailed(ValueError):
    """A teacher or the sampler no longer answers as at the run's start; ``safe_step`` was right."""

    def __init__(self, message: str, safe_step: int):
        super().__init__(message)
        self.safe_step = safe_step


class Watch:
    """The known requests of a run, and what is known about its steps.

    ``probes`` are each teacher's request, with the scores of the run's start.
    """

    def __init__(self, engine: Engine, recipe: Recipe, probes: Mapping[TeacherId, KnownRequest]):
        self.engine, self.checks, self.probes = engine, recipe.checks, dict(probes)
        self.sampler_check = SamplerCheck.of_completions(recipe)
        of_step = SamplerCheck.of_recipe(recipe)
        # whether every step compares the sampler's own tokens
        self.compares_each_step = (
            of_step is not None
            and math.isfinite(of_step.limit)
            and recipe.rollout.student_fraction > 0
        )
        self.max_tokens = recipe.rollout.max_tokens  # that the sampler is asked for per prompt
        self.safe_step = 0  # finished steps at the time of the last right answers of everyone
        for teacher, probe in self.probes.items():
            probe.limit = self.checks.tolerance or tolerance(engine, teacher, probe)
        self._sampler_starts = server_starts(engine.sampler)

    def check(self, step: int, before_use: bool = False, student: nn.Module | None = None) -> None:
        """Ask everyone where it is due, and whose server may be another one.

        Due are the steps of ``checks.every``, and each one before its weights are saved.
        """
        every, starts = self.checks.every, server_starts(self.engine.sampler)
        due = every > 0 and step > self.safe_step and (before_use or step % every == 0)
        teachers = [
            teacher
            for teacher, probe in self.probes.items()
            if due or probe.is_due(server_starts(self._scorers()[teacher]))
        ]
        for teacher in teachers:
            self._check_teacher(teacher)
        restarted = starts != self._sampler_starts
        if restarted or (due and (before_use or not self.compares_each_step)):
            self._check_sampler(self.engine.model if student is None else student)
            self._sampler_starts = starts
        everyone = len(teachers) == len(self.probes) and (restarted or self.compares_each_step)
        if due or ((teachers or restarted) and everyone):
            self.safe_step = step

    def doubts(self, step: int) -> str:
        """Return a sentence about finished steps that are not verified; "" without any."""
        served = any(self.engine.teacher_specs[name].serves for name in self.probes)
        may_change = served or not self.compares_each_step
        if self.checks.every == 0 or step <= self.safe_step or not may_change:
            return ""
        first = self.safe_step + 1
        steps = f"step {step} is" if first == step else f"steps {first} to {step} are"
        return f"{steps} not verified, since teachers and sampler were not asked after that"

    def verified(self, step: int) -> int | None:
        """Return the last verified step where ``step`` is in doubt; None where it is not."""
        return self.safe_step if self.doubts(step) else None

    def state_dict(self) -> dict[str, Any]:
        """Return the probes and their scores, as tensors and plain values for a checkpoint."""
        return {
            "safe_step": self.safe_step,
            "teachers": {
                teacher.table: {
                    "token_ids": probe.rollout.token_ids,
                    "start": probe.rollout.start,
                    "own": probe.scores.ref_logprobs,
                    "support_ids": probe.scores.token_ids[:, :COMPARED_IDS].clone(),
                    "support": probe.scores.teacher_logprobs[:, :COMPARED_IDS].clone(),
                    "known": probe.scores.all_known[:, :COMPARED_IDS].clone(),
                }
                for teacher, probe in self.probes.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the probes of the run's start from a checkpoint, and send them at once."""
        # A teacher that is right now may have been another one before the checkpoint.
        self.safe_step = state["safe_step"]
        for teacher in self.probes:
            if teacher.table in state["teachers"]:
                stored = state["teachers"][teacher.table]
                probe = self.probes[teacher]
                probe.rollout = known_rollout(stored["token_ids"], stored["start"])
                probe.scores = Scores(
                    *(stored["own"], stored["support_ids"], stored["support"]),
                    known=stored.get("known"),
                )
                self._check_teacher(teacher)

    def _scorers(self) -> Mapping[TeacherId, Scorer]:
        return {} if self.engine.teachers is None else self.engine.teachers.watched

    def _check_teacher(self, teacher: TeacherId) -> None:
        probe, scorer = self.probes[teacher], self._scorers()[teacher]
        starts = server_starts(scorer)
        try:
            (scores,) = scorer.score([probe.rollout], compared_ids(probe))
        except InvalidAnswer as error:  # what it scored since it was asked last may be wrong too
            raise WatchFailed(
                f"[{teacher.table}] cannot score the tokens of the run's start any more: "
                f"{str(error).rstrip('.')}; {self._doubt()}Start it as it was, or start a new run",
                self.safe_step,
            ) from error
        if change := probe.change(scores, starts):
            spec = self.engine.teacher_specs[teacher]
            half = spec.serves and probe.limit < TOLERANCES["bfloat16"]
            dtype = "say so with `dtype` in that table if it computes in half precision, or "
            raise WatchFailed(
                f"[{teacher.table}] {place(spec)} {change}; "
                f"{self._doubt()}Start it as it was, or start a new run. Where it is the same "
                f"model on another machine or build, {dtype if half else ''}set checks.tolerance "
                "above that difference",
                self.safe_step,
            )
        if (taped := given(self.engine.teachers).tapes.get(teacher)) is not None:
            taped.mark()

    def _check_sampler(self, student: nn.Module) -> None:
        kl, limit = self._sampler_mismatch(student), self.sampler_check.limit
        if not kl <= limit:
            raise WatchFailed(
                f"[rollout] the sampler's log-probs are not those of the student's weights: KL "
                f"{kl:.2g} nat per token (at most {limit:g}). It has other weights or caches than "
                f"the trainer; {self._doubt()}{self.sampler_check.remedy}",
                self.safe_step,
            )

    @torch.no_grad()
    def _sampler_mismatch(self, student: nn.Module) -> float:
        """Return KL(sampler || student) on a few completions, in nats per token."""
        engine = self.engine
        problems = engine.problems.problem_set.practice[:SAMPLER_PROMPTS]
        # Without its first token a prompt shares no prefix with those of the run. A server that
        # caches prefixes would compute the run's own rollouts in other pieces.
        prompts = [ids[1:] or ids for ids in map(engine.problems.prompt, problems)]
        params = SamplingParams(max_tokens=self.max_tokens)
        rollouts = engine.sampler.generate(prompts, params, seed=0)
        samples = [Sample(one, problem) for one, problem in zip(rollouts, problems, strict=True)]
        mismatch = Mismatch(self.sampler_check)
        with autocast(student, self.sampler_check.dtype):
            mismatch.add(student_inputs(student, samples))
        return mismatch.capped_kl

    def _doubt(self) -> str:
        return (
            f"it was right at step {self.safe_step}, and later steps may have trained on wrong "
            "numbers. "
        )


def open_watch(engine: Engine, recipe: Recipe, status: Callable[[str], None]) -> Watch:
    """Run the preflight, and return the watch over what it has found."""
    return Watch(engine, recipe, preflight(engine, recipe, status).probes)


def tolerance(engine: Engine, teacher: TeacherId, probe: KnownRequest) -> float:
    """Return how far a teacher's scores of one sequence may be apart, in nats.

    A server shows its dtype: in float32 one request has one answer, in half precision it depends on
    what else is in the batch.
    """
    assert engine.teachers is not None
    spec, config = engine.teacher_specs[teacher], engine.teachers.routing.teachers[teacher]
    if not spec.serves or config.dtype is not None:
        return TOLERANCES[spec.dtype]
    crowd = engine.teachers.watched[teacher].score([probe.rollout] * CROWD, compared_ids(probe))
    spread = float(torch.tensor([largest_difference(probe.scores, one) for one in crowd]).max())
    if spread <= TOLERANCES["float32"] / 10:
        return TOLERANCES["float32"]
    if not spread <= TOLERANCES["bfloat16"]:
        raise PreflightError(
            f"[{teacher.table}] {place(spec)} gives answers to one question that are {spread:.2g} "
            "nat apart; let one model answer there, not several behind one address."
        )
    return TOLERANCES["bfloat16"]


def compared_ids(probe: KnownRequest) -> int:
    """Return the K of the probe's request."""
    return min(probe.scores.token_ids.shape[1], COMPARED_IDS)


def place(spec: BackendSpec) -> str:
    """Return where a teacher is: "at URL" without a password, or its model."""
    return f"({spec.model})" if spec.table.url is None else f"at {public_url(spec.table.url)}"
