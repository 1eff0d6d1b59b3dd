"""TAID: the schedule against its authors' numbers, and the loss that moves it."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from prime_composer.contract import LossInputs, LossOutputs, Support
from prime_composer.losses import LOSS_FNS, LOSS_TYPES, setup_loss_fn
from tests.builders import identity_heads

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "taid.json").read_text())


def taid(**knobs):
    return LOSS_TYPES["taid"](**{"total_steps": 10, "k": "full", "normalization": "full", **knobs})


def inputs_of(seq=3, seed=0) -> LossInputs:
    g = torch.Generator().manual_seed(seed)
    z, t = torch.randn(2, seq, 5, generator=g, dtype=torch.float64)
    log_p, ids = z.log_softmax(-1).requires_grad_(), torch.arange(5).expand(seq, 5)
    zeros = torch.zeros(seq, dtype=torch.float64)
    mask = torch.ones(seq, dtype=torch.bool)
    support, heads = Support(ids, t.log_softmax(-1), log_p), identity_heads(log_p, t)
    return LossInputs(log_p[:, 0], zeros, None, zeros.clone(), mask, None, support, heads)


@pytest.mark.parametrize("case", GOLDEN["scheduler"])
def test_the_schedule_equals_its_authors_numbers(case):
    rows = GOLDEN["scheduler"][case]["rows"]
    state = taid(**GOLDEN["scheduler"][case]["knobs"]).make_state()
    assert state.t == 0.4
    for (_, t, momentum, _), loss in zip(rows, GOLDEN["scheduler_losses"], strict=False):
        state.end_step(loss)
        assert state.t == pytest.approx(t, abs=1e-9)
        if momentum is not None:
            assert state.momentum == pytest.approx(momentum, abs=1e-9)


def test_alpha_zero_is_a_straight_line_to_t_end():
    state = taid(alpha=0.0, t_start=0.2, t_end=0.8).make_state()
    ts = [state.t]
    for _ in range(14):
        state.end_step(1.0)
        ts.append(state.t)
    # The first call stores the loss, as in the reference. Then the line reads the step's index.
    assert ts[:4] == pytest.approx([0.2, 0.2, 0.26, 0.32])
    assert ts[-1] == 0.8 and max(ts) == 0.8


def test_an_exploding_loss_does_not_overflow_the_schedule():
    state = taid().make_state()
    for loss in (1e-30, 1e30, 1e-30, 1e30):
        state.end_step(loss)
    assert 0.4 <= state.t <= 1


def test_a_step_ends_with_its_loss_per_token(monkeypatch):
    """Micro-batches of 2 and 5 tokens with 3.0 and 1.6 per token are a step of 2.0, then 1.8."""
    per_token = iter([3.0, 1.6, 1.8])

    def fixed(inputs: LossInputs, config, state) -> LossOutputs:
        graph = inputs.trainer_logprobs.sum() * 0
        return LossOutputs(graph + next(per_token) * inputs.loss_mask.sum(), {})

    monkeypatch.setitem(LOSS_FNS, LOSS_TYPES["taid"], fixed)
    loss = setup_loss_fn(taid(alpha=0.5, beta=0.5))
    for step in ([2, 5], [4]):
        for seq in step:
            loss(inputs_of(seq))
        loss.end_step()
    assert loss.state.previous_loss == pytest.approx(1.8)
    assert loss.state.t == pytest.approx(0.5537492, abs=1e-6)


def test_a_step_without_tokens_does_not_move_the_schedule():
    loss = setup_loss_fn(taid())
    before = loss.state_dict()
    loss.end_step()
    loss(dataclasses.replace(inputs_of(), loss_mask=torch.zeros(3, dtype=torch.bool)))
    loss.end_step()
    assert loss.state_dict() == before


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


def test_a_schedule_within_a_sum_reads_its_own_mean():
    moving = {"weight": 0.25, "loss": taid(alpha=0.5, beta=0.5)}
    composed = setup_loss_fn(LOSS_TYPES["compose"](distillation={"moving": moving}))
    mixed = setup_loss_fn(taid(alpha=0.5, beta=0.5, rl_mix={"kd": 0.3}))
    bound = setup_loss_fn(taid(alpha=0.5, beta=0.5))
    alone = bound.state
    for step in range(3):
        batches = [
            inputs_of(seq, seed=10 * step + seq) for seq in (2, 5)
        ]  # two micro-batches of unlike length
        sums = [bound(b).loss.item() for b in batches]
        for loss in (composed, mixed):
            for b in batches:
                loss(b)
                with torch.no_grad():
                    loss(dataclasses.replace(b))  # an evaluation in between does not count
            loss.end_step()
        alone.end_step(sum(sums) / 7)
        _, moving = composed.terms["moving"]
        assert moving.state.t == pytest.approx(alone.t, abs=1e-12)
        assert mixed.terms["kd"][1].state.t == pytest.approx(alone.t, abs=1e-12)
    assert not math.isclose(alone.t, 0.4)


def test_the_state_survives_a_checkpoint():
    """Also within a sum, and the next steps move it as without one."""
    config = LOSS_TYPES["compose"](
        distillation={"moving": {"weight": 1.0, "loss": taid(alpha=0.5)}}
    )
    first, second = setup_loss_fn(config), setup_loss_fn(config)

    def steps(loss, seeds):
        for seed in seeds:
            loss(inputs_of(seed=seed))
            loss.end_step()

    steps(first, range(3))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert first.stateful and set(first.state_dict()) == {"moving"}
    for loss in (first, second):
        steps(loss, range(3, 6))
    assert first.state_dict() == second.state_dict()
    assert first.terms["moving"][1].state.t > 0.4
