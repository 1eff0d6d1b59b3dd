"""What every backend shares: sequences to score, rollouts, scores, size checks, and the top K."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, cast

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from prime_composer.backends.answers import InvalidAnswer, check_completion, check_scores
from prime_composer.backends.protocols import Rollout
from prime_composer.contract import Scores
from prime_composer.scoring.shared_vocabulary import LOG_FLOOR, lacking, within_head


@dataclass(frozen=True)
class SequenceToScore:
    """The tokens that a teacher reads for one rollout."""

    token_ids: list[int]  # ids that the teacher's head lacks are replaced
    start: int  # index in ``token_ids`` of the first token that is scored
    lacks: Bool[Tensor, " n"]  # which tokens from ``start`` on were replaced, [n]
    index: int | None = None  # of the sequence in its request, for messages
    trained: bool = True  # the tokens that are scored train; False where some may not
    vocab_size: int | None = None  # of the teacher's head; None where unknown
    # tokens from ``start`` on whose scores are read; None: all
    read: Bool[Tensor, " n"] | None = None

    @property
    def count(self) -> int:
        """How many rows are read."""
        return len(self.lacks) if self.read is None else int(self.read.sum())

    @property
    def runs(self) -> list[slice]:
        """The rows that are read, in runs of adjacent ones."""
        if self.read is None:
            return [slice(0, len(self.lacks))]
        return runs_of(self.read)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Positions of the tokens whose scores are read, each [first, last), in order."""
        return [(self.start + rows.start, self.start + rows.stop) for rows in self.runs]

    @property
    def skip(self) -> list[tuple[int, int]]:
        """Positions between ``ranges``."""
        return [(before[1], after[0]) for before, after in pairwise(self.ranges)]

    @property
    def asked_ids(self) -> list[int]:
        """The tokens up to the last one whose score is read."""
        return self.token_ids[: self.ranges[-1][1]]

    def window(self, rows: slice) -> "SequenceToScore":
        """Return the sequence up to a row, with the scores of some adjacent rows."""
        return replace(
            self,
            token_ids=self.token_ids[: self.start + rows.stop],
            start=self.start + rows.start,
            lacks=self.lacks[rows],
            read=None if self.read is None else self.read[rows],
        )

    @property
    def sampled(self) -> Int[Tensor, " n"]:
        """The tokens that are scored."""
        return tensor_of(self.token_ids[self.start :])


def tensor_of(token_ids: Sequence[int]) -> Int[Tensor, " n"]:
    """Return ids as a tensor. NumPy reads a list five times as fast as torch."""
    return torch.from_numpy(np.array(token_ids, np.int64))


def runs_of(mask: Bool[Tensor, " n"]) -> list[slice]:
    """Return where a mask is True, in runs of adjacent places."""
    edges = np.diff(mask.numpy(), prepend=False, append=False).nonzero()[0].tolist()
    return [slice(*ends) for ends in zip(edges[::2], edges[1::2], strict=True)]


def sequences_to_score(
    rollouts: Sequence[Rollout],
    prompts: Sequence[Sequence[int]] | None = None,
    vocab_size: int | None = None,
) -> list[SequenceToScore]:
    """Return what the teacher reads for each rollout."""
    if prompts is not None and len(prompts) != len(rollouts):
        raise ValueError(
            f"{len(prompts)} prompts for {len(rollouts)} rollouts; pass one teacher prompt per "
            "rollout."
        )
    sequences = []
    for index, rollout in enumerate(rollouts):
        start = rollout.start
        tokens = rollout.token_ids.tolist()
        if start == len(tokens):
            raise ValueError(
                f"Rollout {index} has no token in its loss_mask; drop it before scoring."
            )
        prompt = tokens[:start] if prompts is None else list(prompts[index])
        if not prompt:
            raise ValueError(
                f"Rollout {index} has no prompt: a first token without a context has no "
                "log-probability."
            )
        sequences.append(
            SequenceToScore(
                within_head(prompt + tokens[start:], vocab_size),
                start=len(prompt),
                lacks=lacking(rollout.token_ids[start:], vocab_size),
                index=index,
                vocab_size=vocab_size,
                read=None if rollout.trained.all() else rollout.trained,
            )
        )
    return sequences


def make_rollout(
    prompt: Sequence[int],
    completion: Sequence[int],
    logprobs: Sequence[float],
    finish_reason: str | None,
    prompt_index: int,
    *,
    max_tokens: int | None = None,
    vocab_size: int | None = None,
    origin: str = "The sampler",
) -> Rollout:
    """Return the ``Rollout`` of a prompt and its completion, checked (``check_completion``).

    Every sampler makes its rollouts here. ``logprobs`` are log mu, and ``origin`` who answered.
    None for ``max_tokens`` or ``vocab_size``: unknown.
    """
    check_completion(
        completion,
        logprobs,
        max_tokens=max_tokens,
        vocab_size=vocab_size,
        origin=origin,
        prompt=prompt_index,
    )
    if finish_reason not in ("stop", "length"):
        raise InvalidAnswer(
            f"{origin} gave up on a completion of prompt {prompt_index}: its finish_reason is "
            f"{finish_reason!r}, where 'stop' or 'length' was expected."
        )
    start, length = len(prompt), len(prompt) + len(completion)
    # In NumPy: a step makes many of these short arrays, and torch takes longer for each.
    inference_logprobs = np.full(length, np.nan, np.float32)
    inference_logprobs[start:] = logprobs
    reason = cast(Literal["stop", "length"], finish_reason)
    return Rollout(
        tensor_of([*prompt, *completion]),
        torch.from_numpy(np.arange(length) >= start),
        torch.from_numpy(inference_logprobs),
        reason,
        prompt_index,
    )


def checked(
    scores: Sequence[Scores],
    sequences: Sequence[SequenceToScore],
    *,
    k: int,
    origin: str,
    ranked: bool = True,
) -> list[Scores]:
    """Return a model's scores of several sequences, checked (``answers.check_scores``).

    Every scorer runs its scores through here. A sampled token that the teacher's head lacks gets
    the log-prob of such an id (``shared_vocabulary``).
    """
    if not sequences:
        return []
    check_scores(
        [
            (one.rows(rows), sequence.sampled[rows], sequence.index)
            for one, sequence in zip(scores, sequences, strict=True)
            for rows in sequence.runs
        ],
        k=k,
        vocab_size=sequences[0].vocab_size,
        origin=origin,
        ranked=ranked,
        trained=sequences[0].trained,
    )
    return [
        replace(one, ref_logprobs=one.ref_logprobs.masked_fill(sequence.lacks, LOG_FLOOR))
        if sequence.lacks.any()
        else one
        for one, sequence in zip(scores, sequences, strict=True)
    ]


def spread(scores: Scores, read: Bool[Tensor, " n"] | None) -> Scores:
    """Return the scores of the rows that were read among all n; the others are not ``scored``.

    A row that was not read has the same probability on the sampled token and on K ids.
    """
    if read is None:
        return scores
    even = -math.log(scores.k + 1)
    own = among(scores.ref_logprobs, read, even)
    return replace(
        scores,
        ref_logprobs=own,
        token_ids=among(scores.token_ids, read, torch.arange(scores.k)),
        teacher_logprobs=among(scores.teacher_logprobs, read, even),
        hidden=tuple(
            replace(share, states=among(share.states, read, 0.0)) for share in scores.hidden
        ),
        scored=read,
    )


def among(rows: Tensor, read: Bool[Tensor, " n"] | None, fill: Tensor | float) -> Tensor:
    """Return the rows that were read among all n, the others filled."""
    if read is None:
        return rows
    whole = rows.new_empty(len(read), *rows.shape[1:])
    whole[:] = fill
    whole[read] = rows
    return whole


def check_sequence_lengths(
    sequences: Sequence[Sequence[int]], new_tokens: int, max_model_len: int | None
) -> None:
    """Check that each sequence and ``new_tokens`` more fit into ``max_model_len``, unless None."""
    for index, ids in enumerate(sequences):
        if not ids:
            raise ValueError(
                f"Sequence {index} is empty; a model needs at least one token to condition on."
            )
        if max_model_len is not None and len(ids) + new_tokens > max_model_len:
            raise ValueError(
                f"Sequence {index} has {len(ids)} tokens, and with {new_tokens} more it does not "
                f"fit into max_model_len {max_model_len}; raise max_model_len to "
                f"{len(ids) + new_tokens}, or shorten prompt or max_tokens."
            )


def check_support_size(
    support_size: int | Literal["full"], vocab_size: int, limit: int, setting: str
) -> int:
    """Return K as a number, checked against the vocabulary and the engine's limit."""
    k = vocab_size if support_size == "full" else support_size
    if not 0 <= k <= vocab_size:
        raise ValueError(
            f"support_size is {k} and the teacher's vocabulary has {vocab_size} entries; use at "
            "most that."
        )
    if k > limit:
        raise ValueError(
            f"support_size is {k} and the teacher's engine answers at most {limit}; raise "
            f"{setting} to {k}."
        )
    return k
