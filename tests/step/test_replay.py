"""Preference pairs: from the rollouts of a group, and from a file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_composer.local.tracker import read_metrics
from prime_composer.problems.config import DataConfig
from prime_composer.problems.prompts import Ends
from prime_composer.step.replay import pairs_of_rollouts, read_pairs
from tests.local.helpers import SOURCES, Letters, run, sample

Raw = Callable[..., dict[str, Any]]


def test_pairs_join_a_correct_and_a_wrong_rollout_of_a_group() -> None:
    """Each rollout is used once; groups without both kinds give no pair."""
    rewards = ((0, 0.0), (0, 1.0), (0, 1.0), (1, 1.0), (1, 1.0), (2, 0.0), (2, 1.0))
    samples = [sample(group, reward) for group, reward in rewards]
    pairs = pairs_of_rollouts(samples, limit=9)
    assert [(pair.chosen, pair.rejected) for pair in pairs] == [
        (samples[1], samples[0]),
        (samples[6], samples[5]),
    ]
    assert len(pairs_of_rollouts(samples, limit=1)) == 1


def test_read_pairs_names_file_and_line_of_an_error(
    student: tuple[Any, Any], tmp_path: Path
) -> None:
    """A good line is a pair with its end of text; a bad one is an error with its place."""
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"question": "q", "chosen": "5", "rejected": "6"}) + "\n")
    (pair,) = read_pairs(path, SOURCES, student[1], Ends.of(student[1], set()))
    chosen = student[1].decode(pair.chosen.rollout.completion_ids)
    assert chosen == " 5" + student[1].eos_token
    path.write_text(path.read_text() + '{"question": "q", "chosen": 3, "rejected": "6"}\n')
    with pytest.raises(ValueError, match='pairs.jsonl:2: "chosen" must be a string'):
        read_pairs(path, SOURCES, student[1], Ends.of(student[1], set()))
    with pytest.raises(ValueError, match="no such file"):
        read_pairs(tmp_path / "absent.jsonl", SOURCES, student[1], Ends.of(student[1], set()))
    path.write_text("\n")
    with pytest.raises(ValueError, match="contains no pair"):
        read_pairs(path, SOURCES, student[1], Ends.of(student[1], set()))


def test_read_pairs_takes_the_environment_that_a_row_names(tmp_path: Path) -> None:
    """Where there are several environments, a row names the one whose prompt it has."""
    one, two = DataConfig(prompt_template="1{question}"), DataConfig(prompt_template="2{question}")
    path = tmp_path / "pairs.jsonl"

    def first_letter(sources: dict[str, DataConfig], **more: Any) -> str:
        path.write_text(json.dumps({"question": "q", "chosen": "5", "rejected": "6", **more}))
        return chr(
            read_pairs(path, sources, Letters(), Ends((0,), 0))[0].rejected.rollout.token_ids[0]
        )

    assert first_letter({"a": one, "b": two}, environment="b") == "2"
    for environment in ({}, {"environment": "c"}, {"environment": ["a"]}):
        with pytest.raises(ValueError, match='pairs.jsonl:1: "environment" must be one of a, b'):
            first_letter({"a": one, "b": two}, **environment)
    assert first_letter({"a": one}) == "1"
    assert first_letter({"problems": one}, environment="elsewhere") == "1"


def test_compose_trains_three_channels_together(tiny_recipe: Raw, tmp_path: Path) -> None:
    """The step's loss is the weighted sum of what the channels log."""
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"question": f"{i} + 1?", "chosen": f"#### {i + 1}", "rejected": "no"} for i in range(5)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = tiny_recipe(
        loss={
            "type": "compose",
            "rl": {"weight": 1.0},
            "distillation": {"near": {"weight": 0.5, "loss": {"type": "topk_reverse_kl", "k": 4}}},
            "replay": {"weight": 0.1, "loss": {"type": "dpo"}},
        },
        rollout__group_size=2,
        replay={"source": "jsonl", "path": str(path), "pairs_per_step": 3},
        trainer={"steps": 2, "batch_size": 4},
    )
    run(raw, tmp_path / "run")
    record = read_metrics(tmp_path / "run")[2]
    assert record["compose/replay/pairs"] == 3.0
    channels = 1.0 * record["compose/rl/loss"] + 0.5 * record["compose/near/loss"]
    expected = channels + 0.1 * record["compose/replay/loss"]
    assert record["loss"] == pytest.approx(expected, abs=1e-5)
