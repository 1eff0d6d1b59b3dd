"""What a run has spent until its KL is small enough, against a run of four steps by hand."""

import pytest

from tests.studies.until_kl import spent_until


def records(kls):
    tokens, seconds = [10.0, 20.0, 40.0, 80.0], [1.0, 2.0, 3.0, 4.0]
    steps = [
        {"step": step, "rollout/tokens": tokens[step - 1], "time/step": seconds[step - 1]}
        for step in (1, 2, 3, 4)
    ]
    return [one | ({"eval/reverse_kl": kls[one["step"]]} if one["step"] in kls else {})
            for one in ({"step": 0}, *steps)]  # fmt: skip


def test_spent_until_ends_between_two_evaluations():
    """From 0.16 to 0.01 in two steps, 0.04 is half of the way on a logarithmic axis."""
    spent = spent_until(records({0: 1.0, 2: 0.16, 4: 0.01}), 5, 0.04)
    assert spent == pytest.approx((3.0, 5 * (10 + 20 + 40), 1 + 2 + 3))
    # 0.02 is three quarters of the way: half of step 4 more.
    spent = spent_until(records({0: 1.0, 2: 0.16, 4: 0.01}), 5, 0.02)
    assert spent == pytest.approx((3.5, 5 * (10 + 20 + 40 + 40), 1 + 2 + 3 + 2))


def test_spent_until_a_kl_that_is_never_reached():
    assert spent_until(records({0: 1.0, 4: 0.5}), 5, 0.04) is None
