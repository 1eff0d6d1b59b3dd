"""Temperatures, denominators and bounds of a loss, as a run on this machine has them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from prime_composer.contract import LossInputs
from prime_composer.local.engine import Engine
from prime_composer.local.student import Student
from prime_composer.losses import parse_loss, setup_loss_fn
from prime_composer.recipe.loading import parse_recipe
from prime_composer.step.gradients import accumulate_gradients
from prime_composer.step.mismatch import Mismatch, SamplerCheck
from prime_composer.step.student_forward import student_inputs
from tests.local.helpers import collect, opened, random_samples

Raw = Callable[..., dict[str, Any]]
RL = {"rollout__group_size": 2}
WITH_RATIOS = {
    "sampled": ({"type": "sampled_reverse_kl", "delta_low": 1e-3, "delta_high": 1e-3}, {}),
    "signed": (
        {"type": "sampled_reverse_kl", "mode": "signed", "delta_low": 1e-3, "delta_high": 1e-3},
        {},
    ),
    "default": ({"type": "default", "dppo_mask_low": 1e-3, "dppo_mask_high": 1e-3}, RL),
    "ipo": ({"type": "ipo", "ipo_threshold": 1e-3}, RL),
    "icepop": ({"type": "icepop", "ratio_low": 0.999, "ratio_high": 1.001}, RL),
    "self": ({"type": "self_distillation", "k": 8, "max_ratio": 1.001}, {}),
    "mix": (
        {"type": "sampled_reverse_kl", "delta_low": 1e-3, "rl_mix": {"kd": 0.5}},
        RL,
    ),
    "compose": (
        {
            "type": "compose",
            "rl": {"loss": {"type": "default", "dppo_mask_low": 1e-3, "dppo_mask_high": 1e-3}},
            "distillation": {"a": {"weight": 1.0, "loss": {"type": "sampled_reverse_kl"}}},
        },
        RL,
    ),
}
OF_RATIOS = ("is_masked", "is_masked_low", "is_clipped", "ratio_at_bound", "mismatch_kl")


@pytest.fixture(scope="module")
def engine(tiny_recipe: Raw) -> Iterator[Engine]:
    """Open models, whose weights no test changes."""
    with opened(tiny_recipe()) as engine:
        yield engine


def first_step(engine: Engine, raw: dict[str, Any], *sizes: int) -> list[dict[str, float]]:
    """Return what the first step measures up to the optimizer, by tokens of a micro-batch."""
    recipe = parse_recipe(raw)
    student = Student(recipe, engine)
    batch, _ = collect(replace(engine, loss=recipe.loss), recipe, 1)
    found = []
    for size in sizes:
        config = recipe.trainer.model_copy(update={"micro_batch_tokens": size})
        assert student.sampler_check is not None
        mismatch = Mismatch(student.sampler_check)
        engine.model.zero_grad()
        measured = accumulate_gradients(engine.model, student.loss, batch, config, 1, mismatch)
        found.append(measured | mismatch.result(1))
    return found


@pytest.mark.parametrize("name", WITH_RATIOS)
def test_first_step_at_a_temperature_drops_no_token(
    name: str, engine: Engine, tiny_recipe: Raw
) -> None:
    """The first step is on-policy: p/mu is 1 at each token, in every loss that has the ratio."""
    loss, changes = WITH_RATIOS[name]
    raw = tiny_recipe(loss=loss, rollout__temperature=0.5, **changes)
    (record,) = first_step(engine, raw, 1000)
    own = {key: value for key, value in record.items() if key.endswith(OF_RATIOS)}
    assert len(own) > 1 and "sampler/mismatch_kl" in own
    assert own == pytest.approx(dict.fromkeys(own, 0.0), abs=1e-8)


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_student_logprobs_have_both_temperatures(
    student: tuple[nn.Module, Any], temperature: float
) -> None:
    """By float64 from the logits: log p/mu at the sampling temperature, log q/p at 1."""
    samples = random_samples([(3, 5), (7, 2)], k=4)
    inputs = student_inputs(student[0], samples, temperature)
    expected: dict[float, list[torch.Tensor]] = {1.0: [], temperature: []}
    for one in samples:
        ids, start = one.rollout.token_ids, one.rollout.start
        logits = student[0](ids[None]).logits[0, start - 1 : -1].double()
        for at, rows in expected.items():
            rows.append((logits / at).log_softmax(-1).gather(1, ids[start:, None])[:, 0])
    tempered, plain = (torch.cat(expected[at]).float() for at in (temperature, 1.0))
    torch.testing.assert_close(inputs.trainer_logprobs, tempered, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(inputs.own_logprobs, plain, rtol=1e-4, atol=1e-5)
    assert student_inputs(student[0], samples).untempered_logprobs is None


def tempered_inputs(**given: Any) -> LossInputs:
    """Return two tokens whose log p is (-1, -2) at temperature 1 and (-0.5, -3) where sampled."""
    sampled = torch.tensor([-0.5, -3.0], dtype=torch.float64, requires_grad=True)
    values = {
        "trainer_logprobs": sampled,
        "inference_logprobs": sampled.detach().clone(),
        "ref_logprobs": torch.tensor([-1.5, -1.25], dtype=torch.float64),
        "advantages": None,
        "loss_mask": torch.tensor([True, True]),
        "untempered_logprobs": torch.tensor([-1.0, -2.0], dtype=torch.float64),
    }
    return LossInputs(**(values | given))


def test_sampled_signal_compares_teacher_and_student_at_one() -> None:
    """A = log q - log p = (-0.5, 0.75) at temperature 1; the gradient is -A d log p where sampled.

    prime-rl has one p alone, and there A = (-1, 1.75).
    """
    loss = setup_loss_fn(parse_loss({"type": "sampled_reverse_kl"}))
    for untempered, expected in ((True, [0.5, -0.75]), (False, [1.0, -1.75])):
        inputs = tempered_inputs(**({} if untempered else {"untempered_logprobs": None}))
        (gradient,) = torch.autograd.grad(loss(inputs).loss, inputs.trainer_logprobs)
        assert gradient.tolist() == pytest.approx(expected)


def test_position_weights_compare_at_one() -> None:
    """|log q - log mu| is (0.5, 0.75) at temperature 1: w = (1 + g, 1 + g 0.75/1.25)."""
    table = {"type": "sampled_reverse_kl", "position_weights": {"gamma": 1.0}}
    mean = setup_loss_fn(parse_loss(table))(tempered_inputs()).metrics["position_weights/mean"]
    assert float(mean) == pytest.approx((2 + 1.6) / 2)


def test_mismatch_limit_goes_with_the_temperature(tiny_recipe: Raw) -> None:
    """A difference of the logits makes a KL of 1/T^2 of that at 1; a limit of the user's stays."""
    for changes, limit in (({}, 4e-6), ({"checks__mismatch": 0.3}, 0.3)):
        check = SamplerCheck.of_recipe(
            parse_recipe(tiny_recipe(rollout__temperature=0.5, **changes))
        )
        assert check is not None and check.limit == pytest.approx(limit)


def removed(last: int) -> dict[str, Any]:
    """Return a modifier that removes all tokens of some ids."""
    return {"ids": list(range(3, last)), "occurrence": "all"}


SIGNED = {"type": "sampled_reverse_kl", "mode": "signed", "delta_low": 1e-4, "delta_high": 1e-4}
TABLES = {
    "special": {"type": "sampled_reverse_kl", "special_tokens": removed(150)},
    "skip": {"type": "self_distillation", "k": 8, "skip_first": 5},
    "dropped": SIGNED,
    "forward": {"type": "topk_forward_kl", "k": 8, "special_tokens": removed(90)},
    "mix": {
        "type": "sampled_reverse_kl",
        "special_tokens": removed(90),
        "rl_mix": {"kd": 0.5},
    },
}


@pytest.mark.parametrize("name", TABLES)
def test_metrics_do_not_depend_on_micro_batches(
    name: str, engine: Engine, tiny_recipe: Raw
) -> None:
    """Each mean is over its own tokens of the step, wherever a modifier removes some."""
    raw = tiny_recipe(loss=TABLES[name], rollout__group_size=2)
    first, second = first_step(engine, raw, 64, 100_000)
    assert len(first) > 2
    for one in (first, second):  # a share of the largest in a micro-batch is none of a step
        for key in [key for key in one if key.endswith("top1pct")]:
            del one[key]
    assert first == pytest.approx(second, rel=1e-4, abs=1e-7)
