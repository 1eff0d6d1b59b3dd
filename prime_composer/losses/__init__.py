"""Losses: a config, then its function, and a family in one file. See README.md in this folder.

Modifiers work with all of them: ``[loss.repetition]``, ``[loss.special_tokens]``,
``[loss.position_weights]``, ``[loss.rl_mix]``. Those that compare with a teacher take
``[loss.clamp]`` too, and those with a top K or the whole vocabulary ``[loss.stops]``.

A new loss registers itself, and has its file imported below. A loss outside the package needs
neither: name it as ``type = "my_package.my_module:my_loss"``.
"""

from prime_composer.losses.bound import Objective, setup_loss_fn
from prime_composer.losses.config import (
    AnyLoss,
    LossConfig,
    LossState,
    SupportLossConfig,
    SupportRequest,
    loss_type,
    parse_loss,
)
from prime_composer.losses.needs import require_inputs
from prime_composer.losses.registry import LOSS_FNS, LOSS_TYPES, register

# Each import registers losses, and this is the order of the table.
# isort: off
from prime_composer.losses.divergence_losses import (
    AdaptiveKLLossConfig,
    AlphaBetaLossConfig,
    AMiDLossConfig,
    GeneralizedJSDLossConfig,
    SkewedKLLossConfig,
    ToDiLossConfig,
    TopKForwardKLLossConfig,
    TopKReverseKLLossConfig,
    TotalVariationLossConfig,
)
from prime_composer.losses.head_tail_reverse_kl import HeadTailReverseKLLossConfig
from prime_composer.losses.taid import TAIDLossConfig
from prime_composer.losses.entropy_aware_opd import EntropyAwareOPDLossConfig
from prime_composer.losses.self_distillation import SelfDistillationLossConfig
from prime_composer.losses.policy_gradients import (
    DefaultLossConfig,
    IcePopLossConfig,
    IPOLossConfig,
    SampledReverseKLLossConfig,
)
from prime_composer.losses.sft import SFTLossConfig
from prime_composer.losses.preferences import DPOLossConfig, SimPOLossConfig
from prime_composer.losses.compose import ComposeLossConfig
# isort: on

__all__ = [
    "LOSS_FNS",
    "LOSS_TYPES",
    "AMiDLossConfig",
    "AdaptiveKLLossConfig",
    "AlphaBetaLossConfig",
    "AnyLoss",
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
    "loss_type",
    "parse_loss",
    "register",
    "require_inputs",
    "setup_loss_fn",
]
