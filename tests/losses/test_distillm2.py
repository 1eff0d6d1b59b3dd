"""DistiLLM-2 against its authors' numbers and its formula, and its schedule."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from prime_composer.contract import Logits, LossInputs, Support, TwoHeads
from prime_composer.losses import LOSS_TYPES, setup_loss_fn

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "distillm2.json").read_text())
CASES = {f"{case['global_step']} {case['anchors']}": case for case in GOLDEN["cases"]}
PAIRS = 2
"""Pairs of the recorded inputs."""


def distillm2(**knobs):
    return LOSS_TYPES["distillm2"](
        **{"beta_steps": 4, "k": "full", "normalization": "full", **knobs}
    )


def recorded_logits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return student's and teacher's logits, labels and answers' indices, [tokens]."""
    z, t = (
        torch.tensor(GOLDEN["inputs"][name], dtype=torch.float64)
        for name in ("student_logits", "teacher_logits")
    )
    labels = torch.tensor(GOLDEN["inputs"]["labels"])
    answers = torch.arange(len(labels)).unsqueeze(1).expand_as(labels)
    trained = labels[:, 1:] != -100
    return z[:, :-1][trained], t[:, :-1][trained], labels[:, 1:][trained], answers[:, 1:][trained]


def inputs_of(z: Tensor, t: Tensor, tokens: Tensor, answers: Tensor) -> LossInputs:
    """Return the inputs of four answers, the first two of the teacher's."""
    log_p, log_q = z.log_softmax(-1), t.log_softmax(-1)
    sampled = tokens.unsqueeze(1)
    head = torch.eye(z.shape[1], dtype=z.dtype)
    return LossInputs(
        trainer_logprobs=log_p.gather(1, sampled)[:, 0],
        inference_logprobs=torch.full_like(z[:, 0], torch.nan),
        ref_logprobs=log_q.gather(1, sampled)[:, 0],
        advantages=None,
        loss_mask=torch.ones_like(tokens, dtype=torch.bool),
        support=Support(torch.arange(z.shape[1]).expand_as(z), log_q, log_p),
        hidden_states=TwoHeads(Logits(z, head), (Logits(t, head),)),
        segment_ids=answers,
        by_teacher=answers < PAIRS,
    )


def bound(case, **knobs):
    """Return the loss at a recorded case's step, with its anchors."""
    loss = setup_loss_fn(distillm2(**knobs))
    gaps = [*(case["anchors"] or (0.0, 0.0)), 1.0, 1.0]
    loss.load_state_dict({"step": case["global_step"], "gaps": gaps})
    return loss


@pytest.mark.parametrize("knobs", [{}, {"k": 5, "normalization": "renorm"}], ids=["heads", "top"])
@pytest.mark.parametrize("name", CASES)
def test_distillm2_equals_its_authors_numbers(name, knobs):
    """The loss per pair is theirs, and its gradient too, where the skew is a constant.

    Their adaptive skew carries a gradient of its own, which the formula does not have.
    """
    case = CASES[name]
    adapted = {"adapt_skew_after": 1} if case["anchors"] else {}
    z, *others = recorded_logits()
    z.requires_grad_()
    out = bound(case, **knobs, **adapted)(inputs_of(z, *others))
    assert (out.loss / PAIRS).item() == pytest.approx(case["loss"], rel=1e-12)
    (out.loss / PAIRS).backward()
    theirs = torch.tensor(case["gradient of the loss"], dtype=torch.float64)
    theirs = theirs[:, :-1][torch.tensor(GOLDEN["inputs"]["labels"])[:, 1:] != -100]
    difference = (z.grad - theirs).abs().max().item()
    assert difference < 1e-14 if case["anchors"] is None else difference > 1e-3


def reference(z: Tensor, t: Tensor, answers: Tensor, beta: float, skews: Tensor) -> Tensor:
    """Return the formula as plain sums over probabilities, with one skew per answer."""
    p, q, total = z.softmax(-1), t.softmax(-1), z.new_zeros(())
    for answer in range(4):
        mine, skew = answers == answer, skews[answer]
        if answer < PAIRS:
            mixture = skew * q[mine] + (1 - skew) * p[mine]
            values = (2 - beta) * (q[mine] * (q[mine] / mixture).log()).sum(-1)
        else:
            mixture = skew * p[mine].detach() + (1 - skew) * q[mine]
            values = beta * (p[mine] * (p[mine] / mixture).log()).sum(-1)
        total = total + values.mean()
    return total


@pytest.mark.parametrize("name", CASES)
def test_distillm2_gradient_holds_mixture_and_skew(name):
    """The gradient is that of the sums, where the mixture's student and the skews are constants.

    An answer's skew is the authors', from their gaps.
    """
    case = CASES[name]
    skews = torch.full((4,), 0.1, dtype=torch.float64)
    if case["anchors"]:
        for side, anchor in enumerate(case["anchors"]):
            for i, gap in enumerate(case["gaps"][side]):
                skews[2 * side + i] = min(max(1 - 0.9 * anchor / (gap + 1e-5), 0.01), 0.1)
        assert ((skews > 0.02) & (skews < 0.09)).sum() == 2
    z, t, tokens, answers = recorded_logits()
    beta = 1 + 0.5 * min(1.0, case["global_step"] / 4)
    expected = torch.autograd.grad(
        reference(z.requires_grad_(), t, answers, beta, skews), z, retain_graph=True
    )[0]
    for knobs in ({}, {"k": 5, "normalization": "renorm"}):
        loss = bound(case, **knobs, **({"adapt_skew_after": 1} if case["anchors"] else {}))
        got = torch.autograd.grad(loss(inputs_of(z, t, tokens, answers)).loss, z)[0]
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-14)


def test_distillm2_beta_rises_over_its_steps():
    """beta rises linearly from its first to its last value and stays there."""
    state = distillm2(beta_start=0.5, beta_end=1.7, beta_steps=3).make_state()
    betas = []
    for _ in range(5):
        betas.append(state.beta)
        state.end_step(1.0)
    assert betas == pytest.approx([0.5, 0.9, 1.3, 1.7, 1.7])


def test_distillm2_anchors_are_mean_gaps_of_first_steps():
    """The anchors are means over the answers of all micro-batches in the first steps.

    An evaluation in between does not count, nor do later steps.
    """
    z, t, tokens, answers = recorded_logits()
    loss = setup_loss_fn(distillm2(adapt_skew_after=2))
    halves = [answers % 2 == side for side in (0, 1)]  # one pair each
    for step in range(3):
        for rows in halves:
            part = inputs_of(z.clone().requires_grad_(), t, tokens, answers)
            part = dataclasses.replace(part, loss_mask=rows)
            if step == 1:  # the student is the teacher: no gap
                part = dataclasses.replace(part, ref_logprobs=part.trainer_logprobs.detach())
            loss(part)
            with torch.no_grad():
                loss(dataclasses.replace(part, ref_logprobs=0 * part.ref_logprobs))
        loss.end_step()
        assert (loss.state.anchors is None) is (step == 0)
    gaps = torch.tensor(GOLDEN["cases"][0]["gaps"], dtype=torch.float64)
    # Over two steps, of which the second has gaps of 0.
    assert loss.state.anchors == pytest.approx((gaps.mean(1) / 2).tolist(), rel=1e-12)


def test_distillm2_state_survives_a_checkpoint():
    """Step and anchors are in the state, as JSON values."""
    first, second = (setup_loss_fn(distillm2(adapt_skew_after=1)) for _ in range(2))
    z, *others = recorded_logits()
    first(inputs_of(z.requires_grad_(), *others))
    first.end_step()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state.anchors == first.state.anchors != (0.0, 0.0)
    assert second.state.beta == first.state.beta == 1.125


def test_distillm2_metrics_are_parts_of_the_token_mean():
    """The two parts are sums over their own answers, per token of all."""
    z, *others = recorded_logits()
    inputs = inputs_of(z.requires_grad_(), *others)
    metrics = setup_loss_fn(distillm2())(inputs).metrics
    case, answers = GOLDEN["cases"][0], others[-1]
    lengths = torch.bincount(answers).tolist()
    parts = {"forward": lengths[:2], "reverse": lengths[2:]}
    for name, sizes in parts.items():
        total = sum(mean * size for mean, size in zip(case[name], sizes, strict=True))
        assert metrics[f"distillm2/{name}"].item() == pytest.approx(total / sum(lengths), rel=1e-12)
    assert metrics["distillm2/teacher_share"].item() == pytest.approx(
        sum(lengths[:2]) / sum(lengths)
    )


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"skew": 1.0}, "skew"),
        ({"beta_end": 2.5}, "beta_end"),
        ({"skew": 0.01, "adapt_skew_after": 5}, "between 0.01 and skew = 0.01: raise skew"),
        ({"rl_mix": {"kd": 0.5}}, "mean over pairs of answers.*leave rl_mix out"),
        ({"normalization": "generalized"}, "normalization"),
    ],
    ids=["skew", "beta", "adaptive", "rl_mix", "normalization"],
)
def test_distillm2_with_a_bad_knob_is_refused(knobs, message):
    """A knob outside its domain, or a sum with a mean over tokens, is refused."""
    with pytest.raises(ValidationError, match=message):
        distillm2(**knobs)


def test_distillm2_in_a_sum_is_refused():
    """compose sums means over tokens, and DistiLLM-2 is one over pairs of answers."""
    table = {"weight": 1.0, "loss": {"type": "distillm2", "beta_steps": 3}}
    with pytest.raises(ValidationError, match="pairs of answers, and the other channels"):
        LOSS_TYPES["compose"](distillation={"two": table})


def test_distillm2_reads_the_sampler_for_position_weights_alone():
    """The adaptive skew needs log q of the tokens and no log mu."""
    adaptive = distillm2(adapt_skew_after=2)
    assert "ref_logprobs" in adaptive.needs and not adaptive.reads_sampler
    assert "ref_logprobs" not in distillm2().needs
    assert distillm2(position_weights={}).reads_sampler
