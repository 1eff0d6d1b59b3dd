"""What every loss shares: its config, and the bound loss that a trainer calls."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveInt,
    SerializeAsAny,
    model_validator,
)
from torch import Tensor

from prime_composer.contract import LossInputs, LossOutputs, Support
from prime_composer.losses.shared.modifiers import Modifier, PositionWeights, SpecialTokenMask

Need = Literal["ref_logprobs", "support", "advantages", "token_ids", "segment_ids", "replay"]
"""Inputs that a trainer has to provide beyond trainer_logprobs, inference_logprobs and loss_mask."""

ChannelName = Literal["rl", "distillation", "replay"]
"""Which of the trainer's streams a loss reads: rewards, a teacher, or preference pairs."""

SupportSize = PositiveInt | Literal["full"]
"""K, the number of token ids per position; "full" is the whole vocabulary."""


class LossConfig(BaseModel):
    """Knobs of one loss. A subclass adds ``type: Literal["<name>"]`` and its fields, and says what it needs.

    The fields here are modifiers: they work with every loss.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    needs_inputs: ClassVar[frozenset[str]] = frozenset()
    channel: ClassVar[ChannelName] = "distillation"

    special_tokens: SpecialTokenMask | None = None
    """Takes the tokens of a chat template out of the loss."""

    position_weights: PositionWeights | None = None
    """Weighs the tokens of a response by their position (IW-OPD)."""

    rl_mix: "RLMix | None" = None
    """Adds the RL loss of the same rollouts."""

    @property
    def needs(self) -> frozenset[str]:
        """The inputs that this configuration of the loss cannot do without (``Need``)."""
        return self.needs_inputs | self.modifier_needs

    @property
    def modifier_needs(self) -> frozenset[str]:
        tokens = {"token_ids"} if self.special_tokens else set()
        scores = {"ref_logprobs"} if self.position_weights else set()
        return frozenset(tokens | scores) | (self.rl_mix.loss.needs if self.rl_mix else frozenset())

    def needs_by_section(self, section: str = "loss") -> dict[str, tuple[str, frozenset[str]]]:
        """Recipe key -> (loss type, needs): where to point when an input is missing."""
        return {section: (self.type, self.needs)}

    @property
    def support_size(self) -> int | Literal["full"]:
        """K, the number of teacher token ids per position that the scorer has to bring; 0 for none."""
        return getattr(self, "k", 0) if "support" in self.needs else 0

    @property
    def reads_sampler(self) -> bool:
        """Whether log mu matters. Text that nobody sampled has none: a policy gradient cannot train on it."""
        return bool(self.needs & {"ref_logprobs", "advantages"})

    def make_state(self, section: str = "loss") -> "LossState | None":
        """State that lives across optimiser steps (a schedule), or None."""
        return None


def parse_loss(value: Any) -> Any:
    """A nested loss table, by its ``type``, through the table of all losses."""
    if isinstance(value, LossConfig):
        return value
    from prime_composer.losses import LOSS_TYPES

    name = value.get("type") if isinstance(value, dict) else value
    if name not in LOSS_TYPES:
        raise ValueError(f"loss type {name!r} is unknown; choose one of {', '.join(LOSS_TYPES)}.")
    return LOSS_TYPES[name].model_validate(value)


AnyLoss = Annotated[SerializeAsAny[LossConfig], BeforeValidator(parse_loss)]
"""A loss within a loss: any entry of the table, chosen by ``type``."""


class RLMix(Modifier):
    """A distillation loss mixed with the RL loss of the same rollouts.

    ``interpolate`` is (1 - kd) RL + kd KD, GKD's mixture (2306.13649, Sec. 3.3); ``add`` is RL + kd KD. For the sampled token both
    are the policy gradient of the mixed advantage (1 - kd) A_rl + kd (log q - log p), but each part keeps its own trust
    region. ``compose`` does the same with more than one distillation term, and with weights of its own.
    """

    form: Literal["interpolate", "add"] = "interpolate"
    """(1 - kd) RL + kd KD, or RL + kd KD."""

    kd: NonNegativeFloat
    """Weight of the distillation loss."""

    loss: AnyLoss = Field(default_factory=lambda: parse_loss({"type": "default"}))
    """The RL loss."""

    @model_validator(mode="after")
    def _rl(self) -> "RLMix":
        require_channel(self.loss, "rl", "rl_mix.loss")
        if self.form == "interpolate" and self.kd > 1:
            raise ValueError(
                f"rl_mix: form = 'interpolate' wants kd between 0 and 1, got {self.kd}; form = 'add' takes any."
            )
        return self

    @property
    def weights(self) -> tuple[float, float]:
        """Of the RL loss, and of the distillation loss."""
        return (1 - self.kd if self.form == "interpolate" else 1.0), self.kd


LossConfig.model_rebuild()


def require_channel(config: LossConfig, channel: ChannelName, key: str) -> None:
    """Refuse a loss that reads another stream than its place in the recipe provides."""
    if config.channel != channel:
        from prime_composer.losses import LOSS_TYPES

        choices = ", ".join(
            name for name, cls in LOSS_TYPES.items() if cls.channel == channel and name != "compose"
        )
        raise ValueError(
            f"{key}: type = {config.type!r} is not a loss of the {channel} channel; choose one of {choices}."
        )


class LossState(Protocol):
    """State of a loss across optimiser steps: read by the loss, advanced once per step, saved in checkpoints."""

    def end_step(self, mean_loss: float) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class StepMean:
    """The loss per token of one optimiser step, over its micro-batches and, in a distributed run, over the ranks."""

    def __init__(self):
        self._sums: list[Tensor] = []

    def add(self, loss: Tensor, mask: Tensor) -> None:
        self._sums.append(torch.stack([loss.detach().double(), mask.sum().double()]))

    def take(self) -> float | None:
        """The mean since the last call; None where no token was seen. Every rank has to call it."""
        total = torch.stack(self._sums).sum(0) if self._sums else torch.zeros(2, dtype=torch.double)
        self._sums.clear()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            if torch.distributed.get_backend() == "nccl":
                total = total.cuda()
            torch.distributed.all_reduce(total)
        loss, tokens = total.tolist()
        return loss / tokens if tokens else None


class Loss:
    """A loss function bound to its config and state: what a trainer calls with ``LossInputs``.

    Args:
        config: the loss's knobs.
        fn: ``fn(inputs, config)``, or ``fn(inputs, config, state)`` where the config makes a state.
        section: where the config stands in the recipe, for error messages.
        rl: the bound RL loss, where the config mixes one in.
        part: True within ``compose``: the trainer's mean loss is then not this loss's own, and it keeps its own.
    """

    def __init__(
        self,
        config: LossConfig,
        fn: Callable[..., LossOutputs],
        section: str = "loss",
        rl: "Loss | None" = None,
        part: bool = False,
    ):
        self.config = config
        self.section = section
        self.state = config.make_state(section)
        self._fn = fn
        self._rl = rl
        self._own_mean = StepMean() if self.state is not None and (part or rl is not None) else None

    def require(self, available: Iterable[str]) -> None:
        """Raise ValueError unless all that the loss needs is among ``available``: the check at load, by recipe key."""
        available = set(available)
        for section, (name, needs) in self.config.needs_by_section(self.section).items():
            for need in sorted(needs - available):
                raise ValueError(
                    f"[{section}] type = {name!r} needs {need}, and the trainer gave none. {REMEDIES[need]}"
                )

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The SUM of the loss over the mask, and its metrics.

        A token of the mask whose teacher score is NaN makes the sum NaN: the trainer stops there, and knows the rollout. A
        missing score must never be 0.0 instead, which means probability 1.

        Raises:
            ValueError: an input that the loss needs is missing, or advantages carry a graph.
        """
        self.require(need for need in self.config.needs if getattr(inputs, need) is not None)
        if inputs.advantages is not None and inputs.advantages.requires_grad:
            raise ValueError(
                f"[{self.section}] got advantages that carry a gradient. A divergence used as an advantage does not depend "
                "on the sampled token: its expected policy gradient is 0. Use it as a loss of its own, or detach a reward."
            )
        everything, metrics = inputs, {}
        inputs = dataclasses.replace(inputs, support=self._first_k(inputs.support))
        for modifier in (self.config.special_tokens, self.config.position_weights):
            if modifier is not None:
                inputs, reported = modifier.apply(inputs)
                metrics |= reported
        outputs = (
            self._fn(inputs, self.config)
            if self.state is None
            else self._fn(inputs, self.config, self.state)
        )
        if self._own_mean is not None and outputs.loss.requires_grad:
            self._own_mean.add(outputs.loss, inputs.loss_mask)
        if self._rl is None:
            return LossOutputs(loss=outputs.loss, metrics=outputs.metrics | metrics)
        rl = self._rl(everything)
        rl_weight, kd_weight = self.config.rl_mix.weights
        return LossOutputs(
            loss=rl_weight * rl.loss + kd_weight * outputs.loss,
            metrics=outputs.metrics | metrics | rl.metrics,
        )

    def _first_k(self, support: Support | None) -> Support | None:
        """The K ids that this loss asked for, where another channel asked for more: most probable first."""
        k = self.config.support_size
        if support is None or k in (0, "full") or support.token_ids.shape[-1] <= k:
            return support
        return Support(
            support.token_ids[:, :k],
            support.teacher_logprobs[:, :k],
            support.student_logprobs[:, :k],
        )

    def end_step(self, mean_loss: float) -> None:
        """Advance the state, once per optimiser step, with the step's loss per token (global over micro-batches).

        A loss that is only a part of the trainer's sum goes by its own mean instead.
        """
        if self.state is None:
            return
        if self._own_mean is not None:
            mean_loss = self._own_mean.take()
        if mean_loss is not None:
            self.state.end_step(mean_loss)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.state is None else self.state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.state is not None:
            self.state.load_state_dict(state)


REMEDIES = {
    "ref_logprobs": "Configure a [teacher] that scores the student's tokens.",
    "support": "Configure a [teacher]: its scorer returns the top-K support of each position.",
    "advantages": "Configure rewards: [rollout] group_size of at least 2 and a dataset with answers.",
    "token_ids": "Pass LossInputs.token_ids.",
    "segment_ids": "Preference losses read pairs of sequences: pass LossInputs.segment_ids (2i chosen, 2i + 1 rejected).",
    "replay": "Configure a source of preference pairs, or set the weight of the replay channel to 0.",
}


def check_normalization(k: SupportSize, normalization: str, allow_biased: bool = False) -> None:
    """Refuse, when a recipe is read, a normalisation that K does not allow (``divergences`` refuses the same in a call)."""
    if normalization == "full" and k != "full":
        raise ValueError(
            f"normalization = 'full' is the whole vocabulary, and k = {k}: set k = 'full', or normalization = 'tail'."
        )
    if normalization == "renorm" and k == 1:
        raise ValueError(
            "normalization = 'renorm' with k = 1 is identically 0. Use normalization = 'tail', or k of at least 2."
        )
    if normalization == "raw" and not allow_biased:
        raise ValueError(
            "normalization = 'raw' is biased: its gradient does not vanish at p = q and its value can be negative. "
            "Use 'tail' or 'generalized', or set allow_biased = true."
        )
