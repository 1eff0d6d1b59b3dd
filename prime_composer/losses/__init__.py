"""Every loss, one file each. ``LOSS_FNS`` is the recipe's union, the dispatch and the tests' parameter list at once.

Distillation, on a support of the teacher's top-K tokens (or all of them):
    topk_reverse_kl         KL(student || teacher), the default of the recipes
    topk_forward_kl         KL(teacher || student)
    generalized_jsd         between the two (GKD)
    head_tail_reverse_kl    the support exactly, the rest sampled: unbiased for the full reverse KL
    taid                    towards an intermediate teacher that moves from the student to the teacher
    entropy_aware_opd       reverse KL, and forward KL where the teacher is unsure
    self_distillation       the teacher is the policy itself, told more (SDPO, OPSD, SDFT)
On the sampled token alone:
    sampled_reverse_kl      what prime-rl ships, bit for bit; or with a trust region of its own
    sft                     cross-entropy on given tokens
RL on rewards: default, ipo. Preference pairs: dpo, simpo. A weighted sum of channels: compose.

Modifiers work with all of them: ``[loss.special_tokens]``, ``[loss.position_weights]``, ``[loss.rl_mix]``.

A new loss is one new file (its config, then its function) and one line in ``LOSS_FNS``.
"""

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Annotated

from pydantic import Field

from prime_composer.contract import LossOutputs
from prime_composer.losses.base import Loss, LossConfig
from prime_composer.losses.compose import ComposeLossConfig, compose_loss_fn
from prime_composer.losses.default import DefaultLossConfig, default_loss_fn
from prime_composer.losses.dpo import DPOLossConfig, dpo_loss_fn
from prime_composer.losses.entropy_aware_opd import (
    EntropyAwareOPDLossConfig,
    entropy_aware_opd_loss_fn,
)
from prime_composer.losses.generalized_jsd import GeneralizedJSDLossConfig, generalized_jsd_loss_fn
from prime_composer.losses.head_tail_reverse_kl import (
    HeadTailReverseKLLossConfig,
    head_tail_reverse_kl_loss_fn,
)
from prime_composer.losses.ipo import IPOLossConfig, ipo_loss_fn
from prime_composer.losses.sampled_reverse_kl import (
    SampledReverseKLLossConfig,
    sampled_reverse_kl_loss_fn,
)
from prime_composer.losses.self_distillation import (
    SelfDistillationLossConfig,
    self_distillation_loss_fn,
)
from prime_composer.losses.sft import SFTLossConfig, sft_loss_fn
from prime_composer.losses.simpo import SimPOLossConfig, simpo_loss_fn
from prime_composer.losses.taid import TAIDLossConfig, taid_loss_fn
from prime_composer.losses.topk_forward_kl import TopKForwardKLLossConfig, topk_forward_kl_loss_fn
from prime_composer.losses.topk_reverse_kl import TopKReverseKLLossConfig, topk_reverse_kl_loss_fn

LOSS_FNS: dict[type[LossConfig], Callable[..., LossOutputs]] = {
    SampledReverseKLLossConfig: sampled_reverse_kl_loss_fn,
    TopKReverseKLLossConfig: topk_reverse_kl_loss_fn,
    TopKForwardKLLossConfig: topk_forward_kl_loss_fn,
    GeneralizedJSDLossConfig: generalized_jsd_loss_fn,
    HeadTailReverseKLLossConfig: head_tail_reverse_kl_loss_fn,
    TAIDLossConfig: taid_loss_fn,
    EntropyAwareOPDLossConfig: entropy_aware_opd_loss_fn,
    SelfDistillationLossConfig: self_distillation_loss_fn,
    SFTLossConfig: sft_loss_fn,
    DefaultLossConfig: default_loss_fn,
    IPOLossConfig: ipo_loss_fn,
    DPOLossConfig: dpo_loss_fn,
    SimPOLossConfig: simpo_loss_fn,
    ComposeLossConfig: compose_loss_fn,
}

LOSS_TYPES: dict[str, type[LossConfig]] = {
    config.model_fields["type"].default: config for config in LOSS_FNS
}
"""Config class by the ``type`` that a recipe writes."""

LossUnion = Annotated[reduce(or_, LOSS_FNS), Field(discriminator="type")]
"""The recipe's ``[loss]``: any config of the table, chosen by ``type``."""


def setup_loss_fn(config: LossConfig, section: str = "loss", part: bool = False) -> Loss:
    """The bound loss of a config.

    Args:
        config: a config of the table.
        section: where it stands in the recipe, for error messages.
        part: True for a channel of ``compose``.
    """
    rl = setup_loss_fn(config.rl_mix.loss, f"{section}.rl_mix.loss") if config.rl_mix else None
    return Loss(config, LOSS_FNS[type(config)], section, rl=rl, part=part)
