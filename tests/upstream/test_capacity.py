"""The page about capacity: its tables are those of the program, and the program's are right."""

from pathlib import Path

import pytest

from tests.benchmarks import capacity
from tests.benchmarks.capacity import LLAMA_8B, LLAMA_70B, QWEN3_0_6B, QWEN3_8B, need

PAGE = Path(__file__).parents[2] / "prime_composer/upstream/capacity.md"


def test_capacity_page_has_the_programs_tables():
    """``python -m tests.benchmarks.capacity --write FILE`` renews them."""
    text = PAGE.read_text(encoding="utf-8")
    assert capacity.renewed(text) == text


@pytest.mark.parametrize(
    "model,layers,all_weights",
    [
        (QWEN3_0_6B, 0.44e9, 0.6e9),
        (QWEN3_8B, 6.95e9, 8.2e9),
        (LLAMA_8B, 6.98e9, 8.03e9),
        (LLAMA_70B, 68.45e9, 70.6e9),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_capacity_sizes_are_those_of_the_model_cards(model, layers, all_weights):
    """Expected: parameters without and with embeddings, as their authors give them."""
    assert model.product_parameters - model.head_parameters == pytest.approx(layers, rel=0.01)
    assert model.weight_bytes / 2 == pytest.approx(all_weights, rel=0.01)


def test_capacity_need_of_a_top_k_loss_by_hand():
    """Student: 6 x 0.59598 + 2 x 0.15558 = 3.8871 GFLOP per token. Teacher: 2 x 7.56835."""
    needed = need(QWEN3_0_6B, QWEN3_8B, full=False)
    assert needed.tokens == pytest.approx(0.4 * 989e12 / 3.8871e9, rel=1e-4)
    assert needed.teacher_gpus == pytest.approx(15.1367 / 3.8871 * 0.4 / 0.5, rel=1e-4)
    assert needed.bytes == pytest.approx(260 * needed.tokens)
    assert needed.api == pytest.approx((3.9e-6 * needed.tokens, 4.6e-6 * needed.tokens))


def test_capacity_need_of_the_whole_vocabulary_by_hand():
    """Both heads are in the trainer, four and two products, and the teacher's on the server too.

    Student: 6 x 7.50465 + 2 x 0.52534 + 4 x 1.05067 = 50.2813 GFLOP. Teacher: 2 x 69.5031.
    """
    needed = need(LLAMA_8B, LLAMA_70B, full=True)
    assert needed.tokens == pytest.approx(0.4 * 989e12 / 50.2813e9, rel=1e-4)
    assert needed.teacher_gpus == pytest.approx(139.006 / 50.2813 * 0.4 / 0.5, rel=1e-4)
    assert needed.bytes == pytest.approx((2 * 8192 + 12) * needed.tokens)
    assert needed.json is None


@pytest.mark.parametrize(
    "value,text",
    [(0.0184, "0.018"), (0.996, "1.0"), (4.07, "4.1"), (60.4, "60"), (101_786.0, "100,000")],
)
def test_capacity_numbers_have_two_significant_digits(value, text):
    assert capacity.rounded(value) == text


def test_capacity_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="tables: begin"):
        capacity.renewed("no tables")
