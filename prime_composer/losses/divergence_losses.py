"""Losses that are one divergence per token, on K ids or over the whole vocabulary.

    L = sum over the mask of  D(p, q; normalization),    S = the K ids, the teacher's by default

with the divergences and normalizations of ``prime_composer.divergences``. A loss is a config here:
its knobs, and the divergence that they choose. ``tail`` adds the tokens outside S as one outcome.

Left out: importance weighting, because the divergence is exact at each visited position, and means
over each sequence, because every token of the batch counts alike here.

Stale rollouts: compared as the current student has them, without an importance ratio.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from prime_composer import divergences
from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.losses.config import SupportLossConfig, SupportSize
from prime_composer.losses.registry import register
from prime_composer.losses.shared.support_divergence import support_divergence

Knobs = dict[str, Any]


class DivergenceLossConfig(SupportLossConfig):
    """Knobs of a loss that is one divergence per token."""

    metric: ClassVar[str] = "divergence"  # name of its mean
    reverse: ClassVar[bool] = True  # direction of the KL among the metrics of the support

    def measure(self) -> tuple[Callable[..., Tensor], Knobs]:
        """Return a function of ``divergences``, and its keyword arguments."""
        raise NotImplementedError


class DistributionLossConfig(DivergenceLossConfig):
    """Knobs of a divergence that is defined for distributions alone."""

    normalization: Literal["full", "tail", "renorm"] = "tail"
    """How the vocabulary outside the support enters the divergence."""


def divergence_loss_fn(inputs: LossInputs, config: DivergenceLossConfig) -> LossOutputs:
    """Return sum_mask w D(p, q)."""
    divergence, knobs = config.measure()
    return support_divergence(
        inputs, config, divergence, metric=config.metric, reverse=config.reverse, **knobs
    )


class TopKReverseKLLossConfig(DivergenceLossConfig):
    """Reverse KL(student || teacher) on the teacher's top-K tokens, the default of the recipes.

    ``tail`` is a lower bound of the full KL. ``renorm`` compares p and q within S only, so that
    nothing constrains the student's mass on S. Left out: the sampled token outside S, see
    ``head_tail_reverse_kl``.

    References: "Revisiting On-Policy Distillation" (2026), https://arxiv.org/abs/2603.25562, Eq.
    6-8 (renorm, K = 32). Tail bucket: TA-OPD (2026), https://arxiv.org/abs/2608.14728.
    Generalized: MOPD (2026), https://arxiv.org/abs/2606.30406, Eq. 5.
    """

    type: Literal["topk_reverse_kl"] = "topk_reverse_kl"

    metric: ClassVar[str] = "kl"
    examples: ClassVar[tuple[Knobs, ...]] = (
        {},
        {"normalization": "renorm", "k": 8},
        {"normalization": "generalized", "k": 8},
        {"normalization": "full", "k": "full"},
        {"special_tokens": {"ids": [1, 2, 3]}},
        {"special_tokens": {"ids": list(range(20)), "occurrence": "all"}, "k": 8},
        {"stops": {"ids": [3, 5]}, "k": 8},
        {"position_weights": {}},
        {"rl_mix": {"kd": 0.3}},
    )

    def measure(self) -> tuple[Callable[..., Tensor], Knobs]:
        return divergences.reverse_kl, {}


class TopKForwardKLLossConfig(DivergenceLossConfig):
    """Forward KL(teacher || student) on the teacher's top-K tokens: the student covers the teacher.

    Its gradient for a logit is p_j - q_j on S (``tail``). It is bounded for any probability of the
    token, unlike the reverse KL's.

    Reference: GKD, "On-Policy Distillation of Language Models" (2023),
    https://arxiv.org/abs/2306.13649, Eq. 1-2. The paper uses the full vocabulary.
    """

    type: Literal["topk_forward_kl"] = "topk_forward_kl"

    metric: ClassVar[str] = "kl"
    reverse: ClassVar[bool] = False
    examples: ClassVar[tuple[Knobs, ...]] = (
        {},
        {"normalization": "renorm", "k": 8},
        {"normalization": "generalized", "k": 8},
        {"k": "full"},
    )

    k: SupportSize = 64
    """Teacher tokens per position. "full" is the whole vocabulary."""

    def measure(self) -> tuple[Callable[..., Tensor], Knobs]:
        return divergences.forward_kl, {}


class GeneralizedJSDLossConfig(DivergenceLossConfig):
    """Generalized Jensen-Shannon divergence of student and teacher: from covering to seeking.

        beta KL(q || m) + (1 - beta) KL(p || m),    m = beta q + (1 - beta) p

    ``beta`` is the teacher's weight in the mixture. By convention 0 is forward KL and 1 is reverse
    KL, and the scale jumps at both ends (see ``divergences.generalized_jsd``). The divergence is
    bounded, unlike either KL. Left out: GKD's lambda, which the engine draws per sequence before
    sampling.

    Reference: GKD, "On-Policy Distillation of Language Models" (2023),
    https://arxiv.org/abs/2306.13649, Eq. 1-2, Alg. 1.
    """

    type: Literal["generalized_jsd"] = "generalized_jsd"

    metric: ClassVar[str] = "jsd"
    examples: ClassVar[tuple[Knobs, ...]] = (
        {},
        {"beta": 0.2, "normalization": "renorm", "k": 8},
        {"beta": 0.9, "normalization": "generalized", "k": 8},
        {"beta": 0.3, "normalization": "full", "k": "full"},
    )

    beta: float = Field(0.5, ge=0, le=1)
    """The teacher's weight in the mixture: 0 is forward KL, 1 is reverse KL."""

    def measure(self) -> tuple[Callable[..., Tensor], Knobs]:
        return divergences.generalized_jsd, {"beta": self.beta}


class AlphaBetaLossConfig(DistributionLossConfig):
    """Alpha-beta divergence (ABKD): between forward and reverse KL.

    ``alpha`` is the exponent of the teacher's probabilities, ``beta`` that of the student's. (1, 0)
    is forward KL, (0, 1) is reverse KL. A small beta pulls harder at tokens that the student finds
    improbable, and a small alpha spreads the pull beyond the teacher's first tokens. The scale
    changes with both, so that a learning rate for one pair does not fit another.

    Reference: ABKD (2025), https://arxiv.org/abs/2505.04560, and ghwang-s/abkd df81318, whose
    script for GPT-2 has these defaults. It differs at the limits, see
    ``divergences.alpha_beta_divergence``.
    """

    type: Literal["alpha_beta"] = "alpha_beta"

    examples: ClassVar[tuple[Knobs, ...]] = (
        {},
        {"alpha": 1.0, "beta": -0.5, "normalization": "renorm", "k": 8},
        {"alpha": 0.4, "beta": 0.0, "normalization": "full", "k": "full"},
    )

    alpha: float = 0.2
    """Exponent of the teacher's probabilities."""

    beta: float = 0.7
    """Exponent of the student's probabilities."""

    def measure(self) -> tuple[Callable[..., Tensor], Knobs]:
        return divergences.alpha_beta_divergence, {"alpha": self.alpha, "beta": self.beta}


class SkewedKLLossConfig(DistributionLossConfig):
    """Skewed KL (DistiLLM): to a mixture of student and teacher, bounded.

        forward:  KL(q || skew q + (1 - skew) p)
        reverse:  KL(p || skew p + (1 - skew) q)

    skew = 0 is the plain KL. The loss is at most -log skew per token, and its gradient falls as
    (1 - skew)^2, so that a larger skew wants a larger learning rate. Left out: DistiLLM's adaptive
    share of the student's own rollouts, which is a property of the data.

    Reference: DistiLLM (2024), https://arxiv.org/abs/2402.03898, and jongwooko/distillm d47e77f,
    whose default is 0.1.
    """

    type: Literal["skewed_kl"] = "skewed_kl"

    examples: ClassVar[tuple[Knobs, ...]] = (
        {},
        {"direction": "reverse", "skew": 0.3, "normalization": "renorm", "k": 8},
        {"skew": 0.9, "normalization": "full", "k": "full"},
    )

    direction: Literal["forward", "reverse"] = "forward"
    """forward: KL(q || mixture). reverse: KL(p || mixture)."""

    skew: float = Field(0.1, ge=0, lt=1)
    """Share of the left distribution in the mixture: of q in forward, of p in reverse."""

    def measure(self) -> tuple[Callable[..., Tensor], Knobs]:
        is_forward = self.direction == "forward"
        skewed = divergences.skewed_forward_kl if is_forward else divergences.skewed_reverse_kl
        return skewed, {"skew": self.skew}


class TotalVariationLossConfig(DistributionLossConfig):
    """Total variation distance: half the sum of absolute differences.

    The gradient for log p_j is p_j sign(p_j - q_j) / 2. It does not shrink as p approaches q, so
    that the learning rate has to.

    Reference: "f-Divergence Minimization for Sequence-Level Knowledge Distillation" (2023),
    https://arxiv.org/abs/2307.15190.
    """

    type: Literal["total_variation"] = "total_variation"

    examples: ClassVar[tuple[Knobs, ...]] = (
        {},
        {"normalization": "renorm", "k": 8},
        {"normalization": "full", "k": "full"},
    )

    def measure(self) -> tuple[Callable[..., Tensor], Knobs]:
        return divergences.total_variation, {}


class ToDiLossConfig(DistributionLossConfig):
    """Forward KL where the student is too low, reverse KL elsewhere (ToDi).

        sum_v a_v q_v log q_v/p_v + (1 - a_v) p_v log p_v/q_v,    a_v = sg sigmoid(log q_v/p_v)

    The value is forward KL plus reverse KL. The gradient is not, because the weights are held
    fixed.

    Reference: ToDi (2025), https://arxiv.org/abs/2505.16297, and jungseongryong/ToDi 45f1f8b.
    """

    type: Literal["todi"] = "todi"

    examples: ClassVar[tuple[Knobs, ...]] = (
        {},
        {"normalization": "renorm", "k": 8},
        {"normalization": "full", "k": "full"},
    )
    surrogate: ClassVar[bool] = True

    def measure(self) -> tuple[Callable[..., Tensor], Knobs]:
        return divergences.todi, {}


for _config in (
    TopKReverseKLLossConfig,
    TopKForwardKLLossConfig,
    GeneralizedJSDLossConfig,
    AlphaBetaLossConfig,
    SkewedKLLossConfig,
    TotalVariationLossConfig,
    ToDiLossConfig,
):
    register(_config)(divergence_loss_fn)
