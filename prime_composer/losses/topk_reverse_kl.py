"""Reverse KL(student || teacher) on the teacher's top-K tokens, the default of the recipes.

    L = sum over the mask of  reverse_kl(p, q; normalization),    S = the teacher's K most probable

with the normalizations of ``prime_composer.divergences``. ``tail`` adds the tokens outside S as one
outcome, and is a lower bound of the full KL. ``renorm`` compares p and q within S only, so that
nothing constrains the student's mass on S.

Left out: importance weighting, because the divergence is exact at each visited position, and the
sampled token outside S, see ``head_tail_reverse_kl``.

Stale rollouts: compared as the current student has them, without an importance ratio.

References: "Revisiting On-Policy Distillation" (2026), https://arxiv.org/abs/2603.25562, Eq. 6-8
(renorm, K = 32). Tail bucket: TA-OPD (2026), https://arxiv.org/abs/2608.14728. Generalized: MOPD
(2026), https://arxiv.org/abs/2606.30406, Eq. 5.
"""

from typing import Any, ClassVar, Literal

from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.divergences import reverse_kl
from prime_composer.losses.config import KLLossConfig
from prime_composer.losses.registry import register
from prime_composer.losses.shared.support_divergence import support_divergence


class TopKReverseKLLossConfig(KLLossConfig):
    """Knobs of ``topk_reverse_kl_loss_fn``."""

    type: Literal["topk_reverse_kl"] = "topk_reverse_kl"

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"normalization": "renorm", "k": 8},
        {"normalization": "generalized", "k": 8},
        {"normalization": "stop_gradient", "k": 8},
        {"normalization": "raw", "allow_biased": True, "k": 8},
        {"normalization": "full", "k": "full"},
        {"special_tokens": {"ids": [1, 2, 3]}},
        {"repetition": {"copies": 2, "tokens": 2}},
        {"special_tokens": {"ids": list(range(20)), "occurrence": "all"}, "k": 8},
        {"stops": {"ids": [3, 5]}, "k": 8},
        {"position_weights": {}},
        {"rl_mix": {"kd": 0.3}},
    )


@register(TopKReverseKLLossConfig)
def topk_reverse_kl_loss_fn(inputs: LossInputs, config: TopKReverseKLLossConfig) -> LossOutputs:
    """Return sum_mask w KL(p || q)."""
    return support_divergence(
        inputs, config, reverse_kl, metric="kl", allow_biased=config.allow_biased
    )
