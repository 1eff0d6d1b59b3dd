"""Make orders of shops, whose cost takes two tools: the price of one piece, and a product.

``prime_composer/upstream/prime_composer_orders.py`` offers them as an environment of verifiers.
"""

import json
import random
from dataclasses import dataclass
from typing import Any, Literal

from prime_composer.problems.generated import ITEMS
from prime_composer.problems.generated_text import PLACES

ChatMessage = dict[str, Any]  # as the OpenAI API has it

PIECES = range(2, 10)
HELD_OUT = 0.1  # Share of the pairs of an item and a shop whose orders are in the test split alone


@dataclass(frozen=True)
class Order:
    """Some pieces of an item, from a shop."""

    pieces: int  # from 2 to 9
    item: str
    shop: str  # on which the price depends

    @property
    def question(self) -> str:
        """What the student is asked. Quotes make each name the token that it is in a call."""
        return f'What do {self.pieces} "{self.item}" from "{self.shop}" cost?'

    @property
    def answer(self) -> str:
        """The cost, a number of at most two digits."""
        return times(self.pieces, int(price(self.item, self.shop)))

    def solution(self) -> list[ChatMessage]:
        """Return the messages after the question of a rollout that solves it in three turns."""
        unit = price(self.item, self.shop)
        return [
            *_call("price", {"item": self.item, "shop": self.shop}, unit),
            *_call("times", {"a": self.pieces, "b": int(unit)}, self.answer),
            {"role": "assistant", "content": self.answer},
        ]


def _call(tool: str, arguments: ChatMessage, result: str) -> list[ChatMessage]:
    call = {
        "id": tool,
        "type": "function",
        "function": {"name": tool, "arguments": json.dumps(arguments)},
    }
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": tool, "content": result},
    ]


_draw = random.Random("prices of orders")

PRICES = {(item, shop): _draw.choice(PIECES) for item in ITEMS for shop in PLACES}
"""Price of one piece by item and shop, from 2 to 9. It is always the same table."""


def price(item: str, shop: str) -> str:
    """Return the price of one piece as text, or "unknown"."""
    return str(PRICES.get((item, shop), "unknown"))


def times(a: int, b: int) -> str:
    """Return the product of two numbers as text."""
    return str(a * b)


def draw_orders(split: Literal["train", "test"]) -> list[Order]:
    """Return all orders of a split, in a fixed order.

    An item from a shop is in one split alone: no price of the test was ever seen in training.
    """
    pairs = sorted(PRICES)
    random.Random("split of orders").shuffle(pairs)
    held_out = round(HELD_OUT * len(pairs))
    own = pairs[:held_out] if split == "test" else pairs[held_out:]
    orders = [Order(pieces, item, shop) for item, shop in own for pieces in PIECES]
    random.Random("order of orders").shuffle(orders)
    return orders
