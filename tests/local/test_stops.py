"""Runs with ``[loss.stops]``: from the texts in a recipe to the steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_composer.local.tracker import read_metrics
from tests.local.helpers import VOCAB, run

Raw = Callable[..., dict[str, Any]]
STOPS = {"texts": ["<|endoftext|>"], "ids": [*range(10, 120)]}


def steps(table: dict[str, Any], folder: Path) -> list[dict[str, float]]:
    run(table, folder)
    return [row for row in read_metrics(folder) if row["step"]]


def test_stops_of_all_ids_are_those_of_the_heads(tiny_recipe: Raw, tmp_path: Path) -> None:
    """Step by step, by a top K that is the vocabulary, and by hidden states."""
    of = {"type": "generalized_jsd", "stops": STOPS}
    short = {"trainer__steps": 2, "eval__every": 0, "eval__kl_size": 0}
    ids = steps(tiny_recipe(loss={**of, "k": VOCAB}, **short), tmp_path / "ids")
    states = steps(tiny_recipe(loss={**of, "k": "full"}, **short), tmp_path / "states")
    plain = steps(tiny_recipe(loss={"type": of["type"], "k": VOCAB}, **short), tmp_path / "plain")
    losses = [[row["loss"] for row in rows] for rows in (ids, states, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][0] < losses[2][0]  # fewer outcomes
    for row in (*ids, *states):
        assert 0 < row["stops/sampled"] < 1
        assert 0 < row["stops/student"] <= 1 and 0 < row["stops/teacher"] <= 1
    assert ids[0]["stops/teacher"] == pytest.approx(states[0]["stops/teacher"], rel=1e-4)


def test_run_of_sampled_stops_trains(tiny_recipe: Raw, tmp_path: Path) -> None:
    """At another temperature too, beside rewards."""
    loss = {"type": "sampled_reverse_kl", "k": 8, "stops": STOPS, "rl_mix": {"kd": 0.5}}
    rows = steps(
        tiny_recipe(loss=loss, rollout__temperature=1.3, rollout__group_size=2), tmp_path / "run"
    )
    assert all(row["stops/sampled"] > 0 and row["grad_norm"] > 0 for row in rows)
