"""Small models prepared on the spot, for recipes that need no download: what they are, and where they are cached.

Only the description and the cache key live here; ``backends/prepare.py`` trains. Both models of a recipe get the same
tokenizer, a byte-level BPE with single digits trained on the recipe's own data, whenever their ``vocab_size`` agrees.
"""

from pydantic import BaseModel, ConfigDict, Field


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

    sft_steps: int = Field(default=750, ge=0)
    """Optimiser steps of supervised fine-tuning on the training problems' worked answers."""

    batch_size: int = Field(default=64, ge=1)
    """Problems per step."""

    learning_rate: float = Field(default=8e-3, gt=0)
    """Peak of AdamW's learning rate: linear warm-up over the first twentieth, then a cosine to zero."""

    label_smoothing: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the target spread over the whole vocabulary. For students only: a smoothed teacher puts its mass on a
    junk tail, which gets sampled into the student's lesson and which no top-K support can see."""

    seed: int = 0
    """Seed of the initial weights and of the batch order."""

    prune: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the weights of the decoder layers' matrices set to zero after training, the smallest magnitudes first,
    all at once: damage that distillation heals."""
