"""What the study of another tokenizer's brute force is compared with, by plain forwards."""

import math

import numpy as np
import pytest
import torch

from prime_composer.contract import Scores
from tests.cross_tokenizer.reference import Exact
from tests.studies.cross_tokenizer import Errors, TeacherRows
from tests.tiny_qwen import make_model


def test_rows_of_other_texts_are_those_of_plain_forwards() -> None:
    """Some texts leave the answer at its begin, in its middle, or go on where it ends."""
    model, prompt, answer = make_model(True, 0, vocab_size=40), (3, 1, 4), (10, 11, 12)
    rows = TeacherRows(model, prompt, answer)
    texts = [(), (10, 11), (20,), (10, 21, 22), (10, 11, 12, 23)]
    for text, row in zip(texts, rows.of(texts), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *text]])).logits[0, -1]
        np.testing.assert_allclose(row, logits.softmax(-1).numpy(), atol=1e-5)


def test_errors_are_the_distance_to_the_exact_teacher() -> None:
    found, q = Errors(), {0: 0.5, 1: 0.25, 2: 0.25}
    logprobs = torch.tensor([[0.25, 0.5]]).log()
    scores = Scores(torch.tensor([math.log(0.25)]), torch.tensor([[0, 1]]), logprobs)
    found.add(0, scores, 0, Exact(q, 0.01, 7), np.array([0.5, 0.25, 0.25]))
    assert found.own == pytest.approx([math.log(0.5)])
    assert found.others == pytest.approx([math.log(2)]) and found.mass == [(0.75, 1.0)]
    (exact, computed) = found.reverse[0]
    assert exact == pytest.approx(0.0) and computed == pytest.approx(0.25 * math.log(2))
