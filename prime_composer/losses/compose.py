"""Several objectives at once: a weighted sum of named channels over the same tokens.

    L = w_rl RL + sum_i w_i KD_i + w_replay REPLAY

``rl`` reads rewards, each entry of ``distillation`` a teacher, ``replay`` preference pairs (a pack of its own,
``LossInputs.replay``). The weight of ``rl`` defaults to 1 and every other to 0. A channel of weight 0 is not computed and asks
for nothing; a channel of positive weight whose input is missing is an error that names its recipe key.

All channels but ``replay`` are sums over the same tokens, so that their weights compare per token; ``replay`` is a sum over
pairs, which the trainer scales by ``LossInputs.replay.loss_weights``. Each channel keeps its own modifiers and its own schedule
(a schedule reads its channel's own mean loss, not the sum). Metrics: ``compose/<channel>/<what>``.
"""

from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, model_validator

from prime_composer.contract import LossInputs, LossOutputs
from prime_composer.losses.base import AnyLoss, Loss, LossConfig, parse_loss, require_channel


class Channel(BaseModel):
    """One term of the sum."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    loss: AnyLoss
    """Any loss of the channel, chosen by ``type``."""

    weight: NonNegativeFloat = 0.0
    """Factor in the sum."""


class RLChannel(Channel):
    """The RL term: there by default."""

    loss: AnyLoss = Field(default_factory=lambda: parse_loss({"type": "default"}))
    """``default`` (DPPO + KL) or ``ipo``."""

    weight: NonNegativeFloat = 1.0
    """Factor in the sum."""


class ComposeLossConfig(LossConfig):
    type: Literal["compose"] = "compose"

    rl: RLChannel = Field(default_factory=RLChannel)
    """``[loss.rl]``: weight, and ``[loss.rl.loss]``."""

    distillation: dict[str, Channel] = Field(default_factory=dict)
    """``[loss.distillation.<name>]``: weight, and ``[loss.distillation.<name>.loss]``; as many as wanted."""

    replay: Channel | None = None
    """``[loss.replay]``: weight, and ``[loss.replay.loss]`` of type dpo or simpo."""

    @model_validator(mode="after")
    def _channels(self) -> "ComposeLossConfig":
        require_channel(self.rl.loss, "rl", "rl.loss")
        for name, channel in self.distillation.items():
            require_channel(channel.loss, "distillation", f"distillation.{name}.loss")
            if channel.loss.type == "compose":
                raise ValueError(
                    f"distillation.{name}.loss: compose does not nest; name its channels here."
                )
            if name in ("rl", "replay"):
                raise ValueError(
                    f"distillation.{name}: choose another name, [loss.{name}] is a channel of its own."
                )
        if self.replay is not None:
            require_channel(self.replay.loss, "replay", "replay.loss")
        if not self.active():
            raise ValueError(
                "every channel's weight is 0: nothing would train. Set rl.weight or another weight above 0."
            )
        return self

    def active(self) -> dict[str, tuple[str, Channel]]:
        """Channels of positive weight: name -> (recipe key below this table, channel)."""
        channels = {"rl": ("rl.loss", self.rl)}
        channels |= {
            name: (f"distillation.{name}.loss", channel)
            for name, channel in self.distillation.items()
        }
        if self.replay is not None:
            channels["replay"] = ("replay.loss", self.replay)
        return {
            name: (key, channel) for name, (key, channel) in channels.items() if channel.weight > 0
        }

    @property
    def needs(self) -> frozenset[str]:
        needs = self.modifier_needs
        for name, (_, channel) in self.active().items():
            needs |= {"replay"} if name == "replay" else channel.loss.needs
        return needs

    def needs_by_section(self, section: str = "loss") -> dict[str, tuple[str, frozenset[str]]]:
        found = {section: (self.type, self.modifier_needs)}
        for name, (key, channel) in self.active().items():
            if name == "replay":
                found[f"{section}.{key}"] = (channel.loss.type, frozenset({"replay"}))
            else:
                found |= channel.loss.needs_by_section(f"{section}.{key}")
        return found

    @property
    def support_size(self) -> int | Literal["full"]:
        sizes = [channel.loss.support_size for _, channel in self.active().values()]
        return "full" if "full" in sizes else max(sizes)

    @property
    def reads_sampler(self) -> bool:
        channels = (
            channel.loss for name, (_, channel) in self.active().items() if name != "replay"
        )
        return bool(self.modifier_needs & {"ref_logprobs", "advantages"}) or any(
            loss.reads_sampler for loss in channels
        )

    def make_state(self, section: str = "loss") -> "Channels":
        return Channels(self, section)


class Channels:
    """The bound losses of the active channels, as the state of the sum: some of them have schedules."""

    def __init__(self, config: ComposeLossConfig, section: str):
        from prime_composer.losses import setup_loss_fn

        self.losses: dict[str, Loss] = {
            name: setup_loss_fn(channel.loss, f"{section}.{key}", part=True)
            for name, (key, channel) in config.active().items()
        }
        self.weights = {name: channel.weight for name, (_, channel) in config.active().items()}

    def end_step(self, mean_loss: float) -> None:
        for loss in self.losses.values():
            loss.end_step(mean_loss)

    def state_dict(self) -> dict[str, Any]:
        return {
            name: loss.state_dict() for name, loss in self.losses.items() if loss.state is not None
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, channel_state in state.items():
            self.losses[name].load_state_dict(channel_state)


def compose_loss_fn(inputs: LossInputs, config: ComposeLossConfig, state: Channels) -> LossOutputs:
    """sum over channels of weight times the channel's sum."""
    # The anchor keeps a micro-batch with replay alone in the graph of the policy's log-probs, as upstream's does.
    loss = torch.where(inputs.loss_mask, inputs.trainer_logprobs, 0.0).sum() * 0.0
    metrics = {}
    for name, channel in state.losses.items():
        outputs = channel(inputs.replay if name == "replay" else inputs)
        loss = loss + state.weights[name] * outputs.loss
        own = f"{channel.config.type}/"
        metrics |= {
            f"compose/{name}/{key.removeprefix(own)}": value
            for key, value in outputs.metrics.items()
        }
        if name != "replay":
            with torch.no_grad():
                mean = outputs.loss.detach() / inputs.loss_mask.sum().clamp(min=1)
                metrics[f"compose/{name}/loss"] = mean
    return LossOutputs(loss=loss, metrics=metrics)
