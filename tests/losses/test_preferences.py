"""DPO and SimPO: values worked by hand, pairs of a pack."""

import dataclasses
import math

import pytest
import torch

from prime_composer.contract import LossInputs
from prime_composer.losses import LOSS_TYPES, setup_loss_fn


def pair(first_segment=0) -> LossInputs:
    """Return a pair with log p -10 (5 tokens) and -14 (7 tokens), and log r -11 and -13."""
    spread = lambda total, n: torch.full((n,), total / n, dtype=torch.float64)  # noqa: E731
    policy = torch.cat([spread(-10, 5), spread(-14, 7)]).requires_grad_()
    return LossInputs(
        trainer_logprobs=policy,
        inference_logprobs=policy.detach(),
        ref_logprobs=torch.cat([spread(-11, 5), spread(-13, 7)]),
        advantages=None,
        loss_mask=torch.ones(12, dtype=torch.bool),
        segment_ids=first_segment + torch.tensor([0] * 5 + [1] * 7),
    )


def concat(a: LossInputs, b: LossInputs) -> LossInputs:
    cat = lambda x, y: None if x is None else torch.cat([x, y])  # noqa: E731
    return LossInputs(
        **{
            f.name: cat(getattr(a, f.name), getattr(b, f.name))
            for f in dataclasses.fields(LossInputs)
        }
    )


def test_dpo_of_one_pair():
    # -log sigmoid(.1 ((-10 + 11) - (-14 + 13))) = log(1 + e^-.2)
    out = setup_loss_fn(LOSS_TYPES["dpo"](beta=0.1))(pair())
    assert out.loss.item() == pytest.approx(0.598138869382, abs=1e-12)
    assert out.metrics["dpo/margin"].item() == pytest.approx(0.2)
    assert out.metrics["dpo/accuracy"] == 1 and out.metrics["dpo/pairs"] == 1


def test_simpo_of_one_pair():
    # -log sigmoid(2 (-10/5 + 14/7) - 1) = log(1 + e)
    out = setup_loss_fn(LOSS_TYPES["simpo"](beta=2.0, gamma=1.0))(pair())
    assert out.loss.item() == pytest.approx(1.313261687518, abs=1e-12)
    assert out.metrics["simpo/margin"].item() == pytest.approx(-1.0)


def test_the_gradient_raises_chosen_and_lowers_rejected():
    """The gradient pushes chosen up and rejected down by the doubt."""
    inputs = pair()
    setup_loss_fn(LOSS_TYPES["dpo"](beta=0.1))(inputs).loss.backward()
    doubt = 0.1 / (1 + math.exp(0.2))  # beta sigmoid(-margin)
    assert inputs.trainer_logprobs.grad.tolist() == pytest.approx([-doubt] * 5 + [doubt] * 7)
    inputs = pair()
    setup_loss_fn(LOSS_TYPES["simpo"]())(inputs).loss.backward()
    doubt = 2 / (1 + math.exp(-1))
    assert inputs.trainer_logprobs.grad.tolist() == pytest.approx(
        [-doubt / 5] * 5 + [doubt / 7] * 7
    )


@pytest.mark.parametrize("name", ["dpo", "simpo"])
def test_order_and_numbering_of_pairs_do_not_matter(name):
    loss = setup_loss_fn(LOSS_TYPES[name]())
    swapped = pair(6)  # segment 6 is chosen, 7 rejected
    flipped = dataclasses.replace(pair(), segment_ids=torch.tensor([1] * 5 + [1] * 7))
    both = concat(pair(0), swapped)
    assert loss(both).loss.item() == pytest.approx(2 * loss(pair()).loss.item())
    assert loss(both).metrics[f"{name}/pairs"] == 2
    assert (
        loss(flipped).loss == 0 and loss(flipped).metrics[f"{name}/pairs"] == 0
    )  # no chosen response: no pair


@pytest.mark.parametrize("name", ["dpo", "simpo"])
def test_a_pair_that_lost_one_side_to_the_mask_trains_nothing(name):
    inputs = concat(pair(0), pair(2))
    inputs.loss_mask[:5] = False
    leaf = inputs.trainer_logprobs.detach().requires_grad_()
    out = setup_loss_fn(LOSS_TYPES[name]())(dataclasses.replace(inputs, trainer_logprobs=leaf))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(setup_loss_fn(LOSS_TYPES[name]())(pair()).loss.item())
    assert (leaf.grad[:12] == 0).all() and (leaf.grad[12:] != 0).all()


@pytest.mark.parametrize("name", ["dpo", "simpo"])
def test_a_pair_weighs_the_mean_of_its_tokens_weights(name):
    weights = torch.tensor([3.0] * 5 + [1.0] * 7 + [2.0] * 12, dtype=torch.float64)
    inputs = dataclasses.replace(concat(pair(0), pair(2)), loss_weights=weights)
    loss = setup_loss_fn(LOSS_TYPES[name]())
    assert loss(inputs).loss.item() == pytest.approx((22 / 12 + 2) * loss(pair()).loss.item())


def test_pairs_need_their_segments():
    with pytest.raises(ValueError, match=r"\[loss\] type = 'dpo' needs segment_ids"):
        setup_loss_fn(LOSS_TYPES["dpo"]())(dataclasses.replace(pair(), segment_ids=None))
