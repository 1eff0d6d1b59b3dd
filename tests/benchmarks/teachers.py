"""Random teachers and rollouts, of the sizes that benchmarks of scores have."""

from pathlib import Path
from typing import NamedTuple

import torch

from prime_composer.backends.alignment import make_rollout
from prime_composer.backends.protocols import Rollout
from tests.tiny_qwen import make_model


class Sizes(NamedTuple):
    """Sizes of a teacher, and of the rollouts that it scores."""

    vocab: int
    hidden: int
    layers: int
    prompt: int
    completion: int
    rollouts: int


SIZES = {
    "templates": Sizes(415, 64, 3, 40, 24, 64),
    "gsm8k": Sizes(1536, 128, 4, 100, 128, 32),
    "135M": Sizes(49152, 576, 30, 100, 64, 8),
}


def save_teacher(directory: Path, sizes: Sizes) -> Path:
    """Save a random Qwen3, and return its directory."""
    heads = sizes.hidden // 32
    make_model(
        True,
        0,
        sizes.layers,
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=3 * sizes.hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        initializer_range=0.2,
    ).save_pretrained(directory)
    return directory


def random_rollouts(sizes: Sizes, seed: int) -> list[Rollout]:
    """Return rollouts of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sizes.rollouts, sizes.prompt + sizes.completion)
    return [
        make_rollout(
            ids[: sizes.prompt], ids[sizes.prompt :], [-1.0] * sizes.completion, "length", i
        )
        for i, ids in enumerate(torch.randint(2, sizes.vocab, shape, generator=generator).tolist())
    ]
