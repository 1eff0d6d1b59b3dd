"""The soft clamp, against Huber's function of a divergence that is computed one token at a time."""

import dataclasses
import math

import pytest
import torch
from pydantic import ValidationError

from prime_composer.contract import LossInputs, Support
from prime_composer.losses import LOSS_TYPES, setup_loss_fn

LIMIT = 0.7
TOKENS, K, VOCAB = 12, 3, 8


def logits(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return those of student and teacher, some rows far from each other."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, TOKENS, VOCAB, generator=generator, dtype=torch.float64)
    return student.requires_grad_(), 2 * teacher


def inputs_of(student: torch.Tensor, teacher: torch.Tensor, **given: object) -> LossInputs:
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    ids = log_q.topk(K).indices
    sampled = torch.arange(TOKENS) % VOCAB
    of_sampled = [x.gather(-1, sampled[:, None])[:, 0] for x in (log_p, log_q)]
    values = {
        "trainer_logprobs": of_sampled[0],
        "inference_logprobs": of_sampled[0].detach(),
        "ref_logprobs": of_sampled[1],
        "advantages": None,
        "loss_mask": torch.arange(TOKENS) % 5 != 1,
        "support": Support(ids, log_q.gather(-1, ids), log_p.gather(-1, ids)),
    }
    return LossInputs(**(values | given))


def kl_with_tail(student: torch.Tensor, teacher: torch.Tensor, t: int) -> torch.Tensor:
    """Return KL(p || q) over K ids and one outcome for the rest, at one token."""
    p, q = student[t].softmax(-1), teacher[t].softmax(-1)
    ids = q.topk(K).indices
    p, q = (torch.cat([x[ids], (1 - x[ids].sum()).unsqueeze(0)]) for x in (p, q))
    return (p * (p / q).log()).sum()


def huber(value: torch.Tensor) -> torch.Tensor:
    return value if value <= LIMIT else LIMIT * (1 + (value / LIMIT).log())


@pytest.mark.parametrize("seed", range(3))
def test_gradient_is_that_of_the_clamped_divergence(seed):
    student, teacher = logits(seed)
    inputs = inputs_of(student, teacher)
    config = LOSS_TYPES["topk_reverse_kl"](k=K, normalization="tail", clamp={"limit": LIMIT})
    outputs = setup_loss_fn(config)(inputs)
    counted = [t for t in range(TOKENS) if inputs.loss_mask[t]]
    divergences = [kl_with_tail(student, teacher, t) for t in counted]
    above = [d.item() for d in divergences if d > LIMIT]
    assert 0 < len(above) < len(counted)
    (got,) = torch.autograd.grad(outputs.loss, student, retain_graph=True)
    (expected,) = torch.autograd.grad(sum(map(huber, divergences)), student)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    # The value is the sum of min(D, c).
    total = sum(d.item() for d in divergences)
    clamped = sum(min(d.item(), LIMIT) for d in divergences)
    assert outputs.loss.item() == pytest.approx(clamped, rel=1e-9)
    assert outputs.metrics["clamp/tokens"].item() == pytest.approx(len(above) / len(counted))
    mean = {name: outputs.metrics[f"clamp/{name}"].item() for name in ("divergence", "removed")}
    removed = (total - clamped) / len(counted)
    assert mean == pytest.approx({"divergence": total / len(counted), "removed": removed})


def test_without_a_support_the_sampled_token_is_measured():
    """In a sum whose other terms have a support as well."""
    student, teacher = logits()
    inputs = inputs_of(student, teacher)
    config = LOSS_TYPES["sampled_reverse_kl"](mode="signed", clamp={"limit": LIMIT})
    plain = setup_loss_fn(LOSS_TYPES["sampled_reverse_kl"](mode="signed"))
    outputs = setup_loss_fn(config)(inputs)
    gaps = (inputs.ref_logprobs - inputs.trainer_logprobs).detach().abs().tolist()
    expected = sum(
        min(1, LIMIT / gaps[t])
        * plain(dataclasses.replace(inputs, loss_mask=torch.arange(TOKENS) == t)).loss.item()
        for t in range(TOKENS)
        if inputs.loss_mask[t]
    )
    assert any(gap > LIMIT for gap in gaps)
    assert outputs.loss.item() == pytest.approx(expected, rel=1e-9)


def test_weights_that_are_given_are_multiplied():
    """The bound is of the value without them, on each token."""
    student, teacher = logits()
    own = torch.linspace(0.5, 2, TOKENS, dtype=torch.float64)
    config = LOSS_TYPES["topk_reverse_kl"](k=K, normalization="tail", clamp={"limit": LIMIT})
    inputs = inputs_of(student, teacher, loss_weights=own)
    values = [kl_with_tail(student, teacher, t).item() for t in range(TOKENS)]
    counted = (t for t in range(TOKENS) if inputs.loss_mask[t])
    expected = sum(own[t].item() * min(values[t], LIMIT) for t in counted)
    assert setup_loss_fn(config)(inputs).loss.item() == pytest.approx(expected, rel=1e-9)


def test_teacher_number_that_is_missing_stays_an_error():
    """NaN makes the loss NaN, at which a trainer stops, and masked ones never matter."""
    student, teacher = logits()
    inputs = inputs_of(student, teacher)
    inputs.ref_logprobs[1] = math.nan  # masked
    fn = setup_loss_fn(LOSS_TYPES["sampled_reverse_kl"](mode="signed", clamp={"limit": LIMIT}))
    assert torch.isfinite(fn(inputs).loss)
    inputs.ref_logprobs[0] = math.nan
    assert torch.isnan(fn(inputs).loss)


@pytest.mark.parametrize(
    "name,knobs,remedy",
    [
        ("ipo", {}, "leave it out"),
        ("sft", {}, "leave it out"),
        ("compose", {"distillation": {"a": {"loss": {"type": "topk_reverse_kl"}}}},
         "in the tables of its terms"),
    ],
)  # fmt: skip
def test_loss_without_a_divergence_per_token_is_refused(name, knobs, remedy):
    with pytest.raises(ValidationError, match=f"clamp: type = '{name}' .* {remedy}"):
        LOSS_TYPES[name](**knobs, clamp={})
