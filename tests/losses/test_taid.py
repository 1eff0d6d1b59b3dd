"""The schedule against its authors' numbers, and who moves it."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from prime_composer.contract import LossInputs, Support
from prime_composer.losses import LOSS_TYPES, setup_loss_fn

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "taid.json").read_text())


def taid(**knobs):
    return LOSS_TYPES["taid"](**{"total_steps": 10, "k": "full", "normalization": "full", **knobs})


def inputs_of(seq=3, seed=0) -> LossInputs:
    g = torch.Generator().manual_seed(seed)
    z, t = torch.randn(2, seq, 5, generator=g, dtype=torch.float64)
    log_p, ids = z.log_softmax(-1).requires_grad_(), torch.arange(5).expand(seq, 5)
    zeros = torch.zeros(seq, dtype=torch.float64)
    support = Support(ids, t.log_softmax(-1), log_p)
    return LossInputs(
        log_p[:, 0], zeros, None, zeros.clone(), torch.ones(seq, dtype=torch.bool), support=support
    )


@pytest.mark.parametrize("case", GOLDEN["scheduler"])
def test_the_schedule_is_its_authors(case):
    rows = GOLDEN["scheduler"][case]["rows"]
    state = taid(**GOLDEN["scheduler"][case]["knobs"]).make_state()
    assert state.t == 0.4
    for (_, t, momentum, _), loss in zip(rows, GOLDEN["scheduler_losses"], strict=False):
        state.end_step(loss)
        assert state.t == pytest.approx(t, abs=1e-9)
        if momentum is not None:
            assert state.momentum == pytest.approx(momentum, abs=1e-9)


def test_both_branches_of_the_schedule_are_covered_by_these_numbers():
    linear, adaptive = (
        GOLDEN["scheduler"][name]["rows"] for name in ("linear wins", "adaptive wins")
    )
    assert linear[1][1] == pytest.approx(0.4 + 0.6 / 1000)
    assert adaptive[1][1] > 0.4 + 0.6 / 100000 + 1e-5


def test_t_ends_at_t_end_and_alpha_zero_is_the_straight_line():
    state = taid(alpha=0.0, t_start=0.2, t_end=0.8).make_state()
    ts = [state.t]
    for _ in range(14):
        state.end_step(1.0)
        ts.append(state.t)
    # The first call stores the loss, as in the reference; the line then reads the index of the step.
    assert ts[:4] == pytest.approx([0.2, 0.2, 0.26, 0.32])
    assert ts[-1] == 0.8 and max(ts) == 0.8


def test_an_exploding_loss_does_not_overflow_the_schedule():
    state = taid().make_state()
    for loss in (1e-30, 1e30, 1e-30, 1e30):
        state.end_step(loss)
    assert 0.4 <= state.t <= 1


def test_micro_batches_of_one_step_see_one_t_and_the_step_moves_it_once():
    loss = setup_loss_fn(taid(alpha=0.5, beta=0.5))
    values = [loss(inputs_of(seed=s)).metrics["taid/t"].item() for s in range(3)]
    assert values == [0.4] * 3
    loss.end_step(2.0)
    loss.end_step(1.8)
    assert loss(inputs_of()).metrics["taid/t"].item() == pytest.approx(0.5537492, abs=1e-6)


def test_the_state_survives_a_checkpoint():
    first, second = setup_loss_fn(taid(alpha=0.5)), setup_loss_fn(taid(alpha=0.5))
    for value in (2.0, 1.8, 1.9):
        first.end_step(value)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for value in (1.2, 1.0):
        first.end_step(value), second.end_step(value)
    assert first.state_dict() == second.state_dict()
    assert first.state.t > 0.4


def test_the_value_uses_the_t_before_the_step():
    inputs = inputs_of()
    p = inputs.support.student_logprobs.detach().exp()
    q = inputs.support.teacher_logprobs.exp()
    mixed = p**0.6 * q**0.4
    target = mixed / mixed.sum(-1, keepdim=True)
    loss = setup_loss_fn(taid())
    assert loss(inputs).loss.item() == pytest.approx(-(target * p.log()).sum().item(), rel=1e-12)
    kl = setup_loss_fn(taid(form="kl"))
    assert kl(inputs).loss.item() == pytest.approx(
        (target * (target / p).log()).sum().item(), rel=1e-10
    )


def test_a_schedule_within_a_sum_reads_its_own_mean_and_not_the_sums():
    moving = {"weight": 0.25, "loss": taid(alpha=0.5, beta=0.5)}
    composed = setup_loss_fn(LOSS_TYPES["compose"](distillation={"moving": moving}))
    mixed = setup_loss_fn(taid(alpha=0.5, beta=0.5, rl_mix={"kd": 0.3}))
    alone = setup_loss_fn(taid(alpha=0.5, beta=0.5))
    for step in range(3):
        batches = [
            inputs_of(seq, seed=10 * step + seq) for seq in (2, 5)
        ]  # two micro-batches of unlike length
        sums = [alone(b).loss.item() for b in batches]
        for loss in (composed, mixed):
            for b in batches:
                loss(b)
                with torch.no_grad():
                    loss(dataclasses.replace(b))  # an evaluation in between does not count
            loss.end_step(1e9)
        alone.end_step(sum(sums) / 7)
        assert composed.state.losses["moving"].state.t == pytest.approx(alone.state.t, abs=1e-12)
        assert mixed.state.t == pytest.approx(alone.state.t, abs=1e-12)
    assert not math.isclose(alone.state.t, 0.4)


def test_a_composed_state_survives_a_checkpoint():
    config = LOSS_TYPES["compose"](
        distillation={"moving": {"weight": 1.0, "loss": taid(alpha=0.5)}}
    )
    first, second = setup_loss_fn(config), setup_loss_fn(config)
    for seed in range(3):
        first(inputs_of(seed=seed))
        first.end_step(0.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state.losses["moving"].state.t == first.state.losses["moving"].state.t > 0.4


def test_knobs_that_go_nowhere_are_refused():
    with pytest.raises(ValidationError, match="total_steps"):
        LOSS_TYPES["taid"]()
    with pytest.raises(ValidationError, match="t only rises"):
        taid(t_start=0.9, t_end=0.5)
