"""Ids that one output head has and another lacks: padding beyond the shared vocabulary.

Models of one tokenizer pad their heads to different sizes: 151,936 rows in the small Qwen2.5, and
152,064 in the large ones. The shared vocabulary is the ids that every head has. Each side is
normalized over its own head. On both sides, what is beyond the shared ids is a part of the tail.

    in a top K      an id that the student lacks is not known (``contract.Support``): a tail bucket,
                    1 minus the support's mass, contains it
    whole heads     the ids beyond the shared ones are one bucket (``full_vocabulary.TwoHeads``)
    sampled tokens  the student may sample an id that the teacher lacks. Sampling is left as it is,
                    and with it the importance ratio. The teacher's probability of the id is 0,
                    floored at that of the bucket. In the sequence that it reads, the last row of
                    its own head, most often padding too, takes the id's place
"""

import math
from collections.abc import Sequence
from typing import Any

MOST_PADDING = 1024  # Most ids more in one head than in another of the same tokenizer

LOG_FLOOR = math.log(1e-7)  # Of a sampled token that the teacher's head lacks; of a bucket


def lacking(token_ids: Any, size: int | None) -> Any:
    """Return which ids a head lacks; none where its ``size`` is unknown (None)."""
    return token_ids >= (2**31 - 1 if size is None else size)


def within_head(token_ids: Sequence[int], size: int | None) -> list[int]:
    """Return a sequence as a model with a head of this size reads it, other ids replaced."""
    if size is None or max(token_ids, default=0) < size:
        return list(token_ids)
    return [min(token, size - 1) for token in token_ids]


def alien(lowest: int, highest: int, size: int) -> int | None:
    """Return an id, from a teacher's smallest to its largest, that no padding explains, or None."""
    if lowest < 0:
        return lowest
    return highest if highest >= size + MOST_PADDING else None


def out_of_vocabulary(origin: str, answer: str) -> str:
    """Return the error for a server of unknown size that lacks an id of the sequence."""
    return (
        f"{origin} lacks an id of the sequence, which the student's wider head may sample, and "
        "without the scoring plugin the size of its head is not known: start it with "
        f"prime-composer teacher. Its answer: {answer}"
    )
