"""Values against sums over probabilities, gradients against closed forms and differences.

References are written differently from the code: loops over probabilities with ``math.log``, sums
in 45 digits by the papers' formulas (mpmath), or numbers that public implementations returned.
"""

import functools
import itertools
import json
import math
from pathlib import Path

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mpf

from prime_composer import divergences as D
from tests.builders import double

GOLDEN = Path(__file__).parent / "golden"
KL_ROWS = ["full", "tail", "renorm", "generalized"]


def golden(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())


def student_teacher(seed: int, vocab: int = 7, k: int = 4):
    """Logits of the student, log q, the teacher's top-k ids; masses on the support differ."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(vocab, generator=g, dtype=torch.float64)
    log_q = (1.7 * torch.randn(vocab, generator=g, dtype=torch.float64)).log_softmax(-1)
    return z, log_q, log_q.topk(k).indices


def on_support(z, log_q, ids):
    return z.log_softmax(-1)[ids], log_q[ids]


def autograd(fn, z):
    z = z.clone().requires_grad_()
    (grad,) = torch.autograd.grad(fn(z), z)
    return grad


@pytest.mark.parametrize(
    "fn", [D.reverse_kl, D.forward_kl, lambda p, q, n: D.generalized_jsd(p, q, 0.3, n)]
)
def test_on_the_full_vocabulary_every_normalization_is_the_same(fn):
    z, log_q, _ = student_teacher(5)
    full = fn(z.log_softmax(-1), log_q, "full")
    for normalization in ("tail", "renorm", "generalized"):
        torch.testing.assert_close(
            fn(z.log_softmax(-1), log_q, normalization), full, rtol=1e-10, atol=1e-10
        )


def expected_gradient(estimator, z, log_q, log_mu):
    """Return E_{y ~ mu} of the estimator's gradient, over every token of the vocabulary."""
    total = torch.zeros_like(z)
    for y in range(len(z)):
        total += log_mu[y].exp() * autograd(
            lambda z, y=y: estimator(z.log_softmax(-1)[y], log_q[y], log_mu[y]), z
        )
    return total


def test_the_gradient_of_an_estimator_is_not_that_of_its_value():
    z, log_q, _ = student_teacher(0)
    log_p = z.log_softmax(-1)
    reverse, forward = (
        reference_gradient(name, z, log_q, torch.arange(7), "full") for name in SUMS[:2]
    )
    k2 = expected_gradient(lambda p, q, mu: D.k2(p, q), z, log_q, log_p)
    k3 = expected_gradient(lambda p, q, mu: D.k3(p, q), z, log_q, log_p)
    k1 = expected_gradient(lambda p, q, mu: p - q, z, log_q, log_p)
    torch.testing.assert_close(k2, reverse, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(k3, forward, rtol=1e-10, atol=1e-13)
    assert k1.abs().max() < 1e-14
    # As values: k1 and k3 are unbiased for the reverse KL, k2 is not.
    p = log_p.exp()
    kl = D.reverse_kl(log_p, log_q, "full")
    with torch.no_grad():
        torch.testing.assert_close((p * D.k1(log_p, log_q)).sum(), kl, rtol=1e-12, atol=0)
        torch.testing.assert_close((p * D.k3(log_p, log_q)).sum(), kl, rtol=1e-12, atol=0)
        assert ((p * D.k2(log_p, log_q)).sum() - kl).abs() > 1e-2


def test_weighted_k1_is_unbiased_with_the_current_student_only():
    z, log_q, _ = student_teacher(3)
    log_mu = (z + 0.7 * torch.tensor([1.0, -1, 0.5, 0, -0.5, 1, 0])).double().log_softmax(-1)
    reverse = reference_gradient("reverse", z, log_q, torch.arange(7), "full")
    live = expected_gradient(D.weighted_k1, z, log_q, log_mu)
    stale = expected_gradient(lambda p, q, mu: (p - mu).exp() * (mu - q).detach(), z, log_q, log_mu)
    torch.testing.assert_close(live, reverse, rtol=1e-10, atol=1e-13)
    assert (stale - reverse).abs().max() > 1e-2


@pytest.mark.parametrize("beta", ["0", "0.1", "0.3", "0.5", "0.7", "1"])
def test_jsd_equals_opsd_and_trl_and_none_of_the_known_bugs(beta):
    g = golden("generalized_jsd")
    z, q, mask = (
        double(g["inputs"]["student_logits"]),
        double(g["inputs"]["teacher_logits"]),
        g["inputs"]["mask"],
    )
    fn = lambda z: D.generalized_jsd(z.log_softmax(-1), q.log_softmax(-1), float(beta), "full")[
        torch.tensor(mask)
    ]  # noqa: E731
    assert fn(z).mean().item() == pytest.approx(g["mean"][beta], abs=1e-11)
    for name, value in g["bugs"].get(beta, {}).items():
        assert abs(fn(z).mean().item() - value) > 1e-3, name
    if beta in g["gradient_of_sum_for_student_logits_position_0"]:
        grad = autograd(lambda z: fn(z).sum(), z)
        assert grad[0].tolist() == pytest.approx(
            g["gradient_of_sum_for_student_logits_position_0"][beta], abs=1e-11
        )
        assert (grad[2] == 0).all()


@pytest.mark.parametrize("t", ["0.0", "0.4", "0.7", "1.0"])
def test_taid_returns_the_numbers_of_its_authors_code(t):
    g = golden("taid")
    z, q = double(g["inputs"]["student_logits"]), double(g["inputs"]["teacher_logits"])
    mask = torch.tensor(g["inputs"]["mask"])
    fn = lambda z, form: D.taid(z.log_softmax(-1), q.log_softmax(-1), float(t), "full", form)[
        mask
    ].mean()  # noqa: E731
    assert fn(z, "cross_entropy").item() == pytest.approx(g["cross_entropy"][t], abs=3e-7)
    if t in g["kl"]:
        assert fn(z, "kl").item() == pytest.approx(g["kl"][t], abs=3e-7)
        grad = autograd(lambda z: fn(z, "cross_entropy"), z)
        assert grad[0].tolist() == pytest.approx(
            g["gradient_of_mean_for_student_logits_position_0"][t], abs=3e-7
        )
    if t in g["bug_probability_space_cross_entropy"]:
        assert (
            abs(fn(z, "cross_entropy").item() - g["bug_probability_space_cross_entropy"][t]) > 1e-3
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_log1mexp_is_accurate_and_its_gradient_finite(dtype):
    x = torch.tensor(
        [-1e-7, -1e-4, -0.1, -math.log(2), -1.0, -30.0, -80.0], dtype=dtype, requires_grad=True
    )
    y = D.log1mexp(x)
    expected = [
        math.log(-math.expm1(v)) if v > -0.6 else math.log1p(-math.exp(v)) for v in x.tolist()
    ]
    torch.testing.assert_close(
        y, torch.tensor(expected, dtype=dtype), rtol=4 * torch.finfo(dtype).eps, atol=0
    )
    y.sum().backward()
    # d/dx log(1 - e^x) = -1/(e^-x - 1)
    torch.testing.assert_close(
        x.grad,
        torch.tensor([-1 / math.expm1(-v) for v in x.tolist()], dtype=dtype),
        rtol=1e-5,
        atol=0,
    )


def test_a_support_that_holds_all_the_mass_stays_finite():
    log_p = torch.tensor([[0.0, -120.0], [-1e-9, -25.0], [-0.7, -0.7]], requires_grad=True)
    log_q = torch.tensor([[-1e-9, -25.0], [0.0, -130.0], [-0.6, -0.8]])
    for fn in (
        D.reverse_kl,
        D.forward_kl,
        lambda p, q: D.generalized_jsd(p, q, 0.3),
        lambda p, q: D.taid(p, q, 0.5),
    ):
        log_p.grad = None
        value = fn(log_p, log_q)
        value.sum().backward()
        assert value.isfinite().all() and log_p.grad.isfinite().all()


def test_a_token_impossible_for_one_side_gives_the_limit():
    inf = math.inf
    p = double([0.5, 0.5, 0.0]).log().requires_grad_()
    q = double([0.5, 0.25, 0.25]).log()
    assert D.reverse_kl(p, q, "full").item() == pytest.approx(0.5 * math.log(2))
    D.reverse_kl(p, q, "full").backward()
    assert p.grad.isfinite().all()
    assert D.forward_kl(p.detach(), q, "full").item() == inf
    assert D.reverse_kl(q, p.detach(), "full").item() == inf
    forward = q.clone().requires_grad_()
    D.forward_kl(forward, p.detach(), "full").backward()
    assert forward.grad.tolist() == pytest.approx([-0.5, -0.5, 0.0])
    both = torch.cat([p.detach(), double([-inf])]).requires_grad_()
    jsd = D.generalized_jsd(both, torch.cat([q, double([-inf])]), 0.3, "full")
    jsd.backward()
    assert jsd.item() == pytest.approx(D.generalized_jsd(p.detach(), q, 0.3, "full").item())
    assert both.grad[:2].isfinite().all() and both.grad[3] == 0
    taid = D.taid(both.detach(), torch.cat([q, double([-inf])]), 0.4, "full")
    assert taid.isfinite()


def test_nan_of_a_position_that_trains_is_not_hidden():
    p, q = double([-1.0, -2.0]), double([float("nan"), -1.0])
    for n in KL_ROWS:
        assert D.reverse_kl(p, q, n).isnan() and D.reverse_kl(q, p, n).isnan(), n
    assert D.forward_kl(p, q).isnan() and D.generalized_jsd(p, q, 0.5).isnan()


@st.composite
def supports(draw):
    """Student and teacher log-probs on k of vocab ids, some of them as improbable as e^-60."""
    vocab = draw(st.integers(3, 12))
    k = draw(st.integers(2, vocab))
    logit = st.floats(-30, 30, allow_nan=False, width=32)
    z = double(draw(st.lists(logit, min_size=vocab, max_size=vocab)))
    t = double(draw(st.lists(logit, min_size=vocab, max_size=vocab)))
    ids = draw(st.permutations(range(vocab)))[:k]
    return z.log_softmax(-1)[ids], t.log_softmax(-1)[ids]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(pair=supports(), order=st.randoms(use_true_random=False))
def test_a_divergence_is_at_least_zero_and_ignores_order(pair, order):
    """In bfloat16 too, which is computed in float32, its gradient is finite."""
    p, q = pair
    index = list(range(len(p)))
    order.shuffle(index)
    for name, normalization in (
        *itertools.product(("reverse", "forward", "jsd 0.3"), KL_ROWS[1:]),
        ("taid 0.4 kl", "tail"),
    ):
        fn = functools.partial(ours(name), normalization=normalization)
        # The clamp of the mass at 1 - 1e-7 can raise the outcomes of ``tail`` above 1 by as much.
        tolerance = 2e-7 if normalization == "tail" else 1e-12
        student = p.clone().requires_grad_()
        value = fn(student, q)
        assert value >= -tolerance and fn(p, p).abs() < tolerance
        torch.testing.assert_close(fn(p[index], q[index]), value, rtol=1e-9, atol=1e-12)
        value.backward()
        assert student.grad.isfinite().all()
        half = fn(p.bfloat16(), q.bfloat16())
        assert half.dtype == torch.float32 and half.isfinite()
        # Rounding to bf16 can raise the mass above 1. The renormalized rows stay divergences.
        assert half >= -1e-5 or normalization != "renorm"


# JSD, TAID, and the divergences of 2024 to 2026, against sums in 45 digits.

AUTHORS = golden("authors_divergences")
NORMALIZATIONS = ["full", "tail", "renorm"]
mpmath.mp.dps = 45


def alpha_beta(p, q, alpha, beta):
    """Return the paper's sum, and its limits by their own formulas."""
    a, b, s = mpf(alpha), mpf(beta), mpf(alpha) + mpf(beta)
    terms = []
    for x, y in zip(p, q, strict=True):
        ratio = mpmath.log(y / x)
        if a == 0 and b == 0:
            terms.append(ratio**2 / 2)
        elif a == 0:
            terms.append((x**b * -ratio * b - x**b + y**b) / b**2)
        elif b == 0:
            terms.append((y**a * ratio * a - y**a + x**a) / a**2)
        elif s == 0:
            terms.append((-a * ratio + (y / x) ** a - 1) / a**2)
        else:
            terms.append(-(y**a * x**b - a / s * y**s - b / s * x**s) / (a * b))
    return sum(terms)


def kl(a, b):
    """Return sum a log a/b - a + b, whose last two sum to 0 up to the rounding of the inputs."""
    return sum(x * mpmath.log(x / y) - x + y for x, y in zip(a, b, strict=True))


def mixed(a, b, share):
    return [mpf(share) * x + (1 - mpf(share)) * y for x, y in zip(a, b, strict=True)]


def total_variation(p, q):
    return sum(abs(x - y) for x, y in zip(p, q, strict=True)) / 2


def todi(p, q, at=None):
    """``at`` is the student of which the weights are taken, p itself by default."""
    total = mpf(0)
    for x, y, fixed in zip(p, q, at or p, strict=True):
        a = y / (y + fixed)
        total += a * y * mpmath.log(y / x) + (1 - a) * x * mpmath.log(x / y)
    return total


def jsd(p, q, beta):
    m = mixed(q, p, beta)
    return mpf(beta) * kl(q, m) + (1 - mpf(beta)) * kl(p, m)


def taid(p, q, t, form, at=None):
    """``at`` is the student that anchors the target, p itself by default."""
    weights = [x ** (1 - mpf(t)) * y ** mpf(t) for x, y in zip(at or p, q, strict=True)]
    target = [w / sum(weights) for w in weights]
    entropy = -sum(w * mpmath.log(w) for w in target)
    # Without the -a + b of ``kl``, whose sum the inputs' rounding would move by as much.
    value = sum(w * mpmath.log(w / x) for w, x in zip(target, p, strict=True))
    return value + (entropy if form == "cross_entropy" else 0)


DIVERGENCES = {
    "reverse": (D.reverse_kl, (), kl),
    "forward": (D.forward_kl, (), lambda p, q: kl(q, p)),
    "jsd": (D.generalized_jsd, ("beta",), jsd),
    "taid": (D.taid, ("t", "form"), taid),
    "alpha_beta": (D.alpha_beta_divergence, ("alpha", "beta"), alpha_beta),
    "skewed_forward": (D.skewed_forward_kl, ("skew",), lambda p, q, skew: kl(q, mixed(q, p, skew))),
    "skewed_reverse": (D.skewed_reverse_kl, ("skew",), lambda p, q, skew: kl(p, mixed(p, q, skew))),
    "total_variation": (D.total_variation, (), total_variation),
    "todi": (D.todi, (), todi),
}
"""Kind: ours, the names of its knobs, the reference over probabilities."""

SUMS = [
    *("reverse", "forward", "jsd 0.1", "jsd 0.3", "jsd 0.9"),
    *(f"taid {t} {form}" for t in (0.0, 0.4, 1.0) for form in ("cross_entropy", "kl")),
]
"""Names, of which the sums are not exact at extreme arguments."""

CASES = [
    *("alpha_beta 0.2 0.7", "alpha_beta 3.0 2.0", "alpha_beta 1.5 -0.5", "alpha_beta -0.5 1.2"),
    *("alpha_beta -0.4 -0.3", "alpha_beta 0.4 0.0", "alpha_beta 0.0 0.6", "alpha_beta 0.0 -0.8"),
    *("alpha_beta 0.4 -0.4", "alpha_beta 0.0 0.0", "alpha_beta 1.0 0.0", "alpha_beta 0.0 1.0"),
    *("alpha_beta 1e-9 1.0", "alpha_beta 1.0 -1e-9", "alpha_beta 0.5 -0.499999999"),
    "alpha_beta 1e-8 1e-8",
    *(
        f"skewed_{way} {skew}"
        for way in ("forward", "reverse")
        for skew in (0.0, 1e-9, 0.5, 1 - 1e-9)
    ),
    *("total_variation", "todi"),
]


def knobs_of(name):
    """Return the kind of a name, and the knobs that follow it."""
    kind, *knobs = name.split()
    return kind, [knob if knob in ("cross_entropy", "kl") else float(knob) for knob in knobs]


def ours(name):
    kind, knobs = knobs_of(name)
    function, names, _ = DIVERGENCES[kind]
    return functools.partial(function, **dict(zip(names, knobs, strict=True)))


def reference(name, p, q, at):
    """``at`` is the student that a target or weights are taken of, where there are such."""
    kind, knobs = knobs_of(name)
    more = {"at": at} if kind in ("taid", "todi") else {}
    return DIVERGENCES[kind][2](p, q, *knobs, **more)


def normalizations_of(name):
    return KL_ROWS if name.startswith(("reverse", "forward", "jsd")) else NORMALIZATIONS


def probabilities(z, log_q, ids, normalization):
    """Return the outcomes that a normalization compares, in 45 digits."""
    outcomes = []
    for logits in (z.tolist(), log_q.tolist()):
        exps = [mpmath.exp(x) for x in logits]
        probs = [x / sum(exps) for x in exps]
        on_s = [probs[i] for i in ids.tolist()]
        if normalization == "tail":
            on_s.append(1 - sum(on_s))
        outcomes.append([x / sum(on_s) for x in on_s] if normalization == "renorm" else on_s)
    return outcomes


def drawn(seed, normalization):
    z, log_q, ids = student_teacher(seed)
    return z, log_q, torch.arange(7) if normalization == "full" else ids


@pytest.mark.parametrize("name", SUMS + CASES)
def test_recent_value_is_the_papers_sum(name):
    """The value is the paper's sum over probabilities, on each set of outcomes."""
    for normalization in normalizations_of(name):
        z, log_q, ids = drawn(1, normalization)
        p, q = probabilities(z, log_q, ids, normalization)
        got = ours(name)(*on_support(z, log_q, ids), normalization=normalization)
        expected = float(reference(name, p, q, at=p))
        assert got.item() == pytest.approx(expected, rel=1e-9, abs=2e-15), normalization


def reference_gradient(name, z, log_q, ids, normalization):
    """Return the differences of the reference for each logit, the weights held fixed."""
    p0, q = probabilities(z, log_q, ids, normalization)
    step = mpf(10) ** -15

    def value(j, by):
        shifted = [mpf(x) + (by if i == j else 0) for i, x in enumerate(z.tolist())]
        exps = [mpmath.exp(x) for x in shifted]
        p = [exps[i] / sum(exps) for i in ids.tolist()]
        if normalization == "tail":
            p.append(1 - sum(p))
        if normalization == "renorm":
            p = [x / sum(p) for x in p]
        return reference(name, p, q, at=p0)

    return double([float((value(j, step) - value(j, -step)) / (2 * step)) for j in range(len(z))])


@pytest.mark.parametrize("name", SUMS + CASES)
def test_recent_gradient_is_the_difference(name):
    # The extreme arguments of ``CASES`` are on the full vocabulary.
    for normalization in ("tail", "renorm") if name in CASES else normalizations_of(name):
        z, log_q, ids = drawn(3, normalization)
        z, log_q, ids = z[:6], log_q[:6].log_softmax(-1), ids[ids < 6]
        fn = functools.partial(ours(name), normalization=normalization)
        got = autograd(lambda z: fn(*on_support(z, log_q, ids)), z)  # noqa: B023
        expected = reference_gradient(name, z, log_q, ids, normalization)
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=2e-15)


@pytest.mark.parametrize("name", CASES)
def test_recent_divergence_is_stationary_at_equality(name):
    for normalization in NORMALIZATIONS:
        _, log_q, ids = drawn(0, normalization)
        own = functools.partial(ours(name), normalization=normalization)
        fn = lambda z: own(*on_support(z, log_q, ids))  # noqa: E731, B023
        assert abs(fn(log_q).item()) < 1e-14
        assert autograd(fn, log_q).abs().max() < 1e-14


FAR = [([0.0, -87.4, -40.0], [-87.4, 0.0, -1.0]), ([-0.7, -0.7, -87.4], [-87.4, -1e-3, -7.0])]
NEAR = [([-2e-5, -11.0, -16.0], [-1.9e-5, -11.1, -16.2]), ([-1.0, -1.0 + 1e-7, 0], [-1.0, -1.0, 0])]
"""Logits of p and q. e^-87.4 is 1e-38, the smallest normal number of float32."""

BOTH_SUMS = ("todi", "total", "skewed_forward 0.0", "skewed_reverse 0.0")
"""Sums in which rounding does not cancel: their error is absolute."""


@pytest.mark.parametrize("name", CASES)
def test_recent_extreme_arguments_stay_right(name):
    """Values and gradients at 1e-38, at tiny gaps, and with knobs next to their limits."""
    fn, ids = functools.partial(ours(name), normalization="full"), torch.arange(3)
    for logits, teacher in FAR + NEAR:
        z, log_q = double(logits), double(teacher).log_softmax(-1)
        p, q = probabilities(z, log_q, ids, "full")
        expected = float(reference(name, p, q, at=p))
        got = fn(*on_support(z, log_q, ids)).item()
        assert got == pytest.approx(expected, rel=1e-7, abs=1e-15 * name.startswith(BOTH_SUMS))
        gradient = autograd(lambda z: fn(*on_support(z, log_q, ids)), z)  # noqa: B023
        slopes = reference_gradient(name, z, log_q, ids, "full")
        # The backward of log_softmax adds slopes that can cancel: they bound its rounding.
        scale = autograd(lambda x: fn(x, log_q), z.log_softmax(-1)).abs().max().item()  # noqa: B023
        atol = 1e-5 * slopes.abs().max().item() + 1e-14 * scale
        torch.testing.assert_close(gradient, slopes, rtol=0, atol=atol)


@pytest.mark.parametrize("name", CASES)
def test_recent_float32_stays_finite_and_close(name):
    fn = functools.partial(ours(name), normalization="full")
    for logits, teacher in FAR:
        z, log_q = torch.tensor(logits), torch.tensor(teacher).log_softmax(-1)
        got = fn(z.log_softmax(-1), log_q).item()
        wide = fn(z.double().log_softmax(-1), double(teacher).log_softmax(-1)).item()
        assert got == pytest.approx(wide, rel=1e-4, abs=1e-6 * name.startswith(BOTH_SUMS))
        assert autograd(lambda z: fn(z.log_softmax(-1), log_q), z).isfinite().all()  # noqa: B023


def test_recent_impossible_tokens_give_the_limit():
    """A token impossible for one side has the limit, one impossible for both has none."""
    p = double([0.5, 0.5, 0.0]).log()
    q = double([0.5, 0.25, 0.25]).log()
    nothing = double([-math.inf])

    def value(name, p, q):
        return ours(name)(p, q, normalization="full").item()

    # alpha = beta = 1/2 is 4 (1 - sum sqrt(p q)); 2 (sqrt p - sqrt q)^2 per token.
    hellinger = 4 * (1 - 0.5 - math.sqrt(0.125))
    assert value("alpha_beta 0.5 0.5", q, p) == pytest.approx(hellinger, rel=1e-12)
    for exponents, other in (("1.0 0.0", "0.0 1.0"), ("1.0 -0.5", "-0.5 1.0")):
        assert value(f"alpha_beta {exponents}", p, q) == math.inf
        assert value(f"alpha_beta {other}", q, p) == math.inf
    for exponents, pair in (("0.0 1.0", (p, q)), ("1.0 0.0", (q, p))):
        assert value(f"alpha_beta {exponents}", *pair) == pytest.approx(0.5 * math.log(2))
    rare = [mpf(x) for x in (0.5, 0.5, 1e-30)], [mpf(x) for x in (0.5, 0.25, 0.25)]
    for name in ("alpha_beta 0.5 0.5", "skewed_forward 0.3", "skewed_reverse 0.3",
                 "total_variation"):  # fmt: skip
        expected = hellinger if "alpha" in name else float(reference(name, *rare, at=None))
        for more in (double([]), nothing):
            both = torch.cat([p, more]), torch.cat([q, more])
            assert value(name, *both) == pytest.approx(expected, rel=1e-9), name
            for one, other in (both, both[::-1]):
                fn = functools.partial(ours(name), teacher_logprobs=other, normalization="full")
                assert autograd(fn, one).isfinite().all(), name
    fn = functools.partial(
        D.todi, teacher_logprobs=torch.cat([double([0.2, 0.3, 0.5]).log(), nothing]),
        normalization="full",
    )  # fmt: skip
    both = torch.cat([q, nothing])
    assert fn(both).isfinite() and autograd(fn, both).isfinite().all()


def test_what_cannot_teach_is_refused_with_the_reason():
    """A knob outside its domain, or with which the divergence is 0, is refused by name."""
    p, q = double([0.6, 0.3]).log(), double([0.5, 0.2]).log()
    for name in SUMS + CASES:
        with pytest.raises(ValueError, match="identically 0"):
            ours(name)(p[:1], q[:1], normalization="renorm")
    for name in CASES:
        with pytest.raises(ValueError, match="'generalized' is not defined.*full, tail, renorm"):
            ours(name)(p, q, normalization="generalized")
    with pytest.raises(ValueError, match="beta = inf are exponents"):
        D.alpha_beta_divergence(p, q, alpha=1.0, beta=math.inf)
    for skew in (1.0, -0.1, math.nan):
        for fn in (D.skewed_forward_kl, D.skewed_reverse_kl):
            with pytest.raises(ValueError, match=r"skew = .*\[0, 1\)"):
                fn(p, q, skew=skew)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        D.generalized_jsd(p, q, 1.5)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        D.taid_target(p, q, -0.1)
    with pytest.raises(ValueError, match="expected gradient 0"):
        D.k1(p.requires_grad_(), q)


@pytest.mark.parametrize("normalization", [*NORMALIZATIONS, "generalized"])
def test_the_teacher_never_gets_a_gradient(normalization):
    """The teacher is detached, and bfloat16 is computed in float32."""
    p, q = (double([[0.3, 0.2], [0.6, 0.1]]).log().requires_grad_() for _ in range(2))
    names = SUMS[:3]
    if normalization in NORMALIZATIONS:
        names += CASES + SUMS[3:]
    fns = [functools.partial(ours(name), normalization=normalization) for name in names]
    values = [*(fn(p, q) for fn in fns), D.k2(p, q), D.k3(p, q)]
    sum(value.sum() for value in values).backward()
    assert q.grad is None and p.grad.isfinite().all()
    half = p.detach().bfloat16()
    assert all(fn(half, half).dtype is torch.float32 for fn in fns)


@pytest.mark.parametrize("name", sorted(AUTHORS.keys() - {"source", "inputs"}))
def test_recent_divergence_equals_its_authors_code(name):
    """Value and gradient are those of the authors' code, up to two constants that are named."""
    inputs, recorded = AUTHORS["inputs"], AUTHORS[name]
    z, log_q = double(inputs["student_logits"]), double(inputs["teacher_logits"]).log_softmax(-1)
    mask = torch.tensor(inputs["mask"])
    own = functools.partial(ours(name), normalization="full")
    fn = lambda z: own(z.log_softmax(-1), log_q)[mask].mean()  # noqa: E731
    factor, constant = 1.0, 0.0
    if name.startswith("skewed_forward"):  # DistiLLM's value leaves out -H(q)
        constant = D.entropy(log_q, "full")[mask].mean().item()
    if name.startswith("alpha_beta"):  # ABKD's limits miss a factor
        alpha, beta = map(float, name.split()[1:])
        if alpha or beta:
            factor = alpha if beta == 0 or alpha + beta == 0 else beta if alpha == 0 else 1.0
    assert factor * fn(z).item() + constant == pytest.approx(recorded["mean"], rel=1e-12)
    assert (factor * autograd(fn, z))[0].tolist() == pytest.approx(
        recorded["gradient of the mean at position 0"], rel=1e-10, abs=1e-15
    )


def coupled(p, q, n):
    """Yield pairs that are equal by the table of losses/README.md."""
    own = lambda name: ours(name)(p, q, normalization=n)  # noqa: E731
    forward, reverse = D.forward_kl(p, q, n), D.reverse_kl(p, q, n)
    yield own("alpha_beta 1.0 0.0"), forward
    yield own("alpha_beta 0.0 1.0"), reverse
    for a, b in ((0.0, 0.6), (0.6, 0.0), (0.6, -0.6), (0.0, 0.0)):
        yield own(f"alpha_beta {a + 1e-14} {b - 1e-14}"), own(f"alpha_beta {a} {b}")
    for share in (0.1, 0.8):
        skewed = share * own(f"skewed_forward {share}")
        skewed = skewed + (1 - share) * own(f"skewed_reverse {1 - share}")
        yield skewed, D.generalized_jsd(p, q, share, n)
    yield own("todi"), forward + reverse


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_one_divergence_written_as_another_has_its_value(normalization):
    """The table of losses/README.md, at 1e-12. ToDi's is in value alone."""
    z, log_q, ids = drawn(5, normalization)
    for one, other in coupled(*on_support(z, log_q, ids), normalization):
        assert one.item() == pytest.approx(other.item(), rel=0, abs=1e-12)
    both = autograd(lambda z: list(coupled(*on_support(z, log_q, ids), normalization))[-1][1], z)
    todi = autograd(lambda z: D.todi(*on_support(z, log_q, ids), normalization=normalization), z)
    assert (todi - both).abs().max() > 1e-2
