"""Rollouts that, with what the teacher reads before them, are longer than the teacher's window."""

from dataclasses import replace
from typing import Literal

from prime_composer.backends.protocols import Rollout
from prime_composer.step.batch import Sample

Rule = Literal["error", "score_head", "drop"]  # ``[teacher] on_overflow``


def fit(sample: Sample, before: int, room: int, rule: Rule) -> Sample | None:
    """Return what of a sample, without scores, the teacher scores; None to drop it.

    A sample whose end is cut off trains on its head alone: the student's log-probs there do not
    depend on the rest. Its reward and advantage stay those of the whole rollout. The teacher can
    read ``room`` tokens, ``before`` of them before the rollout's first trained token.
    """
    rollout = sample.rollout
    length = len(rollout.token_ids)
    if rule == "error" or before + length - rollout.start <= room:
        return sample
    end = rollout.start + room - before
    if rule == "drop" or end <= rollout.start:
        return None
    return replace(sample, rollout=head_of(rollout, end))


def head_of(rollout: Rollout, end: int) -> Rollout:
    """Return the first ``end`` tokens of a rollout, as if it was cut there."""
    return replace(
        rollout,
        token_ids=rollout.token_ids[:end],
        loss_mask=rollout.loss_mask[:end],
        inference_logprobs=rollout.inference_logprobs[:end],
        finish_reason="length",
    )
