"""Losses of rewards and a teacher on the same tokens: rlsd, rlrt, rlcsd, sdar."""

import json
import math
from pathlib import Path

import pytest
import torch

from prime_composer.contract import LossInputs
from prime_composer.losses import LOSS_TYPES, setup_loss_fn

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "authors_rl_and_teacher.json").read_text()
)
RECORDED = GOLDEN["inputs"]
RLSD, RLRT, SDAR = LOSS_TYPES["rlsd"], LOSS_TYPES["rlrt"], LOSS_TYPES["sdar"]
RLCSD = LOSS_TYPES["rlcsd"]

# Two responses of four tokens, of advantage .75 and -.25, and one that is masked.
P = [0.7, 0.2, 0.9, 0.35, 0.4, 0.8, 0.05, 0.5, 0.3]
MU = [0.6, 0.25, 0.9, 0.3, 0.5, 0.75, 0.06, 0.55, 0.3]
Q = [0.5, 0.4, 0.85, 0.35, 0.2, 0.9, 0.06, 0.54, 0.9]
A = [0.75] * 4 + [-0.25] * 4 + [5.0]
C = [0.4, 0.8, 0.8, 0.35, 0.9, 0.1, 0.05, 0.6, 0.1]  # with wrong hints
W = [1.0, 2.0, 0.5, 1.0, 1.0, 3.0, 0.25, 1.0, 1.0]
SEGMENTS = [0] * 4 + [1] * 5
MASK = [True] * 8 + [False]


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def inputs_of(**changed):
    values = dict(
        trainer_logprobs=double(P).log().requires_grad_(),
        inference_logprobs=double(MU).log(),
        ref_logprobs=double(Q).log(),
        contrast_logprobs=double(C).log(),
        advantages=double(A),
        loss_mask=torch.tensor(MASK),
        loss_weights=double(W),
        segment_ids=torch.tensor(SEGMENTS),
    )
    return LossInputs(**{**values, **changed})


def run(config, inputs=None, steps=0):
    inputs = inputs_of() if inputs is None else inputs
    loss = setup_loss_fn(config)
    for _ in range(steps):
        loss(inputs)
        loss.end_step()
    out = loss(inputs)
    (grad,) = torch.autograd.grad(out.loss, inputs.trainer_logprobs)
    return out, grad


def rlsd_weight(p, q, a, clip):
    return min(max((q / p) ** math.copysign(1, a), 1 - clip), 1 + clip)


def rlrt_weight(p, q, a, clip):
    return min(max(p / q, 1 - clip), 1 + clip) if a > 0 else 1.0


def written(weight, clip, mix, mean_one, delta=0.06, kl_tau=0.01):
    """Return loss and gradient by the formula, token by token, in probabilities."""
    weights = [weight(p, q, a, clip) for p, q, a in zip(P, Q, A, strict=True)]
    if mean_one:
        means = [sum(weights[:4]) / 4, sum(weights[4:8]) / 4]
        weights = [w / means[s] for w, s in zip(weights, SEGMENTS, strict=True)]
    loss, grad = 0.0, []
    for p, mu, a, w, lw, m in zip(P, MU, A, weights, W, MASK, strict=True):
        drop = p - mu > delta if a > 0 else p - mu < -delta
        pull = 0.0 if drop else a * (1 - mix + mix * w) * p / mu
        loss += m * lw * (-pull + kl_tau * math.log(p / mu) ** 2)
        grad.append(m * lw * (-pull + 2 * kl_tau * math.log(p / mu)))
    return loss, grad


@pytest.mark.parametrize("mean_one", [False, True])
@pytest.mark.parametrize("mix", [0.5, 1.0])
@pytest.mark.parametrize("clip", [0.2, 0.9])
@pytest.mark.parametrize(("cls", "weight"), [(RLSD, rlsd_weight), (RLRT, rlrt_weight)])
def test_reweighted_loss_is_its_formula(cls, weight, clip, mix, mean_one):
    """Value and gradient, with tokens inside and outside of the trust region and of the clip."""
    config = cls(
        clip=clip,
        mix=mix,
        normalize="mean_one" if mean_one else "none",
        delta_low=0.06,
        delta_high=0.06,
        kl_tau=0.01,
    )
    out, grad = run(config)
    loss, expected = written(weight, clip, mix, mean_one)
    assert out.loss.item() == pytest.approx(loss, rel=1e-12)
    assert grad.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert out.metrics[f"{cls.model_fields['type'].default}/is_masked"].item() == 2 / 8


@pytest.mark.parametrize("cls", [RLSD, RLRT])
def test_reweighted_gradient_is_autograds_of_the_formula(cls):
    """With detached weights, the graph of -A w p/mu has the same gradient."""
    log_p = double(P).log().requires_grad_()
    sign = 1 if cls is RLSD else -1
    a, mask = double(A), torch.tensor(MASK)
    evidence = (sign * a.sign() * (double(Q).log() - log_p.detach())).exp()
    w = evidence.clamp(0.8, 1.2)
    if cls is RLRT:
        w = torch.where(a > 0, w, 1.0)
    loss = -(double(W) * a * w * (log_p - double(MU).log()).exp())[mask].sum()
    (expected,) = torch.autograd.grad(loss, log_p)
    out, grad = run(cls(mix=1.0, kl_tau=0.0))
    torch.testing.assert_close(out.loss, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-15)


def test_rlsd_without_reweighting_is_the_default_loss():
    """With mix = 0, or with a teacher that is the student, nothing is left but RL."""
    out, grad = run(LOSS_TYPES["default"]())
    for config, inputs in (
        (RLSD(mix=0.0), inputs_of()),
        (RLRT(mix=0.0), inputs_of()),
        (RLSD(mix=1.0), inputs_of(ref_logprobs=double(P).log())),
        (RLRT(), inputs_of(ref_logprobs=double(P).log())),
    ):
        same, same_grad = run(config, inputs)
        assert torch.equal(same.loss, out.loss) and torch.equal(same_grad, grad)


def test_rlsd_decays_to_the_default_loss():
    """The share falls linearly, and a checkpoint continues it."""
    config = RLSD(mix=0.8, decay_steps=4)
    for steps, mix in ((0, 0.8), (1, 0.6), (3, 0.2), (4, 0.0), (9, 0.0)):
        out, grad = run(config, steps=steps)
        _, expected = run(RLSD(mix=mix))
        assert out.metrics["rlsd/mix"].item() == pytest.approx(mix, abs=1e-12)
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-15)
    loss = setup_loss_fn(config)
    loss(inputs_of())
    loss.end_step()
    resumed = setup_loss_fn(config)
    resumed.load_state_dict(json.loads(json.dumps(loss.state_dict())))
    assert resumed(inputs_of()).metrics["rlsd/mix"].item() == pytest.approx(0.6)


def test_a_mean_of_one_keeps_the_credit_of_a_response():
    """The metric is the mean weight over the pack: 1, and not 1 without the normalization."""
    assert run(RLSD(normalize="mean_one"))[0].metrics["rlsd/weight"].item() == pytest.approx(1)
    assert run(RLSD())[0].metrics["rlsd/weight"].item() != pytest.approx(1, abs=0.01)


def test_rlrt_leaves_wrong_rollouts_alone():
    """Tokens of negative advantage train as under plain RL, whatever the teacher says."""
    _, grad = run(RLRT(clip=0.9))
    _, plain = run(LOSS_TYPES["default"]())
    assert torch.equal(grad[4:], plain[4:]) and not torch.equal(grad[:4], plain[:4])


@pytest.mark.parametrize("cls", [RLSD, RLRT, SDAR])
def test_a_missing_teacher_score_makes_the_sum_nan(cls):
    """NaN at a token of the mask is never taken for a score, also where the weight is 1."""
    for position in (0, 5):
        q = double(Q).log()
        q[position] = math.nan
        assert setup_loss_fn(cls())(inputs_of(ref_logprobs=q)).loss.isnan()


def test_an_impossible_token_has_a_finite_weight():
    """A teacher that gives no probability at all reaches the clip range, and no infinity."""
    q = double(Q).log()
    q[[0, 5]] = -math.inf
    for cls in (RLSD, RLRT):
        out, grad = run(cls(), inputs_of(ref_logprobs=q))
        assert out.loss.isfinite() and grad.isfinite().all()


def recorded_inputs():
    """Return the recorded batch as one pack, with the sampler equal to the student."""
    mask = torch.tensor(RECORDED["mask"])
    log_p = double(RECORDED["student_logprobs"]).flatten()
    rows, width = mask.shape
    return LossInputs(
        trainer_logprobs=log_p.clone().requires_grad_(),
        inference_logprobs=log_p,
        ref_logprobs=double(RECORDED["teacher_logprobs"]).flatten(),
        advantages=double(RECORDED["advantages"]).repeat_interleave(width),
        loss_mask=mask.flatten(),
        segment_ids=torch.arange(rows).repeat_interleave(width),
    )


@pytest.mark.parametrize("name", [n for n in GOLDEN if n.startswith(("rlsd ", "sdar "))])
def test_loss_equals_its_authors_code(name):
    """Gradients are the authors'. With mu = p, that of RL is minus the reweighted advantage."""
    kind, *knobs = name.split()
    inputs, recorded = recorded_inputs(), GOLDEN[name]
    tokens = int(inputs.loss_mask.sum())
    if kind == "sdar":
        out, grad = run(SDAR(beta=float(knobs[0])), inputs)
        assert out.metrics["sdar/gate"].item() == pytest.approx(recorded["gate"], rel=1e-12)
    else:
        mix, clip = map(float, knobs[-2:])
        out, grad = run(RLSD(mix=mix, clip=clip), inputs)
    if "advantages" in recorded:
        expected = -double(recorded["advantages"]).flatten() * inputs.loss_mask
    else:
        expected = tokens * double(recorded["gradient"]).flatten()
        assert out.loss.item() == pytest.approx(tokens * recorded["mean"], rel=1e-12)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-14)


def test_sdar_gradient_is_minus_the_gate():
    """Value and gradient by the formula, in probabilities."""
    out, grad = run(SDAR(beta=2.0))
    gates = [1 / (1 + (p / q) ** 2.0) for p, q in zip(P, Q, strict=True)]
    terms = zip(gates, P, Q, W, MASK, strict=True)
    assert out.loss.item() == pytest.approx(
        sum(m * w * g * math.log(q / p) for g, p, q, w, m in terms), rel=1e-12
    )
    expected = [-m * w * g for g, w, m in zip(gates, W, MASK, strict=True)]
    assert grad.tolist() == pytest.approx(expected, rel=1e-12)


def test_sdar_is_stationary_in_expectation_at_the_teacher():
    """Over y ~ p the expected gradient is 0 at p = q, and reaches toward q elsewhere."""

    def expected_gradient(z, log_q):
        z = z.clone().requires_grad_()
        log_p = z.log_softmax(-1)
        inputs = LossInputs(
            trainer_logprobs=log_p,
            inference_logprobs=log_p.detach(),
            ref_logprobs=log_q,
            advantages=None,
            loss_mask=torch.ones(4, dtype=torch.bool),
            loss_weights=log_p.detach().exp(),
        )
        (grad,) = torch.autograd.grad(setup_loss_fn(SDAR())(inputs).loss, z)
        return grad

    z = double([0.3, -0.2, 1.0, -1.5])
    assert expected_gradient(z, z.log_softmax(-1)).abs().max() < 1e-15
    higher = (z + double([0.0, 0.0, 0.0, 2.0])).log_softmax(-1)
    assert expected_gradient(z, higher)[3] < 0


def shifted_advantage(a, e, temperature, scale, clip, threshold):
    s = min(max(scale * math.tanh(e / temperature), -clip), clip)
    s = 0.0 if abs(s) <= threshold else s
    return max(a + s, 0.0) if a > 0 else min(a + s, 0.0) if a < 0 else 0.0


@pytest.mark.parametrize(
    "knobs",
    [
        {"temperature": 0.02, "scale": 0.5, "clip": 2.0, "threshold": 0.02},
        {"temperature": 0.5, "scale": 0.9, "clip": 0.35, "threshold": 0.1},
        {"temperature": 3.0, "scale": 1.0, "clip": 2.0, "threshold": 0.2},
    ],
    ids=["sign", "clipped", "threshold"],
)
def test_rlcsd_is_its_formula(knobs):
    """Value and gradient, token by token; an advantage is cancelled and never turned."""
    out, grad = run(RLCSD(**knobs, delta_low=0.06, delta_high=0.06, kl_tau=0.01))
    loss, expected, signals = 0.0, [], []
    for p, mu, q, c, a, w, m in zip(P, MU, Q, C, A, W, MASK, strict=True):
        drop = p - mu > 0.06 if a > 0 else p - mu < -0.06
        signals.append(shifted_advantage(a, math.log(q / c), **knobs))
        pull = 0.0 if drop else signals[-1] * p / mu
        loss += m * w * (-pull + 0.01 * math.log(p / mu) ** 2)
        expected.append(m * w * (-pull + 0.02 * math.log(p / mu)))
    assert out.loss.item() == pytest.approx(loss, rel=1e-12)
    assert grad.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert out.metrics["rlcsd/cancelled"].item() == signals[:8].count(0.0) / 8


def test_rlcsd_gradient_is_autograds_of_the_formula():
    """With the advantage detached, the graph of -A' p/mu has the same gradient."""
    log_p, a, mask = double(P).log().requires_grad_(), double(A), torch.tensor(MASK)
    s = 0.9 * torch.tanh((double(Q).log() - double(C).log()) / 0.5)
    signal = a.sign() * (a.abs() + a.sign() * s).clamp(min=0)
    loss = -(double(W) * signal * (log_p - double(MU).log()).exp())[mask].sum()
    (expected,) = torch.autograd.grad(loss, log_p)
    out, grad = run(RLCSD(temperature=0.5, scale=0.9, threshold=0.0, kl_tau=0.0))
    torch.testing.assert_close(out.loss, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-15)


def test_rlcsd_without_a_contrast_is_the_default_loss():
    """Right and wrong hints that say the same leave RL, and A = 0 trains nothing."""
    same, same_grad = run(RLCSD(), inputs_of(contrast_logprobs=double(Q).log()))
    out, grad = run(LOSS_TYPES["default"]())
    assert torch.equal(same.loss, out.loss) and torch.equal(same_grad, grad)
    _, grad = run(RLCSD(kl_tau=0.0), inputs_of(advantages=torch.zeros(9, dtype=torch.float64)))
    assert (grad == 0).all()
    c = double(C).log()
    c[2] = math.nan
    assert setup_loss_fn(RLCSD())(inputs_of(contrast_logprobs=c)).loss.isnan()


@pytest.mark.parametrize("name", [n for n in GOLDEN if n.startswith("rlcsd ")])
def test_rlcsd_equals_its_authors_code(name):
    """Gradients are the authors' times the tokens of the mean that each token belongs to."""
    temperature, beta, lam, threshold, clip = map(float, name.split()[1:])
    inputs, recorded = recorded_inputs(), GOLDEN[name]
    valid = torch.tensor(RECORDED["wrong_valid"])
    wrong = double(RECORDED["wrong_logprobs"]).exp() * valid.unsqueeze(-1)
    c = (wrong.sum(1) / valid.sum(1, keepdim=True)).log().flatten()
    inputs.contrast_logprobs = c
    knobs = dict(temperature=temperature, scale=beta * lam, clip=clip, threshold=threshold)
    _, grad = run(RLCSD(**knobs), inputs)
    s = (beta * lam * torch.tanh((inputs.ref_logprobs - c) / temperature)).clamp(-clip, clip)
    with_s = (s.abs() > threshold) & inputs.loss_mask
    count = int(with_s.sum())
    assert count == recorded["selected"]
    tokens = torch.where(with_s, count, int(inputs.loss_mask.sum()) - count)
    expected = tokens * double(recorded["gradient"]).flatten()
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-14)
