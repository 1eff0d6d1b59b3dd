"""Losses, one file each: a config, then its function. See README.md in this folder.

Modifiers work with all of them: ``[loss.repetition]``, ``[loss.special_tokens]``,
``[loss.position_weights]``, ``[loss.rl_mix]``. Those that compare with a teacher take
``[loss.clamp]`` too, and those with a top K or the whole vocabulary ``[loss.stops]``.

A new loss is one new file that registers itself, and one import below. A loss outside the package
needs neither: name it as ``type = "my_package.my_module:my_loss"``.
"""

from prime_composer.losses.bound import BoundLoss, Objective, WeightedSum, setup_loss_fn
from prime_composer.losses.config import (
    AnyLoss,
    LossConfig,
    LossState,
    SupportLossConfig,
    SupportRequest,
    loss_type,
    parse_loss,
)
from prime_composer.losses.needs import Unmet, require, unmet
from prime_composer.losses.registry import LOSS_FNS, LOSS_TYPES, register

# Each import registers a loss, and this is the order of the table.
# isort: off
from prime_composer.losses.sampled_reverse_kl import SampledReverseKLLossConfig
from prime_composer.losses.topk_reverse_kl import TopKReverseKLLossConfig
from prime_composer.losses.topk_forward_kl import TopKForwardKLLossConfig
from prime_composer.losses.generalized_jsd import GeneralizedJSDLossConfig
from prime_composer.losses.head_tail_reverse_kl import HeadTailReverseKLLossConfig
from prime_composer.losses.taid import TAIDLossConfig
from prime_composer.losses.entropy_aware_opd import EntropyAwareOPDLossConfig
from prime_composer.losses.self_distillation import SelfDistillationLossConfig
from prime_composer.losses.alpha_beta import AlphaBetaLossConfig
from prime_composer.losses.skewed_kl import SkewedKLLossConfig
from prime_composer.losses.total_variation import TotalVariationLossConfig
from prime_composer.losses.todi import ToDiLossConfig
from prime_composer.losses.amid import AMiDLossConfig
from prime_composer.losses.adaptive_kl import AdaptiveKLLossConfig
from prime_composer.losses.sft import SFTLossConfig
from prime_composer.losses.default import DefaultLossConfig
from prime_composer.losses.ipo import IPOLossConfig
from prime_composer.losses.icepop import IcePopLossConfig
from prime_composer.losses.dpo import DPOLossConfig
from prime_composer.losses.simpo import SimPOLossConfig
from prime_composer.losses.compose import ComposeLossConfig
# isort: on

__all__ = [
    "LOSS_FNS",
    "LOSS_TYPES",
    "AMiDLossConfig",
    "AdaptiveKLLossConfig",
    "AlphaBetaLossConfig",
    "AnyLoss",
    "BoundLoss",
    "ComposeLossConfig",
    "DPOLossConfig",
    "DefaultLossConfig",
    "EntropyAwareOPDLossConfig",
    "GeneralizedJSDLossConfig",
    "HeadTailReverseKLLossConfig",
    "IPOLossConfig",
    "IcePopLossConfig",
    "LossConfig",
    "LossState",
    "Objective",
    "SFTLossConfig",
    "SampledReverseKLLossConfig",
    "SelfDistillationLossConfig",
    "SimPOLossConfig",
    "SkewedKLLossConfig",
    "SupportLossConfig",
    "SupportRequest",
    "TAIDLossConfig",
    "ToDiLossConfig",
    "TopKForwardKLLossConfig",
    "TotalVariationLossConfig",
    "TopKReverseKLLossConfig",
    "Unmet",
    "WeightedSum",
    "loss_type",
    "parse_loss",
    "register",
    "require",
    "setup_loss_fn",
    "unmet",
]
