"""Losses on a support against public numbers and loops, and their metrics by hand."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from prime_composer.contract import LossInputs, Support
from prime_composer.losses import LOSS_TYPES, setup_loss_fn
from prime_composer.losses.shared.metrics import (
    in_top,
    overlap,
    support_metrics,
    top_share,
    topk_overlap_min,
)
from tests.builders import VOCAB, double, identity_heads, packed_inputs

GOLDEN = Path(__file__).parents[1] / "golden"


def full_inputs(student_logits, teacher_logits, mask, tokens, log_ratio=None) -> LossInputs:
    log_p = double(student_logits).log_softmax(-1).requires_grad_()
    log_q = double(teacher_logits).log_softmax(-1)
    index = torch.tensor(tokens).unsqueeze(-1)
    trainer = log_p.detach().gather(-1, index).squeeze(-1)
    vocab = log_p.shape[-1]
    return LossInputs(
        trainer_logprobs=trainer.requires_grad_(),
        inference_logprobs=trainer.detach() - double(log_ratio or [0.0] * len(tokens)),
        ref_logprobs=log_q.gather(-1, index).squeeze(-1),
        advantages=None,
        loss_mask=torch.tensor(mask),
        support=Support(torch.arange(vocab).expand(len(tokens), vocab), log_q, log_p),
        hidden_states=identity_heads(log_p, log_q),
        token_ids=torch.tensor(tokens),
    )


@pytest.mark.parametrize(
    ("tau", "expected"), [(0.8, 0.740904589460), (0.9, 0.607796236046), (10.0, 0.391657168407)]
)
def test_entropy_aware_adds_forward_kl_at_high_entropy(tau, expected):
    # Worked from the definition (arXiv 2603.07079) on the inputs of golden/generalized_jsd.json,
    # alpha 1, mean over the mask;
    # the teacher's entropies there are .975327829166 and .832395581840.
    g = json.loads((GOLDEN / "generalized_jsd.json").read_text())["inputs"]
    inputs = full_inputs(g["student_logits"], g["teacher_logits"], g["mask"], [0, 0, 0])
    config = LOSS_TYPES["entropy_aware_opd"](
        tau=tau, alpha=1.0, reverse="topk", k="full", normalization="full"
    )
    out = setup_loss_fn(config)(inputs)
    assert (out.loss / 2).item() == pytest.approx(expected, abs=1e-11)
    assert out.metrics["entropy_aware_opd/entropy"].item() == pytest.approx(
        (0.975327829166 + 0.832395581840) / 2, abs=1e-11
    )
    assert out.metrics["entropy_aware_opd/unsure"].item() == {0.8: 1.0, 0.9: 0.5, 10.0: 0.0}[tau]


def test_entropy_aware_sampled_is_signed_plus_forward_kl():
    g = json.loads((GOLDEN / "generalized_jsd.json").read_text())["inputs"]
    inputs = full_inputs(
        g["student_logits"], g["teacher_logits"], [True] * 3, [0, 1, 2], [0.9, -0.3, 0.1]
    )
    both = setup_loss_fn(LOSS_TYPES["entropy_aware_opd"](tau=0.9, alpha=0.7, k="full"))(inputs).loss
    sampled = setup_loss_fn(LOSS_TYPES["sampled_reverse_kl"](mode="signed", kl_tau=0.0))(
        inputs
    ).loss
    unsure = dataclasses.replace(inputs, loss_mask=torch.tensor([True, False, False]))
    forward = setup_loss_fn(LOSS_TYPES["topk_forward_kl"](k="full"))(unsure).loss
    assert both.item() == pytest.approx((sampled + 0.7 * forward).item(), rel=1e-12)


SDPO = json.loads((GOLDEN / "sdpo.json").read_text())


def sdpo_inputs():
    g = SDPO["inputs"]
    return full_inputs(
        g["student_logits"], g["teacher_logits"], g["mask"], g["tokens"], g["log_ratio"]
    )


@pytest.mark.parametrize("normalization", ["tail", "renorm"])
@pytest.mark.parametrize("alpha", ["0.0", "0.3", "0.5", "1.0"])
def test_self_distillation_on_the_students_top_two_is_sdpo(normalization, alpha):
    config = LOSS_TYPES["self_distillation"](
        beta=float(alpha), k=2, chosen_by="student", normalization=normalization, max_ratio="off"
    )
    assert config.support_size == "full"
    out = setup_loss_fn(config)(sdpo_inputs())
    assert (out.loss / 2).item() == pytest.approx(SDPO[normalization][alpha], abs=1e-11)
    named = {"0.0": "forward_kl", "1.0": "reverse_kl"}.get(alpha)
    if named:
        config = config.model_copy(update={"divergence": named, "beta": 0.5})
        assert (setup_loss_fn(config)(sdpo_inputs()).loss / 2).item() == pytest.approx(
            SDPO[normalization][alpha], abs=1e-11
        )


def test_self_distillation_bounds_its_ratio_as_sdpo_does():
    tail = LOSS_TYPES["self_distillation"](beta=0.5, k=2, chosen_by="student")
    out = setup_loss_fn(tail)(sdpo_inputs())
    assert (out.loss / 2).item() == pytest.approx(
        SDPO["tail alpha=.5, ratio clamped at 2"], abs=1e-11
    )
    assert out.metrics["self_distillation/ratio_at_bound"] == 0
    bounded = setup_loss_fn(tail.model_copy(update={"max_ratio": 1.0}))(sdpo_inputs())
    assert bounded.metrics["self_distillation/ratio_at_bound"] == 0.5  # e^.5 is, e^-1 is not
    assert bounded.loss < out.loss


def test_self_distillation_on_the_sampled_token_is_sdpos():
    config = LOSS_TYPES["self_distillation"](divergence="sampled_reverse_kl", max_ratio="off")
    assert config.needs == {"ref_logprobs"} and config.support_size == 0
    inputs = sdpo_inputs()
    out = setup_loss_fn(config)(inputs)
    assert (out.loss / 2).item() == pytest.approx(SDPO["sampled"], abs=1e-11)
    out.loss.backward()
    expected = [2 * x for x in SDPO["sampled gradient of the mean for log p"]]
    assert inputs.trainer_logprobs.grad.tolist() == pytest.approx(expected, abs=1e-11)
    weighted = setup_loss_fn(config.model_copy(update={"max_ratio": 2.0}))(inputs).loss
    assert (weighted / 2).item() == pytest.approx(SDPO["sampled, ratio clamped at 2"], abs=1e-11)


def test_self_distillation_can_skip_the_first_tokens():
    inputs = sdpo_inputs()
    inputs = dataclasses.replace(
        inputs, loss_mask=torch.tensor([True, True, True]), segment_ids=torch.tensor([4, 4, 9])
    )
    config = LOSS_TYPES["self_distillation"](k=2, skip_first=1, max_ratio="off")
    only_second = dataclasses.replace(inputs, loss_mask=torch.tensor([False, True, False]))
    plain = LOSS_TYPES["self_distillation"](k=2, max_ratio="off")
    assert (
        setup_loss_fn(config)(inputs).loss.item() == setup_loss_fn(plain)(only_second).loss.item()
    )


def test_a_loss_reads_the_first_k_of_a_larger_support():
    inputs = sdpo_inputs()
    order = inputs.support.teacher_logprobs.argsort(-1, descending=True)
    wide, narrow = (inputs.support.of_ids(ids) for ids in (order, order[:, :2]))
    loss = setup_loss_fn(LOSS_TYPES["topk_reverse_kl"](k=2))
    got = loss(dataclasses.replace(inputs, support=wide)).loss
    assert got.item() == loss(dataclasses.replace(inputs, support=narrow)).loss.item()
    full = setup_loss_fn(LOSS_TYPES["topk_reverse_kl"](k="full"))(
        dataclasses.replace(inputs, support=wide)
    ).loss
    assert full > got


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({"type": "alpha_beta", "alpha": 1.0, "beta": 0.0}, {"type": "topk_forward_kl"}),
        ({"type": "skewed_kl", "skew": 0.0}, {"type": "topk_forward_kl"}),
        ({"type": "skewed_kl", "skew": 0.0, "direction": "reverse"}, {"type": "topk_reverse_kl"}),
    ],
    ids=["alpha_beta", "skewed forward", "skewed reverse"],
)
@pytest.mark.parametrize("normalization", ["tail", "renorm"])
def test_recent_loss_passes_its_knobs_on(knobs, expected, normalization):
    """At knobs with which two losses are one, their sums are the same."""
    found = []
    for table in (knobs, expected):
        config = LOSS_TYPES[table["type"]](**table, k=2, normalization=normalization)
        found.append(setup_loss_fn(config)(sdpo_inputs()).loss.item())
    assert found[0] == pytest.approx(found[1], rel=1e-12)


@pytest.mark.parametrize("name", ["topk_reverse_kl", "generalized_jsd", "alpha_beta", "todi"])
def test_a_normalization_that_does_not_fit_k_is_refused(name):
    with pytest.raises(ValidationError, match="k = 'full'"):
        LOSS_TYPES[name](normalization="full")
    with pytest.raises(ValidationError, match="identically 0"):
        LOSS_TYPES[name](normalization="renorm", k=1)


def test_the_share_of_the_top_percent():
    values = torch.tensor([5.0] + [-1.0] * 39 + [100.0] * 60)
    mask = torch.arange(100) < 40
    assert top_share(values, mask).item() == pytest.approx(5 / 44)  # one token of 40, at least
    assert top_share(values, mask, share=0.02).item() == pytest.approx(
        5 / 44
    )  # .8 tokens: one, though the pack has 100
    assert top_share(values, mask, share=0.05).item() == pytest.approx(6 / 44)  # two of them
    assert top_share(values, torch.zeros(100, dtype=torch.bool)) == 0
    assert top_share(values[:0], mask[:0]) == 0
    assert top_share(torch.zeros(4), torch.ones(4, dtype=torch.bool)) == 0


def test_masses_and_the_two_parts_of_the_tail_kl_by_hand():
    # p = (.4, .2 | .4), q = (.6, .3 | .1): p^ = q^, so that all the divergence is in the mass.
    one = Support(torch.tensor([[0, 1]]), double([[0.6, 0.3]]).log(), double([[0.4, 0.2]]).log())
    got = support_metrics(one, torch.tensor([True]))
    assert got["student_mass"].item() == pytest.approx(0.6) and got[
        "teacher_mass"
    ].item() == pytest.approx(0.9)
    assert got["kl_in_support"].item() == pytest.approx(0.0, abs=1e-14)
    assert got["kl_mass"].item() == pytest.approx(
        0.6 * math.log(0.6 / 0.9) + 0.4 * math.log(0.4 / 0.1)
    )
    forward = support_metrics(one, torch.tensor([True]), reverse=False)
    assert forward["kl_mass"].item() == pytest.approx(
        0.9 * math.log(0.9 / 0.6) + 0.1 * math.log(0.1 / 0.4)
    )
    # p = (.2, .4), q = (.4, .2), equal masses: all of it is within the support.
    other = Support(torch.tensor([[0, 1]]), double([[0.4, 0.2]]).log(), double([[0.2, 0.4]]).log())
    got = support_metrics(other, torch.tensor([True]))
    assert got["kl_mass"].item() == pytest.approx(0.0, abs=1e-14)
    assert got["kl_in_support"].item() == pytest.approx(0.2 * math.log(0.5) + 0.4 * math.log(2))


@pytest.mark.parametrize(
    ("name", "metric", "knobs"),
    [
        ("topk_reverse_kl", "kl", {}),
        ("topk_forward_kl", "kl", {}),
        ("taid", "kl", {"form": "kl", "total_steps": 9, "t_start": 1.0}),
        ("self_distillation", "divergence", {"divergence": "forward_kl"}),
    ],
)
def test_the_parts_of_a_tail_kl_add_up_to_it(name, metric, knobs):
    """In the loss's own direction."""
    metrics = setup_loss_fn(LOSS_TYPES[name](k=2, **knobs))(sdpo_inputs()).metrics
    parts = metrics[f"{name}/kl_in_support"] + metrics[f"{name}/kl_mass"]
    assert parts.item() == pytest.approx(metrics[f"{name}/{metric}"].item(), rel=1e-10)


def test_the_least_overlap_never_exceeds_the_overlap():
    g = torch.Generator().manual_seed(0)
    log_p = (3 * torch.randn(20, 30, generator=g, dtype=torch.float64)).log_softmax(-1)
    log_q = log_p + 2 * torch.randn(20, 30, generator=g, dtype=torch.float64)
    for row, ids in enumerate(log_q.topk(8).indices):
        overlap = len(set(ids.tolist()) & set(log_p[row].topk(8).indices.tolist())) / 8
        assert topk_overlap_min(log_p[row, ids]).item() <= overlap


def test_the_least_overlap_of_a_sharp_student_is_the_overlap():
    # p = .9, .05, .03, .0101, rest < .01: no token of the rest can exceed the fourth.
    assert topk_overlap_min(double([0.9, 0.05, 0.03, 0.0101]).log()).item() == 1.0
    # Outside, .5: it may hold one token of .5, ten of .05, or fifty of .01.
    assert topk_overlap_min(double([0.4, 0.06, 0.03, 0.01]).log()).item() == pytest.approx(1 / 4)


def test_overlap_is_that_of_plain_sets():
    """Worked by hand: shares of the top K, and minus KL / |I| of what is renormalized there."""
    p, q = (0.5, 0.3, 0.12, 0.08), (0.4, 0.1, 0.45, 0.05)
    log_p, log_q = double([p, p, p]).log(), double([q, q, p]).log()
    both = in_top(log_p, 2) & in_top(log_q, 2)
    assert both.tolist() == [[True, False, False, False]] * 2 + [[True, True, False, False]]
    assert overlap(log_p, log_q, both, 2).tolist() == [[0.5, 0], [0.5, 0], [1, 0]]
    first = [(x / 0.92, y / 0.95) for x, y in zip(p[:3], q[:3], strict=True)]
    expected = sum(x * math.log(y / x) for x, y in first) / 3
    both = in_top(log_p, 3) & in_top(log_q, 3)
    assert overlap(log_p, log_q, both, 3)[0].tolist() == pytest.approx([1, expected], rel=1e-12)


def test_overlap_without_a_shared_id_is_zero():
    """Nothing is NaN there, nor where a teacher rules ids out."""
    log_p, log_q = double([[0.9, 0.1, 0.0]]).log(), double([[0.0, 0.0, 1.0]]).log()
    assert overlap(log_p, log_q, in_top(log_p, 1) & in_top(log_q, 1), 1).tolist() == [[0, 0]]


def test_a_missing_score_of_a_trained_token_makes_the_sum_nan():
    """A missing score of a token that trains shows in the sum and elsewhere does not."""
    inputs = sdpo_inputs()
    inputs.support.teacher_logprobs[1, 0] = torch.nan
    inputs.ref_logprobs[0] = torch.nan
    for config in (
        LOSS_TYPES["topk_reverse_kl"](k=2),
        LOSS_TYPES["sampled_reverse_kl"](),
        LOSS_TYPES["taid"](total_steps=9),
    ):
        assert setup_loss_fn(config)(inputs).loss.isnan()
    # Only the support's score is missing: the entropy that gates the forward part is NaN.
    inputs.loss_mask = torch.tensor([False, True, True])
    assert setup_loss_fn(LOSS_TYPES["entropy_aware_opd"](tau=0.5, alpha=1.0, k=2))(
        inputs
    ).loss.isnan()
    inputs.loss_mask = torch.tensor([False, False, True])
    for config in (
        LOSS_TYPES["topk_reverse_kl"](k=2),
        LOSS_TYPES["sampled_reverse_kl"](),
        LOSS_TYPES["taid"](total_steps=9),
    ):
        assert setup_loss_fn(config)(inputs).loss.isfinite()


TEMPERED = {
    "topk_reverse_kl": lambda p, q: (p * (p / q).log()).sum(-1),
    "topk_forward_kl": lambda p, q: (q * (q / p).log()).sum(-1),
    "total_variation": lambda p, q: (p - q).abs().sum(-1) / 2,
}


@pytest.mark.parametrize("name", TEMPERED)
@pytest.mark.parametrize("normalization", ["renorm", "full"])
def test_temperature_divides_both_logits(name, normalization):
    """Within the support or over the whole vocabulary, written out with softmaxes of z / T."""
    g = torch.Generator().manual_seed(5)
    student, teacher = torch.randn(2, 6, 7, generator=g, dtype=torch.float64)
    student.requires_grad_()
    k = 7 if normalization == "full" else 3
    ids = teacher.topk(k).indices
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    inputs = LossInputs(
        trainer_logprobs=log_p[:, 0],
        inference_logprobs=log_p[:, 0].detach(),
        ref_logprobs=log_q[:, 0],
        advantages=None,
        loss_mask=torch.arange(6) != 2,
        support=Support(ids, log_q.gather(-1, ids), log_p.gather(-1, ids)),
        hidden_states=identity_heads(student, teacher),
    )
    knobs = {"k": "full" if normalization == "full" else k, "normalization": normalization}
    loss = setup_loss_fn(LOSS_TYPES[name](**knobs, temperature=1.7))(inputs).loss
    p, q = ((z.gather(-1, ids) / 1.7).softmax(-1) for z in (student, teacher))
    expected = TEMPERED[name](p, q)[inputs.loss_mask].sum()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    gradients = (torch.autograd.grad(x, student, retain_graph=True)[0] for x in (loss, expected))
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)


def test_a_loss_reads_the_students_choice_of_a_larger_support():
    """As where another loss of the same run reads the whole vocabulary's log-probs."""
    log_p = double([[0.1, 0.2, 0.3, 0.4]]).log().requires_grad_()
    log_q = double([[0.4, 0.3, 0.2, 0.1]]).log()
    inputs = LossInputs(
        trainer_logprobs=log_p[:, 0],
        inference_logprobs=log_p[:, 0].detach(),
        ref_logprobs=log_q[:, 0],
        advantages=None,
        loss_mask=torch.tensor([True]),
        support=Support(torch.arange(4)[None], log_q, log_p),
    )
    config = LOSS_TYPES["topk_reverse_kl"](k=2, chosen_by="student", normalization="renorm")
    p, q = double([4 / 7, 3 / 7]), double([1 / 3, 2 / 3])
    expected = (p * (p / q).log()).sum()
    torch.testing.assert_close(setup_loss_fn(config)(inputs).loss, expected, rtol=1e-12, atol=0)


WHOLE = {
    "entropy_aware_opd": {"tau": 1.5, "alpha": 0.5, "reverse": "topk"},
    "taid": {"total_steps": 10},
}


@pytest.mark.parametrize(
    "name",
    [name for name, cls in LOSS_TYPES.items() if hasattr(cls, "comparison_need")],
)
def test_two_heads_give_the_loss_of_a_support_of_all_ids(name, monkeypatch):
    """Loss and gradient for each logit, with every knob of the examples that fits."""
    cls = LOSS_TYPES[name]
    base = WHOLE.get(name, {})
    knobs = [base, *(example for example in cls.examples if example.get("k") == "full")]
    if name == "self_distillation":
        knobs += [{"divergence": d} for d in ("reverse_kl", "forward_kl")]
    for example in knobs:
        config = cls(**{**example, "k": "full"})
        by_heads = packed_inputs(config)
        student = by_heads.hidden_states.student.hidden
        (found,) = torch.autograd.grad(
            (loss := setup_loss_fn(config)(by_heads).loss), student, allow_unused=True
        )
        with monkeypatch.context() as patch:
            patch.setattr(cls, "comparison_need", "support")
            all_ids = cls(**{**example, "k": "full"})
            log_p = student.log_softmax(-1)
            teacher = by_heads.hidden_states.teachers[0].hidden.detach()
            support = Support(
                torch.arange(VOCAB).expand(len(log_p), VOCAB), teacher.log_softmax(-1), log_p
            )
            expected = setup_loss_fn(all_ids)(dataclasses.replace(by_heads, support=support)).loss
        (wanted,) = torch.autograd.grad(expected, student, allow_unused=True)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)
