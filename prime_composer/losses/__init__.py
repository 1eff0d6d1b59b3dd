"""Losses: a config, then its function, and a family in one file. See README.md in this folder.

Modifiers work with all of them: ``[loss.special_tokens]``, ``[loss.position_weights]``,
``[loss.rl_mix]``. Those with a top K or the whole vocabulary take ``[loss.stops]`` too.

A new loss registers itself, and has its file imported below. A loss outside the package needs
neither: name it as ``type = "my_package.my_module:my_loss"``.
"""

# isort: off
from prime_composer.losses.bound import Objective as Objective, setup_loss_fn as setup_loss_fn
from prime_composer.losses.config import (
    AnyLoss as AnyLoss,
    LossConfig as LossConfig,
    LossState as LossState,
    SupportLossConfig as SupportLossConfig,
    SupportRequest as SupportRequest,
    loss_type as loss_type,
    parse_loss as parse_loss,
)
from prime_composer.losses.needs import require_inputs as require_inputs
from prime_composer.losses.registry import (
    LOSS_FNS as LOSS_FNS,
    LOSS_TYPES as LOSS_TYPES,
    register as register,
)

# Each import registers losses, and this is the order of the table.
from prime_composer.losses.divergence_losses import (
    AlphaBetaLossConfig as AlphaBetaLossConfig,
    GeneralizedJSDLossConfig as GeneralizedJSDLossConfig,
    SkewedKLLossConfig as SkewedKLLossConfig,
    ToDiLossConfig as ToDiLossConfig,
    TopKForwardKLLossConfig as TopKForwardKLLossConfig,
    TopKReverseKLLossConfig as TopKReverseKLLossConfig,
    TotalVariationLossConfig as TotalVariationLossConfig,
)
from prime_composer.losses.head_tail_reverse_kl import (
    HeadTailReverseKLLossConfig as HeadTailReverseKLLossConfig,
)
from prime_composer.losses.taid import TAIDLossConfig as TAIDLossConfig
from prime_composer.losses.entropy_aware_opd import (
    EntropyAwareOPDLossConfig as EntropyAwareOPDLossConfig,
)
from prime_composer.losses.self_distillation import (
    SelfDistillationLossConfig as SelfDistillationLossConfig,
)
from prime_composer.losses.policy_gradients import (
    DefaultLossConfig as DefaultLossConfig,
    IcePopLossConfig as IcePopLossConfig,
    IPOLossConfig as IPOLossConfig,
    SampledReverseKLLossConfig as SampledReverseKLLossConfig,
)
from prime_composer.losses.sft import SFTLossConfig as SFTLossConfig
from prime_composer.losses.compose import ComposeLossConfig as ComposeLossConfig
# isort: on
