import pytest
import torch

from prime_composer.lm_head import _check, selected_logprobs
from tests.builders import LargestTensor


def problem(dtype=torch.float64, seed=0, n=13, d=5, v=37, m=4):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=g, dtype=torch.float64).mul(2).to(dtype)
    weight = torch.randn(v, d, generator=g, dtype=torch.float64).to(dtype)
    ids = torch.randint(0, v, (n, m), generator=g)
    upstream = torch.randn(n, m, generator=g, dtype=torch.float64)
    return hidden.requires_grad_(), weight.requires_grad_(), ids, upstream


def plain(hidden, weight, ids):
    return torch.log_softmax(hidden @ weight.T, dim=-1).gather(1, ids)


@pytest.mark.parametrize(
    ("block", "temperature", "form"),
    [
        ((1, 1), 1.0, {}),
        ((5, 7), 0.6, {}),
        ((100, 37), 1.0, {}),
        ((5, 7), 1.0, {"bias": True}),
        ((5, 7), 0.6, {"softcap": 1.5}),
        ((5, 7), 1.0, {"scale": 0.25}),
        ((5, 100), 0.6, {"bias": True, "softcap": 2.0, "scale": 3.0}),
    ],
    ids=str,
)
def test_values_and_gradients_equal_log_softmax_in_float64(block, temperature, form):
    """Through several blocks of rows and ids."""
    hidden, weight, ids, upstream = problem()
    bias = torch.linspace(-2, 2, 37, dtype=torch.float64, requires_grad=True)
    leaves = [hidden, weight, *[bias] * ("bias" in form)]
    options = {**form, **({"bias": bias} if "bias" in form else {})}
    out = selected_logprobs(hidden, weight, ids, temperature, block, **options)
    z = hidden @ weight.T + (bias if "bias" in form else 0)
    if cap := form.get("softcap"):
        z = cap * torch.tanh(z / cap)
    expected = torch.log_softmax(z * form.get("scale", 1) / temperature, dim=-1).gather(1, ids)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    grads, wanted = (torch.autograd.grad(each, leaves, upstream) for each in (out, expected))
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_bias_cap_and_scale_in_bfloat16_are_float64s_within_a_percent():
    hidden, weight, ids, upstream = problem(torch.bfloat16, v=500)
    bias = torch.linspace(-2, 2, 500, requires_grad=True)
    leaves = hidden, weight, bias
    out = selected_logprobs(hidden, weight, ids, 0.6, (5, 64), bias=bias, softcap=2.0, scale=3.0)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    z = 2 * torch.tanh((exact[0] @ exact[1].T + exact[2]) / 2)
    expected = torch.log_softmax(z * 3 / 0.6, dim=-1).gather(1, ids)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-4)
    grads = torch.autograd.grad(out, leaves, upstream.to(out))
    for got, want in zip(grads, torch.autograd.grad(expected, exact, upstream), strict=True):
        assert (got.double() - want).norm() < 1e-2 * want.norm()


def test_an_id_in_several_columns_sums_their_gradients():
    hidden, weight, _, _ = problem()
    ids = torch.full((13, 3), 5)
    grads = torch.autograd.grad(
        selected_logprobs(hidden, weight, ids, block=(1024, 6)).sum(), (hidden, weight)
    )
    expected = torch.autograd.grad(3 * plain(hidden, weight, ids[:, :1]).sum(), (hidden, weight))
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_large_logits_do_not_overflow():
    hidden = torch.tensor([[1.0]])
    weight = torch.tensor([[-3e4], [0.0], [3e4], [3e4]])
    out = selected_logprobs(hidden, weight, torch.tensor([[2, 1, 0]]), block=(9, 1))
    torch.testing.assert_close(out, torch.tensor([[-0.6931472, -30000.693, -60000.693]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_accumulated_in_float32(dtype):
    hidden, weight, ids, upstream = problem(dtype, v=500)
    out = selected_logprobs(hidden, weight, ids, block=(4, 64))
    assert out.dtype == torch.float32
    exact_hidden, exact_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    exact = plain(exact_hidden, exact_weight, ids)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-5)
    grads = torch.autograd.grad(out, (hidden, weight), upstream.float())
    for got, want in zip(
        grads, torch.autograd.grad(exact, (exact_hidden, exact_weight), upstream), strict=True
    ):
        assert got.dtype == dtype
        torch.testing.assert_close(got, want.to(dtype), rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_around_it_changes_nothing(dtype):
    # bfloat16 logits are off by 0.02 nat, and so are the sums: a support's mass can exceed 1.
    hidden, weight, ids, upstream = problem(dtype, v=500)
    plainly = selected_logprobs(hidden, weight, ids, block=(1024, 64))
    with torch.autocast("cpu", torch.bfloat16):
        within = selected_logprobs(hidden, weight, ids, block=(1024, 64))
        grads = torch.autograd.grad(within, (hidden, weight), upstream.to(within.dtype))
    assert torch.equal(within, plainly)
    for got, want in zip(
        grads,
        torch.autograd.grad(plainly, (hidden, weight), upstream.to(plainly.dtype)),
        strict=True,
    ):
        assert torch.equal(got, want)


def test_only_the_wanted_gradients_are_computed():
    hidden, weight, ids, upstream = problem()
    frozen_head = selected_logprobs(hidden, weight.detach(), ids)
    (got,) = torch.autograd.grad(frozen_head, hidden, upstream)
    torch.testing.assert_close(
        got, torch.autograd.grad(plain(hidden, weight, ids), hidden, upstream)[0]
    )
    head_only = selected_logprobs(hidden.detach(), weight, ids)
    (got,) = torch.autograd.grad(head_only, weight, upstream)
    torch.testing.assert_close(
        got, torch.autograd.grad(plain(hidden, weight, ids), weight, upstream)[0]
    )
    assert not selected_logprobs(hidden.detach(), weight.detach(), ids).requires_grad


@pytest.mark.parametrize("n, m", [(0, 4), (3, 0)])
def test_no_tokens_or_no_ids_give_a_zero_gradient(n, m):
    hidden, weight, ids, _ = problem(n=n, m=m)
    out = selected_logprobs(hidden, weight, ids)
    assert out.shape == (n, m)
    out.sum().backward()
    assert hidden.grad.shape == (n, 5) and not hidden.grad.any() and not weight.grad.any()


def test_the_logits_of_a_batch_never_exist_at_once():
    hidden, weight, ids, upstream = problem(n=64, d=2, v=1000)
    with LargestTensor() as watch:
        torch.autograd.grad(
            selected_logprobs(hidden, weight, ids, block=(16, 100)),
            (hidden, weight),
            upstream,
        )
    assert watch.largest <= 2000  # the weight's gradient, against 64,000 logits


@pytest.mark.parametrize("token", [37, -1])
def test_an_id_that_the_head_lacks_is_refused(token):
    """It would be in no chunk of the vocabulary, and have the log-prob of a logit of 0."""
    hidden, weight, _, _ = problem()
    with pytest.raises(ValueError, match=f"reach from {token} to {token} .* vocabulary of 37"):
        selected_logprobs(hidden, weight, torch.full((13, 1), token))


def test_token_ids_of_other_rows_are_refused():
    """One row of them would be that of every token. By the check itself: with the shapes executed,
    as in these tests, jaxtyping speaks before it."""
    hidden, weight, ids, _ = problem()
    with pytest.raises(ValueError, match="1 rows for 13 hidden states"):
        _check(hidden, weight, ids[:1], 1.0, (8, 8))
