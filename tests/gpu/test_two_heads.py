"""Divergences over two heads on a GPU, against float64 on the CPU, and their peak memory."""

import pytest
import torch

from prime_composer.two_heads import GeneralizedJSD, Logits, TwoHeads, compare

N, D, D_TEACHER, V = 257, 128, 192, 5003
BETA, T = 0.3, 0.4


def sides(device, dtype):
    """Return a student's leaves and a teacher, of ``dtype``."""
    g = torch.Generator().manual_seed(0)
    hidden, teacher_hidden = (
        torch.randn(N, width, generator=g).mul(0.3).to(dtype) for width in (D, D_TEACHER)
    )
    weight, teacher_weight = (
        torch.randn(V, width, generator=g).to(dtype) for width in (D, D_TEACHER)
    )
    student = [x.to(device).requires_grad_() for x in (hidden, weight)]
    return student, (teacher_hidden.to(device), teacher_weight.to(device))


def in_float64(student, teacher):
    """Return reverse KL, TAID's KL and JSD from whole logits, and the student's leaves."""
    leaves = [x.detach().cpu().double().requires_grad_() for x in student]
    log_p = (leaves[0] @ leaves[1].T).log_softmax(-1)
    log_q = (teacher[0].cpu().double() @ teacher[1].cpu().double().T).log_softmax(-1)
    log_r = ((1 - T) * log_p.detach() + T * log_q).log_softmax(-1)
    log_m = (BETA * log_q.exp() + (1 - BETA) * log_p.exp()).log()
    jsd = BETA * log_q.exp() * (log_q - log_m) + (1 - BETA) * log_p.exp() * (log_p - log_m)
    values = (log_p.exp() * (log_p - log_q), log_r.exp() * (log_r - log_p), jsd)
    return [value.sum(-1) for value in values], leaves


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_two_heads_on_a_gpu_equal_float64(device, dtype):
    """Operands are exact in dtype, and sums are float32. The gradient is rounded to dtype once."""
    student, teacher = sides(device, dtype)
    expected, leaves = in_float64(student, teacher)
    heads = TwoHeads(Logits(*student), (Logits(*teacher),))
    result = compare(
        heads, reverse=True, forward=True, interpolation=T, divergence=GeneralizedJSD(),
        parameters=(BETA,), chunk=1024, token_block=100,
    )  # fmt: skip
    values = (result.reverse_kl, result.forward_kl, result.divergence)
    for value, wanted in zip(values, expected, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.cpu().double(), wanted, rtol=1e-5, atol=1e-4)
    for value, wanted in zip(values, expected, strict=True):
        grads = torch.autograd.grad(value.sum(), student, retain_graph=True)
        references = torch.autograd.grad(wanted.sum(), leaves, retain_graph=True)
        for grad, reference in zip(grads, references, strict=True):
            assert grad.dtype == dtype
            scale = reference.abs().max().item()
            # The logits' gradient is rounded to dtype before its products.
            torch.testing.assert_close(
                grad.cpu().double(), reference,
                rtol=4 * torch.finfo(dtype).eps, atol=(torch.finfo(dtype).eps + 1e-4) * scale,
            )  # fmt: skip


def test_two_heads_do_not_wait_for_the_gpu(device):
    """Without a mask and without ids to check, nothing is read on the host."""
    student, teacher = sides(device, torch.float32)
    heads = TwoHeads(Logits(*student), (Logits(*teacher),))

    def step():
        compare(heads, reverse=True, forward=True).reverse_kl.sum().backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_teachers_head_may_stay_on_the_cpu(device):
    student, teacher = sides(device, torch.float32)
    on_gpu = TwoHeads(Logits(*student), (Logits(*teacher),))
    on_cpu = TwoHeads(Logits(*student), (Logits(teacher[0], teacher[1].cpu()),))
    for asked in ({"reverse": True}, {"divergence": GeneralizedJSD(), "parameters": (BETA,)}):
        for value, expected in zip(compare(on_cpu, **asked), compare(on_gpu, **asked), strict=True):
            assert value is None or torch.equal(value, expected)


def test_memory_does_not_grow_with_the_vocabulary_times_tokens(device):
    """Beside the gradients, a step needs a few blocks: less than the logits of one side."""
    tokens, vocab, width = 8192, 32_768, 64
    g = torch.Generator(device).manual_seed(0)

    def side():
        return [torch.randn(rows, width, generator=g, device=device) for rows in (tokens, vocab)]

    student, teacher = [x.requires_grad_() for x in side()], side()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    heads = TwoHeads(Logits(*student), (Logits(*teacher),))
    compare(heads, reverse=True).reverse_kl.sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < tokens * vocab * 4 / 2
