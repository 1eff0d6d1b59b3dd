"""Orders of shops: the same everywhere, answered by two tools, and split by the price."""

import json

import pytest

from prime_composer.problems.orders import PRICES, Order, draw_orders, price, times


def test_prices_are_the_same_on_every_machine() -> None:
    """Python promises the order of its draws. Runs of other machines compare with these."""
    assert len(PRICES) == 16 * 24
    assert [price("pens", shop) for shop in ("Bath", "Kiel", "York")] == ["8", "4", "4"]
    assert price("pens", "Paris") == price("", "") == "unknown"
    assert set(PRICES.values()) == set(range(2, 10))


def test_draw_orders_splits_by_item_and_shop() -> None:
    """No order of the test has a price that an order of training has."""
    train, test = draw_orders("train"), draw_orders("test")
    assert (len(train), len(test)) == (2768, 304)
    assert len({*train, *test}) == len(PRICES) * 8
    pairs = [{(order.item, order.shop) for order in orders} for orders in (train, test)]
    assert not pairs[0] & pairs[1]
    assert draw_orders("train") == train and draw_orders("test") == test


@pytest.mark.parametrize("order", draw_orders("test")[:5])
def test_solution_calls_both_tools_with_their_own_answers(order: Order) -> None:
    """What a tool says in a solution is what the tool says, and the last message is the answer."""
    first, priced, second, multiplied, last = order.solution()
    assert [message["role"] for message in order.solution()] == [
        *("assistant", "tool", "assistant", "tool", "assistant")
    ]
    calls = [message["tool_calls"][0]["function"] for message in (first, second)]
    assert [call["name"] for call in calls] == ["price", "times"]
    arguments = [json.loads(call["arguments"]) for call in calls]
    assert priced["content"] == price(**arguments[0])
    assert multiplied["content"] == times(**arguments[1]) == last["content"] == order.answer
    assert arguments[1] == {"a": order.pieces, "b": int(priced["content"])}
