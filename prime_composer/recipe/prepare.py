"""What a small model that is built on the spot looks like."""

from pydantic import BaseModel, ConfigDict, Field, model_validator


class PrepareConfig(BaseModel):
    """A tiny model of the Qwen3 architecture: its sizes, its supervised fine-tuning, and what is pruned from it after."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int = Field(default=415, ge=260)
    """Size of the byte-level BPE vocabulary trained on the data, special tokens included. Teacher and student agree."""

    hidden_size: int = Field(default=64, ge=8)
    """Width of the residual stream."""

    layers: int = Field(default=3, ge=1)
    """Number of decoder layers."""

    heads: int = Field(default=2, ge=1)
    """Number of attention heads; as many key-value heads."""

    head_dim: int = Field(default=32, ge=2, multiple_of=2)
    """Width of one head."""

    intermediate_size: int = Field(default=192, ge=8)
    """Width of the gated MLP."""

    tie_word_embeddings: bool = True
    """Whether the output layer is the embedding."""

    max_position_embeddings: int = Field(default=512, ge=16)
    """Longest sequence, prompt and completion together."""

    sft_steps: int = Field(default=900, ge=0)
    """Optimiser steps of supervised fine-tuning on the training problems' worked answers."""

    batch_size: int = Field(default=32, ge=1)
    """Problems per step."""

    learning_rate: float = Field(default=6e-3, gt=0)
    """AdamW's peak learning rate, for embeddings and norms: a linear warm-up over the first twentieth of the steps,
    then a cosine to zero."""

    matrix_learning_rate: float = Field(default=0.03, gt=0)
    """Muon's peak learning rate, for the decoder layers' matrices, on the same schedule."""

    label_smoothing: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the target spread over the whole vocabulary. For students only: a smoothed teacher puts its mass on a
    junk tail, which gets sampled into the student's lesson and which no top-K support can see."""

    seed: int = 0
    """Seed of the initial weights and of the batch order."""

    hint_template: str | None = None
    """Teaches the model to read a hint: the question as it is asked in ``hint_share`` of the examples, with ``{question}``
    and ``{hint}``, the worked answer. For self-distillation, whose ``[teacher.policy]`` then uses the same template."""

    hint_share: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of the training examples that carry the hint; goes with ``hint_template``."""

    environments: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Which of the recipe's ``[environments]`` it is trained on; unset: all. The tokenizer always reads all of them."""

    prune: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the weights of the decoder layers' matrices set to zero after training, the smallest magnitudes first,
    all at once: damage that distillation heals."""

    @model_validator(mode="after")
    def _hints_fit(self) -> "PrepareConfig":
        if (self.hint_template is None) != (self.hint_share is None):
            raise ValueError("hint_template and hint_share go together")
        if self.hint_template is not None and not all(
            n in self.hint_template for n in ("{question}", "{hint}")
        ):
            raise ValueError("hint_template must contain {question} and {hint}")
        return self
