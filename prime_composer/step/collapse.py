"""Measure how the student's answers end: a student that collapses shows it there first.

Every number is of rollouts that the student sampled, and of what sampling and scoring have given
anyway. One that nothing was asked for is absent.
"""

from collections.abc import Sequence

import torch

from prime_composer.losses.shared.modifiers import RepetitionMask
from prime_composer.losses.shared.repetition import repeated_end
from prime_composer.step.batch import Sample


def collapse_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the numbers of sampled rollouts, before they are scored.

    - ``rollout/repeated``: share of the samples that end in a repetition, by the measure of
      ``[loss.repetition]`` at its defaults.
    - ``rollout/repeated_tokens``: share of the tokens that repeat, without the first copy.
    - ``rollout/entropy``: mean of -log mu in nats per token. Its expectation is the entropy of the
      policy that samples, at its temperature and top-p.
    """
    own = [sample.rollout for sample in samples if is_own(sample)]
    if not own:
        return {}
    masks = [rollout.loss_mask for rollout in own]
    of_token = torch.arange(len(own)).repeat_interleave(torch.tensor([len(one) for one in masks]))
    mask, limits = torch.cat(masks), RepetitionMask()
    repeated = repeated_end(
        torch.cat([rollout.token_ids for rollout in own]),
        mask,
        of_token,
        *(limits.period, limits.copies, limits.tokens),
    )
    log_mu = torch.cat([rollout.inference_logprobs[rollout.loss_mask] for rollout in own])
    return {
        "rollout/repeated": len(of_token[repeated].unique()) / len(own),
        "rollout/repeated_tokens": float(repeated.sum() / mask.sum()),
        "rollout/entropy": -float(log_mu.mean()),
    }


def end_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean probability of the token that ended an answer, over scored rollouts.

    ``rollout/end_student`` is that of the policy that sampled it, ``rollout/end_teacher`` the
    teacher's at the same place. A teacher that ends its answers by another token has nearly 0.
    """
    own = [
        sample
        for sample in samples
        if is_own(sample)
        and sample.rollout.finish_reason == "stop"
        and bool(sample.rollout.loss_mask[-1])
    ]
    means = {}
    if own:
        log_mu = torch.stack([sample.rollout.inference_logprobs[-1] for sample in own])
        means["rollout/end_student"] = float(log_mu.exp().mean())
    ends = [sample.scores.ref_logprobs[-1] for sample in own if sample.scores is not None]
    if ends:
        means["rollout/end_teacher"] = float(torch.stack(ends).exp().mean())
    return means


def is_own(sample: Sample) -> bool:
    """Return whether the student sampled a rollout, which then has log-probs of its own."""
    rollout = sample.rollout
    return bool(rollout.inference_logprobs[rollout.loss_mask].isfinite().all())
