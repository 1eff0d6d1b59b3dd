"""Every loss, one file each. ``LOSS_FNS`` is the recipe's union, the dispatch and the tests' parameter list at once.

A new loss is one new file (its config, then its function) and one line in ``LOSS_FNS``.
"""

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Annotated

from pydantic import Field

from prime_composer.contract import LossOutputs
from prime_composer.losses.base import Loss, LossConfig
from prime_composer.losses.sampled_reverse_kl import SampledReverseKLLossConfig, sampled_reverse_kl_loss_fn
from prime_composer.losses.topk_forward_kl import TopKForwardKLLossConfig, topk_forward_kl_loss_fn
from prime_composer.losses.topk_reverse_kl import TopKReverseKLLossConfig, topk_reverse_kl_loss_fn

LOSS_FNS: dict[type[LossConfig], Callable[..., LossOutputs]] = {
    SampledReverseKLLossConfig: sampled_reverse_kl_loss_fn,
    TopKReverseKLLossConfig: topk_reverse_kl_loss_fn,
    TopKForwardKLLossConfig: topk_forward_kl_loss_fn,
}

LOSS_TYPES: dict[str, type[LossConfig]] = {config.model_fields["type"].default: config for config in LOSS_FNS}
"""Config class by the ``type`` that a recipe writes."""

LossUnion = Annotated[reduce(or_, LOSS_FNS), Field(discriminator="type")]
"""The recipe's ``[loss]``: any config of the table, chosen by ``type``."""


def setup_loss_fn(config: LossConfig, section: str = "loss") -> Loss:
    """The bound loss of a config.

    Args:
        config: a config of the table.
        section: where it stands in the recipe, for error messages.
    """
    return Loss(config, LOSS_FNS[type(config)], section)
