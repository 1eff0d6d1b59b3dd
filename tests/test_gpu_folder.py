"""What the tests of a GPU look with, on machines without one."""

import pytest
import torch

from tests.gpu.waits import Waited, no_waits


@pytest.mark.parametrize("expression", ["float(x.sum())", "x[x > 0]"])
def test_watch_on_a_cpu_notices_what_waits_on_a_gpu(expression):
    x = torch.ones(3)
    with pytest.raises(Waited), no_waits("cpu"):
        eval(expression, {"x": x})
    with no_waits("cpu"):
        x[torch.tensor([0, 2])] + x[1:].sum()
