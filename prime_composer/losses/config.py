"""Configs of losses: the knobs, what a loss needs, and which part of a recipe it belongs to."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol, final, runtime_checkable

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    model_validator,
)

from prime_composer.divergences import Normalization
from prime_composer.losses import registry
from prime_composer.losses.needs import NEEDS, OF_TEACHER
from prime_composer.losses.shared.balance import Balance
from prime_composer.losses.shared.modifiers import (
    Modifier,
    PositionWeights,
    SpecialTokenMask,
)
from prime_composer.losses.shared.stops import Stops
from prime_composer.tables import Table

ChannelName = Literal["rl", "distillation"]  # What a loss learns from

SupportSize = PositiveInt | Literal["full"]  # K ids per position, or the whole vocabulary


@dataclass(frozen=True)
class SupportRequest:
    """Token ids at which a loss compares both: the k most probable of teacher or student."""

    k: int | Literal["full"]
    chosen_by: Literal["teacher", "student"] = "teacher"


@dataclass(frozen=True)
class Term:
    """One summand of a loss that is a weighted sum of other losses."""

    name: str  # in checkpoints and metrics
    key: str  # recipe key of the term's loss, below the sum's own table. "" for that table itself.
    weight: float
    loss: "LossConfig"
    # its metrics are named as if the loss stood alone, not below ``name``
    mixed: bool = False


@runtime_checkable
class LossState(Protocol):
    """State that a loss reads in each step, advanced once per optimizer step and checkpointed."""

    def end_step(self, mean_loss: float) -> None:
        """Advance by the step's loss per token."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""


class LossConfig(Table):
    """Knobs of one loss.

    A subclass adds ``type: Literal["<name>"] = "<name>"``, its fields and what it needs. The fields
    of this class are modifiers, which work with every loss.

    Attributes:
        needs_inputs: inputs without which the loss cannot be computed (``NEEDS``).
        channel: what the loss learns from.
        examples: knobs of the configs that the contract tests run, one table each.
        surrogate: True where the loss contains a stop-gradient, so that its gradient is not the
            derivative of its value.
        on_given_text: the loss trains on given text alone. On the student's own samples its
            expected gradient is 0.
        takes_reference: ``ref_logprobs`` may be extrapolated from a reference model, and are then
            log-probs of no distribution.
    """

    needs_inputs: ClassVar[frozenset[str]] = frozenset()
    channel: ClassVar[ChannelName] = "distillation"
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    surrogate: ClassVar[bool] = False
    on_given_text: ClassVar[bool] = False
    takes_reference: ClassVar[bool] = False

    type: str
    """Name of the loss."""

    special_tokens: SpecialTokenMask | None = None
    """Removes the tokens of a chat template from the loss."""

    stops: Stops | None = None
    """Compares ids that end an answer as one outcome."""

    position_weights: PositionWeights | None = None
    """Weights the tokens of a response by their position (IW-OPD)."""

    balance: Balance | None = None
    """Weights the sequences of a step."""

    rl_mix: "RLMix | None" = None
    """Adds the RL loss of the same rollouts."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a subclass that replaces ``needs``, or that needs an input that does not exist."""
        super().__init_subclass__(**kwargs)
        if "needs" in cls.__dict__ or "needs" in cls.__dict__.get("__annotations__", {}):
            raise TypeError(
                f"{cls.__name__} overrides `needs`, which adds what the modifiers need. "
                "Override `own_needs`, or set `needs_inputs`."
            )
        if unknown := cls.needs_inputs - NEEDS.keys():
            raise TypeError(
                f"{cls.__name__}.needs_inputs names {', '.join(sorted(unknown))}; a loss may need: "
                f"{', '.join(NEEDS)} (prime_composer.losses.needs.NEEDS)."
            )

    @model_validator(mode="after")
    def _has_a_top_k_for_stops(self) -> "LossConfig":
        top_k = self.own_needs & OF_TEACHER - {"ref_logprobs"}
        if self.stops is not None and (self.is_sum() or not top_k):
            of_terms = "set stops in the tables of its terms"
            raise ValueError(
                f"stops: type = {self.type!r} has no top K of a teacher, of which they are: "
                f"{of_terms if self.is_sum() else 'leave it out'}."
            )
        return self

    @property
    def own_needs(self) -> frozenset[str]:
        """Inputs that the loss function itself needs. Override it where a knob decides."""
        return self.needs_inputs

    @property
    def needs_fixed_support(self) -> bool:
        """Whether the ids of the support must not depend on the sampled token.

        Override it where the gradient is an estimate that is unbiased for a fixed support only.
        """
        return False

    @property
    @final
    def needs(self) -> frozenset[str]:
        """Inputs that the loss, its modifiers and its terms cannot do without."""
        return frozenset().union(*(needs for _, needs in self.needs_by_section().values()))

    @property
    @final
    def modifiers(self) -> tuple[Modifier, ...]:
        """Modifiers of the inputs, in the order in which they apply."""
        own = (self.special_tokens, self.stops, self.position_weights)
        chosen = (*(own if self.rl_mix is None else ()), self.balance)
        return tuple(modifier for modifier in chosen if modifier is not None)

    @property
    def _needs_without_terms(self) -> frozenset[str]:
        own = frozenset() if self.terms else self.own_needs
        return own.union(*(modifier.needs for modifier in self.modifiers))

    @property
    @final
    def stop_ids(self) -> tuple[int, ...]:
        """Ids at which ``LossInputs.stops`` are needed: those of the loss and of its terms."""
        own = [term.loss.stop_ids for term in self.terms]
        own += [] if self.stops is None else [self.stops.ids]
        return tuple(sorted({i for ids in own for i in ids}))

    @property
    def channels(self) -> tuple[Term, ...]:
        """Terms of a loss that is a weighted sum. Empty for one with a function of its own."""
        return ()

    @classmethod
    @final
    def is_sum(cls) -> bool:
        """Return whether the loss is a sum of channels, and not a term of another sum."""
        return cls.channels is not LossConfig.channels

    @property
    @final
    def terms(self) -> tuple[Term, ...]:
        """Summands of the sum to compute: the channels, or the loss itself and its RL mix."""
        mix = self.rl_mix
        if mix is None:
            return self.channels
        alone = self.model_copy(update={"rl_mix": None, "balance": None})
        rl_weight = 1 - mix.kd if mix.form == "interpolate" else 1.0
        return (
            Term("kd", "", mix.kd, alone, mixed=True),
            Term("rl", "rl_mix.loss", rl_weight, mix.loss, mixed=True),
        )

    def needs_by_section(
        self, section: str = "loss"
    ) -> dict[str, tuple["LossConfig", frozenset[str]]]:
        """Map each recipe section to its loss and its needs, for error messages."""
        found: dict[str, tuple[LossConfig, frozenset[str]]] = {}
        found[section] = (self, self._needs_without_terms)
        for term in self.terms:
            below = f"{section}.{term.key}" if term.key else section
            for place, (loss, needs) in term.loss.needs_by_section(below).items():
                _, others = found.get(place, (loss, frozenset()))
                found[place] = (loss, needs | others)
        return found

    @property
    def compares_with_teacher(self) -> bool:
        """Whether the loss reads what a teacher's scores are needed for."""
        return bool(self.needs & OF_TEACHER)

    @property
    def reads_hidden_states(self) -> bool:
        """Whether a teacher is asked for hidden states, and not for log-probs of K ids alone."""
        return "hidden_states" in self.needs

    @property
    def reads_rewards_and_teacher(self) -> bool:
        """Whether the loss reads advantages and a teacher's log-probs of the same tokens."""
        return self.compares_with_teacher and "advantages" in self.needs

    @property
    def support(self) -> SupportRequest | None:
        """Token ids at which the loss compares student and teacher, None where it needs none."""
        if "support" in self.needs:
            raise ValueError(
                f"{type(self).__name__} needs the support without naming the number of ids: "
                "derive it from SupportLossConfig, or override `support`."
            )
        return None

    @property
    @final
    def support_size(self) -> int | Literal["full"]:
        """K: ids per position at which the teacher's log-probs are needed, 0 for none."""
        request = self.support
        if request is None:
            return 0
        return "full" if request.chosen_by == "student" else request.k

    @property
    @final
    def asked_of_teacher(self) -> tuple[int | Literal["full"], bool]:
        """K that a teacher is asked for which can score given ids, and whether these are given."""
        request = self.support
        if request is not None and request.chosen_by == "student" and request.k != "full":
            return request.k, True
        return self.support_size, False

    @property
    def reads_sampler(self) -> bool:
        """Whether ``inference_logprobs`` matter. Dataset text has none."""
        return bool(self._needs_without_terms & {"ref_logprobs", "advantages"}) or any(
            term.loss.reads_sampler for term in self.terms
        )

    def make_state(self) -> LossState | None:
        """Return a new state, or None for a loss without one."""
        return None


def loss_type(name: str) -> type[LossConfig]:
    """Return the config class of a ``type``. A ``"module:function"`` is imported at first use."""
    return registry.lookup(name, LossConfig)


def parse_loss(value: Any) -> LossConfig:
    """Parse a loss table by its ``type``. A config is returned as it is.

    Raises:
        ValueError: no ``type``, or an unknown one.
        pydantic.ValidationError: wrong fields, with their locations.
    """
    if isinstance(value, LossConfig):
        return value
    name = value.get("type") if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise ValueError(f"a loss is a table with a `type`. {registry.choices()}")
    return loss_type(name).model_validate(value)


AnyLoss = Annotated[SerializeAsAny[LossConfig], BeforeValidator(parse_loss)]
"""Any loss, chosen by its ``type``: the type of a field that contains a loss table."""


class RLMix(Table):
    """The RL loss of the same rollouts, as a second term beside any loss.

    ``interpolate`` is (1 - kd) RL + kd KD, GKD's mixture (2306.13649, Sec. 3.3). ``add`` is
    RL + kd KD. For the sampled token both are the policy gradient of the mixed advantage
    (1 - kd) A_rl + kd (log q - log p), but each part keeps its own trust region. ``compose`` does
    the same with several distillation terms.
    """

    form: Literal["interpolate", "add"] = "interpolate"
    """(1 - kd) RL + kd KD, or RL + kd KD."""

    kd: NonNegativeFloat
    """Weight of the distillation loss."""

    loss: AnyLoss = Field(default_factory=lambda: parse_loss({"type": "default"}))
    """The RL loss."""

    @model_validator(mode="after")
    def _is_rl_with_valid_weights(self) -> "RLMix":
        require_channel(self.loss, "rl", "rl_mix.loss")
        if self.form == "interpolate" and self.kd > 1:
            raise ValueError(
                f"rl_mix: form = 'interpolate' takes a kd between 0 and 1, got {self.kd}. "
                "form = 'add' takes any kd from 0."
            )
        return self


LossConfig.model_rebuild()


def require_channel(config: LossConfig, channel: ChannelName, key: str) -> None:
    """Refuse a loss at ``key`` that learns from something else than its place provides."""
    if config.channel != channel:
        names = ", ".join(
            name
            for name, other in registry.LOSS_TYPES.items()
            if other.channel == channel and not other.is_sum()
        )
        raise ValueError(
            f"{key}: type = {config.type!r} is not a loss of the {channel} channel; "
            f"choose one of {names}."
        )


class TopKLossConfig(LossConfig):
    """Knobs of a loss on K tokens per position, or on the whole vocabulary.

    k = "full" needs ``LossInputs.hidden_states``. ``LossInputs.support`` is then made of them.
    """

    needs_inputs: ClassVar[frozenset[str]] = frozenset({"support"})

    k: SupportSize = 32
    """Tokens per position. "full" is the whole vocabulary."""

    chosen_by: Literal["teacher", "student"] = "teacher"
    """Whose K most probable tokens are compared. "student" works on one machine."""

    @property
    def comparison_need(self) -> str:
        """The input in which student and teacher are compared: the support or hidden states."""
        return "hidden_states" if self.k == "full" else "support"

    @property
    def own_needs(self) -> frozenset[str]:
        """The inputs that the class names, with hidden states in the place of a whole support."""
        return frozenset(
            self.comparison_need if need == "support" else need for need in self.needs_inputs
        )

    @property
    def support(self) -> SupportRequest | None:
        """The k most probable tokens of the teacher or of the student."""
        return SupportRequest(self.k, self.chosen_by) if "support" in self.needs else None


class SupportLossConfig(TopKLossConfig):
    """Knobs of a divergence on K tokens per position, or on the whole vocabulary.

    A subclass narrows ``normalization`` to the values that its divergence defines.
    """

    temperature: PositiveFloat = 1.0
    """Divides the logits of student and teacher, with k = "full" or normalization = "renorm". The
    loss is not multiplied by its square."""

    normalization: Normalization = "tail"
    """How the vocabulary outside the support enters the divergence."""

    @model_validator(mode="after")
    def _knobs_fit_k(self) -> "SupportLossConfig":
        if self.normalization == "full" and self.k != "full":
            raise ValueError(
                f"normalization = 'full' is the whole vocabulary, and k = {self.k}: "
                "set k = 'full', or normalization = 'tail'."
            )
        if self.normalization == "renorm" and self.k == 1:
            raise ValueError(
                "normalization = 'renorm' with k = 1 is identically 0. "
                "Use normalization = 'tail', or k of at least 2."
            )
        masses = self.normalization != "renorm" or self.stops is not None
        if self.temperature != 1 and self.k != "full" and masses:
            raise ValueError(
                f"temperature = {self.temperature} divides logits, and normalization = "
                f"{self.normalization!r} or stops compare masses of the teacher's own "
                "distribution: set k = 'full' or normalization = 'renorm' without stops, or "
                "temperature = 1."
            )
        return self
