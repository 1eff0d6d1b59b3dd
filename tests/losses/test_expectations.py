"""Exact expected gradients: one position per token of the vocabulary, weighted by mu(y)."""

import pytest
import torch

from prime_composer.contract import LossInputs, Support
from prime_composer.losses import LOSS_TYPES, setup_loss_fn
from tests.builders import identity_heads

VOCAB = 9


def problem(seed: int, stale: float):
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(VOCAB, generator=g, dtype=torch.float64)
    log_q = (1.5 * torch.randn(VOCAB, generator=g, dtype=torch.float64)).log_softmax(-1)
    log_mu = (z + stale * torch.randn(VOCAB, generator=g, dtype=torch.float64)).log_softmax(-1)
    return z, log_q, log_mu


def every_token(z, log_q, log_mu, ids) -> LossInputs:
    """Position y samples token y; its weight is mu(y), so that the SUM is the expectation."""
    log_p = z.log_softmax(-1)
    return LossInputs(
        trainer_logprobs=log_p,
        inference_logprobs=log_mu,
        ref_logprobs=log_q,
        advantages=None,
        loss_mask=torch.ones(VOCAB, dtype=torch.bool),
        loss_weights=log_mu.exp(),
        support=Support(
            ids.expand(VOCAB, -1), log_q[ids].expand(VOCAB, -1), log_p[ids].expand(VOCAB, -1)
        ),
        hidden_states=identity_heads(z.expand(VOCAB, -1), log_q.expand(VOCAB, -1)),
        token_ids=torch.arange(VOCAB),
    )


def expected(config, z, log_q, log_mu, ids):
    z = z.clone().requires_grad_()
    out = setup_loss_fn(config)(every_token(z, log_q, log_mu, ids))
    (grad,) = torch.autograd.grad(out.loss, z)
    return out, grad


def reverse_kl_gradient(z, log_q):
    """p_j (log p_j/q_j - KL), in probabilities."""
    p = z.softmax(-1)
    ratio = (p / log_q.exp()).log()
    return p * (ratio - (p * ratio).sum()), (p * ratio).sum()


# Without the trust region and kl_tau the sampled token is unbiased for the reverse KL.
OPEN = dict(delta_low=2.0, delta_high=2.0, kl_tau=0.0)


@pytest.mark.parametrize("stale", [0.0, 0.8])
@pytest.mark.parametrize(
    "config",
    [
        LOSS_TYPES["sampled_reverse_kl"](**OPEN),
        LOSS_TYPES["sampled_reverse_kl"](mode="signed", **OPEN),
        LOSS_TYPES["head_tail_reverse_kl"](k=3),
        LOSS_TYPES["head_tail_reverse_kl"](k=1),
        LOSS_TYPES["head_tail_reverse_kl"](k=3, tail="event"),
        LOSS_TYPES["head_tail_reverse_kl"](k=1, tail="event"),
        LOSS_TYPES["head_tail_reverse_kl"](k="full"),
        LOSS_TYPES["topk_reverse_kl"](k="full", normalization="full"),
    ],
    ids=[
        "prime_rl",
        "signed",
        "head+tail K=3",
        "head+tail K=1",
        "head+event K=3",
        "head+event K=1",
        "head+tail K=V",
        "full",
    ],
)
def test_the_expected_gradient_is_that_of_the_full_reverse_kl(config, stale):
    z, log_q, log_mu = problem(0, stale)
    ids = log_q.topk(max(config.support_size, 1)).indices
    _, grad = expected(config, z, log_q, log_mu, ids)
    torch.testing.assert_close(grad, reverse_kl_gradient(z, log_q)[0], rtol=1e-9, atol=1e-12)


def test_head_tail_is_unbiased_and_a_bounded_ratio_is_not():
    z, log_q, log_mu = problem(1, 0.8)
    ids = log_q.topk(3).indices
    kl = reverse_kl_gradient(z, log_q)[1]
    out, _ = expected(LOSS_TYPES["head_tail_reverse_kl"](k=3), z, log_q, log_mu, ids)
    torch.testing.assert_close(out.loss.detach(), kl, rtol=1e-10, atol=0)
    # A bound beyond every ratio changes nothing. A reached bound stops the gradient there.
    loose, loose_grad = expected(
        LOSS_TYPES["head_tail_reverse_kl"](k=3, max_ratio=1e6), z, log_q, log_mu, ids
    )
    assert torch.equal(loose.loss, out.loss)
    tight, tight_grad = expected(
        LOSS_TYPES["head_tail_reverse_kl"](k=3, max_ratio=1.0), z, log_q, log_mu, ids
    )
    outside = [y for y in range(VOCAB) if y not in ids.tolist()]
    p, q, mu = z.softmax(-1), log_q.exp(), log_mu.exp()
    bounded = sum(mu[y] * min(p[y] / mu[y], 1.0) * (p[y] / q[y]).log() for y in outside)
    unbounded = sum(p[y] * (p[y] / q[y]).log() for y in outside)
    torch.testing.assert_close(
        tight.loss.detach() - out.loss.detach(), bounded - unbounded, rtol=1e-9, atol=1e-12
    )
    assert (tight_grad - loose_grad).abs().max() > 1e-3


def test_event_samples_only_which_id_is_outside():
    """Outside, p and q differ by their masses alone: the head is the whole KL."""
    z, _, log_mu = problem(3, 0.8)
    log_q = (z + torch.tensor([1.0, -1.0, 0.5] + [0.0] * (VOCAB - 3))).log_softmax(-1)
    config = LOSS_TYPES["head_tail_reverse_kl"](k=3, tail="event")
    metrics = expected(config, z, log_q, log_mu, torch.arange(3))[0].metrics
    kl = reverse_kl_gradient(z, log_q)[1]
    torch.testing.assert_close(metrics["head_tail_reverse_kl/head"], kl, rtol=1e-12, atol=0)
    assert metrics["head_tail_reverse_kl/sampled_tail"].abs() < 1e-15
