"""Our losses against a reading of prime-rl's main: READ, NOT RUN.

No whole tree of it can be had, so nothing of it is run. What its losses do was read in single
files of October and November 2026: loss.py with its ``ref_kl_loss_fn``, ``IPOLoss`` and
``IcePopLoss``, the knobs and defaults in configs/trainer.py, and docs/algorithms.md. Below is that
reading, token by token, in Python's floats: value, gradient and metrics. When a tree of main can be
run, its numbers take the place of these (record_goldens.py).
"""

import math

import pytest
import torch

from prime_composer.losses import parse_loss
from tests.parity import cases, outcomes

LARGEST_METRIC = 1e30


def capped(log_ratio, cap=1e4):
    """The value of a ratio that is cut, by comparison and without a tensor."""
    return cap if log_ratio > math.log(cap) else math.exp(log_ratio)


def mismatch(log_ratio):
    if log_ratio > math.log(LARGEST_METRIC):
        return LARGEST_METRIC - log_ratio
    return math.expm1(log_ratio) - log_ratio


def mean(values):
    return sum(values) / len(values) if values else 0.0


class Token:
    """One token of the mask: its log-probs, its advantage, its weight."""

    def __init__(self, rows, t):
        self.p, self.mu, self.ref = rows["trainer"][t], rows["inference"][t], rows["ref"][t]
        self.advantage = rows["advantages"][t]
        self.weight = 1.0 if rows["weights"] is None else rows["weights"][t]
        self.log_ratio = self.p - self.mu


def trust_region(tokens, drops, signals, ratio):
    """Return the terms of the kept tokens (value, gradient), and the metrics of dropped ones."""
    terms = []
    for token, dropped, signal in zip(tokens, drops, signals, strict=True):
        term = 0.0 if dropped else -signal * ratio(token.log_ratio)
        terms.append((term, term))  # d exp(x) is exp(x): the gradient equals the value
    pairs = list(zip(tokens, drops, strict=True))
    return terms, {
        "masked_mismatch_kl": mean([mismatch(t.log_ratio) for t, dropped in pairs if dropped]),
        "unmasked_mismatch_kl": mean([mismatch(t.log_ratio) for t, d in pairs if not d]),
        "is_masked": mean([float(dropped) for dropped in drops]),
    }


def ref_kl(tokens):
    """The low side alone, 0.2 wide. No advantage, no squared log-ratio."""
    drops = [math.exp(t.p) - math.exp(t.mu) < -0.2 for t in tokens]
    signals = [t.ref - t.p for t in tokens]
    terms, metrics = trust_region(tokens, drops, signals, capped)
    return terms, {**metrics, "ref_kl": mean(signals)}


def ipo(tokens, eps=0.3, max_importance_ratio=1e4, adv_tau=1.0):
    drops = [abs(math.exp(t.p) - math.exp(t.mu)) > eps for t in tokens]
    signals = [adv_tau * t.advantage for t in tokens]
    return trust_region(tokens, drops, signals, lambda x: capped(x, max_importance_ratio))


def icepop(tokens, ratio_low=0.2, ratio_high=5.0, adv_tau=1.0):
    low, high = math.log(ratio_low), math.log(ratio_high)
    drops = [t.log_ratio < low or t.log_ratio > high for t in tokens]
    return trust_region(tokens, drops, [adv_tau * t.advantage for t in tokens], math.exp)


READINGS = {
    "ref_kl": (ref_kl, {"type": "sampled_reverse_kl", "dialect": "main"}, [{}]),
    "ipo": (
        ipo,
        {"type": "ipo", "dialect": "main"},
        [{}, {"eps": 0.15, "max_importance_ratio": 3.0, "adv_tau": 0.7}],
    ),
    "icepop": (
        icepop,
        {"type": "icepop"},
        [{}, {"ratio_low": 0.7, "ratio_high": 1.5, "adv_tau": 0.7}],
    ),
}
"""main's name: the reading, our table that has to equal it, and knobs by main's names."""

OUR_NAMES = {"eps": "ipo_threshold"}


def far(rows):
    """Return a sequence with ratios beyond every cap, and beyond what float32 can hold."""
    drifted = {**rows, "inference": list(rows["inference"])}
    for t, drift in ((0, -12.0), (3, -200.0), (5, 30.0), (6, -9.5)):
        drifted["inference"][t] = rows["trainer"][t] + drift
    return {**drifted, "mask": [True] * 8 + rows["mask"][8:]}


INPUTS = {
    "64 tokens": cases.sequence(1, 64),
    "512 tokens": cases.sequence(2, 512),
    "weights": cases.sequence(7, 64, weights=True),
    "one token": cases.sequence(3, 1),
    "no drift": {**cases.sequence(6, 32), "inference": cases.sequence(6, 32)["trainer"]},
    "far": far(cases.sequence(9, 48, weights=True)),
}


@pytest.mark.parametrize("rows", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("kind", READINGS)
def test_our_loss_is_the_reading_of_main(kind, rows):
    reading, table, knobs_of_main = READINGS[kind]
    tokens = [Token(rows, t) for t, trains in enumerate(rows["mask"]) if trains]
    for knobs in knobs_of_main:
        named = {OUR_NAMES.get(name, name): value for name, value in knobs.items()}
        ours = outcomes.ours({**table, **named}, cases.Case(rows, torch.float64), kind)
        terms, metrics = reading(tokens, **knobs)
        value = sum(token.weight * term for token, (term, _) in zip(tokens, terms, strict=True))
        assert ours["loss"].item() == pytest.approx(value, rel=1e-10, abs=1e-12)
        gradient = iter(
            token.weight * slope for token, (_, slope) in zip(tokens, terms, strict=True)
        )
        expected = [next(gradient) if trains else 0.0 for trains in rows["mask"]]
        assert ours["grad"][0].tolist() == pytest.approx(expected, rel=1e-10, abs=1e-14)
        found = {name: ours["metrics"][name].item() for name in metrics}
        assert found == pytest.approx(metrics, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("kind", READINGS)
def test_inputs_of_the_reading_fire_every_rule(kind):
    """Some tokens of "512 tokens" are dropped and some are not; "far" is finite."""
    _, table, _ = READINGS[kind]
    metrics = outcomes.ours(table, cases.Case(INPUTS["512 tokens"]), kind)["metrics"]
    assert 0.02 < metrics["is_masked"] < 0.98
    outcome = outcomes.ours(table, cases.Case(INPUTS["far"]), kind)
    assert outcome["loss"].isfinite() and outcome["grad"][0].isfinite().all()
    assert all(value.isfinite() for value in outcome["metrics"].values())


@pytest.mark.parametrize("kind", ["ref_kl", "ipo"])
def test_dialect_main_has_no_squared_log_ratio_unless_it_is_asked_for(kind):
    _, table, _ = READINGS[kind]
    assert parse_loss(table).kl_tau == 0
    assert parse_loss({**table, "kl_tau": 0.5}).kl_tau == 0.5


def test_mode_signed_has_no_dialect():
    """An export names main's dialect for every mode; the signed mode keeps its own arithmetic."""
    signed = {"type": "sampled_reverse_kl", "mode": "signed"}
    rows = cases.Case(INPUTS["64 tokens"], torch.float64)
    plain, main = (
        outcomes.ours({**signed, **more}, rows, "ref_kl") for more in ({}, {"dialect": "main"})
    )
    assert torch.equal(plain["loss"], main["loss"])
    assert torch.equal(plain["grad"][0], main["grad"][0])
