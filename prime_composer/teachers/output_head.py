"""A served teacher's output head on this machine."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from prime_composer.contract import TeacherHead
from prime_composer.scoring.head import DTYPES_BY_NAME, bits_of
from prime_composer.scoring.wire import HeadFacts, row_digests

TOLERANCES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.5}
"""How far log q of a token by hidden state and head may be from the server's own, in nats, by the
dtype of the head's products.

The sums are the same up to their order. In half precision each logit is rounded, so that another
order moves it by one unit in the last place: 0.0625 in bfloat16 for logits of 8 to 16.
"""

MOST_HEAD_ENTRIES = 2**33  # More than any model has


@dataclass(frozen=True)
class OutputHead:
    """A teacher's output head: logits = scale · softcap(h Wᵀ + bias)."""

    weight: Float[Tensor, "v d"]  # W, [V, d]
    bias: Float[Tensor, " v"] | None  # [V]; None without one
    facts: HeadFacts  # scale, softcap, and the dtype that the server multiplies in

    @property
    def sha256(self) -> str:
        """Of the rows' own digests, in hexadecimal digits."""
        bias = None if self.bias is None else bits_of(self.bias)
        return hashlib.sha256(row_digests(bits_of(self.weight), bias)).hexdigest()

    def of_teacher(self, origin: str) -> TeacherHead:
        """Return the head, with the dtype that the server multiplies in."""
        head = teacher_head(
            DTYPES_BY_NAME[self.facts.computed_in],
            self.weight,
            self.bias,
            scale=self.facts.scale,
            softcap=self.facts.softcap,
            tolerance=TOLERANCES[self.facts.computed_in],
            origin=origin,
        )
        head.refuse_non_finite("weight", head.weight)
        return head


def teacher_head(
    computed_in: torch.dtype,
    weight: Float[Tensor, "v d"],
    bias: Float[Tensor, " v"] | None,
    **others: Any,
) -> TeacherHead:
    """Return the head of a teacher that multiplies in this dtype.

    Products of half precision are exact in float32, so that such a weight stays as it is.
    """
    if computed_in == torch.float32:
        return TeacherHead(weight, bias, **others)
    bias = None if bias is None else bias.to(computed_in)
    return TeacherHead(weight.to(computed_in), bias, rounded_to=computed_in, **others)


def available_bytes() -> int:
    """Return the memory that new programs can have, by the kernel's own estimate."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    except OSError:  # another system
        return 2**63
    return int(fields["MemAvailable"].split()[0]) * 1024
