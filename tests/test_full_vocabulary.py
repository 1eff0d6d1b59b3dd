"""Divergences over two heads, against plain formulas over whole logits in float64."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from prime_composer import divergences
from prime_composer.contract import Logits, TwoHeads
from prime_composer.full_vocabulary import WholeVocabulary, blocks, compare, teacher_logprobs
from prime_composer.full_vocabulary import token_blocks as general
from prime_composer.full_vocabulary.heads import check
from tests.builders import LargestTensor

N, D, D_TEACHER, V = 7, 5, 3, 37
BLOCKS = [(1, 37, 6), (3, 10, 0), (3, 10, 6)]
"""Rows, ids and padding of the student: one row, an edge at the common ids, edges anywhere."""
FLOOR = math.log(1e-7)


def asked(name: str, /, **knobs):
    """Return a divergence of two heads by its name."""
    return lambda two: compare(two, getattr(divergences, name), **knobs)


def by_token_blocks(name: str, /, **knobs):
    """Return the same, without the kernel."""
    return lambda two: compare(two, lambda *p, **k: getattr(divergences, name)(*p, **k), **knobs)


reverse_kl, forward_kl = asked("reverse_kl"), asked("forward_kl")


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


OBJECTIVES = {
    "reverse": (reverse_kl, plain_reverse),
    "forward": (forward_kl, plain_forward),
    **{
        f"jsd {beta}": (
            asked("generalized_jsd", beta=beta),
            lambda two, beta=beta: plain_jsd(two, beta),
        )
        for beta in (0.1, 0.7)
    },
    **{
        f"taid {t} {form}": (
            asked("taid", t=t, form=form),
            lambda two, t=t, form=form: plain_taid(two, t, form),
        )
        for t, form in ((0.4, "cross_entropy"), (0.9, "kl"), (0.0, "kl"), (1.0, "cross_entropy"))
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


@pytest.mark.parametrize("objective", [x for x in OBJECTIVES if "cross_entropy" not in x])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_models_have_a_divergence_of_exactly_zero(objective, dtype):
    student = logits(0, v=3000, dtype=dtype, with_bias=True, softcap=5.0)
    two = heads(student, student, temperature=0.7)
    # The logarithm of JSD's mixture rounds.
    limit = 1e-6 if "jsd" in objective else 0
    assert (OBJECTIVES[objective][0](two).abs() <= limit).all()


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
        (asked("generalized_jsd", beta=0.5)(two), jsd / 2),
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
        for value in (reverse_kl(two), by_token_blocks("reverse_kl")(two)):
            torch.testing.assert_close(value, torch.tensor([expected]))
    # Disjoint distributions: log 2 at most, for any logits.
    opposite = Logits(-torch.ones(1, 1), weight)
    value = asked("generalized_jsd", beta=0.5)(TwoHeads(student, (opposite,)))
    torch.testing.assert_close(value, torch.tensor([math.log(2)]))


@pytest.mark.parametrize("gap", [95.0, 2000.0])
@pytest.mark.parametrize("padded", ["student", "teacher"])
@pytest.mark.parametrize("objective", OBJECTIVES)
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
    # In token blocks the roundings of a row's gradient meet the head's entries of this size too.
    in_blocks = objective.startswith("jsd")
    close = {"rtol": max(1e-5, gap / 2**20), "atol": max(1e-5, gap / 2**24 * in_blocks)}
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


def test_a_teacher_with_other_rows_is_refused():
    """By the check itself: with the shapes executed, as in these tests, jaxtyping speaks before."""
    two = object.__new__(TwoHeads)
    two.__dict__.update(
        student=logits(0), teachers=(logits(1, n=N + 1),), teacher_weights=None, temperature=1.0
    )
    with pytest.raises(ValueError, match="teacher has 8 rows and the student 7"):
        check(two)


def test_ids_that_a_head_lacks_are_refused():
    with pytest.raises(ValueError, match="reach from 9 to 9, and the smallest head .* of 9"):
        teacher_logprobs(heads(None, logits(1, v=9)), torch.tensor([[9]] * N))


def test_all_rows_masked_with_several_teachers_give_zero():
    weights = torch.full((N, 2), 0.5, dtype=torch.float64)
    mask = torch.zeros(N, dtype=torch.bool)
    two = TwoHeads(logits(0), (logits(1), logits(2)), teacher_weights=weights, mask=mask)
    assert torch.equal(reverse_kl(two), torch.zeros(N, dtype=torch.float64))


EVERY = {
    "reverse_kl": {},
    "forward_kl": {},
    "taid": {"t": 0.3},
    "kls_and_entropy": {},
    "generalized_jsd": {"beta": 0.2},
    "alpha_beta_divergence": {"alpha": 0.6, "beta": -0.2},
    "skewed_forward_kl": {"skew": 0.3},
    "skewed_reverse_kl": {"skew": 0.7},
    "total_variation": {},
    "todi": {},
}
"""The divergences that a loss asks for, with numbers."""


def value_and_gradients(divergence, two) -> list[Tensor]:
    value = divergence(two)
    incoming = torch.randn(value.shape, generator=torch.Generator().manual_seed(9)).to(value)
    return [value, *torch.autograd.grad(value, leaves(two), incoming)]


@pytest.mark.parametrize("setting", ["bias, cap and scale", "three teachers"])
@pytest.mark.parametrize("name", EVERY)
def test_any_divergence_is_the_function_of_log_probs(name, setting):
    """By a kernel and by token blocks, in the words of ``prime_composer.divergences``."""
    two, knobs = SETTINGS[setting](), EVERY[name]
    function = getattr(divergences, name)
    expected = value_and_gradients(
        lambda two: function(*log_outcomes(two), normalization="full", **knobs), two
    )
    for ours in (asked(name, **knobs), by_token_blocks(name, **knobs)):
        for found, wanted in zip(value_and_gradients(ours, two), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("rows,chunk,padding", BLOCKS)
@pytest.mark.parametrize("name", EVERY)
def test_blocks_change_no_number(name, rows, chunk, padding, monkeypatch):
    """A result is the same whatever the blocks, up to the rounding of float64 sums."""
    student, ours = logits(0, v=V + padding, softcap=4.0), asked(name, **EVERY[name])
    two = heads(student, logits(1, d=D_TEACHER))
    expected = value_and_gradients(ours, two)
    monkeypatch.setitem(blocks.BLOCKS, "cpu", (rows, chunk))
    monkeypatch.setitem(general.TOKENS, "cpu", rows)
    monkeypatch.setitem(general.CHUNK, "cpu", chunk)
    monkeypatch.setitem(general.CACHED, "cpu", 2 * rows * V)
    for found, wanted in zip(value_and_gradients(ours, two), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


def test_teachers_log_probs_at_ids_are_its_softmax_in_any_blocks(monkeypatch):
    monkeypatch.setitem(general.TOKENS, "cpu", 3)
    two, ids = heads(), torch.randint(0, V, (N, 2), generator=torch.Generator().manual_seed(4))
    expected = log_outcomes(two)[1].gather(1, ids)
    torch.testing.assert_close(teacher_logprobs(two, ids), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["kls_and_entropy", "skewed_reverse_kl"])
def test_masked_rows_change_nothing(name, garbage):
    """Neither a value nor a gradient, whatever their hidden states, weights and knobs hold."""
    g = torch.Generator().manual_seed(3)
    mask = torch.rand(N, generator=g) > 0.4
    assert mask.any() and not mask.all()
    shares = torch.rand(N, 2, generator=g, dtype=torch.float64).softmax(-1)
    base = heads(logits(0), logits(1), logits(2, d=2), teacher_weights=shares)

    def spoiled(x):
        if not isinstance(x, Tensor):
            return x
        return x.detach().masked_fill(~(mask if x.dim() == 1 else mask[:, None]), garbage)

    knobs = EVERY[name]
    dirty_leaf = spoiled(base.student.hidden).requires_grad_()
    dirty = TwoHeads(
        dataclasses.replace(base.student, hidden=dirty_leaf),
        tuple(dataclasses.replace(x, hidden=spoiled(x.hidden)) for x in base.teachers),
        spoiled(shares),
        mask=mask | (torch.arange(N) < 3),
    ).masked(mask | (torch.arange(N) >= 3))
    clean = asked(name, **knobs)(base).view(N, -1).sum(1)
    found = asked(name, **{k: spoiled(x) for k, x in knobs.items()})(dirty).view(N, -1).sum(1)
    torch.testing.assert_close(found, torch.where(mask, clean, 0.0))
    found.sum().backward()
    clean[mask].sum().backward()
    torch.testing.assert_close(dirty_leaf.grad, base.student.hidden.grad)
    assert not dirty_leaf.grad[~mask].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["kls_and_entropy", "generalized_jsd"])
def test_no_row_gives_a_zero_gradient(name, dtype):
    """Fresh memory is full of NaN (``conftest``). Rows of which none counts: the contract's."""
    student = logits(0, n=0, v=V + 6, dtype=dtype, with_bias=True)
    two = heads(student, logits(1, n=0, dtype=dtype))
    asked(name, **EVERY[name])(two).sum().backward()
    assert all(not leaf.grad.any() for leaf in leaves(two))


@pytest.mark.parametrize("name", ["kls_and_entropy", "generalized_jsd"])
def test_the_teacher_gets_no_gradient(name):
    two = heads()
    asked(name, **EVERY[name])(two).sum().backward()
    assert two.teachers[0].hidden.grad is None and two.teachers[0].weight.grad is None


@pytest.mark.parametrize(
    "name,largest",
    [("kls_and_entropy", 500), ("generalized_jsd", 8 * 500)],
)
def test_the_logits_of_a_batch_never_exist_at_once(name, largest, monkeypatch):
    """Of 16,000 logits a kernel has a block, and token blocks those of eight tokens."""
    monkeypatch.setitem(blocks.BLOCKS, "cpu", (8, 60))
    monkeypatch.setitem(general.LOGITS, "cpu", 8 * 500)
    two = heads(logits(0, n=32, d=1, v=500), logits(1, n=32, d=1, v=500))
    with LargestTensor() as watch:
        torch.autograd.grad(asked(name, **EVERY[name])(two).sum(), leaves(two))
    assert watch.largest <= largest


@pytest.mark.parametrize("name", ["kls_and_entropy", "taid", "generalized_jsd"])
def test_rows_of_one_teacher_are_those_of_that_teacher_alone(name):
    """A teacher without a weight in a row changes nothing there, not even the bucket's ids."""
    student, small, large = logits(0, v=V + 5), logits(1), logits(2, d=2, v=V + 2)
    one, other = TwoHeads(student, (small,)), TwoHeads(student, (large,))
    weights = torch.zeros(N, 2, dtype=torch.float64)
    weights[:, 0] = torch.arange(N) % 2
    weights[:, 1] = 1 - weights[:, 0]
    mask = torch.arange(N) != 3
    both = TwoHeads(student, (small, large), teacher_weights=weights, mask=mask)

    def wanted(_):
        first, second = (asked(name, **EVERY[name])(two) for two in (one, other))
        shape = (N, *[1] * (first.dim() - 1))
        rows = torch.where(weights[:, 0].bool().view(shape), first, second)
        return torch.where(mask.view(shape), rows, 0.0)

    for found, expected in zip(
        value_and_gradients(asked(name, **EVERY[name]), both),
        value_and_gradients(wanted, both),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("setting", [name for name in SETTINGS if "other sizes" not in name])
def test_support_of_all_ids_has_the_log_probs_of_both_sides(setting):
    """What a loss sees that reads the tensors themselves, with the gradient of the student's."""
    two = SETTINGS[setting]()
    mask = torch.arange(N) != 2
    support = WholeVocabulary(two).masked(mask)
    k = min(side.size for side in two.sides)
    log_p, log_q = (x[:, :k] for x in log_outcomes(two))
    fill = -math.log(k + 1)
    assert torch.equal(support.token_ids[0], torch.arange(k))
    torch.testing.assert_close(support.teacher_logprobs[mask], log_q[mask], rtol=0, atol=1e-12)
    assert (
        support.student_logprobs[2] == fill
    ).all() and not support.teacher_logprobs.requires_grad
    incoming = torch.randn(N, k, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    incoming[2] = 0
    torch.testing.assert_close(support.student_logprobs[mask], log_p[mask], rtol=0, atol=1e-12)
    grads = torch.autograd.grad(support.student_logprobs, leaves(two), incoming)
    for grad, wanted in zip(grads, torch.autograd.grad(log_p, leaves(two), incoming), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-11)
