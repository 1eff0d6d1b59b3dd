"""The numbers of the gradient-bias study on gradients whose bias and noise are known."""

import pytest
import torch

from tests.studies.gradient_bias import bias_and_noise


def test_half_the_gradient_is_biased_along_and_not_across() -> None:
    full = torch.tensor([[4.0, 0.0], [2.0, 0.0]])
    bias, error, cosine, length, noise = bias_and_noise(full / 2, full)
    # Means (1.5, 0) and (3, 0); the gaps -2 and -1 have sample variance 0.5, the halves 2 and 1 the
    # same.
    assert (bias, cosine, length) == pytest.approx((0.5, 1.0, 0.5))
    assert error == pytest.approx((0.5 / 2) ** 0.5 / 3) and noise == pytest.approx(0.5**0.5 / 3)
