"""Measure how the student's answers end: a student that collapses shows it there first.

Every number is of what sampling and scoring have given anyway. One that nothing was asked for is
absent.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from prime_composer.backends.protocols import Rollout
from prime_composer.losses.shared.modifiers import RepetitionMask
from prime_composer.losses.shared.repetition import repeated_end
from prime_composer.step.batch import Sample

LIMITS = RepetitionMask()

SHORTEST = min(max(LIMITS.tokens, LIMITS.copies * p) - p for p in range(1, LIMITS.period + 1))
"""Fewest tokens after the first copy of a repetition."""


def collapse_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the numbers of sampled rollouts, before they are scored.

    - ``rollout/repeated``: share of the samples that end in a repetition, by the measure of
      ``[loss.repetition]`` at its defaults.
    - ``rollout/repeated_tokens``: share of the tokens that repeat, without the first copy.
    - ``rollout/entropy``: mean of -log mu in nats per token. Its expectation is the entropy of the
      policy that samples, at its temperature and top-p.
    - ``rollout/student_truncated``: share of the rollouts that are cut.
    - ``rollout/student_tokens``: mean length of a rollout.
    """
    sampled = [sample for sample in samples if is_own(sample)]
    if not sampled:
        return {}
    own = [sample.rollout for sample in sampled]
    firsts = [sample.rollout for sample in sampled if sample.first]
    masks = torch.cat([rollout.loss_mask for rollout in own])
    log_mu = torch.cat([rollout.inference_logprobs for rollout in own])[masks]
    repeated = [count for count in map(repeated_tokens, own) if count]
    return {
        "rollout/repeated": len(repeated) / len(own),
        "rollout/repeated_tokens": sum(repeated) / len(log_mu),
        "rollout/entropy": -float(log_mu.mean()),
        "rollout/student_truncated": sum(one.finish_reason == "length" for one in firsts)
        / len(firsts),
        "rollout/student_tokens": len(log_mu) / len(firsts),
    }


def repeated_tokens(rollout: Rollout) -> int:
    """Return how many tokens at the end of a rollout only repeat."""
    ids = rollout.token_ids.numpy()
    if not rollout.loss_mask.numpy()[-1]:  # what came after its last answer
        ids = ids[: int(rollout.loss_mask.nonzero()[-1]) + 1]
    # Its last tokens stand at least once in the text before them: that is asked at once.
    end, place = ids[-SHORTEST:].tobytes(), ids[-SHORTEST - LIMITS.period : -1].tobytes()
    if end not in place:
        return 0
    limits = LIMITS.period, LIMITS.copies, LIMITS.tokens
    return int(repeated_end(rollout.token_ids, rollout.loss_mask, None, *limits).sum())


def end_metrics(samples: Sequence[Sample], of_teacher: bool = True) -> dict[str, float]:
    """Return the mean probability of the token that ended an answer, over scored rollouts.

    ``rollout/end_student`` is that of the policy that sampled it, ``rollout/end_teacher`` the
    teacher's at the same place. A teacher that ends its answers by another token has nearly 0.
    """
    own = [
        sample
        for sample in samples
        if is_own(sample)
        and sample.rollout.finish_reason == "stop"
        and sample.rollout.loss_mask.numpy()[-1]
    ]
    means = {}
    if own:
        log_mu = [sample.rollout.inference_logprobs.numpy()[-1] for sample in own]
        means["rollout/end_student"] = float(np.exp(log_mu).mean())
    ends = [sample.scores.ref_logprobs[-1] for sample in own if sample.scores is not None]
    if ends and of_teacher:
        means["rollout/end_teacher"] = float(torch.stack(ends).exp().mean())
    return means


def is_own(sample: Sample) -> bool:
    """Return whether the student sampled a rollout, whose tokens then all have a log mu."""
    rollout = sample.rollout
    return math.isfinite(rollout.inference_logprobs.numpy()[rollout.start])
