"""The head kernels in half precision on a GPU, against plain float64."""

import pytest
import torch

from prime_composer.lm_head import selected_logprobs
from prime_composer.upstream.trainer.logits import folded, support_logits, support_rows

K = 8


def problem(device, dtype, sizes):
    """Return hidden states, weight, ids and an incoming gradient, the first two of ``dtype``."""
    g = torch.Generator().manual_seed(0)
    scale = 0.3 * (128 / sizes.width) ** 0.5  # the same logits at any width
    hidden = torch.randn(sizes.tokens, sizes.width, generator=g).mul(scale).to(dtype)
    weight = torch.randn(sizes.vocab, sizes.width, generator=g).to(dtype)
    ids = torch.stack([torch.randperm(sizes.vocab, generator=g)[:K] for _ in range(sizes.tokens)])
    incoming = torch.randn(sizes.tokens, K, generator=g)
    leaves = hidden.to(device).requires_grad_(), weight.to(device).requires_grad_()
    return *leaves, ids.to(device), incoming.to(device)


def in_float64(hidden, weight, ids, incoming):
    """Return log-probs and gradients from the plain formula."""
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logprobs = (h @ w.T).log_softmax(-1).gather(1, ids)
    grads = torch.autograd.grad(logprobs, (h, w), incoming.double())
    return logprobs.detach(), grads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_selected_logprobs_on_a_gpu_equal_float64(device, dtype, sizes):
    """Operands are exact in dtype and sums are float32: a logit is known to d 2^-24 of its terms.

    float32 operands may go through TF32 only if the caller allows it; PyTorch's default does not.
    """
    hidden, weight, ids, incoming = problem(device, dtype, sizes)
    logprobs, grads = in_float64(hidden, weight, ids, incoming)
    result = selected_logprobs(hidden, weight, ids, **sizes.blocks)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), logprobs, rtol=0, atol=1e-4)
    ours = torch.autograd.grad(result, (hidden, weight), incoming)
    for gradient, expected in zip(ours, grads, strict=True):
        assert gradient.dtype == dtype
        scale = expected.abs().max().item()
        # The logits' gradient is rounded to dtype before its products.
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(
            gradient.double(), expected, rtol=2 * eps, atol=max(1e-3, eps) * scale
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_support_logits_beside_a_head_equal_float64_on_a_gpu(device, dtype, sizes):
    """The head computes log p(label); the support's logits relative to it give log p(id)."""
    hidden, weight, ids, incoming = problem(device, dtype, sizes)
    labels = ids[:, 0].clone()
    scored = torch.ones(sizes.tokens, dtype=torch.bool, device=device)
    rows = support_rows(ids, labels, scored, None)
    assert rows is not None
    head_weight, token = folded(weight, rows)
    logits = (hidden @ head_weight.T).float()
    label_logprobs = logits.log_softmax(-1).gather(1, labels.unsqueeze(1))
    student = support_logits(hidden, token, head_weight, rows) + label_logprobs
    expected, expected_grads = in_float64(hidden, weight, ids, incoming)
    # The stand-in head rounds its logits to dtype. The label's log-prob has that error, once.
    atol = 1e-4 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(student.detach().double(), expected, rtol=0, atol=atol)
    grads = torch.autograd.grad(student, (hidden, weight), incoming)
    for gradient, reference in zip(grads, expected_grads, strict=True):
        scale = reference.abs().max().item()
        # The stand-in head's gradient is rounded to dtype twice, and the support's is added to it.
        torch.testing.assert_close(
            gradient.double(), reference,
            rtol=4 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps * scale + 1e-5 * scale,
        )  # fmt: skip
