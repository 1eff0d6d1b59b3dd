"""Inputs on which our losses must equal prime-rl's bit by bit. Numbers from a fixed linear congruential generator, so
that a golden recorded on one machine means the same inputs on another. torch only: the drivers import this too."""

import torch

VERSIONS_OF_ERA = {"v0.6": ("v0.6.0",), "v0.7": ("v0.7.0", "v0.8.0", "newest")}

KINDS = {
    "v0.6": {
        "default": {"type": "default"},
        "ipo": {"type": "ipo"},
        "sft": {"type": "sft"},
        "opd": {"type": "sampled_reverse_kl", "dialect": "v0_6"},
    },
    "v0.7": {
        "default": {"type": "default"},
        "ipo": {"type": "ipo"},
        "ce": {"type": "sft"},
        "ref_kl": {"type": "sampled_reverse_kl", "dialect": "v0_7"},
    },
}
"""Era: prime-rl's loss: our loss table that is to equal it."""

METRIC_PREFIXES = ("sampled_reverse_kl/", "default/", "ipo/", "sft/", "ref_kl/")


def plain_metrics(metrics):
    """Metrics by the part of their name that both sides share."""
    out = {}
    for name, value in metrics.items():
        for prefix in METRIC_PREFIXES:
            name = name.removeprefix(prefix)
        out[name] = value
    return out


def uniform(seed):
    """Numbers in [0, 1): x' = 1664525 x + 1013904223 mod 2^32 (Numerical Recipes)."""
    state = seed
    while True:
        state = (1664525 * state + 1013904223) % 2**32
        yield state / 2**32


def sequence(seed, length, *, weights=False):
    """One sequence whose sampler and trainer disagree enough to fire every trust region, both signs of advantage."""
    draw = uniform(seed)
    rows = {name: [] for name in ("trainer", "inference", "ref", "advantages", "mask", "weights")}
    for _ in range(length):
        rows["trainer"].append(-4 * next(draw) ** 2)
        rows["inference"].append(-4 * next(draw) ** 2)
        rows["ref"].append(-5 * next(draw))
        rows["advantages"].append(round(4 * next(draw)) / 2 - 1)
        rows["mask"].append(next(draw) > 0.25)
        rows["weights"].append(next(draw) if next(draw) > 0.2 else 0.0)
    if not weights:
        rows["weights"] = None
    return rows


def cases(era):
    """Name: sequence. The first two are worked examples, B fires both sides of the trust region."""
    named = {
        "example a": {
            "trainer": [-0.5, -1.2, -0.1, -2.0],
            "inference": [-0.6, -1.0, -0.1, -1.5],
            "ref": [-0.9, -0.3, -4.0, -2.5],
            "advantages": [0.5] * 4,
            "mask": [True, True, False, True],
            "weights": None,
        },
        "example b": {
            "trainer": [-0.2, -2.5, -0.3, -1.6, -0.7],
            "inference": [-1.2, -0.4, -1.5, -0.3, -0.7],
            "ref": [-0.1, -3.0, -2.0, -0.5, -0.9],
            "advantages": [1.0, 1.0, -1.0, -1.0, 0.0],
            "mask": [True] * 5,
            "weights": None,
        },
        "64 tokens": sequence(1, 64),
        "512 tokens": sequence(2, 512),
        "one token": sequence(3, 1),
    }
    named["empty mask"] = {**sequence(4, 8), "mask": [False] * 8}
    named["one advantage"] = {**sequence(5, 32), "advantages": [1.0] * 32}
    named["no drift"] = {**sequence(6, 32)}
    named["no drift"]["inference"] = list(named["no drift"]["trainer"])
    if era == "v0.7":
        named["weights"] = sequence(7, 64, weights=True)
        named["unit weights"] = {**sequence(8, 16), "weights": [1.0] * 16}
    return named


def tensors(rows):
    """The sequence as float32 tensors; ``trainer`` is a leaf with a gradient."""
    return {
        "trainer": torch.tensor(rows["trainer"]).requires_grad_(),
        "inference": torch.tensor(rows["inference"]),
        "ref": torch.tensor(rows["ref"]),
        "advantages": torch.tensor(rows["advantages"]),
        "mask": torch.tensor(rows["mask"]),
        "weights": None if rows["weights"] is None else torch.tensor(rows["weights"]),
    }


def packed():
    """A bin: a sequence, one fully masked, one that the teacher did not score (filled with 0.0), one more."""
    bin_ = [sequence(11, 40), sequence(12, 12), sequence(13, 9), sequence(14, 33)]
    bin_[1]["mask"] = [False] * 12
    bin_[2]["ref"] = [0.0] * 9
    return bin_


def mixed():
    """A bin of two distillation samples and two of an rl environment."""
    return [sequence(21, 30), sequence(22, 18), sequence(23, 9), sequence(24, 25)]
