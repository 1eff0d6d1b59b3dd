"""Measure how the student's answers end: a student that collapses shows it there first.

Every number is of what sampling and scoring have given anyway. One that nothing was asked for is
absent.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from prime_composer.backends.protocols import Rollout
from prime_composer.step.batch import Sample


def collapse_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the numbers of sampled rollouts, before they are scored.

    - ``rollout/repeated``: share of the samples that end in a repetition (``repeated_tokens``).
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


def repeated_tokens(rollout: Rollout, period: int = 64, copies: int = 4, tokens: int = 16) -> int:
    """Return how many tokens at the end of a rollout only repeat.

    An answer x_1 ... x_n ends in a repetition of period p if x_t = x_{t-p} for all of its last m
    tokens, where m is as large as possible. The repetition is m + p tokens long. It counts from
    ``copies`` p and ``tokens`` on, up to the largest ``period``. The result is the largest m, of
    the last answer of a conversation.
    """
    trained = np.flatnonzero(rollout.loss_mask.numpy())
    *_, last = np.split(trained, np.flatnonzero(np.diff(trained) > 1) + 1)
    text, longest = rollout.token_ids.numpy()[last], 0
    before = text[-1 - period : -1][::-1]
    for p in (np.flatnonzero(before == text[-1]) + 1).tolist():
        least = max(copies * p, tokens) - p
        if len(text) >= least + p and (text[-least:] == text[-least - p : -p]).all():
            differs = np.flatnonzero(text[p:] != text[:-p])
            longest = max(longest, len(text) - p - (int(differs[-1]) + 1 if len(differs) else 0))
    return longest


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
