"""Define ``[*.prepare]``: a small model that is built on the spot, or one that is damaged."""

from collections.abc import Collection, Iterator
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt
from pydantic import (
    BeforeValidator,
    Field,
    model_serializer,
)

from prime_composer.tables import Table

LARGEST_SIZE = 1_000_000  # Of widths, lengths and steps: built on the spot, models are small

MOST_LAYERS = 1000  # Upper bound of layers and heads

LARGEST_SEED = 2**63 - 1  # Upper bound of seeds: that of TOML's integers


class PrepareConfig(Table):
    """A tiny model of the Qwen3 architecture: its sizes, its fine-tuning, and its pruning."""

    vocab_size: int = Field(default=415, ge=260, le=LARGEST_SIZE)
    """Size of the byte-level BPE vocabulary trained on the data, special tokens included. Teacher
    and student must agree."""

    pieces: Literal["gpt2"] | None = None
    """Which pieces of a text no token spans. Unset: each digit is a piece, and punctuation keeps
    the white space around it. "gpt2": GPT-2's words, with whole numbers."""

    hidden_size: int = Field(default=64, ge=8, le=LARGEST_SIZE)
    """Width of the residual stream."""

    layers: int = Field(default=3, ge=1, le=MOST_LAYERS)
    """Number of decoder layers."""

    heads: int = Field(default=2, ge=1, le=MOST_LAYERS)
    """Number of attention heads, and of key-value heads."""

    head_dim: int = Field(default=32, ge=2, le=LARGEST_SIZE, multiple_of=2)
    """Width of one head."""

    intermediate_size: int = Field(default=192, ge=8, le=LARGEST_SIZE)
    """Width of the gated MLP."""

    tie_word_embeddings: bool = True
    """Use the embedding as the output layer."""

    max_position_embeddings: int = Field(default=512, ge=16, le=LARGEST_SIZE)
    """Longest sequence in tokens, prompt and completion together."""

    sft_steps: int = Field(default=900, ge=0, le=LARGEST_SIZE)
    """Optimizer steps of supervised fine-tuning on the worked answers of problems, and the solved
    rollouts of environments by id."""

    batch_size: int = Field(default=32, ge=1, le=LARGEST_SIZE)
    """Problems per step."""

    learning_rate: float = Field(default=6e-3, gt=0, le=1)
    """AdamW's peak learning rate, for embeddings and norms: a linear warm-up over a twentieth of
    the steps, then a cosine to zero."""

    matrix_learning_rate: float = Field(default=0.03, gt=0, le=1)
    """Muon's peak learning rate, for the decoder layers' matrices, on the same schedule."""

    label_smoothing: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the target spread over the whole vocabulary, which makes a flat teacher."""

    seed: int = Field(default=0, ge=-LARGEST_SEED, le=LARGEST_SEED)
    """Seed of the initial weights and of the batch order."""

    hint_template: str | None = None
    """Teach the model to use a hint: the question in ``hint_share`` of the examples, with
    ``{question}`` and ``{hint}``, the worked answer. ``[teacher.policy]`` needs the same
    template."""

    hint_share: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of the training examples with the hint."""

    environments: tuple[str, ...] | None = Field(default=None, min_length=1)
    """The ``[environments]`` that it is trained on. Unset: all with tasks to train on."""

    prune: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the weights of the decoder layers' matrices set to zero after training, smallest
    magnitudes first."""

    def refusals(self) -> Iterator[str]:
        if (self.hint_template is None) != (self.hint_share is None):
            yield "hint_template and hint_share go together"
        if self.hint_template is not None and not all(
            name in self.hint_template for name in ("{question}", "{hint}")
        ):
            yield "hint_template must contain {question} and {hint}"

    @property
    def work(self) -> str:
        """What is done to build the model, in words."""
        return f"{self.sft_steps} steps of fine-tuning"


class QuantizeConfig(Table):
    """Rounding of the linear layers' weights. Embeddings, output head and norms stay exact."""

    bits: int = Field(ge=2, le=8)
    """Bits per weight: each group has 2^bits levels, evenly spaced from its smallest weight to its
    largest (asymmetric)."""

    group: int = Field(ge=2, le=LARGEST_SIZE)
    """Weights of one output that share their levels, consecutive along the input. It must divide
    the inputs of every layer."""

    @property
    def work(self) -> str:
        """What is done to the weights, in words."""
        return f"its weights rounded to {self.bits} bits in groups of {self.group}"


class StaysRoundedConfig(QuantizeConfig):
    """Quantization-aware training: sampler, comparison with the teacher and checkpoints have the
    rounded weights. The optimizer trains float32 weights behind them, with the gradient at the
    rounded ones (straight-through). Name the unrounded model: from weights on the levels a small
    learning rate moves few to another."""


class DamagedConfig(Table):
    """An existing model, damaged, in float32: without some layers, or with rounded weights."""

    source: str = Field(alias="from", min_length=1)
    """The model: a directory in Hugging Face format, or a hub id. It needs ``drop_layers``,
    ``quantize`` or both."""

    drop_layers: tuple[Annotated[int, Ge(0), Lt(MOST_LAYERS)], ...] = ()
    """Decoder layers to remove, counted from 0."""

    quantize: QuantizeConfig | None = None
    """How the weights of the layers that are left are rounded. Unset: not at all."""

    def refusals(self) -> Iterator[str]:
        if self.quantize is None and not self.drop_layers:
            yield (
                "`from` alone changes nothing: add drop_layers = [..] or quantize = "
                "{ bits = .., group = .. }, or name the model as it is with `model`"
            )
        if len(set(self.drop_layers)) < len(self.drop_layers):
            yield f"drop_layers = {list(self.drop_layers)} has one twice: leave it out"

    @model_serializer
    def _as_written(self) -> dict[str, Any]:
        written: dict[str, Any] = {"from": self.source}
        if self.drop_layers:
            written["drop_layers"] = list(self.drop_layers)
        return written if self.quantize is None else written | {"quantize": self.quantize}

    @property
    def work(self) -> str:
        """What is done to build the model, in words."""
        words = [self.source]
        if self.drop_layers:
            words.append(f"without its layers {', '.join(map(str, self.drop_layers))}")
        if self.quantize is not None:
            words.append(self.quantize.work)
        return ", ".join(words)


def check_dropped(dropped: Collection[int], layers: int, model: str) -> None:
    """Check that a model has the layers that are removed from it, and others."""
    absent = [str(index) for index in dropped if index >= layers]
    if absent:
        raise ValueError(
            f"drop_layers names {', '.join(absent)}, and {model} has the layers 0 to {layers - 1}: "
            "choose among them"
        )
    if len(dropped) == layers:
        raise ValueError(f"drop_layers names all {layers} layers of {model}: leave one")


def prepare_kind(table: dict[str, Any]) -> type[PrepareConfig] | type[DamagedConfig]:
    """Return the model of a ``[*.prepare]`` table, which its keys tell."""
    damaged = {"from", "drop_layers", "quantize"} & table.keys()
    return DamagedConfig if damaged else PrepareConfig


def _parse_prepare(table: Any) -> Any:
    return prepare_kind(table).model_validate(table) if isinstance(table, dict) else table


AnyPrepare = Annotated[PrepareConfig | DamagedConfig, BeforeValidator(_parse_prepare)]
"""A ``[*.prepare]`` table of either kind."""
