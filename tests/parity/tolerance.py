"""How far two correct runs of one loss may differ on two processors, derived from the arithmetic.

Write eps for the dtype's machine epsilon: 2^-23 in float32, 2^-52 in float64. One rounding changes
a number by at most eps/2 of its magnitude, and one ulp is at most eps of its magnitude. Inputs are
the same bits on both processors, and so is every result of +, -, * on inputs alone (IEEE 754).
What remains:

1. ``exp``. Sleef, SVML, MKL's VML and glibc promise one ulp or better, so two of them differ by at
   most 2 eps of the value.
2. Each later rounding acts on operands that may differ already: eps/2 on each processor, eps
   between the two. A fused multiply-add leaves one rounding out, which the same eps covers. The
   longest chain after ``exp`` has five roundings (times the advantage, plus the squared log-ratio,
   times the weight, times the incoming gradient, plus the gradient of the other branch).
   Together: ``PER_TOKEN`` = 8 eps, with one eps to spare.
3. A sum of n terms. Its order depends on the width of the vector registers. In any order its error
   is at most (n - 1) eps/2 of the sum of the terms' magnitudes (Higham, Accuracy and Stability of
   Numerical Algorithms, 4.2), so two orders differ by at most n eps of it.

Terms cancel: the policy gradient against the squared log-ratio, one token against another. Each
bound is therefore relative to the magnitude of the terms and never to that of the result. The
magnitudes below are the formulas at the top of prime_composer/losses/{default,ipo,sft,
sampled_reverse_kl}.py in float64, without the trust region. A dropped token only makes them larger.

Outside the mask the magnitude is 0: the gradient there has to be exactly 0. Shares of tokens are
ratios of integers, so they have to be equal. Both hold while no token is so close to the edge of
a trust region that ``exp`` moves it to the other side, which a test asserts of the inputs.
"""

import math

import torch

PER_TOKEN = 8
"""Multiples of eps: items 1 and 2 above."""

SHARES = {
    "is_masked",
    "is_masked_low",
    "is_masked_high",
    "masked_advantage_positive",
    "masked_advantage_negative",
}
"""Metrics that are a number of tokens divided by a number of tokens."""


def bounds(kind, case):
    """Return the largest differences that are no mistake: ``{"loss", "grad", "metrics"}``.

    ``metrics`` is a function of a metric's plain name.
    """
    rows, knobs = case.rows, case.knobs(kind)
    eps = torch.finfo(case.dtype).eps
    length = len(rows["mask"])
    weights = rows["weights"] or [1.0] * length
    log_ratio = [p - mu for p, mu in zip(rows["trainer"], rows["inference"], strict=True)]
    ratio = [math.exp(x) for x in log_ratio]
    gap = [q - p for q, p in zip(rows["ref"], rows["trainer"], strict=True)]
    if kind in ("sft", "ce"):
        loss_terms = [abs(p) for p in rows["trainer"]]
        grad_terms = [1.0] * length
    else:
        kl_tau = knobs.get("kl_tau", 1e-3)
        signal = gap if kind in ("opd", "ref_kl") else rows["advantages"]
        policy = [abs(a) * r for a, r in zip(signal, ratio, strict=True)]
        loss_terms = [g + kl_tau * x**2 for g, x in zip(policy, log_ratio, strict=True)]
        grad_terms = [g + 2 * kl_tau * abs(x) for g, x in zip(policy, log_ratio, strict=True)]
    scale = [weight * m for weight, m in zip(weights, rows["mask"], strict=True)]
    loss = sum(s * term for s, term in zip(scale, loss_terms, strict=True))
    mismatch = [r + abs(x) + 1 for r, x in zip(ratio, log_ratio, strict=True)]

    def metric(name):
        if name in SHARES:
            return 0.0
        terms = {"nll": rows["trainer"], "ref_kl": gap, "teacher_kl": gap}.get(name, mismatch)
        # A mean of any of the tokens has a magnitude of at most the largest one's.
        return (PER_TOKEN + length) * eps * max(abs(x) for x in terms)

    return {
        "loss": (PER_TOKEN + length) * eps * loss,
        "grad": [PER_TOKEN * eps * s * term for s, term in zip(scale, grad_terms, strict=True)],
        "metrics": metric,
    }


def differences(ours, theirs, allowed):
    """Return what differs by more than ``allowed``, as text. NaN differs from everything."""
    wrong = []
    deltas = (ours["grad"][0].double() - theirs["grad"][0].double()).abs().tolist()
    for t, (delta, limit) in enumerate(zip(deltas, allowed["grad"], strict=True)):
        if not delta <= limit:
            wrong.append(f"grad[{t}]: off by {delta:.3g}, {limit:.3g} allowed")
    delta = abs(ours["loss"].item() - theirs["loss"].item())
    if not delta <= allowed["loss"]:
        wrong.append(f"loss: off by {delta:.3g}, {allowed['loss']:.3g} allowed")
    for name, value in theirs["metrics"].items():
        delta, limit = abs(ours["metrics"][name].item() - value.item()), allowed["metrics"](name)
        if not delta <= limit:
            wrong.append(f"{name}: off by {delta:.3g}, {limit:.3g} allowed")
    return wrong
