"""Divergences over two heads on a GPU, against plain float64, and their peak memory."""

import json

import pytest
import torch

from prime_composer.contract import Logits, TwoHeads
from prime_composer.divergences import (
    generalized_jsd,
    kls_and_entropy,
    reverse_kl,
    taid,
)
from prime_composer.full_vocabulary import compare, token_blocks
from tests.gpu.programs import output_of
from tests.gpu.waits import no_waits

BETA, T = 0.3, 0.4


def sides(device, dtype, sizes):
    """Return a student's leaves and a teacher, of ``dtype``."""
    g = torch.Generator().manual_seed(0)

    def side(width):
        scale = 0.3 * (128 / width) ** 0.5  # the same logits at any width
        hidden = torch.randn(sizes.tokens, width, generator=g).mul(scale).to(dtype)
        return hidden.to(device), torch.randn(sizes.vocab, width, generator=g).to(device, dtype)

    student = [x.requires_grad_() for x in side(sizes.width)]
    return student, side(sizes.teacher_width)


def in_float64(student, teacher):
    """Return reverse KL, TAID's KL and JSD from whole logits, and the student's leaves."""
    leaves = [x.detach().double().requires_grad_() for x in student]
    log_p = (leaves[0] @ leaves[1].T).log_softmax(-1)
    log_q = (teacher[0].double() @ teacher[1].double().T).log_softmax(-1)
    log_r = ((1 - T) * log_p.detach() + T * log_q).log_softmax(-1)
    log_m = (BETA * log_q.exp() + (1 - BETA) * log_p.exp()).log()
    jsd = BETA * log_q.exp() * (log_q - log_m) + (1 - BETA) * log_p.exp() * (log_p - log_m)
    values = (log_p.exp() * (log_p - log_q), log_r.exp() * (log_r - log_p), jsd)
    return [value.sum(-1) for value in values], leaves


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_two_heads_on_a_gpu_equal_float64(device, dtype, sizes):
    """Operands are exact in dtype, and sums are float32. The gradient is rounded to dtype once."""
    student, teacher = sides(device, dtype, sizes)
    expected, leaves = in_float64(student, teacher)
    heads = TwoHeads(Logits(*student), (Logits(*teacher),))
    values = (
        compare(heads, reverse_kl),
        compare(heads, taid, t=T, form="kl"),
        compare(heads, generalized_jsd, beta=BETA),
    )
    for value, wanted in zip(values, expected, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-4)
    for value, wanted in zip(values, expected, strict=True):
        grads = torch.autograd.grad(value.sum(), student, retain_graph=True)
        references = torch.autograd.grad(wanted.sum(), leaves, retain_graph=True)
        for grad, reference in zip(grads, references, strict=True):
            assert grad.dtype == dtype
            scale = reference.abs().max().item()
            # The logits' gradient is rounded to dtype before its products: float16 loses what is
            # small, half of its least number in each of the vocabulary's terms.
            info = torch.finfo(dtype)
            lost = 6 * (sizes.vocab / 12) ** 0.5 * info.smallest_normal * info.eps
            torch.testing.assert_close(
                grad.double(), reference,
                rtol=4 * info.eps, atol=(info.eps + 1e-4) * scale + lost,
            )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_no_counted_row_on_a_gpu_has_a_zero_gradient(device, dtype, sizes):
    student, teacher = sides(device, dtype, sizes)
    none = torch.zeros(sizes.tokens, dtype=torch.bool, device=device)
    heads = TwoHeads(Logits(*student), (Logits(*teacher),), mask=none)
    value = compare(heads, reverse_kl)
    # The allocator gives this memory out again.
    past = [torch.full_like(student[1], torch.nan) for _ in range(2)]
    del past
    assert all(not grad.any() for grad in torch.autograd.grad(value.sum(), student))


def test_two_heads_do_not_wait_for_the_gpu(device, sizes):
    """Without a mask and without ids to check, nothing is read on the host."""
    student, teacher = sides(device, torch.float32, sizes)
    heads = TwoHeads(Logits(*student), (Logits(*teacher),))

    def step():
        compare(heads, kls_and_entropy).sum().backward()

    step()
    with no_waits(device):
        step()


def test_a_teachers_head_may_stay_on_the_cpu(device, sizes):
    student, teacher = sides(device, torch.float32, sizes)
    on_gpu = TwoHeads(Logits(*student), (Logits(*teacher),))
    on_cpu = TwoHeads(Logits(*student), (Logits(teacher[0], teacher[1].cpu()),))
    for divergence, knobs in ((reverse_kl, {}), (generalized_jsd, {"beta": BETA})):
        found, expected = (compare(two, divergence, **knobs) for two in (on_cpu, on_gpu))
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("divergence", "knobs"), [(reverse_kl, {}), (generalized_jsd, {"beta": BETA})]
)
def test_memory_does_not_grow_with_the_vocabulary_times_tokens(
    cuda, monkeypatch, divergence, knobs
):
    """Beside the gradients, a step needs a few blocks: less than the logits of one side."""
    tokens, vocab, width = 32_768, 32_768, 64
    monkeypatch.setitem(token_blocks.TOKENS, "cuda", 64)
    g = torch.Generator(cuda).manual_seed(0)

    def side():
        return [torch.randn(rows, width, generator=g, device=cuda) for rows in (tokens, vocab)]

    student, teacher = [x.requires_grad_() for x in side()], side()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    heads = TwoHeads(Logits(*student), (Logits(*teacher),))
    compare(heads, divergence, **knobs).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < tokens * vocab * 4 / 2


def test_compiled_work_equals_float64(device):
    """A bfloat16 gradient is rounded twice: that of the logits, and the result."""
    sizes = (600, 64, 30_000) if device == "cuda" else (70, 32, 900)
    found = json.loads(output_of("tests.gpu.compiled", device, *sizes).splitlines()[-1])
    assert len(found) == 18
    for name, (value, *gradients) in found.items():
        assert value < 1e-4, name
        assert max(gradients) < (1e-2 if "bfloat16" in name else 1e-5), name
