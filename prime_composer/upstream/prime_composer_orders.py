"""Offer orders of shops as an environment of verifiers' v1 API, with two tools.

The wheel puts this file beside the package, where verifiers and prime-rl look for the id
"prime-composer-orders". A rollout that solves an order has three turns: ``price``, ``times``, and
the answer. Its tasks have a ``solution``, so small models of ``[*.prepare]`` learn from them.
"""

from typing import Any, Literal

import verifiers.v1 as vf

from prime_composer.problems.orders import Order, draw_orders, price, times


class OrderData(vf.TaskData):
    """An order."""

    pieces: int
    item: str
    shop: str


class OrderTask(vf.Task[OrderData]):
    """Find out what an order costs."""

    @property
    def order(self) -> Order:
        """The order."""
        return Order(self.data.pieces, self.data.item, self.data.shop)

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """Return 1 where the last answer is the cost and nothing else."""
        return float((trace.last_reply or "").strip() == self.order.answer)

    def solution(self) -> list[dict[str, Any]]:
        """Return the messages after the prompt of a rollout that solves the task."""
        return self.order.solution()


class OrderToolset(vf.Toolset[vf.SharedToolsetConfig]):
    """The two tools."""

    TOOL_PREFIX = None

    @vf.tool
    async def price(self, item: str, shop: str) -> str:
        """Return the price of one piece of an item from a shop."""
        return price(item, shop)

    @vf.tool
    async def times(self, a: int, b: int) -> str:
        """Return the product of two numbers."""
        return times(a, b)


class OrderTasksetConfig(vf.TasksetConfig):
    """Which orders."""

    split: Literal["train", "test"] = "train"


class OrderTaskset(vf.Taskset[OrderTask, OrderTasksetConfig]):
    """All orders of a split."""

    def load(self) -> list[OrderTask]:
        """Return the tasks, in a fixed order."""
        return [
            OrderTask(
                OrderData(
                    prompt=order.question, pieces=order.pieces, item=order.item, shop=order.shop
                ),
                self.config.task,
            )
            for order in draw_orders(self.config.split)
        ]

    @classmethod
    def toolsets(cls, config: OrderTasksetConfig) -> list[vf.Toolset]:
        """Return the server of the tools, which all rollouts share."""
        return [OrderToolset(vf.SharedToolsetConfig())]


__all__ = ["OrderTaskset"]

if __name__ == "__main__":
    OrderToolset.run()
