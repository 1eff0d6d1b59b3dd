"""The command ``pytest tests/gpu``, on machines without a GPU too."""

from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import is_this_folder_alone
from tests.gpu.waits import Waited, no_waits

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "words,alone",
    [
        (["tests/gpu"], True),
        (["tests/gpu/test_demo.py::test_it", "tests/gpu/test_losses.py"], True),
        (["tests/gpu", "tests/local"], False),
        (["-mload", "tests/gpu"], False),
    ],
)
def test_gpu_folder_is_selected_where_it_is_asked_for_alone(words, alone):
    paths = [word for word in words if word.startswith("tests")]
    assert is_this_folder_alone(paths, words, ROOT) is alone


@pytest.mark.parametrize("expression", ["float(x.sum())", "x[x > 0]"])
def test_watch_on_a_cpu_notices_what_waits_on_a_gpu(expression):
    x = torch.ones(3)
    with pytest.raises(Waited), no_waits("cpu"):
        eval(expression, {"x": x})
    with no_waits("cpu"):
        x[torch.tensor([0, 2])] + x[1:].sum()
