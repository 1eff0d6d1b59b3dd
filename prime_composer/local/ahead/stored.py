"""A batch that was collected ahead, as a checkpoint stores it."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prime_composer.backends.protocols import Rollout
from prime_composer.contract import HiddenStates, Scores, TeacherHead
from prime_composer.local.collect import Collected
from prime_composer.problems.config import Problem
from prime_composer.step.batch import Batch, Pair, Sample


def batch_state(collected: Collected) -> dict[str, Any]:
    """Return a batch and its metrics as tensors and plain values.

    Problems are left out: a step's problems follow from its number. A teacher's output head, which
    hidden states belong to, is there once.
    """
    heads: list[TeacherHead] = []
    batch = collected.batch
    return {
        "samples": [_sample_state(one, heads) for one in batch.samples],
        "pairs": [
            [_sample_state(one, heads) for one in (pair.chosen, pair.rejected)]
            for pair in batch.pairs
        ],
        "heads": [_plain(head) for head in heads],
        "temperature": batch.temperature,
        "metrics": dict(collected.metrics),
    }


def batch_of_state(
    state: dict[str, Any], problems: Sequence[Problem], pairs: Sequence[Pair] | None = None
) -> Collected:
    """Return what ``batch_state`` was made of.

    ``problems`` are the step's, by the rollouts' ``prompt_index``. ``pairs`` are its pairs of a
    file; None where they are of its own rollouts.
    """
    heads = [TeacherHead(**head) for head in state["heads"]]
    if pairs is None:
        pairs = [
            Pair(*(_sample_of(one, problems, heads) for one in pair)) for pair in state["pairs"]
        ]
    samples = [_sample_of(one, problems, heads) for one in state["samples"]]
    return Collected(Batch(samples, pairs, state.get("temperature", 1.0)), state["metrics"])


def _plain(record: Any, *without: str) -> dict[str, Any]:
    """Return a record's fields by name. Tensors are copies: a view would store all behind it."""
    values = {one.name: getattr(record, one.name) for one in fields(record)}
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in values.items()
        if name not in without
    }


def _sample_state(sample: Sample, heads: list[TeacherHead]) -> dict[str, Any]:
    scores = sample.scores
    return _plain(sample, "problem") | {
        "rollout": _plain(sample.rollout),
        "scores": None if scores is None else _scores_state(scores, heads),
    }


def _sample_of(
    state: dict[str, Any], problems: Sequence[Problem], heads: Sequence[TeacherHead]
) -> Sample:
    rollout, scores = Rollout(**state["rollout"]), state["scores"]
    own = {
        "rollout": rollout,
        "problem": problems[rollout.prompt_index],
        "scores": None if scores is None else _scores_of(scores, heads),
    }
    return Sample(**(state | own))


def _scores_state(scores: Scores, heads: list[TeacherHead]) -> dict[str, Any]:
    """Return scores with their support as ``Scores.to_bytes`` has it."""
    assert scores.scored is None, "tokens without a score do not train"
    hidden = []
    for share in scores.hidden:
        place = next((i for i, head in enumerate(heads) if head is share.head), len(heads))
        heads += [share.head] * (place == len(heads))
        hidden.append(_plain(share, "head") | {"head": place})
    return {
        "ref_logprobs": scores.ref_logprobs.clone(),
        "support": torch.from_numpy(np.frombuffer(scores.to_bytes(), np.int32).copy()),
        "start": scores.start,
        "hidden": hidden,
    }


def _scores_of(state: dict[str, Any], heads: Sequence[TeacherHead]) -> Scores:
    scores = Scores.of_bytes(state["support"], state["ref_logprobs"], state["start"])
    hidden = [HiddenStates(**(share | {"head": heads[share["head"]]})) for share in state["hidden"]]
    return replace(scores, hidden=tuple(hidden))
