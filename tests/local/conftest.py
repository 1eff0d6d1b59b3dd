"""Fixtures of the one-machine engine's tests."""

from typing import Any

import pytest
import torch

from prime_composer.backends.hf_model import load_student
from tests.backends.conftest import (  # noqa: F401  (fixtures)
    models,
    tied_model,
    vllm_sampler,
    vllm_scorer,
)
from tests.conftest import TINY_RECIPE
from tests.local.helpers import tiny_models


@pytest.fixture(scope="session")
def student() -> tuple[torch.nn.Module, Any]:
    """The student of TINY_RECIPE with its tokenizer; not to be changed."""
    return load_student(tiny_models(TINY_RECIPE)["student"])
