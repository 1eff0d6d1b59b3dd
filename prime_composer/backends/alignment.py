"""What every backend shares: making rollouts, checking sizes, the top K, and the alignment of teacher scores.

Where a rollout's completion stands in the sequence that a teacher reads, and its scores in ``TeacherScores``.

Position t of a score is conditioned on the tokens before t; every backend puts its numbers in place through here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from prime_composer.backends.protocols import Rollout, TeacherScores


@dataclass(frozen=True)
class Scored:
    """What a teacher reads for one rollout.

    Attributes:
        token_ids: the prompt (the rollout's own or another one) and everything from the first trained token on.
        start: index in ``token_ids`` of the first trained token; the scores of interest are [start, len(token_ids)).
        rollout_start: index of that same token in the rollout.
    """

    token_ids: list[int]
    start: int
    rollout_start: int


def sequences_to_score(
    rollouts: Sequence[Rollout], prompts: Sequence[Sequence[int]] | None = None
) -> list[Scored]:
    """What the teacher reads for each rollout; ``prompts`` replaces everything before the first trained token.

    Raises:
        ValueError: not one prompt per rollout, a rollout that trains nothing, or a first token without a context.
    """
    if prompts is not None and len(prompts) != len(rollouts):
        raise ValueError(
            f"{len(prompts)} prompts for {len(rollouts)} rollouts; pass one teacher prompt per rollout."
        )
    scored = []
    for index, rollout in enumerate(rollouts):
        trained = rollout.loss_mask.nonzero()
        if len(trained) == 0:
            raise ValueError(
                f"Rollout {index} has no token in its loss_mask; drop it before scoring."
            )
        start = int(trained[0])
        tokens = rollout.token_ids.tolist()
        prompt = tokens[:start] if prompts is None else list(prompts[index])
        if not prompt:
            raise ValueError(
                f"Rollout {index} has no prompt: a first token without a context has no log-probability."
            )
        scored.append(
            Scored(token_ids=prompt + tokens[start:], start=len(prompt), rollout_start=start)
        )
    return scored


def place(
    length: int,
    scored: Scored,
    ref_logprobs: Float[Tensor, " scored"],
    token_ids: Int[Tensor, "scored k"],
    teacher_logprobs: Float[Tensor, "scored k"],
) -> TeacherScores:
    """Scores of the tokens [scored.start, end) put where the rollout of ``length`` tokens has them; NaN and -1 before."""
    k, start = token_ids.shape[1], scored.rollout_start
    ref = torch.full((length,), torch.nan)
    ids = torch.full((length, k), -1, dtype=torch.int64)
    logprobs = torch.full((length, k), torch.nan)
    ref[start:], ids[start:], logprobs[start:] = ref_logprobs, token_ids, teacher_logprobs
    return TeacherScores(ref_logprobs=ref, token_ids=ids, teacher_logprobs=logprobs)


def make_rollout(
    prompt: Sequence[int],
    completion: Sequence[int],
    logprobs: Sequence[float],
    finish_reason: str,
    prompt_index: int,
) -> Rollout:
    """A ``Rollout`` of a prompt and its completion; a completion that ran out of tokens is a truncated one."""
    if finish_reason not in ("stop", "length"):
        raise RuntimeError(
            f"The sampler gave up on a completion with finish_reason {finish_reason!r}."
        )
    n = len(prompt)
    token_ids = torch.tensor([*prompt, *completion], dtype=torch.int64)
    inference_logprobs = torch.full(token_ids.shape, torch.nan)
    inference_logprobs[n:] = torch.tensor(logprobs, dtype=torch.float32)
    loss_mask = torch.arange(len(token_ids)) >= n
    return Rollout(token_ids, loss_mask, inference_logprobs, finish_reason, prompt_index)


def check_lengths(sequences: Sequence[Sequence[int]], new_tokens: int, max_model_len: int) -> None:
    """Every sequence and ``new_tokens`` more fit into the engine; otherwise a ValueError with the numbers."""
    for index, ids in enumerate(sequences):
        if not ids:
            raise ValueError(
                f"Sequence {index} is empty; a model needs at least one token to condition on."
            )
        if len(ids) + new_tokens > max_model_len:
            raise ValueError(
                f"Sequence {index} has {len(ids)} tokens, and with {new_tokens} more it does not fit into max_model_len "
                f"{max_model_len}; raise max_model_len to {len(ids) + new_tokens}, or shorten prompt or max_tokens."
            )


def check_support_size(
    support_size: int | Literal["full"], vocab_size: int, limit: int, setting: str
) -> int:
    """K as a number, within the vocabulary and the engine's limit; otherwise a ValueError with the remedy."""
    k = vocab_size if support_size == "full" else support_size
    if not 0 <= k <= vocab_size:
        raise ValueError(
            f"support_size is {k} and the teacher's vocabulary has {vocab_size} entries; use at most that."
        )
    if k > limit:
        raise ValueError(
            f"support_size is {k} and the teacher's engine answers at most {limit}; raise {setting} to {k}."
        )
    return k


def top_k(
    logprobs: Float[Tensor, "n v"], k: int
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The k largest entries of each row and their ids, largest first: ``torch.topk``, on a CPU two times as fast.

    NumPy partitions with vector instructions. Beyond some thousand entries torch's heap is the faster one.
    """
    if logprobs.is_cuda or logprobs.shape[1] > 8192 or k in (0, logprobs.shape[1]):
        return tuple(logprobs.topk(k, dim=-1))
    found = np.argpartition(logprobs.numpy(), -k, axis=1)[:, -k:]
    ids = torch.from_numpy(np.ascontiguousarray(found))
    values, order = logprobs.gather(1, ids).sort(dim=-1, descending=True)
    return values, ids.gather(1, order)
