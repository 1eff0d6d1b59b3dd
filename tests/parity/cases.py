"""Inputs on which our losses must return what prime-rl's own losses return.

The numbers come from a fixed linear congruential generator, so a record made on one machine means
the same inputs on another. The driver imports this module inside each version's tree.
"""

from dataclasses import dataclass, field

import torch

CONTRACTS = {"v0.6": "v0.6", "head": "v0.7"}
"""Version that we run: the loss contract that it has."""

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
"""Contract: prime-rl's loss: our loss table that has to equal it."""

KNOBS = {
    "default": {"dppo_mask_low": 0.15, "dppo_mask_high": 0.3, "adv_tau": 0.7, "kl_tau": 2e-3},
    "ipo": {"ipo_threshold": 0.25, "adv_tau": 0.7, "kl_tau": 2e-3},
}
"""prime-rl's loss: values that differ from every default. Both sides use the same names."""

PAIRS = [(version, kind) for version, contract in CONTRACTS.items() for kind in KINDS[contract]]
"""Every version with every loss of it: what the suites are parametrized with."""

METRIC_PREFIXES = tuple(
    f"{name}/" for name in ("sampled_reverse_kl", "default", "ipo", "sft", "ref_kl", "icepop")
)


@dataclass(frozen=True)
class Case:
    """One sequence, the dtype it is given in, and whether the losses get their ``KNOBS``."""

    rows: dict = field(repr=False)
    dtype: torch.dtype = torch.float32
    with_knobs: bool = False

    def knobs(self, kind):
        """Return the settings of prime-rl's loss ``kind`` in this case."""
        return KNOBS.get(kind, {}) if self.with_knobs else {}

    @property
    def recorded(self):
        """Whether goldens.json contains it.

        bfloat16 is compared live only: its tolerance over a sequence would exceed the loss itself.
        """
        return self.dtype != torch.bfloat16


def plain_metrics(metrics):
    """Return metrics by the part of their name that both sides share."""
    plain = {}
    for name, value in metrics.items():
        for prefix in METRIC_PREFIXES:
            name = name.removeprefix(prefix)
        plain[name] = value
    return plain


def uniform(seed):
    """Yield numbers in [0, 1): x' = 1664525 x + 1013904223 mod 2^32 (Numerical Recipes)."""
    state = seed
    while True:
        state = (1664525 * state + 1013904223) % 2**32
        yield state / 2**32


def sequence(seed, length, *, weights=False):
    """Return a sequence that fires every side of every trust region, with advantages of both signs.

    One advantage in eight is about 0.
    """
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


EXAMPLE_A = {
    "trainer": [-0.5, -1.2, -0.1, -2.0],
    "inference": [-0.6, -1.0, -0.1, -1.5],
    "ref": [-0.9, -0.3, -4.0, -2.5],
    "advantages": [0.5] * 4,
    "mask": [True, True, False, True],
    "weights": None,
}
EXAMPLE_B = {
    "trainer": [-0.2, -2.5, -0.3, -1.6, -0.7],
    "inference": [-1.2, -0.4, -1.5, -0.3, -0.7],
    "ref": [-0.1, -3.0, -2.0, -0.5, -0.9],
    "advantages": [1.0, 1.0, -1.0, -1.0, 0.0],
    "mask": [True] * 5,
    "weights": None,
}
"""Fires both sides of the trust region."""


def cases(contract):
    """Return ``Case`` by name, for one loss contract. Only v0.7 and later have loss weights."""
    no_drift = sequence(6, 32)
    no_drift["inference"] = list(no_drift["trainer"])
    by_name = {
        "example a": Case(EXAMPLE_A),
        "example b": Case(EXAMPLE_B),
        "example b, float64": Case(EXAMPLE_B, torch.float64),
        "64 tokens": Case(sequence(1, 64)),
        "512 tokens": Case(sequence(2, 512)),
        "one token": Case(sequence(3, 1)),
        "empty mask": Case({**sequence(4, 8), "mask": [False] * 8}),
        "one advantage": Case({**sequence(5, 32), "advantages": [1.0] * 32}),
        "no drift": Case(no_drift),
    }
    weighted = contract != "v0.6"
    if weighted:
        by_name["weights"] = Case(sequence(7, 64, weights=True))
        by_name["unit weights"] = Case({**sequence(8, 16), "weights": [1.0] * 16})
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        label = str(dtype).removeprefix("torch.")
        empty = {**sequence(33, 8, weights=weighted), "mask": [False] * 8}
        by_name[f"knobs, {label}"] = Case(sequence(31, 97), dtype, True)
        by_name[f"knobs, weights, {label}"] = Case(sequence(32, 97, weights=weighted), dtype, True)
        by_name[f"knobs, empty mask, {label}"] = Case(empty, dtype, True)
    return by_name


def tensors(rows, dtype=torch.float32):
    """Return the sequence as tensors of ``dtype``. ``trainer`` is a leaf with a gradient."""
    values = {
        name: None if rows[name] is None else torch.tensor(rows[name], dtype=dtype)
        for name in ("trainer", "inference", "ref", "advantages", "weights")
    }
    values["trainer"].requires_grad_()
    return {**values, "mask": torch.tensor(rows["mask"])}


def packed():
    """Return a pack: a sequence, one fully masked, one without teacher scores (0.0), one more."""
    pack = [sequence(11, 40), sequence(12, 12), sequence(13, 9), sequence(14, 33)]
    pack[1]["mask"] = [False] * 12
    pack[2]["ref"] = [0.0] * 9
    return pack


def mixed():
    """Return a pack of two distillation samples and two of an RL environment."""
    return [sequence(21, 30), sequence(22, 18), sequence(23, 9), sequence(24, 25)]
