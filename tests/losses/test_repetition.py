"""The repeated end of a response against a search by hand; the modifier that leaves it out."""

import dataclasses
import random

import pytest
import torch
from pydantic import ValidationError

from prime_composer.contract import LossInputs, SampledText
from prime_composer.losses import parse_loss, setup_loss_fn
from prime_composer.losses.shared.modifiers import RepetitionMask
from prime_composer.losses.shared.repetition import repeated_end


def by_hand(ids, mask, period, copies, tokens):
    """Return the places after the first copy of the piece whose repetition is the longest."""
    last = max((t for t, one in enumerate(mask) if one), default=-1)
    first = last
    while first >= 0 and mask[first]:
        first -= 1
    text, found = ids[first + 1 : last + 1], set()
    for p in range(1, min(period, len(text) - 1) + 1):
        length = p
        while length < len(text) and text[-length - 1] == text[-length - 1 + p]:
            length += 1
        if length >= max(tokens, copies * p) and length > p:
            found |= set(range(last + 1 - length + p, last + 1))
    return found


def looping(seed):
    """Return a pack of sequences of two ids, some of which loop, with gaps in their masks."""
    draw = random.Random(seed)
    ids, mask, segments = [], [], []
    for segment in range(8):
        text = [draw.randrange(3) for _ in range(draw.randrange(1, 9))]
        piece = [draw.randrange(3) for _ in range(draw.randrange(1, 6))]
        text += piece * draw.randrange(0, 7) + piece[: draw.randrange(len(piece))]
        trained = [draw.random() < 0.95 for _ in text]
        tail = draw.randrange(3)  # what comes after the last answer
        ids += text + [draw.randrange(3) for _ in range(tail)]
        mask += trained + [False] * tail
        segments += [segment] * (len(text) + tail)
    return ids, mask, segments


@pytest.mark.parametrize("limits", [(64, 4, 16), (4, 2, 2), (20, 3, 6), (1, 2, 2)])
@pytest.mark.parametrize("seed", range(12))
def test_repeated_end_is_that_of_a_search_by_hand(seed, limits):
    ids, mask, segments = looping(seed)
    expected = set()
    for segment in range(8):
        start, size = segments.index(segment), segments.count(segment)
        part = slice(start, start + size)
        expected |= {start + t for t in by_hand(ids[part], mask[part], *limits)}
    found = repeated_end(torch.tensor(ids), torch.tensor(mask), torch.tensor(segments), *limits)
    assert set(found.nonzero()[:, 0].tolist()) == expected
    if limits == (4, 2, 2):
        assert expected  # the packs do loop


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([7, 8, 9] + [1, 2] * 8, range(5, 19)),
        ([7, 8, 9] + [1, 2] * 7 + [1], range(0)),  # 15 tokens are too few
        ([1] * 16, range(1, 16)),
        ([1] * 16 + [2], range(0)),  # it stopped
        ([], range(0)),
    ],
)
def test_repeated_end_begins_after_the_first_copy(ids, expected):
    tokens = torch.tensor(ids, dtype=torch.long)
    found = repeated_end(tokens, torch.ones_like(tokens, dtype=torch.bool), None, 64, 4, 16)
    assert found.nonzero()[:, 0].tolist() == list(expected)


def pack():
    g = torch.Generator().manual_seed(0)
    ids = torch.tensor([3, 4, 5, 6] + [1, 2] * 10 + [5, 6, 7, 8])
    return LossInputs(
        trainer_logprobs=torch.randn(28, generator=g).double().abs().neg().requires_grad_(),
        inference_logprobs=torch.randn(28, generator=g).double().abs().neg(),
        ref_logprobs=torch.randn(28, generator=g).double().abs().neg(),
        advantages=None,
        loss_mask=torch.ones(28, dtype=torch.bool),
        token_ids=ids,
        segment_ids=torch.tensor([0] * 24 + [1] * 4),
    )


def test_repetition_leaves_the_loss_as_masked_tokens_do():
    """Loss and gradient are those without the tokens, whatever the teacher says of them."""
    inputs = pack()
    by_hand_mask = torch.tensor([True] * 6 + [False] * 18 + [True] * 4)
    plain = setup_loss_fn(parse_loss({"type": "sampled_reverse_kl"}))
    expected = plain(dataclasses.replace(inputs, loss_mask=by_hand_mask)).loss
    (gradient,) = torch.autograd.grad(expected, inputs.trainer_logprobs)
    ref = torch.where(by_hand_mask, inputs.ref_logprobs, -torch.inf)
    loss = setup_loss_fn(parse_loss({"type": "sampled_reverse_kl", "repetition": {}}))
    outputs = loss(dataclasses.replace(inputs, ref_logprobs=ref))
    assert torch.equal(outputs.loss, expected)
    assert torch.equal(torch.autograd.grad(outputs.loss, inputs.trainer_logprobs)[0], gradient)
    assert outputs.metrics["repetition/tokens"].item() == pytest.approx(18 / 28)


def test_repetition_goes_on_over_tokens_without_a_score():
    """Every ninth sampled token does not train, and the search reads it all the same."""
    ids = torch.tensor([3, 4, 5, 6] + [1, 2] * 100)
    trained = torch.arange(204) % 9 != 8
    places = trained.nonzero()[:, 0]
    n = len(places)
    inputs = LossInputs(
        trainer_logprobs=torch.zeros(n),
        inference_logprobs=torch.zeros(n),
        ref_logprobs=None,
        advantages=None,
        loss_mask=torch.ones(n, dtype=torch.bool),
        token_ids=ids[trained],
        sampled=SampledText(ids, torch.ones(204, dtype=torch.bool), None, places),
    )
    kept, metrics = RepetitionMask().apply(inputs)
    assert places[kept.loss_mask].tolist() == [0, 1, 2, 3, 4, 5]
    assert metrics["repetition/tokens"].item() == pytest.approx((n - 6) / n)


def test_repetition_without_a_mask_measures_alone():
    inputs = pack()
    changed, metrics = RepetitionMask(mask=False).apply(inputs)
    assert torch.equal(changed.loss_mask, inputs.loss_mask)
    assert metrics["repetition/tokens"].item() == pytest.approx(18 / 28)


@pytest.mark.parametrize("wrong", [{"copies": 1}, {"period": 0}, {"tokens": 1}, {"piece": 3}])
def test_repetition_refuses_limits_that_mean_nothing(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        RepetitionMask(**wrong)
