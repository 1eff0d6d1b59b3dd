"""Divergences of 2024 to 2026 against sums in 45 digits, differences, and their authors' code.

References are sums over probabilities in mpmath, written by the papers' formulas.
"""

import json
import math
from pathlib import Path

import mpmath
import pytest
import torch
from mpmath import mpf

from prime_composer import divergences as D
from tests.test_divergences import autograd, double, on_support
from tests.test_divergences import student_teacher as pair_of

GOLDEN = json.loads((Path(__file__).parent / "golden/authors_divergences.json").read_text())
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


def skewed_forward(p, q, skew):
    return kl(q, mixed(q, p, skew))


def skewed_reverse(p, q, skew):
    return kl(p, mixed(p, q, skew))


def total_variation(p, q):
    return sum(abs(x - y) for x, y in zip(p, q, strict=True)) / 2


def amid(p, q, alpha, skew, divergence):
    a, lam = mpf(alpha), mpf(skew)
    if a == 1:
        r = [y**lam * x ** (1 - lam) for x, y in zip(p, q, strict=True)]
    else:
        g = (1 - a) / 2
        r = [(lam * y**g + (1 - lam) * x**g) ** (1 / g) for x, y in zip(p, q, strict=True)]
    named = {"p": p, "q": q, "r": [x / sum(r) for x in r]}
    return kl(named[divergence[0]], named[divergence[-1]])


def todi(p, q, at=None):
    """``at`` is the student of which the weights are taken, p itself by default."""
    total = mpf(0)
    for x, y, fixed in zip(p, q, at or p, strict=True):
        a = y / (y + fixed)
        total += a * y * mpmath.log(y / x) + (1 - a) * x * mpmath.log(x / y)
    return total


def adaptive(p, q, head_mass, at=None, tail=False):
    ids = sorted(range(len(q) - tail), key=lambda i: -q[i])
    head, mass = [ids[0]], q[ids[0]]
    for i in ids[1:]:
        mass += q[i]
        if mass > head_mass:
            break
        head.append(i)
    gaps = [abs(y - x) for x, y in zip(at or p, q, strict=True)]
    w = sum(gaps[i] for i in head) / sum(gaps)
    return w * kl(q, p) + (1 - w) * kl(p, q)


CASES = {
    **{
        f"alpha_beta {a} {b}": (
            lambda p, q, n, a=a, b=b: D.alpha_beta_divergence(
                p, q, alpha=a, beta=b, normalization=n
            ),
            lambda p, q, a=a, b=b, **_: alpha_beta(p, q, a, b),
        )
        for a, b in [
            (0.2, 0.7), (0.5, 0.5), (3.0, 2.0), (1.5, -0.5), (-0.5, 1.2), (-0.4, -0.3),
            (0.4, 0.0), (0.0, 0.6), (0.0, -0.8), (0.4, -0.4), (0.0, 0.0), (1.0, 0.0), (0.0, 1.0),
            (1e-9, 1.0), (1.0, -1e-9), (0.5, -0.5 + 1e-9), (1e-8, 1e-8),
        ]
    },
    **{
        f"skewed_{name} {skew}": (
            lambda p, q, n, fn=fn, skew=skew: fn(p, q, skew=skew, normalization=n),
            lambda p, q, reference=reference, skew=skew, **_: reference(p, q, skew),
        )
        for name, fn, reference in [
            ("forward", D.skewed_forward_kl, skewed_forward),
            ("reverse", D.skewed_reverse_kl, skewed_reverse),
        ]
        for skew in (0.0, 1e-9, 0.1, 0.5, 0.9, 1 - 1e-9)
    },
    "total_variation": (
        lambda p, q, n: D.total_variation(p, q, normalization=n),
        lambda p, q, **_: total_variation(p, q),
    ),
    **{
        f"amid {alpha} {skew} {divergence}": (
            lambda p, q, n, a=alpha, s=skew, d=divergence: D.amid(
                p, q, alpha=a, skew=s, divergence=d, normalization=n
            ),
            lambda p, q, a=alpha, s=skew, d=divergence, **_: amid(p, q, a, s, d),
        )
        for alpha, skew, divergence in [
            (-3.0, 0.3, "q||r"), (-1.0, 0.7, "p||r"), (0.0, 0.5, "r||q"), (0.5, 0.2, "r||p"),
            (1.0, 0.3, "q||r"), (1.0, 0.3, "r||p"), (1 - 1e-9, 0.4, "q||r"), (0.5, 1e-9, "q||r"),
            (0.5, 1 - 1e-9, "p||r"),
        ]
    },
    "todi": (
        lambda p, q, n: D.todi(p, q, normalization=n),
        lambda p, q, at=None, **_: todi(p, q, at),
    ),
    **{
        f"adaptive_kl {mass}": (
            lambda p, q, n, mass=mass: D.adaptive_kl(p, q, head_mass=mass, normalization=n),
            lambda p, q, at=None, tail=False, mass=mass: adaptive(p, q, mass, at, tail),
        )
        for mass in (0.3, 0.8)
    },
}  # fmt: skip
"""Name: (ours, the reference over probabilities)."""


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
    z, log_q, ids = pair_of(seed)
    return z, log_q, torch.arange(7) if normalization == "full" else ids


@pytest.mark.parametrize("name", CASES)
def test_recent_value_is_the_papers_sum(name):
    """The value is the paper's sum over probabilities, on each of the three sets of outcomes."""
    ours, reference = CASES[name]
    for normalization in NORMALIZATIONS:
        z, log_q, ids = drawn(1, normalization)
        expected = reference(
            *probabilities(z, log_q, ids, normalization), tail=normalization == "tail"
        )
        got = ours(*on_support(z, log_q, ids), normalization)
        assert got.item() == pytest.approx(float(expected), rel=1e-9, abs=2e-15), normalization


def reference_gradient(name, z, log_q, ids, normalization):
    """Return the differences of the reference for each logit, the weights held fixed."""
    _, reference = CASES[name]
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
        return reference(p, q, at=p0, tail=normalization == "tail")

    return double([float((value(j, step) - value(j, -step)) / (2 * step)) for j in range(len(z))])


@pytest.mark.parametrize("name", CASES)
def test_recent_gradient_is_the_difference(name):
    """The gradient is the central difference, where detached weights are held fixed."""
    ours, _ = CASES[name]
    for normalization in ("tail", "renorm"):  # the extreme arguments are on the full vocabulary
        z, log_q, ids = drawn(3, normalization)
        z, log_q, ids = z[:6], log_q[:6].log_softmax(-1), ids[ids < 6]
        got = autograd(lambda z: ours(*on_support(z, log_q, ids), normalization), z)  # noqa: B023
        expected = reference_gradient(name, z, log_q, ids, normalization)
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=2e-15)


@pytest.mark.parametrize("name", CASES)
def test_recent_divergence_is_stationary_at_equality(name):
    """p = q is stationary, and the value is 0."""
    ours, _ = CASES[name]
    for normalization in NORMALIZATIONS:
        _, log_q, ids = drawn(0, normalization)
        fn = lambda z: ours(*on_support(z, log_q, ids), normalization)  # noqa: E731, B023
        assert abs(fn(log_q).item()) < 1e-14
        assert autograd(fn, log_q).abs().max() < 1e-14


def test_total_variation_does_not_flatten_near_equality():
    """Next to p = q the gradient of the total variation has its usual size: a kink."""
    _, log_q, ids = drawn(0, "full")
    near = log_q + 1e-6 * torch.arange(7)
    grad = autograd(lambda z: D.total_variation(*on_support(z, log_q, ids)), near)
    assert grad.abs().max() > 1e-2
    flat = autograd(lambda z: D.reverse_kl(*on_support(z, log_q, ids), "full"), near)
    assert flat.abs().max() < 1e-5


FAR = [([0.0, -87.4, -40.0], [-87.4, 0.0, -1.0]), ([-0.7, -0.7, -87.4], [-87.4, -1e-3, -7.0])]
NEAR = [([-2e-5, -11.0, -16.0], [-1.9e-5, -11.1, -16.2]), ([-1.0, -1.0 + 1e-7, 0], [-1.0, -1.0, 0])]
"""Logits of p and q. e^-87.4 is 1e-38, the smallest normal number of float32."""

BOTH_SUMS = ("amid", "todi", "adaptive", "total", "skewed_forward 0.0", "skewed_reverse 0.0")
"""Sums in which rounding does not cancel: their error is absolute."""


@pytest.mark.parametrize("name", CASES)
def test_recent_extreme_arguments_stay_right(name):
    """Values and gradients at 1e-38, at tiny gaps, and with knobs next to their limits."""
    ours, _ = CASES[name]
    ids = torch.arange(3)
    for logits, teacher in FAR + NEAR:
        z, log_q = double(logits), double(teacher).log_softmax(-1)
        expected = float(CASES[name][1](*probabilities(z, log_q, ids, "full")))
        got = ours(*on_support(z, log_q, ids), "full").item()
        assert got == pytest.approx(expected, rel=1e-7, abs=1e-15 * name.startswith(BOTH_SUMS))
        gradient = autograd(lambda z: ours(*on_support(z, log_q, ids), "full"), z)  # noqa: B023
        slopes = reference_gradient(name, z, log_q, ids, "full")
        # The backward of log_softmax adds slopes that can cancel: they bound its rounding.
        scale = autograd(lambda x: ours(x, log_q, "full"), z.log_softmax(-1)).abs().max().item()  # noqa: B023
        atol = 1e-5 * slopes.abs().max().item() + 1e-14 * scale
        torch.testing.assert_close(gradient, slopes, rtol=0, atol=atol)


@pytest.mark.parametrize("name", CASES)
def test_recent_float32_stays_finite_and_close(name):
    """float32 at 1e-38 is finite and has the value of float64."""
    ours, _ = CASES[name]
    for logits, teacher in FAR:
        z, log_q = torch.tensor(logits), torch.tensor(teacher).log_softmax(-1)
        got = ours(*on_support(z, log_q, torch.arange(3)), "full").item()
        wide = ours(z.double().log_softmax(-1), double(teacher).log_softmax(-1), "full").item()
        assert got == pytest.approx(wide, rel=1e-4, abs=1e-6 * name.startswith(BOTH_SUMS))
        assert autograd(lambda z: ours(z.log_softmax(-1), log_q, "full"), z).isfinite().all()  # noqa: B023


def test_recent_impossible_tokens_give_the_limit():
    """A token impossible for one side has the limit, one impossible for both has none."""
    p = double([0.5, 0.5, 0.0]).log().requires_grad_()
    q = double([0.5, 0.25, 0.25]).log()
    ab = lambda p, q, a, b: D.alpha_beta_divergence(  # noqa: E731
        p, q, alpha=a, beta=b, normalization="full"
    )
    # alpha = beta = 1/2 is 4 (1 - sum sqrt(p q)); 2 (sqrt p - sqrt q)^2 per token.
    hellinger = 4 * (1 - 0.5 - math.sqrt(0.125))
    for a, b in ((p, q), (q, p)):
        assert ab(a, b, 0.5, 0.5).item() == pytest.approx(hellinger, rel=1e-12)
    assert ab(p, q, 1.0, 0.0).item() == math.inf and ab(q, p, 0.0, 1.0).item() == math.inf
    assert ab(p, q, 0.0, 1.0).item() == pytest.approx(0.5 * math.log(2))
    assert ab(q, p, 1.0, 0.0).item() == pytest.approx(0.5 * math.log(2))
    assert ab(p, q, 1.0, -0.5).item() == math.inf and ab(q, p, -0.5, 1.0).item() == math.inf
    finite = {
        "ab": lambda p, q: ab(p, q, 0.5, 0.5),
        "forward": lambda p, q: D.skewed_forward_kl(p, q, skew=0.3, normalization="full"),
        "reverse": lambda p, q: D.skewed_reverse_kl(p, q, skew=0.3, normalization="full"),
        "tv": lambda p, q: D.total_variation(p, q, normalization="full"),
        "amid": lambda p, q: D.amid(
            p, q, alpha=0.5, skew=0.3, divergence="q||r", normalization="full"
        ),
    }
    expected = {
        "ab": hellinger,
        "forward": float(skewed_forward([0.5, 0.5, 1e-30], [0.5, 0.25, 0.25], 0.3)),
        "reverse": float(skewed_reverse([0.5, 0.5, 1e-30], [0.5, 0.25, 0.25], 0.3)),
        "tv": 0.25,
        "amid": float(amid([0.5, 0.5, 1e-200], [0.5, 0.25, 0.25], 0.5, 0.3, "q||r")),
    }
    nothing = double([-math.inf])
    for name, fn in finite.items():
        assert fn(p, q).item() == pytest.approx(expected[name], rel=1e-9), name
        assert autograd(lambda x: fn(x, q), p.detach()).isfinite().all(), name  # noqa: B023
        assert autograd(lambda x: fn(x, p.detach()), q).isfinite().all(), name  # noqa: B023
        both = torch.cat([p.detach(), nothing]), torch.cat([q, nothing])
        assert fn(*both).item() == pytest.approx(expected[name], rel=1e-9), name
        assert autograd(lambda x: fn(x, both[1]), both[0]).isfinite().all(), name  # noqa: B023
    both = torch.cat([q, nothing]), torch.cat([double([0.2, 0.3, 0.5]).log(), nothing])
    for name in ("todi", "adaptive_kl 0.3"):
        assert CASES[name][0](*both, "full").isfinite(), name
        assert autograd(lambda x: CASES[name][0](x, both[1], "full"), both[0]).isfinite().all()  # noqa: B023


def test_recent_bad_knobs_are_refused_with_their_range():
    """A knob outside its domain, or with which the divergence is 0, is refused by name."""
    p, q = double([0.6, 0.3]).log(), double([0.5, 0.2]).log()
    for ours, _ in CASES.values():
        with pytest.raises(ValueError, match="'generalized' is not defined.*full, tail, renorm"):
            ours(p, q, "generalized")
        with pytest.raises(ValueError, match="identically 0"):
            ours(p[:1], q[:1], "renorm")
    with pytest.raises(ValueError, match="beta = inf are exponents"):
        D.alpha_beta_divergence(p, q, alpha=1.0, beta=math.inf)
    for skew in (1.0, -0.1, math.nan):
        for fn in (D.skewed_forward_kl, D.skewed_reverse_kl):
            with pytest.raises(ValueError, match=r"skew = .*\[0, 1\)"):
                fn(p, q, skew=skew)
    for alpha in (1.1, -math.inf, math.nan):
        with pytest.raises(ValueError, match="alpha = .* at most 1"):
            D.amid(p, q, alpha=alpha, skew=0.5, divergence="q||r")
    with pytest.raises(ValueError, match=r"skew = 1.5 .*\[0, 1\]"):
        D.amid(p, q, alpha=0.0, skew=1.5, divergence="q||r")
    for skew, zero, other in ((0.0, "p", "q"), (1.0, "q", "p")):
        for divergence in (f"{zero}||r", f"r||{zero}"):
            with pytest.raises(ValueError, match=f"makes r = {zero}, .* identically 0"):
                D.amid(p, q, alpha=0.0, skew=skew, divergence=divergence)
        assert D.amid(p, q, alpha=0.0, skew=skew, divergence=f"{other}||r") > 0
    for mass in (0.0, 1.0):
        with pytest.raises(ValueError, match="head_mass = .* between 0 and 1"):
            D.adaptive_kl(p, q, head_mass=mass)


def test_adaptive_head_always_has_the_first_and_no_tail():
    """The head has the first token even above head_mass, and never the tail bucket."""
    # q = (.6, .1 | .3), p = (.3, .2 | .5). Head {0}: w = .3/(.3 + .1 + .2) = 1/2.
    p, q = double([0.3, 0.2]).log(), double([0.6, 0.1]).log()
    half = 0.5 * (D.forward_kl(p, q) + D.reverse_kl(p, q)).item()
    assert D.adaptive_kl(p, q, head_mass=0.5).item() == pytest.approx(half, rel=1e-12)
    # The tail's .3 would still fit below .95. Head {0, 1}: w = .4/.6.
    w = 2 / 3
    expected = w * D.forward_kl(p, q).item() + (1 - w) * D.reverse_kl(p, q).item()
    assert D.adaptive_kl(p, q, head_mass=0.95).item() == pytest.approx(expected, rel=1e-12)
    # Less than the mean mass of 1/6 may still be in the head. Head {0, 1}: w = (.4 + .2)/.8.
    p, q = double([0.1, 0.3, *[0.15] * 4]).log(), double([0.5, *[0.1] * 5]).log()
    kl = [f(p, q, "full").item() for f in (D.forward_kl, D.reverse_kl)]
    found = D.adaptive_kl(p, q, head_mass=0.69, normalization="full").item()
    assert found == pytest.approx(0.75 * kl[0] + 0.25 * kl[1], rel=1e-12)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_recent_teacher_never_gets_a_gradient(normalization):
    """The teacher is detached, and bfloat16 is computed in float32."""
    p, q = (double([[0.3, 0.2], [0.6, 0.1]]).log().requires_grad_() for _ in range(2))
    sum(ours(p, q, normalization).sum() for ours, _ in CASES.values()).backward()
    assert q.grad is None and p.grad.isfinite().all()
    half = p.detach().bfloat16()
    assert all(ours(half, half, normalization).dtype is torch.float32 for ours, _ in CASES.values())


def authors(name):
    """Return our function for an entry of the golden file, of log-probs on the full vocabulary."""
    kind, *knobs = name.split()
    orders = {"pr": "q||r", "qr": "p||r", "rp": "r||q", "rq": "r||p"}
    return {
        "alpha_beta": lambda p, q: D.alpha_beta_divergence(
            p, q, alpha=float(knobs[0]), beta=float(knobs[1]), normalization="full"
        ),
        "skewed_forward": lambda p, q: D.skewed_forward_kl(
            p, q, skew=float(knobs[0]), normalization="full"
        ),
        "skewed_reverse": lambda p, q: D.skewed_reverse_kl(
            p, q, skew=float(knobs[0]), normalization="full"
        ),
        "total_variation": lambda p, q: D.total_variation(p, q, normalization="full"),
        "amid": lambda p, q: D.amid(
            p, q, alpha=float(knobs[0]), skew=0.3, divergence=orders[knobs[1]], normalization="full"
        ),
        "adaptive_kl": lambda p, q: D.adaptive_kl(
            p, q, head_mass=float(knobs[0]), normalization="full"
        ),
        "todi": lambda p, q: D.todi(p, q, normalization="full"),
    }[kind]


@pytest.mark.parametrize("name", sorted(GOLDEN.keys() - {"source", "inputs"}))
def test_recent_divergence_equals_its_authors_code(name):
    """Value and gradient are those of the authors' code, up to two constants that are named."""
    inputs, recorded = GOLDEN["inputs"], GOLDEN[name]
    z, log_q = double(inputs["student_logits"]), double(inputs["teacher_logits"]).log_softmax(-1)
    mask = torch.tensor(inputs["mask"])
    fn = lambda z: authors(name)(z.log_softmax(-1), log_q)[mask].mean()  # noqa: E731
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


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("seed", [5])
class TestCoupled:
    """The table of losses/README.md: one divergence written as another, at 1e-12."""

    @pytest.fixture
    def pair(self, seed, normalization):
        return on_support(*drawn(seed, normalization))

    def same(self, a, b):
        assert a.item() == pytest.approx(b.item(), rel=0, abs=1e-12)

    def test_coupled_alpha_beta_at_its_ends_is_kl(self, pair, normalization):
        p, q = pair
        for alpha, beta, kl_of in ((1.0, 0.0, D.forward_kl), (0.0, 1.0, D.reverse_kl)):
            got = D.alpha_beta_divergence(p, q, alpha=alpha, beta=beta, normalization=normalization)
            self.same(got, kl_of(p, q, normalization))

    def test_coupled_alpha_beta_is_continuous(self, pair, normalization):
        p, q = pair
        ab = lambda a, b: D.alpha_beta_divergence(  # noqa: E731
            p, q, alpha=a, beta=b, normalization=normalization
        )
        for alpha, beta in ((0.0, 0.6), (0.6, 0.0), (0.6, -0.6), (0.0, 0.0)):
            for da, db in ((1e-14, 0.0), (-1e-14, 0.0), (0.0, 1e-14), (-1e-14, -1e-14)):
                self.same(ab(alpha + da, beta + db), ab(alpha, beta))

    def test_coupled_amid_at_minus_one_is_skewed_kl(self, pair, normalization):
        p, q = pair
        for skew in (0.1, 0.5, 0.8):
            knobs = {"alpha": -1.0, "skew": skew, "normalization": normalization}
            self.same(
                D.amid(p, q, divergence="q||r", **knobs),
                D.skewed_forward_kl(p, q, skew=skew, normalization=normalization),
            )
            self.same(
                D.amid(p, q, divergence="p||r", **knobs),
                D.skewed_reverse_kl(p, q, skew=1 - skew, normalization=normalization),
            )

    def test_coupled_amid_at_one_is_taid_in_value(self, pair, normalization):
        p, q = pair
        for t in (0.4, 0.7, 1.0):
            got = D.amid(p, q, alpha=1.0, skew=t, divergence="r||p", normalization=normalization)
            self.same(got, D.taid(p, q, t, normalization, "kl"))

    def test_coupled_jsd_is_the_sum_of_skewed_kls(self, pair, normalization):
        p, q = pair
        for beta in (0.1, 0.5, 0.8):
            forward = D.skewed_forward_kl(p, q, skew=beta, normalization=normalization)
            reverse = D.skewed_reverse_kl(p, q, skew=1 - beta, normalization=normalization)
            self.same(
                beta * forward + (1 - beta) * reverse, D.generalized_jsd(p, q, beta, normalization)
            )

    def test_coupled_todi_is_both_kls_in_value_alone(self, pair, normalization, seed):
        z, log_q, ids = drawn(seed, normalization)
        both = lambda z: (  # noqa: E731
            D.forward_kl(*on_support(z, log_q, ids), normalization)
            + D.reverse_kl(*on_support(z, log_q, ids), normalization)
        )
        todi = lambda z: D.todi(*on_support(z, log_q, ids), normalization=normalization)  # noqa: E731
        self.same(todi(z), both(z))
        assert (autograd(todi, z) - autograd(both, z)).abs().max() > 1e-2
