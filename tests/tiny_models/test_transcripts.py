"""Small models that learn from solved rollouts: their tokens, what is learned, and the cache."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from prime_composer.problems.config import Problem
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.orders import Order, draw_orders
from prime_composer.tiny_models.cache import cache_key, prepare_model
from prime_composer.tiny_models.training import _padded, train_tokenizer
from prime_composer.tiny_models.transcripts import END_OF_TEXT, MARKS, example_of
from tests.tiny_models import test_prepare

ORDERS = draw_orders("train")[:200]
TINY = test_prepare.TINY.model_copy(update={"vocab_size": 415, "sft_steps": 2})


def messages_of_order(order: Order) -> list[dict[str, Any]]:
    return [{"role": "user", "content": order.question}, *order.solution()]


def problems_of(orders: Sequence[Order]) -> ProblemSet:
    """Return tasks with transcripts, as ``load_sources`` makes them."""
    problems = [
        Problem(order.question, "", "orders", transcript=json.dumps(messages_of_order(order)))
        for order in orders
    ]
    return ProblemSet(problems, [], {})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(problems_of(ORDERS), TINY.vocab_size)


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    return [tokenizer.decode([token]) for token in ids]


def test_example_learns_the_assistants_tokens_alone(tokenizer: Any) -> None:
    """Written out for one order: calls, answer and their ends are learned, and nothing else."""
    order = Order(7, "lamps", "Derby")
    unit, total = order.solution()[1]["content"], order.answer
    ids, learned = example_of(json.dumps(messages_of_order(order)), tokenizer)
    spans: list[tuple[bool, str]] = []
    for piece, is_learned in zip(pieces(tokenizer, ids), learned, strict=True):
        if spans and spans[-1][0] == is_learned:
            spans[-1] = is_learned, spans[-1][1] + piece
        else:
            spans.append((is_learned, piece))
    end = END_OF_TEXT
    price = '{"name": "price", "arguments": {"item": "lamps", "shop": "Derby"}}'
    times = f'{{"name": "times", "arguments": {{"a": 7, "b": {unit}}}}}'
    assert spans == [
        (False, f'<|user|>What do 7 "lamps" from "Derby" cost?{end}<|assistant|>'),
        (True, f"<tool_call>{price}</tool_call>{end}"),
        (False, f"<|tool|>{unit}{end}<|assistant|>"),
        (True, f"<tool_call>{times}</tool_call>{end}"),
        (False, f"<|tool|>{total}{end}<|assistant|>"),
        (True, f"{total}{end}"),
    ]


def test_padded_targets_are_the_learned_tokens(tokenizer: Any) -> None:
    """Each learned token is the target of the position before it. Padding has none."""
    chat = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}]
    short = json.dumps(chat)
    batch = [
        example_of(json.dumps(messages_of_order(ORDERS[0])), tokenizer),
        example_of(short, tokenizer),
    ]
    token_ids, targets = _padded(batch)
    for row, (ids, learned) in enumerate(batch):
        assert token_ids[row, : len(ids) - 1].tolist() == ids[:-1]
        expected = [ids[i] if learned[i] else -1 for i in range(1, len(ids))]
        assert targets[row, : len(ids) - 1].tolist() == expected
        assert (targets[row, len(ids) - 1 :] == -1).all()
    # <|assistant|> is context, and "1" and its end are learned.
    assert batch[1][1][-3:] == [False, True, True]


def test_tokenizer_has_one_token_per_mark_and_per_name(tokenizer: Any) -> None:
    """A name is the same single token in the question and in the call."""
    for mark in MARKS:
        assert len(tokenizer.encode(mark)) == 1
    for order in ORDERS[:20]:
        ids, _ = example_of(json.dumps(messages_of_order(order)), tokenizer)
        for name in (order.item, order.shop):
            assert pieces(tokenizer, ids).count(name) == 2


def test_example_of_a_turn_that_changes_is_refused(tokenizer: Any) -> None:
    """A template that rewrites an earlier turn would give the tokens a context of no rollout."""
    changed = train_tokenizer(problems_of(ORDERS[:20]), TINY.vocab_size)
    changed.chat_template = tokenizer.chat_template.replace(
        "m.content or ''", "(m.content or '') if loop.last else ''"
    )
    with pytest.raises(AssertionError, match="keeps every turn"):
        example_of(json.dumps(messages_of_order(ORDERS[0])), changed)


def test_prepared_model_has_the_template(tmp_path: Path) -> None:
    """Its folder is complete: template, marks and one token to end a turn."""
    from transformers import AutoTokenizer

    folder = prepare_model(TINY, problems_of(ORDERS[:40]), tmp_path)
    saved = AutoTokenizer.from_pretrained(folder)
    transcript = json.dumps(messages_of_order(ORDERS[0]))
    assert example_of(transcript, saved)[0][-1] == saved.eos_token_id
    assert saved.decode(saved.encode("<tool_call>"), skip_special_tokens=True) == ""
    assert (folder / "model.safetensors").is_file()


def test_cache_key_changes_with_a_transcript() -> None:
    keys = {cache_key(TINY, problems_of(orders)) for orders in (ORDERS[:20], ORDERS[1:21])}
    assert len(keys) == 2
    assert cache_key(TINY, problems_of(ORDERS[:20])) in keys
