"""Divergences over two heads, against plain formulas over whole logits in float64."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from prime_composer.two_heads import (
    ForwardKL,
    GeneralizedJSD,
    Logits,
    ReverseKL,
    Terms,
    TwoHeads,
    adaptive_kl,
    compare,
    forward_kl,
    generalized_jsd,
    reverse_kl,
    taid,
)
from prime_composer.two_heads.heads import check
from tests.builders import LargestTensor

N, D, D_TEACHER, V = 7, 5, 3, 37
BLOCKS = [(1, 1), (10, 3), (37, 7), (1000, 1000)]
FLOOR = math.log(1e-7)


def logits(
    seed: int, n: int = N, d: int = D, v: int = V, dtype=torch.float64, **settings
) -> Logits:
    """Return random logits, hidden states and weight as leaves."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(v, d, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    if settings.pop("with_bias", False):
        settings["bias"] = torch.randn(v, generator=g, dtype=torch.float64).requires_grad_()
    return Logits(hidden, weight, **settings)


def heads(student: Logits | None = None, *teachers: Logits, **settings) -> TwoHeads:
    return TwoHeads(student or logits(0), teachers or (logits(1, d=D_TEACHER),), **settings)


def leaves(two: TwoHeads) -> list[Tensor]:
    student = two.student
    return [x for x in (student.hidden, student.weight, student.bias) if x is not None]


def whole_logits(side: Logits, temperature: float) -> Tensor:
    z = side.hidden @ side.weight.T
    if side.bias is not None:
        z = z + side.bias
    if side.softcap is not None:
        z = side.softcap * torch.tanh(z / side.softcap)
    return z * side.scale / temperature


def log_outcomes(two: TwoHeads) -> tuple[Tensor, Tensor]:
    """Return log p and log q over the common ids, and over the bucket where sizes differ."""
    sizes = {side.size for side in (two.student, *two.teachers)}
    common = min(sizes)

    def log_probs(side: Logits) -> Tensor:
        z = whole_logits(side, two.temperature)
        log_p = z.log_softmax(-1)
        if len(sizes) == 1:
            return log_p
        ids, beyond = log_p[:, :common], log_p[:, common:]
        # No entry at all: logsumexp is -inf.
        bucket = beyond.logsumexp(-1, keepdim=True)
        return torch.cat([ids, bucket], -1)

    log_p = log_probs(two.student)
    parts = torch.stack([log_probs(teacher) for teacher in two.teachers])
    if two.teacher_weights is None:
        log_q = parts[0]
    else:
        log_q = (two.teacher_weights.T.unsqueeze(-1) * parts.exp()).sum(0).log()
    if len(sizes) > 1:
        log_p, log_q = (
            torch.cat([x[:, :-1], x[:, -1:].clamp(min=FLOOR)], -1) for x in (log_p, log_q)
        )
    return log_p, log_q.detach()


def plain_reverse(two):
    log_p, log_q = log_outcomes(two)
    return (log_p.exp() * (log_p - log_q) - log_p.exp() + log_q.exp()).sum(-1)


def plain_forward(two):
    log_p, log_q = log_outcomes(two)
    return (log_q.exp() * (log_q - log_p) + log_p.exp() - log_q.exp()).sum(-1)


def plain_jsd(two, beta):
    log_p, log_q = log_outcomes(two)
    log_m = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log()
    student = (log_p.exp() * (log_p - log_m)).sum(-1)
    return beta * (log_q.exp() * (log_q - log_m)).sum(-1) + (1 - beta) * student


def plain_taid(two, t, form):
    log_p, log_q = log_outcomes(two)
    log_r = log_q if t == 1 else ((1 - t) * log_p.detach() + t * log_q).log_softmax(-1)
    kl = (log_r.exp() * (log_r - log_p) + log_p.exp() - log_r.exp()).sum(-1)
    return kl if form == "kl" else kl - (log_r.exp() * log_r).sum(-1)


def plain_top_gap(two, mass):
    """Return the share of sum |q - p| on the teacher's top ids, id by id in their order."""
    log_p, log_q = log_outcomes(two)
    p, q = log_p.detach().exp(), log_q.exp()
    common, shares = min(side.size for side in two.sides), []
    for masses, gaps in zip(q.tolist(), (q - p).abs().tolist(), strict=True):
        first, *others = sorted(range(common), key=lambda v: -masses[v])
        top, cumulated = [first], masses[first]
        for v in others:
            cumulated += masses[v]
            if cumulated > mass:
                break
            top.append(v)
        shares.append(sum(gaps[v] for v in top) / sum(gaps))
    return torch.tensor(shares, dtype=torch.float64)


def plain_adaptive(two, mass):
    weight = plain_top_gap(two, mass)
    return weight * plain_forward(two) + (1 - weight) * plain_reverse(two)


OBJECTIVES = {
    "reverse": (reverse_kl, plain_reverse),
    "forward": (forward_kl, plain_forward),
    **{
        f"jsd {beta}": (
            lambda two, beta=beta: generalized_jsd(two, beta),
            lambda two, beta=beta: plain_jsd(two, beta),
        )
        for beta in (0.1, 0.7)
    },
    **{
        f"taid {t} {form}": (
            lambda two, t=t, form=form: taid(two, t, form),
            lambda two, t=t, form=form: plain_taid(two, t, form),
        )
        for t, form in ((0.4, "cross_entropy"), (0.9, "kl"), (0.0, "kl"), (1.0, "cross_entropy"))
    },
    **{
        f"adaptive {mass}": (
            lambda two, mass=mass: adaptive_kl(two, mass),
            lambda two, mass=mass: plain_adaptive(two, mass),
        )
        for mass in (1e-9, 0.3, 0.5, 0.95, 1 - 1e-9)
    },
}

SETTINGS = {
    "plain": lambda: heads(),
    "student's head larger": lambda: heads(logits(0, v=V + 6)),
    "teacher's head larger": lambda: heads(None, logits(1, d=D_TEACHER, v=V + 9)),
    "bias, cap and scale": lambda: heads(
        logits(0, with_bias=True, softcap=3.0, scale=0.7),
        logits(1, d=D_TEACHER, with_bias=True, softcap=2.0, scale=1.4),
        temperature=1.7,
    ),
    "temperature": lambda: heads(temperature=0.6),
    "three teachers": lambda: heads(
        None,
        *(logits(seed, d=d) for seed, d in ((1, 2), (2, 3), (3, 4))),
        teacher_weights=torch.rand(
            N, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        ).softmax(-1),
    ),
    "two teachers of other sizes": lambda: heads(
        logits(0, v=V + 2),
        logits(1, d=2, v=V + 5),
        logits(2),
        teacher_weights=torch.tensor([[0.3, 0.7]] * (N - 1) + [[0.9, 0.1]], dtype=torch.float64),
    ),
}  # fmt: skip


def assert_equal_values_and_gradients(ours, plain, two, atol=1e-12):
    """Compare values, and gradients under a random incoming gradient."""
    incoming = torch.randn(N, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    value, expected = ours(two), plain(two)
    torch.testing.assert_close(value, expected, rtol=0, atol=atol)
    options = {"allow_unused": True}
    grads = torch.autograd.grad(value, leaves(two), incoming)
    expected_grads = torch.autograd.grad(expected, leaves(two), incoming, **options)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objective_equals_the_plain_formula_in_float64(objective, setting):
    """Values, and gradients of hidden states, weight and bias."""
    ours, plain = OBJECTIVES[objective]
    assert_equal_values_and_gradients(ours, plain, SETTINGS[setting]())


@pytest.mark.parametrize("chunk,token_block", BLOCKS)
def test_blocks_change_no_number(chunk, token_block):
    """A result is the same whatever the blocks, up to the rounding of float64 sums."""
    two = heads(logits(0, v=V + 6), logits(1, d=D_TEACHER))
    ids = torch.arange(N).unsqueeze(1) * torch.tensor([1, 5])
    asked = {
        "reverse": True,
        "forward": True,
        "interpolation": 0.3,
        "divergence": GeneralizedJSD(),
        "parameters": (0.2,),
        "top_mass": 0.6,
        "token_ids": ids,
    }
    results = compare(two, **asked, chunk=chunk, token_block=token_block)
    expected = (
        plain_reverse(two),
        plain_taid(two, 0.3, "kl"),
        plain_taid(two, 0.3, "cross_entropy") - plain_taid(two, 0.3, "kl"),
        plain_jsd(two, 0.2),
        whole_logits(two.student, 1.0).log_softmax(-1).gather(1, ids),
        whole_logits(two.teachers[0], 1.0).log_softmax(-1).gather(1, ids),
        plain_top_gap(two, 0.6),
    )
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted.to(result), rtol=0, atol=1e-12)
    # One backward for all of them.
    differentiable = (0, 1, 3, 4)
    total, total_expected = (
        sum(((i + 1) * x[i].sin()).sum() for i in differentiable) for x in (results, expected)
    )
    for grad, wanted in zip(
        torch.autograd.grad(total, leaves(two)),
        torch.autograd.grad(total_expected, leaves(two)),
        strict=True,
    ):
        torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("objective", ["reverse", "forward", "jsd 0.1", "taid 1.0 cross_entropy"])
def test_gradient_of_an_objective_equals_finite_differences(objective):
    """TAID has t = 1: finite differences move the student in its target, which is detached."""
    ours, _ = OBJECTIVES[objective]
    teacher = logits(1, n=2, d=2, v=5)

    def values(hidden, weight, bias):
        student = Logits(hidden, weight, bias, softcap=4.0, scale=1.3)
        return ours(TwoHeads(student, (teacher,), temperature=0.8))

    student = logits(0, n=2, d=2, v=7, with_bias=True)
    assert torch.autograd.gradcheck(values, (student.hidden, student.weight, student.bias))


def test_slopes_and_sums_written_by_hand_equal_autograd():
    g = torch.Generator().manual_seed(0)
    log_p, log_q = (
        torch.randn(N, V, generator=g, dtype=torch.float64).mul(3).log_softmax(-1) for _ in "pq"
    )
    beta = torch.rand(N, 1, generator=g, dtype=torch.float64)
    for divergence, parameters in (
        (ReverseKL(), ()), (ForwardKL(), ()), (GeneralizedJSD(), (beta,)),
    ):  # fmt: skip
        by_autograd = Terms(divergence.terms)
        expected_slopes = by_autograd.slopes(log_p, log_q, *parameters)
        expected_sums = by_autograd.sums(log_p, log_q, *parameters)
        slopes = divergence.slopes(log_p.clone(), log_q.clone(), *parameters)
        sums = divergence.sums(log_p.clone(), log_q.clone(), *parameters)
        torch.testing.assert_close(slopes, expected_slopes, rtol=0, atol=1e-13)
        torch.testing.assert_close(sums, expected_sums, rtol=0, atol=1e-13)


@pytest.mark.parametrize("setting", SETTINGS)
def test_one_pass_kls_equal_the_generic_kernel(setting):
    two = SETTINGS[setting]()
    for one_pass, divergence in ((reverse_kl, ReverseKL()), (forward_kl, ForwardKL())):
        assert_equal_values_and_gradients(
            one_pass, lambda two, d=divergence: compare(two, divergence=d).divergence, two
        )


def total_variation(log_p, log_q):
    return (log_p.exp() - log_q.exp()).abs() / 2


def todi(log_p, log_q):
    share = torch.sigmoid(log_q - log_p).detach()
    forward, reverse = log_q.exp() * (log_q - log_p), log_p.exp() * (log_p - log_q)
    return share * forward + (1 - share) * reverse


def skewed_reverse(log_p, log_q, skew):
    mixture = (skew * log_p.exp() + (1 - skew) * log_q.exp()).log()
    return log_p.exp() * (log_p - mixture)


def alpha_beta(log_p, log_q, alpha, beta):
    both = alpha + beta
    terms = (alpha * log_q + beta * log_p).exp()
    terms = terms - alpha / both * (both * log_q).exp() - beta / both * (both * log_p).exp()
    return -terms / (alpha * beta)


@pytest.mark.parametrize("setting", ["plain", "student's head larger", "three teachers"])
@pytest.mark.parametrize(
    "terms,parameters",
    [(total_variation, ()), (todi, ()), (skewed_reverse, (0.1,)), (alpha_beta, (0.6, -0.2))],
)
def test_another_divergence_needs_its_terms_alone(terms, parameters, setting):
    """Its derivative comes from autograd, chunk by chunk, stop-gradients included."""

    def plain(two):
        return terms(*log_outcomes(two), *parameters).sum(-1)

    def ours(two):
        return compare(two, divergence=Terms(terms), parameters=parameters, chunk=8).divergence

    assert_equal_values_and_gradients(ours, plain, SETTINGS[setting]())


@pytest.mark.parametrize("setting", ["plain", "student's head larger"])
def test_a_sum_within_a_divergence_is_a_parameter(setting):
    """AMiD's normalized mean r of p and q: its log-total has a gradient, by a call before."""
    alpha, skew = -0.4, 0.3
    power = (1 - alpha) / 2

    def log_mean(log_p, log_q):
        mean = skew * (power * log_q).exp() + (1 - skew) * (power * log_p).exp()
        return mean.log() / power

    def reverse_from(log_p, log_q, log_total):
        return log_p.exp() * (log_p - log_mean(log_p, log_q) + log_total)

    def ours(two):
        mass = Terms(lambda log_p, log_q: log_mean(log_p, log_q).exp())
        log_total = compare(two, divergence=mass).divergence.log()
        return compare(two, divergence=Terms(reverse_from), parameters=[log_total]).divergence

    def plain(two):
        log_p, log_q = log_outcomes(two)
        log_r = log_mean(log_p, log_q).log_softmax(-1)
        return (log_p.exp() * (log_p - log_r)).sum(-1)

    assert_equal_values_and_gradients(ours, plain, SETTINGS[setting]())


def test_entropy_decides_per_token_which_kl_is_added():
    """EOPD is reverse KL + alpha 1[H(q) > tau] forward KL, by arithmetic on one pass's results."""
    two, alpha = heads(), 0.7
    log_p, log_q = log_outcomes(two)
    entropies = -(log_q.exp() * log_q).sum(-1)
    tau = 1.65
    assert 0 < (entropies > tau).sum() < N

    def ours(two):
        result = compare(two, reverse=True, forward=True)
        unsure = result.target_entropy > tau
        return result.reverse_kl + alpha * torch.where(unsure, result.forward_kl, 0.0)

    def plain(two):
        return plain_reverse(two) + torch.where(entropies > tau, alpha * plain_forward(two), 0.0)

    torch.testing.assert_close(
        compare(two, forward=True).target_entropy, entropies.detach(), rtol=0, atol=1e-12
    )
    assert_equal_values_and_gradients(ours, plain, two)


def test_parameters_per_token_equal_one_call_per_token():
    two = heads()
    per_token = torch.linspace(0.05, 0.95, N, dtype=torch.float64)
    for ours, plain in (
        (generalized_jsd, plain_jsd),
        (lambda two, t: taid(two, t, "kl"), lambda two, t: plain_taid(two, t, "kl")),
    ):
        values = ours(two, per_token)
        for i, parameter in enumerate(per_token):
            torch.testing.assert_close(values[i], plain(two, parameter)[i], rtol=0, atol=1e-12)


def test_jsd_at_its_ends_is_a_kl():
    two = heads()
    torch.testing.assert_close(generalized_jsd(two, 0.0), plain_forward(two))
    torch.testing.assert_close(generalized_jsd(two, 1.0), plain_reverse(two))
    with pytest.raises(ValueError, match="beta = 1.1 is the teacher's weight"):
        generalized_jsd(two, 1.1)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_rows_change_nothing(garbage):
    """Neither a value nor a gradient, whatever their hidden states and weights hold."""
    g = torch.Generator().manual_seed(3)
    mask = torch.rand(N, generator=g) > 0.4
    assert mask.any() and not mask.all()
    shares = torch.rand(N, 2, generator=g, dtype=torch.float64).softmax(-1)
    base = heads(logits(0), logits(1), logits(2, d=2), teacher_weights=shares)
    beta = torch.full((N,), 0.3, dtype=torch.float64)
    ids = torch.full((N, 1), 4)
    asked = {
        "reverse": True, "forward": True, "divergence": GeneralizedJSD(), "top_mass": 0.5,
        "token_ids": ids,
    }  # fmt: skip

    def spoiled(x):
        return x.detach().masked_fill(~(mask if x.dim() == 1 else mask[:, None]), garbage)

    def total(results):
        kls = results.reverse_kl + results.top_gap * results.forward_kl
        return kls + results.divergence + results.student_logprobs[:, 0]

    dirty_leaf = spoiled(base.student.hidden).requires_grad_()
    dirty = TwoHeads(
        dataclasses.replace(base.student, hidden=dirty_leaf),
        tuple(dataclasses.replace(x, hidden=spoiled(x.hidden)) for x in base.teachers),
        spoiled(shares),
        mask=mask | (torch.arange(N) < 3),
    ).masked(mask | (torch.arange(N) >= 3))
    clean_value = total(compare(base, **asked, parameters=(beta,)))
    dirty_value = total(
        compare(dirty, **{**asked, "token_ids": ids.masked_fill(~mask[:, None], -1)},
                parameters=(spoiled(beta),))
    )  # fmt: skip
    torch.testing.assert_close(dirty_value, torch.where(mask, clean_value, 0.0))
    dirty_value.sum().backward()
    clean_value[mask].sum().backward()
    torch.testing.assert_close(dirty_leaf.grad, base.student.hidden.grad)
    assert not dirty_leaf.grad[~mask].any()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_no_row_gives_a_zero_gradient(masked, dtype):
    """Fresh memory is full of NaN (``conftest``)."""
    n = 4 if masked else 0
    student = logits(0, n=n, v=V + 6, dtype=dtype, with_bias=True)
    two = heads(student, logits(1, n=n, dtype=dtype))
    if masked:
        two = two.masked(torch.zeros(n, dtype=torch.bool))
    result = compare(two, reverse=True, forward=True, divergence=ReverseKL(), top_mass=0.5)
    gated = result.top_gap * result.forward_kl
    (result.reverse_kl + gated + result.divergence).sum().backward()
    assert all(not leaf.grad.any() for leaf in leaves(two))


@pytest.mark.parametrize("objective", [x for x in OBJECTIVES if "cross_entropy" not in x])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_models_have_a_divergence_of_exactly_zero(objective, dtype):
    student = logits(0, v=3000, dtype=dtype, with_bias=True, softcap=5.0)
    two = heads(student, student, temperature=0.7)
    assert (OBJECTIVES[objective][0](two) == 0).all()


@pytest.mark.parametrize("scale,closeness", [(1e-7, 3.5e-4), (1e-3, 4e-2)])
@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_float32_is_exact_to_5e_7_nat(scale, closeness, offset):
    """Against float64 on the same float32 inputs, at a KL of about ``scale``.

    The logits are of size 10, and an offset of the teacher's is one that softmax removes.
    """
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(16, 32, generator=g) / 2, torch.randn(20_000, 32, generator=g)
    other = hidden + closeness / 5 * torch.randn(16, 32, generator=g)
    bias = torch.full((20_000,), offset)
    two = TwoHeads(Logits(hidden, weight), (Logits(other, weight, bias),))
    p, q = hidden.double() @ weight.T.double(), other.double() @ weight.T.double()
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    reverse = (log_p.exp() * (log_p - log_q)).sum(-1)
    forward = (log_q.exp() * (log_q - log_p)).sum(-1)
    log_m = ((log_p.exp() + log_q.exp()) / 2).log()
    jsd = (log_p.exp() * (log_p - log_m)).sum(-1) + (log_q.exp() * (log_q - log_m)).sum(-1)
    assert scale / 5 < reverse.min() and reverse.max() < 5 * scale
    for value, expected in (
        (reverse_kl(two), reverse),
        (forward_kl(two), forward),
        (generalized_jsd(two, 0.5), jsd / 2),
        (compare(two, divergence=ReverseKL()).divergence, reverse),
    ):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=5e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounded", [False, True])
def test_half_precision_is_the_head_that_it_names(dtype, rounded):
    """Sums are float32. ``rounded_to`` is the distribution of a server that rounds its logits."""
    student = logits(0, v=500, dtype=dtype)
    teacher = logits(1, v=500, dtype=dtype, rounded_to=dtype if rounded else None)
    exact = [x.detach().double().requires_grad_() for x in (student.hidden, student.weight)]
    z = teacher.hidden.detach().float() @ teacher.weight.detach().float().T
    if rounded:
        z = z.to(dtype)
    log_p, log_q = (exact[0] @ exact[1].T).log_softmax(-1), z.double().log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    value = reverse_kl(TwoHeads(student, (teacher,)))
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), expected, rtol=0, atol=5e-6)
    grads = torch.autograd.grad(value.sum(), (student.hidden, student.weight))
    for grad, wanted in zip(grads, torch.autograd.grad(expected.sum(), exact), strict=True):
        assert grad.dtype == dtype
        torch.testing.assert_close(grad, wanted.to(dtype), rtol=2**-7, atol=1e-4)


def test_the_two_heads_may_have_different_dtypes():
    student, teacher = logits(0, dtype=torch.float32), logits(1, dtype=torch.bfloat16)
    value = reverse_kl(TwoHeads(student, (teacher,)))
    as_double = [
        Logits(x.hidden.detach().double(), x.weight.detach().double()) for x in (student, teacher)
    ]
    expected = plain_reverse(TwoHeads(as_double[0], (as_double[1],)))
    torch.testing.assert_close(value.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_around_it_changes_nothing(dtype):
    two = heads(logits(0, dtype=dtype), logits(1, dtype=torch.float32))
    value = reverse_kl(two)
    with torch.autocast("cpu", torch.bfloat16):
        within = reverse_kl(two)
        grads = torch.autograd.grad(within.sum(), leaves(two))
    assert torch.equal(within, value)
    for grad, expected in zip(grads, torch.autograd.grad(value.sum(), leaves(two)), strict=True):
        assert torch.equal(grad, expected)


def test_large_logits_do_not_overflow():
    """Probabilities of 1/2 at a logit of 3e4, against uniform ones."""
    weight = torch.tensor([[-3e4], [0.0], [3e4], [3e4]])
    student, teacher = Logits(torch.ones(1, 1), weight), Logits(torch.zeros(1, 1), weight)
    for two, expected in (
        (TwoHeads(student, (teacher,)), math.log(2)),
        (TwoHeads(teacher, (student,)), (6e4 + 3e4) / 4 - math.log(2)),
    ):
        for value in (reverse_kl(two), compare(two, divergence=ReverseKL(), chunk=1).divergence):
            torch.testing.assert_close(value, torch.tensor([expected]))
    # Disjoint distributions: log 2 at most, for any logits.
    opposite = Logits(-torch.ones(1, 1), weight)
    value = generalized_jsd(TwoHeads(student, (opposite,)), 0.5)
    torch.testing.assert_close(value, torch.tensor([math.log(2)]))


@pytest.mark.parametrize("gap", [60.0, 95.0, 300.0, 2000.0])
@pytest.mark.parametrize("padded", ["student", "teacher"])
@pytest.mark.parametrize("objective", [x for x in OBJECTIVES if x != f"adaptive {1 - 1e-9}"])
def test_padding_far_above_the_common_ids_equals_float64(objective, padded, gap):
    """exp(gap) is beyond float32 from 88.7 nats on, and beyond float64 from 709.

    In the last row the common ids are above the padding. A top mass of 1 - 1e-9 is left out, which
    is 1 in float32.
    """
    sizes = [V + 6 * (name == padded) for name in ("student", "teacher")]
    sides = [logits(seed, v=size, dtype=torch.float32) for seed, size in enumerate(sizes)]
    with torch.no_grad():
        for side in sides:
            side.weight[:, 0] = gap * (torch.arange(side.size) >= V)
            side.hidden[:, 0] = torch.tensor([1.0] * (N - 1) + [-1.0])
    exact = [
        Logits(*(x.detach().double().requires_grad_() for x in (side.hidden, side.weight)))
        for side in sides
    ]
    found, wanted = heads(*sides), heads(*exact)
    ours, plain = OBJECTIVES[objective]
    value, expected = ours(found), plain(wanted)
    # The float32 logits of this size are a few roundings of 2^-24 off, and probabilities with them.
    close = {"rtol": max(1e-5, gap / 2**20), "atol": 1e-5}
    torch.testing.assert_close(value.double(), expected, **close)
    grads = torch.autograd.grad(value.sum(), leaves(found))
    for grad, right in zip(grads, torch.autograd.grad(expected.sum(), leaves(wanted)), strict=True):
        torch.testing.assert_close(grad.double(), right, **close)


def test_only_the_wanted_gradients_are_computed():
    two = heads()
    frozen = dataclasses.replace(two.student, weight=two.student.weight.detach())
    (grad,) = torch.autograd.grad(
        reverse_kl(dataclasses.replace(two, student=frozen)).sum(), two.student.hidden
    )
    (expected,) = torch.autograd.grad(plain_reverse(two).sum(), two.student.hidden)
    torch.testing.assert_close(grad, expected)
    frozen = Logits(two.student.hidden.detach(), two.student.weight.detach())
    assert not reverse_kl(dataclasses.replace(two, student=frozen)).requires_grad


def test_the_teacher_gets_no_gradient():
    two = heads()
    result = compare(two, forward=True, top_mass=0.5, token_ids=torch.zeros(N, 1).long())
    assert not result.target_entropy.requires_grad and not result.teacher_logprobs.requires_grad
    assert not result.top_gap.requires_grad
    compare(two, reverse=True, forward=True, divergence=GeneralizedJSD(), parameters=(0.5,))[
        0
    ].sum().backward()
    assert two.teachers[0].hidden.grad is None and two.teachers[0].weight.grad is None


def test_the_logits_of_a_batch_never_exist_at_once():
    two = heads(logits(0, n=32, d=1, v=500), logits(1, n=32, d=1, v=500))
    with LargestTensor() as watch:
        results = compare(
            two, reverse=True, forward=True, divergence=GeneralizedJSD(), parameters=(0.5,),
            chunk=60, token_block=8,
        )  # fmt: skip
        torch.autograd.grad(results.reverse_kl.sum() + results.divergence.sum(), leaves(two))
    assert watch.largest <= 500  # the weight's gradient, against 16,000 logits


def top_gap_of(q: list[float], p: list[float], mass: float, dtype=torch.float64, **sizes) -> float:
    """Return the share of a row with these masses. Its logits are the same in any block."""
    one = torch.ones(1, 1, dtype=dtype)
    student, teacher = (
        Logits(one, one.new_tensor([[math.log(x) if x else -900.0] for x in masses]))
        for masses in (p, q)
    )
    return compare(TwoHeads(student, (teacher,)), top_mass=mass, **sizes).top_gap.item()


HALVES = [1 / 16] * 3 + [1 / 4] + [1 / 16] * 3 + [1 / 4] + [1 / 16] * 2
TIES = {
    "some of equal ids": ([1 / 8] * 8, 0.45, [0, 1, 2]),
    "one of equal ids": ([1 / 8] * 8, 0.2, [0]),
    "the first of equal ids, though too large": ([1 / 8] * 8, 0.1, [0]),
    "the first, though too large": ([0.2, 0.7, 0.1], 0.5, [1]),
    "the first, and no smaller one that would fit": ([0.2, 0.5, 0.3], 0.75, [1]),
    "equal ids below larger ones": (HALVES, 0.8, [3, 7, 0, 1, 2, 4]),
    "no equal id below larger ones": (HALVES, 0.55, [3, 7]),
    "one of the two largest": (HALVES, 0.3, [3]),
    "ids of mass 0": ([0.6, 0.4 - 3e-7, 1e-7, 2e-7, 0.0, 0.0], 1 - 1e-7, [0, 1, 3]),
    "all mass on one id": ([0.0, 1.0, 0.0], 0.5, [1]),
}


@pytest.mark.parametrize("block", [1, 3, 100])
@pytest.mark.parametrize("case", TIES)
def test_top_ids_are_a_beginning_of_the_sorted_ones(case, block):
    """Equal ids have the order of their numbers, over the borders of chunks too."""
    q, mass, top = TIES[case]
    g = torch.Generator().manual_seed(0)
    p = torch.rand(len(q), generator=g, dtype=torch.float64).add(0.1).tolist()
    p = [x / sum(p) for x in p]
    gaps = [abs(a - b) for a, b in zip(q, p, strict=True)]
    expected = sum(gaps[v] for v in top) / sum(gaps)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        if dtype is torch.float32 and "mass 0" in case:
            continue  # a cumulated mass of 1 - 1e-7 is within float32's rounding
        share = top_gap_of(q, p, mass, dtype, chunk=block)
        assert share == pytest.approx(expected, abs=tolerance)


def test_all_ids_are_top_where_the_bucket_has_the_rest():
    """Ids whose mass underflows too. The bucket's own difference stays outside."""
    one = torch.ones(1, 1, dtype=torch.float64)
    student = Logits(one, torch.tensor([[0.3], [0.2], [0.5]]).double().log())
    teacher = Logits(
        one, torch.tensor([[math.log(0.4)], [-800.0], [-900.0], [math.log(0.6)]]).double()
    )
    share = compare(TwoHeads(student, (teacher,)), top_mass=0.5).top_gap.item()
    assert share == pytest.approx((0.1 + 0.2 + 0.5) / (0.1 + 0.2 + 0.5 + 0.6), abs=1e-6)


def test_adaptive_kl_in_float32_is_that_of_float64():
    """A flat teacher of 20,000 ids, whose top has thousands of them."""
    two = heads(logits(0, v=20_000, dtype=torch.float32), logits(1, v=20_000, dtype=torch.float32))
    exact = heads(
        *(
            Logits(side.hidden.detach().double(), side.weight.detach().double())
            for side in two.sides
        )
    )
    torch.testing.assert_close(
        adaptive_kl(two, 0.5).double(), plain_adaptive(exact, 0.5), rtol=1e-5, atol=1e-5
    )


def test_memory_of_the_top_ids_does_not_grow_with_the_vocabulary():
    n = 32
    for v in (2_000, 8_000):
        two = heads(*(logits(seed, n=n, d=1, v=v, dtype=torch.float32) for seed in (0, 1)))
        with LargestTensor() as watch:
            value = compare(two, forward=True, top_mass=0.5, chunk=500, token_block=8)
            value.top_gap.sum()
        assert watch.largest == n * 256  # the masses of one digit, against 256,000 logits


def test_adaptive_kl_refuses_a_mass_outside_its_range():
    with pytest.raises(ValueError, match="head_mass = 1.0 .* between 0 and 1"):
        adaptive_kl(heads(), 1.0)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"teachers": ()}, "there is no teacher"),
        ({"student": (4, 5, 6)}, "student's hidden states have width 5 and its head 6"),
        ({"teacher": (4, 3, 2)}, "teacher's hidden states have width 3 and its head 2"),
        ({"teacher": (5, 3, 3)}, "teacher has 5 rows and the student 4"),
        ({"weights": (4, 1)}, r"1 teacher\(s\) with weights of shape \(4, 1\)"),
        ({"dtype": torch.float32}, "torch.float64 and its head is torch.float32"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"token_ids": [[9]] * 4}, "reach from 9 to 9, and the smallest head .* of 9"),
        ({"token_ids": [[1]]}, "1 rows for 4 hidden states"),
        ({"chunk": 0}, "chunk is 0"),
        ({"bias": 3}, "9 rows and a bias of 3"),
    ],
)
def test_a_call_that_cannot_be_right_says_what_to_change(change, message):
    # The check itself, and instances without their own: with the shapes executed, as in these
    # tests, jaxtyping speaks before it.
    def side(n, d, d_head, dtype=torch.float64, bias=None):
        values = {"hidden": torch.zeros(n, d).double(), "weight": torch.zeros(9, d_head).to(dtype)}
        built = object.__new__(Logits)
        built.__dict__.update(values, bias=None if bias is None else torch.zeros(bias))
        return built

    two = object.__new__(TwoHeads)
    two.__dict__.update(
        student=side(*change.get("student", (4, 5, 5)), bias=change.get("bias")),
        teachers=change.get("teachers", (side(*change.get("teacher", (4, 3, 3)),
                                              change.get("dtype", torch.float64)),)),
        teacher_weights=torch.zeros(change["weights"]) if "weights" in change else None,
        temperature=change.get("temperature", 1.0),
        mask=None,
    )  # fmt: skip
    ids = torch.tensor(change["token_ids"]) if "token_ids" in change else None
    with pytest.raises(ValueError, match=message):
        check(two, ids, change.get("chunk"), None)


def test_rows_of_one_teacher_are_those_of_that_teacher_alone():
    """A teacher without a weight in a row changes nothing there, not even the bucket's ids."""
    student, small, large = logits(0, v=V + 5), logits(1), logits(2, d=2, v=V + 2)
    one, other = TwoHeads(student, (small,)), TwoHeads(student, (large,))
    weights = torch.zeros(N, 2, dtype=torch.float64)
    weights[:, 0] = torch.arange(N) % 2
    weights[:, 1] = 1 - weights[:, 0]
    mask = torch.arange(N) != 3
    both = TwoHeads(student, (small, large), teacher_weights=weights, mask=mask)
    beta = torch.linspace(0.1, 0.9, N, dtype=torch.float64)
    ids = torch.arange(2 * N).reshape(N, 2) % V

    def results(two):
        options = {"divergence": GeneralizedJSD(), "parameters": [beta], "token_ids": ids}
        options["top_mass"] = 0.4
        return compare(two, reverse=True, forward=True, interpolation=0.3, **options)

    expected = zip(results(one), results(other), strict=True)
    for mixed, (first, second) in zip(results(both), expected, strict=True):
        shape = (N, *[1] * (mixed.dim() - 1))
        wanted = torch.where(weights[:, 0].bool().view(shape), first, second)
        wanted = torch.where(mask.view(shape), wanted, 0.0)
        torch.testing.assert_close(mixed, wanted, rtol=0, atol=1e-14)
    grads = torch.autograd.grad(results(both).reverse_kl.sum(), [student.hidden, student.weight])
    rows = results(one).reverse_kl[(weights[:, 0] > 0) & mask].sum()
    rows = rows + results(other).reverse_kl[(weights[:, 1] > 0) & mask].sum()
    for grad, wanted in zip(
        grads, torch.autograd.grad(rows, [student.hidden, student.weight]), strict=True
    ):
        torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-13)


def test_all_rows_masked_with_several_teachers_give_zero():
    weights = torch.full((N, 2), 0.5, dtype=torch.float64)
    mask = torch.zeros(N, dtype=torch.bool)
    two = TwoHeads(logits(0), (logits(1), logits(2)), teacher_weights=weights, mask=mask)
    assert torch.equal(reverse_kl(two), torch.zeros(N, dtype=torch.float64))
