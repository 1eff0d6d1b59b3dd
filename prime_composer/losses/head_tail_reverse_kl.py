"""Reverse KL, exact on the teacher's top-K tokens and sampled outside: unbiased for the full KL.

Per token y ~ mu of the mask,

    sum_S p sg(log p/q)  +  1[y not in S] rho sg(log p(y)/q(y)),    rho = p(y)/mu(y)

The head has the gradient sum_S grad p log p/q, without noise. The second term samples its missing
part, sum_{not S} grad p log p/q, with an importance weight where the rollout is stale. Summed over
y the gradient is that of the full KL, since sum grad p = 0. A head without the detach adds the
gradient of the mass P on the support, which no sample outside cancels. With a mixture of teachers
the head's q is a lower bound where K < V, and the loss is as biased as that bound is loose.

With ``tail = "event"`` the mass outside, P' of the student and Q' of the teacher, is an outcome of
the head, and what is sampled is the rest of the chain rule: which id outside it is,

    sum_S p log p/q + P' log P'/Q'  +  1[y not in S] rho sg(log p(y)/P' - log q(y)/Q')

The gradient has the same mean, because sum_{not S} p grad log(p/P') = 0, and in 19 of 20 random
pairs of p and q less noise at the same K: what all ids outside have in common of log p/q is not
sampled. P' and Q' are at least 1e-7.

Left out: the trust region. ``max_ratio`` bounds rho instead, and gives up the unbiasedness beyond
the bound.

Stale rollouts: the head is of the current student, without a ratio, and the sampled tail is
weighted by the importance ratio rho.

Temperature: p and q are at 1 in head and tail, so that rho leads from mu, at the sampling
temperature, to p at 1. ``max_ratio`` bounds its part p/mu at the sampling temperature.

References: EMA-PG (2026), https://arxiv.org/abs/2602.04417 (head and masked sampled tail, with a
head that is not detached). SC-TA of TA-OPD (2026), https://arxiv.org/abs/2608.14728. "event":
ResOPD (2026), https://arxiv.org/abs/2610.04882.
"""

import math
from typing import Any, ClassVar, Literal

import torch
from pydantic import PositiveFloat

from prime_composer.contract import LossInputs, LossOutputs, Support, given
from prime_composer.divergences import reverse_kl, upcast, weighted_k1, with_tail
from prime_composer.full_vocabulary import WholeVocabulary, on_support
from prime_composer.losses.config import SupportSize, TopKLossConfig
from prime_composer.losses.registry import register
from prime_composer.losses.shared.metrics import support_metrics, token_mean, top_share
from prime_composer.losses.shared.reductions import masked_sum


class HeadTailReverseKLLossConfig(TopKLossConfig):
    """Knobs of ``head_tail_reverse_kl_loss_fn``."""

    type: Literal["head_tail_reverse_kl"] = "head_tail_reverse_kl"

    needs_inputs: ClassVar[frozenset[str]] = frozenset({"support", "ref_logprobs", "token_ids"})
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"k": 8},
        {"k": 8, "max_ratio": 1.0},
        {"k": 8, "tail": "event"},
        {"k": "full"},
    )
    surrogate: ClassVar[bool] = True

    k: SupportSize = 32
    """Tokens per position. "full" is the whole vocabulary, and leaves nothing to sample."""

    tail: Literal["token", "event"] = "token"
    """What is sampled outside the support. event: only which id it is, mostly with less noise."""

    max_ratio: PositiveFloat | None = None
    """Bound of rho of a token outside the support, where its gradient stops. None is unbiased."""

    @property
    def own_needs(self) -> frozenset[str]:
        """The class's, or hidden states alone where nothing is left to sample."""
        whole = self.comparison_need == "hidden_states"
        return frozenset({"hidden_states"}) if whole else super().own_needs

    @property
    def needs_fixed_support(self) -> bool:
        """The tail is estimated by the sampled token, where that is outside of the support."""
        return True


@register(HeadTailReverseKLLossConfig)
def head_tail_reverse_kl_loss_fn(
    inputs: LossInputs, config: HeadTailReverseKLLossConfig
) -> LossOutputs:
    """Return sum_mask w (head + tail), as above."""
    mask = inputs.loss_mask
    support = given(inputs.support).masked(mask)
    if isinstance(support, WholeVocabulary):
        return _whole(inputs, support)
    sampled = given(inputs.token_ids).unsqueeze(-1)
    outside = mask & ~(support.token_ids == sampled).any(-1)
    # Tokens of the support are masked here too: their ratio is not used, and must not overflow.
    student = torch.where(outside, upcast(inputs.own_logprobs), 0.0)
    tempered = torch.where(outside, upcast(inputs.trainer_logprobs), 0.0).detach()
    teacher = torch.where(outside, upcast(given(inputs.ref_logprobs)), 0.0)
    sampler = torch.where(outside, upcast(inputs.inference_logprobs), 0.0)
    if config.max_ratio is not None:
        # The bound moves mu up to p / max_ratio, and stops the gradient there. It compares both at
        # the sampling temperature: what the temperature alone does to rho is no staleness.
        at_bound = tempered - sampler > math.log(config.max_ratio)
        student = torch.where(at_bound, student.detach(), student)
        sampler = torch.where(at_bound, tempered - math.log(config.max_ratio), sampler)
    p, q = upcast(support.student_logprobs), upcast(support.teacher_logprobs)
    if config.tail == "event":
        p, q = with_tail(p), with_tail(q)
        head = reverse_kl(p, q, "full")
        p_outside, q_outside = p[:, -1].detach(), q[:, -1]
        teacher = torch.where(outside, teacher + p_outside - q_outside, 0.0)
    else:
        head = (torch.exp(p) * torch.where(p == -math.inf, 0.0, p - q).detach()).sum(-1)
    tail = weighted_k1(student, teacher, sampler)
    per_token = head + tail
    loss = masked_sum(per_token, mask, inputs.loss_weights)

    with torch.no_grad():
        metrics = {
            "kl": token_mean(per_token, mask),
            "head": token_mean(head, mask),
            "sampled_tail": token_mean(tail, mask),
            "outside": token_mean(outside, mask),
            "signal_top1pct": top_share(per_token, mask),
            **support_metrics(support, mask),
        }
    return LossOutputs(loss=loss, metrics=metrics)


def _whole(inputs: LossInputs, support: Support) -> LossOutputs:
    mask = inputs.loss_mask
    per_token = on_support(support, reverse_kl)
    with torch.no_grad():
        metrics = {
            "kl": token_mean(per_token, mask),
            "signal_top1pct": top_share(per_token, mask),
        }
    return LossOutputs(masked_sum(per_token, mask, inputs.loss_weights), metrics)
