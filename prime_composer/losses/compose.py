"""Several objectives at once: a weighted sum of named channels over the same tokens.

    L = w_rl RL + sum_i w_i KD_i

``rl`` learns from rewards, and each entry of ``distillation`` from a teacher. The weight of ``rl``
is 1 by default, and every other weight is 0. Channels with weight 0 are skipped and have no
requirements.

All channels are sums over the same tokens, so that their weights compare per token. Each keeps its
own modifiers and its own schedule. Metrics are ``compose/<channel>/<what>``.

Stale rollouts: as each channel has it, with or without an importance ratio.
"""

from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, model_validator

from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.losses.bound import setup_loss_fn
from prime_composer.losses.config import (
    AnyLoss,
    LossConfig,
    SupportRequest,
    Term,
    parse_loss,
    require_channel,
)
from prime_composer.losses.registry import register
from prime_composer.tables import Table


class Channel(Table):
    """One term of the sum."""

    loss: AnyLoss
    """Any loss of the channel, chosen by ``type``."""

    weight: NonNegativeFloat = 0.0
    """Factor in the sum."""


class RLChannel(Channel):
    """The RL term, present by default."""

    loss: AnyLoss = Field(default_factory=lambda: parse_loss({"type": "default"}))
    """``default`` (DPPO + KL), ``ipo`` or ``icepop``."""

    weight: NonNegativeFloat = 1.0
    """Factor in the sum."""


class ComposeLossConfig(LossConfig):
    """Channels and their weights."""

    type: Literal["compose"] = "compose"

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {
            "distillation": {
                "tail": {"weight": 0.5, "loss": {"type": "topk_reverse_kl", "k": 8}},
                "moving": {"weight": 0.25, "loss": {"type": "taid", "total_steps": 10, "k": 8}},
                "off": {"loss": {"type": "topk_forward_kl", "k": "full"}},
            },
            "position_weights": {},
        },
    )
    surrogate: ClassVar[bool] = True

    rl: RLChannel = Field(default_factory=RLChannel)
    """``[loss.rl]``: weight, and ``[loss.rl.loss]``."""

    distillation: dict[str, Channel] = Field(default_factory=dict)
    """``[loss.distillation.<name>]``: weight, and ``[loss.distillation.<name>.loss]``, any number
    of them."""

    @model_validator(mode="after")
    def _channels_fit(self) -> "ComposeLossConfig":
        require_channel(self.rl.loss, "rl", "rl.loss")
        for name, channel in self.distillation.items():
            require_channel(channel.loss, "distillation", f"distillation.{name}.loss")
            if channel.loss.is_sum():
                raise ValueError(
                    f"distillation.{name}.loss: compose does not nest; name its channels here."
                )
            if name == "rl":
                raise ValueError(
                    "distillation.rl: choose another name, [loss.rl] is a channel of its own."
                )
        if not self.channels:
            raise ValueError(
                "every channel's weight is 0: nothing would train. "
                "Set rl.weight or another weight above 0."
            )
        return self

    @property
    def channels(self) -> tuple[Term, ...]:
        """Channels with a positive weight."""
        channels = [Term("rl", "rl.loss", self.rl.weight, self.rl.loss)]
        channels += [
            Term(name, f"distillation.{name}.loss", channel.weight, channel.loss)
            for name, channel in self.distillation.items()
        ]
        return tuple(channel for channel in channels if channel.weight > 0)

    @property
    def support(self) -> SupportRequest | None:
        """The largest support of all channels. Each channel reads its own K of it."""
        requests = [term.loss.support for term in self.channels]
        given = [request for request in requests if request is not None]
        choosers = {request.chosen_by for request in given}
        numbers = [request.k for request in given if request.k != "full"]
        if not given:
            return None
        if len(numbers) < len(given) or len(choosers) > 1:
            return SupportRequest("full")
        return SupportRequest(max(numbers), choosers.pop())


@register(ComposeLossConfig)
def compose_loss_fn(inputs: LossInputs, config: ComposeLossConfig) -> LossOutputs:
    """sum over channels of weight times the channel's sum."""
    return setup_loss_fn(config)(inputs)
