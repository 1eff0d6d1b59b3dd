"""The page about capacity: its tables are those of the program, and the program's are right."""

from pathlib import Path

import pytest

from tests.benchmarks import capacity
from tests.benchmarks.capacity import QWEN3_0_6B, QWEN3_8B, need

PAGE = Path(__file__).parents[2] / "prime_composer/upstream/capacity.md"


def test_capacity_page_has_the_programs_tables():
    """``python -m tests.benchmarks.capacity --write FILE`` renews them."""
    text = PAGE.read_text(encoding="utf-8")
    assert capacity.renewed(text) == text


def test_capacity_need_of_a_top_k_loss_by_hand():
    """Student: 6 x 0.59598 + 2 x 0.15558 = 3.8871 GFLOP per token. Teacher: 2 x 7.56835."""
    needed = need(QWEN3_0_6B, QWEN3_8B, full=False)
    assert needed.tokens == pytest.approx(0.4 * 989e12 / 3.8871e9, rel=1e-4)
    assert needed.teacher_gpus == pytest.approx(15.1367 / 3.8871 * 0.4 / 0.5, rel=1e-4)
    assert needed.bytes == pytest.approx(260 * needed.tokens)
    assert needed.api == pytest.approx((3.9e-6 * needed.tokens, 4.6e-6 * needed.tokens))
