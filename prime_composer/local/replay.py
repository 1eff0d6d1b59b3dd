"""The replay channel's preference pairs: from the rollouts of a group, or from a file."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prime_composer.backends.protocols import Rollout
from prime_composer.contract import LossInputs
from prime_composer.local.student_forward import student_inputs
from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.prompts import answer_text, render_prompt


@dataclass(frozen=True, eq=False)
class Pair:
    """Two responses to one prompt, the first one preferred."""

    chosen: Rollout
    rejected: Rollout

    @property
    def longer(self) -> Rollout:
        return max(self.chosen, self.rejected, key=lambda rollout: rollout.token_ids.shape[0])


def pairs_of_rollouts(
    rollouts: Sequence[Rollout], rewards: Sequence[float], limit: int
) -> list[Pair]:
    """A correct and a wrong rollout of the same group, each rollout at most once, the first ``limit`` pairs."""
    pairs = []
    for prompt in dict.fromkeys(rollout.prompt_index for rollout in rollouts):
        group = [
            (rollout, reward)
            for rollout, reward in zip(rollouts, rewards, strict=True)
            if rollout.prompt_index == prompt
        ]
        right = [rollout for rollout, reward in group if reward > 0]
        wrong = [rollout for rollout, reward in group if reward <= 0]
        pairs += [Pair(chosen, rejected) for chosen, rejected in zip(right, wrong, strict=False)]
    return pairs[:limit]


def read_pairs(path: Path, sources: Mapping[str, DataConfig], tokenizer: Any) -> list[Pair]:
    """The pairs of a JSONL file: one object per line with the strings "question", "chosen" and "rejected", and, where a
    recipe has several environments, "environment", whose prompt is used.

    Raises:
        ValueError: the file is missing or empty, or a line is malformed: ``file:line: what is wrong``.
    """
    if not path.is_file():
        raise ValueError(f"no such file: {path}. [replay] path is a JSONL file of preference pairs")
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}:{number}: not JSON: {error.msg} at column {error.colno}"
            ) from error
        for key in ("question", "chosen", "rejected"):
            if (
                not isinstance(row, dict)
                or not isinstance(row.get(key), str)
                or not row[key].strip()
            ):
                raise ValueError(f'{path}:{number}: "{key}" must be a string that is not empty')
        environment = row.get("environment") if len(sources) > 1 else next(iter(sources))
        if not isinstance(environment, str) or environment not in sources:
            raise ValueError(f'{path}:{number}: "environment" must be one of {", ".join(sources)}')
        data = sources[environment]
        prompt = render_prompt(Problem(row["question"], row["chosen"]), data, tokenizer)
        pairs.append(
            Pair(
                *(response(prompt, row[key], data, tokenizer, 0) for key in ("chosen", "rejected"))
            )
        )
    if not pairs:
        raise ValueError(f"{path} holds no pair")
    return pairs


def response(
    prompt: Sequence[int], text: str, data: DataConfig, tokenizer: Any, prompt_index: int
) -> Rollout:
    """A given text as the response to a prompt, end of text included; nobody sampled it, so it has no log mu (NaN)."""
    completion = [
        *tokenizer.encode(answer_text(text, data), add_special_tokens=False),
        tokenizer.eos_token_id,
    ]
    token_ids = torch.tensor([*prompt, *completion])
    return Rollout(
        token_ids=token_ids,
        loss_mask=torch.arange(len(token_ids)) >= len(prompt),
        inference_logprobs=torch.full(token_ids.shape, torch.nan),
        finish_reason="stop",
        prompt_index=prompt_index,
    )


def pair_inputs(model: nn.Module, pairs: Sequence[Pair], reference: nn.Module | None) -> LossInputs:
    """The pack of some pairs: segment 2i is the chosen and 2i + 1 the rejected response of pair i."""
    rollouts = [rollout for pair in pairs for rollout in (pair.chosen, pair.rejected)]
    inputs = student_inputs(model, rollouts)
    if reference is None:
        return inputs
    with torch.no_grad():
        return dataclasses.replace(
            inputs, ref_logprobs=student_inputs(reference, rollouts).trainer_logprobs
        )


def empty_pack(like: LossInputs) -> LossInputs:
    """A pack without a pair, for a micro-batch of rollouts."""
    none = like.trainer_logprobs.detach()[:0]
    return LossInputs(
        trainer_logprobs=none,
        inference_logprobs=none,
        ref_logprobs=none,
        advantages=None,
        loss_mask=like.loss_mask[:0],
        token_ids=like.token_ids[:0],
        segment_ids=like.segment_ids[:0],
    )
