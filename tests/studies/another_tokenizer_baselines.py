"""Crude versions of published ways to compare two tokenizers, for ``another_tokenizer``.

Each is a ``ByRows``: it makes scores of the student's tokens from the same rows of the teacher, and
only where a token of either begins at the same byte. Nothing is merged between these places.

    ULD  rank by rank, whatever the tokens are: sum_i |p_(i) - q_(i)| over sorted probabilities.
         https://arxiv.org/abs/2402.12030, with CE + 1.5 of it on a teacher's answers. TRL's GOLD
         takes it alone, on spans of merged tokens; there are none here.
    BPM  https://arxiv.org/abs/2607.22334, of which only the summary was read: each teacher token
         counts for the longest student token that is a byte prefix of it. The rest is a residual,
         here the tail.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import NonNegativeFloat
from torch import Tensor

from prime_composer.contract import IN_TAIL, LossInputs, LossOutputs, Scores, given
from prime_composer.cross_tokenizer.finish import FULL, NEVER, Totals
from prime_composer.cross_tokenizer.pair import TokenizerPair
from prime_composer.cross_tokenizer.plan import ReadingPlan
from prime_composer.losses.config import TopKLossConfig
from prime_composer.losses.shared.metrics import token_mean
from prime_composer.losses.shared.reductions import masked_sum
from prime_composer.teachers.own_tokenizer import ByRows, dense


def aligned_rows(plan: ReadingPlan) -> tuple[Int[Tensor, " m"], Int[Tensor, " m"]]:
    """Return the places of the student's tokens that begin where one of the teacher's does, and the
    teacher's rows there."""
    both = [(at, p.row) for at, p in enumerate(plan.positions) if p is not None and p.aligned]
    places = torch.tensor(both, dtype=torch.long).reshape(-1, 2)
    return places[:, 0], places[:, 1]


def counted(plan: ReadingPlan, aligned: int) -> Totals:
    """Return what ``finish.means`` makes means of."""
    counts = {"tokens": len(plan.positions), "teacher_tokens": len(plan.teacher_ids)}
    return {**counts, "scored": aligned, "aligned": aligned}


class ByRank(ByRows):
    """Scores whose columns are the teacher's ranks, most probable first, and no ids.

    Every token is scored, for the losses of the text alone. A row that is not aligned has no known
    column.
    """

    def scores(self, plan: ReadingPlan, read: Scores, k: int, size: int) -> tuple[Scores, Totals]:
        """Return the k largest probabilities of each aligned row; k = V_S is all that count."""
        rows = dense(read, plan, max(size, len(self.pair.teacher.of_id)))
        places, row = aligned_rows(plan)
        n, width = len(plan.positions), min(k, rows.shape[1])
        logprobs, known = torch.full((n, k), NEVER), torch.zeros(n, k, dtype=torch.bool)
        ranked = rows[row].sort(-1, descending=True).values[:, :width]
        # A rank that the teacher's vocabulary does not have has probability 0.
        logprobs[places] = torch.nn.functional.pad(ranked, (0, k - width)).log().clamp(min=IN_TAIL)
        known[places] = True
        ids = torch.arange(k).expand(n, k)
        return Scores(torch.full((n,), NEVER), ids, logprobs, known=known), counted(
            plan, len(places)
        )


class ByLongestPrefix(ByRows):
    """Scores from each teacher token's longest byte prefix among the student's tokens."""

    @cached_property
    def prefix(self) -> Int[Tensor, " vocab"]:
        """The student's id of each teacher token; -1 without one. Ends are the student's end."""
        return longest_prefixes(self.pair)

    def scores(self, plan: ReadingPlan, read: Scores, k: int, size: int) -> tuple[Scores, Totals]:
        """Return supports of the k ids with most mass; others are not ``scored``."""
        rows = dense(read, plan, max(size, len(self.pair.teacher.of_id)))
        places, row = aligned_rows(plan)
        n, has = len(plan.positions), self.prefix >= 0
        mass = torch.zeros(len(row), len(self.pair.student.of_id))
        mass.index_add_(1, self.prefix[has], rows[row][:, : len(has)][:, has])
        # A tail of exactly 0 makes a KL infinite.
        mass = mass * (FULL / mass.sum(-1, keepdim=True).clamp(min=FULL))
        top = mass.topk(k, dim=-1)
        scored = torch.zeros(n, dtype=torch.bool)
        scored[places] = True
        ids, logprobs = torch.arange(k).repeat(n, 1), torch.full((n, k), NEVER)
        ids[places], logprobs[places] = top.indices, top.values.log().clamp(min=NEVER)
        known = torch.ones(n, k, dtype=torch.bool)
        known[places] = top.values > 0
        own = torch.full((n,), NEVER)
        tokens = [p.token for p in plan.positions if p is not None and p.aligned]
        own[places] = mass[range(len(tokens)), tokens].log().clamp(min=NEVER)
        return Scores(own, ids, logprobs, known=known, scored=scored), counted(plan, len(places))


def longest_prefixes(pair: TokenizerPair) -> Int[Tensor, " vocab"]:
    """Return ``ByLongestPrefix.prefix``."""
    id_of = {content: i for i, content in enumerate(pair.student.of_id) if content}
    found = []
    for content in pair.teacher.of_id:
        lengths = range(len(content or b""), 0, -1)
        prefixes = (id_of.get((content or b"")[:length]) for length in lengths)
        found.append(next((i for i in prefixes if i is not None), -1))
    prefix = torch.tensor(found)
    prefix[pair.teacher_ends] = pair.student_end
    return prefix


class ULDConfig(TopKLossConfig):
    """Knobs of ``uld``. ``k`` is the student's vocabulary, and the teacher's are ``ByRank``."""

    type: Literal["tests.studies.another_tokenizer_baselines:uld"] = (
        "tests.studies.another_tokenizer_baselines:uld"
    )
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({"k": 8},)

    distance: NonNegativeFloat = 1.0
    """Weight of the distance."""

    cross_entropy: NonNegativeFloat = 0.0
    """Weight of -log p of the token itself."""


def uld(inputs: LossInputs, config: ULDConfig) -> LossOutputs:
    """Return sum_mask (distance sum_i |p_(i) - q_(i)| - cross_entropy log p(y)).

    Ranks that only the teacher has are a constant, and left out.
    """
    mask = inputs.loss_mask
    per_rank = rank_distance(inputs, mask)
    nll = -torch.where(mask, inputs.trainer_logprobs, 0.0)
    loss = config.distance * per_rank + config.cross_entropy * nll
    with torch.no_grad():
        metrics = {"distance": token_mean(per_rank, mask), "nll": token_mean(nll, mask)}
    return LossOutputs(loss=masked_sum(loss, mask, inputs.loss_weights), metrics=metrics)


def rank_distance(inputs: LossInputs, mask: Tensor) -> Float[Tensor, " seq"]:
    """Return sum_i |p_(i) - q_(i)| of each token; 0 where no column is known."""
    support = given(inputs.support).masked(mask)
    student = support.student_logprobs.exp().sort(-1, descending=True).values
    return (student - support.teacher_logprobs.exp()).abs().sum(-1)
