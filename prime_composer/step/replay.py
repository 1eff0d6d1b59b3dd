"""Preference pairs of the replay channel: from the rollouts of a group, or from a file."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prime_composer.backends.protocols import Rollout
from prime_composer.contract import LossInputs, given
from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.prompts import Ends, render_answer, render_prompt
from prime_composer.problems.rows import read_rows
from prime_composer.step.batch import PreferencePair, Sample
from prime_composer.step.student_forward import student_inputs


def pairs_of_rollouts(samples: Sequence[Sample], limit: int) -> list[PreferencePair]:
    """Pair a correct and a wrong rollout of the same group, each once, at most ``limit`` pairs."""
    pairs: list[PreferencePair] = []
    for prompt_index in dict.fromkeys(sample.rollout.prompt_index for sample in samples):
        group = [sample for sample in samples if sample.rollout.prompt_index == prompt_index]
        correct = [sample for sample in group if sample.reward > 0]
        wrong = [sample for sample in group if sample.reward <= 0]
        pairs += [PreferencePair(*responses) for responses in zip(correct, wrong, strict=False)]
    return pairs[:limit]


def read_pairs(
    path: Path, sources: Mapping[str, DataConfig], tokenizer: Any, ends: Ends
) -> list[PreferencePair]:
    """Read the pairs of a JSONL file: objects with the strings "question", "chosen", "rejected".

    Where a recipe has several environments they have "environment", whose template is used.
    """
    if not path.is_file():
        raise ValueError(f"no such file: {path}. [replay] path is a JSONL file of preference pairs")
    pairs = read_rows(path, lambda row: pair_of_row(row, sources, tokenizer, ends))
    if not pairs:
        raise ValueError(f"{path} contains no pair")
    return pairs


def pair_of_row(
    row: Any, sources: Mapping[str, DataConfig], tokenizer: Any, ends: Ends
) -> PreferencePair:
    for key in ("question", "chosen", "rejected"):
        if not isinstance(row, dict) or not isinstance(row.get(key), str) or not row[key].strip():
            raise ValueError(f'"{key}" must be a string that is not empty')
    environment = row.get("environment") if len(sources) > 1 else next(iter(sources))
    if not isinstance(environment, str) or environment not in sources:
        raise ValueError(f'"environment" must be one of {", ".join(sources)}')
    data = sources[environment]
    problem = Problem(row["question"], row["chosen"], environment)
    prompt = render_prompt(problem, data, tokenizer)
    chosen, rejected = (
        Sample(response(prompt, answer), problem, row[key])
        for key in ("chosen", "rejected")
        for answer in [render_answer(problem, row[key], data, tokenizer, ends)]
    )
    return PreferencePair(chosen, rejected)


def response(prompt: Sequence[int], answer: Sequence[int], prompt_index: int = 0) -> Rollout:
    """Return a given answer, its end included, as the response to a prompt. log mu is NaN."""
    token_ids = torch.tensor([*prompt, *answer])
    return Rollout.not_sampled(token_ids, len(prompt), "stop", prompt_index)


def pair_inputs(
    model: nn.Module, pairs: Sequence[PreferencePair], reference: nn.Module | None
) -> LossInputs:
    """Pack pairs: segment 2i is the chosen and 2i + 1 the rejected response of pair i."""
    responses = [
        Sample(s.rollout, s.problem) for pair in pairs for s in (pair.chosen, pair.rejected)
    ]
    inputs = student_inputs(model, responses)
    if reference is None:
        return inputs
    with torch.no_grad():
        reference_logprobs = student_inputs(reference, responses).trainer_logprobs
    return dataclasses.replace(inputs, ref_logprobs=reference_logprobs)


def empty_pack(like: LossInputs) -> LossInputs:
    """Return a pack without a pair, for a micro-batch of rollouts."""
    none = like.trainer_logprobs.detach()[:0]
    return LossInputs(
        trainer_logprobs=none,
        inference_logprobs=none,
        ref_logprobs=none,
        advantages=None,
        loss_mask=like.loss_mask[:0],
        token_ids=given(like.token_ids)[:0],
        segment_ids=given(like.segment_ids)[:0],
    )
