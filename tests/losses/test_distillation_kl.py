"""The series that all losses share, distillation/kl, against plain sums in float64."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from prime_composer.contract import LossInputs, Support
from prime_composer.losses.shared.metrics import distillation_kl

VOCAB, SEQ = 7, 3
P, Q = (
    torch.randn(SEQ, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    .mul(2)
    .log_softmax(-1)
    for seed in (0, 1)
)


def kl_by_hand(row: int) -> float:
    """Return KL(p || q) of a position, in nats."""
    pairs = zip(P[row].tolist(), Q[row].tolist(), strict=True)
    return math.fsum(math.exp(p) * (p - q) for p, q in pairs)


def inputs_of(tokens: list[int], k: int, known: Tensor | None = None) -> LossInputs:
    """Return the inputs of sampled tokens, with the teacher's top k as the support."""
    y = torch.tensor(tokens).unsqueeze(-1)
    own = P.gather(-1, y)[:, 0]
    ids = Q.topk(k).indices
    support = Support(ids, Q.gather(-1, ids), P.gather(-1, ids), known) if k else None
    return LossInputs(
        trainer_logprobs=own,
        inference_logprobs=own.clone(),
        ref_logprobs=Q.gather(-1, y)[:, 0],
        advantages=None,
        loss_mask=torch.ones(SEQ, dtype=torch.bool),
        support=support,
        token_ids=y[:, 0],
    )


@pytest.mark.parametrize("k", [0, 1, 3, VOCAB])
def test_distillation_kl_has_the_kl_as_its_mean(k: int) -> None:
    """Over all tokens that the student may sample, whatever the support is."""
    values = [distillation_kl(inputs_of([y] * SEQ, k))[0] for y in range(VOCAB)]
    for row in range(SEQ):
        mean = math.fsum(math.exp(P[row, y]) * values[y][row] for y in range(VOCAB))
        assert mean == pytest.approx(kl_by_hand(row), rel=1e-12)
    if k == VOCAB:
        assert values[0].tolist() == pytest.approx([kl_by_hand(row) for row in range(SEQ)])


def test_distillation_kl_with_unknown_ids_keeps_its_mean() -> None:
    """An id that the teacher could not answer for is outside, whatever its numbers are."""
    known = torch.tensor([[True, False, True]] * SEQ)
    total = torch.zeros(SEQ, dtype=torch.float64)
    for y in range(VOCAB):
        inputs = inputs_of([y] * SEQ, 3, known)
        assert inputs.support is not None
        inputs.support.teacher_logprobs[:, 1] = math.nan
        total += P[:, y].exp() * distillation_kl(inputs)[0]
    assert total.tolist() == pytest.approx([kl_by_hand(row) for row in range(SEQ)])


def test_distillation_kl_compares_at_temperature_one() -> None:
    inputs = inputs_of([0, 1, 2], 0)
    hot = dataclasses.replace(
        inputs,
        trainer_logprobs=inputs.trainer_logprobs / 2,
        untempered_logprobs=inputs.trainer_logprobs,
    )
    assert distillation_kl(hot)[0].equal(distillation_kl(inputs)[0])


def test_distillation_kl_leaves_out_what_is_no_sample() -> None:
    """Tokens that do not train, those of the data, and those that the teacher rules out."""
    inputs = inputs_of([0, 1, 2], 3)
    inputs.loss_mask[0] = False
    inputs.inference_logprobs[1] = math.nan
    assert distillation_kl(inputs)[1].tolist() == [False, False, True]
    inputs = inputs_of([0, 1, 2], 0)
    assert inputs.ref_logprobs is not None
    inputs.ref_logprobs[1] = -math.inf
    assert distillation_kl(inputs)[1].tolist() == [True, False, True]
