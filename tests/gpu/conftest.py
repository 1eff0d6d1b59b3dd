"""Every test of this folder needs a CUDA device, and says so where there is none."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def device() -> str:
    return "cuda"
