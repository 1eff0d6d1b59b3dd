"""The control of the study of RL beside distillation, by hand."""

import math

import pytest
import torch

from prime_composer import LossInputs
from tests.studies.fixed_advantage import FixedAdvantageConfig, fixed_advantage


def test_only_improbable_tokens_of_the_mask_are_pushed_down() -> None:
    """Sampled at 0.05, 0.5 and 0.02, the last one outside the mask; the first is at 0.1 now."""
    student = torch.tensor([0.1, 0.5, 0.02]).log().requires_grad_()
    sampler = torch.tensor([0.05, 0.5, 0.02]).log()
    mask = torch.tensor([True, True, False])
    inputs = LossInputs(student, sampler, torch.full((3,), math.nan), torch.zeros(3), mask)
    found = fixed_advantage(inputs, FixedAdvantageConfig(penalty=3.0))
    found.loss.backward()
    assert found.loss.item() == pytest.approx(6.0)  # 3 * 0.1 / 0.05
    assert student.grad is not None
    assert student.grad.tolist() == pytest.approx([6.0, 0.0, 0.0])  # of rho by log p: rho
    assert found.metrics["improbable"].item() == 0.5
