"""A small shop with orders, in the style of the tau-squared benchmark: the agent must find out what
the customer wants, and what has become of the shop at the end decides the reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from flowtrain.agents.chat.environment import EnvironmentTool
from flowtrain.records import Task
from flowtrain.tools import Parameter, Tool, ToolCard, ToolError, schema_of

EVENTS: list[str] = []
"""What has become of all shops, for tests."""
ORDER = Parameter("order", "number of the order", int)


class Shop:
    """A shop of two orders, one of which the customer wants to cancel."""

    can_repeat = True

    def __init__(self, task: Task) -> None:
        self.wanted = int(task.answers[0])
        self.orders = {1: "open", 2: "open", 3: "sent"}
        self.num_told = 0
        EVENTS.append("made")

    @property
    def tools(self) -> Mapping[str, Tool]:
        look = ToolCard("look_up", "Tells the state of an order.", schema_of(ORDER))
        cancel = ToolCard("cancel", "Cancels an order.", schema_of(ORDER), is_stateful=True)
        tools = (EnvironmentTool(look, self.look_up), EnvironmentTool(cancel, self.cancel))
        return {tool.card.name: tool for tool in tools}

    async def open(self) -> Sequence[Mapping[str, Any]]:
        EVENTS.append("opened")
        return [
            {"role": "system", "content": "You work for a shop."},
            {"role": "user", "content": "I want to cancel an order."},
        ]

    async def look_up(self, order: int) -> str:
        if order not in self.orders:
            raise ToolError(f"there is no order {order}")
        return self.orders[order]

    async def cancel(self, order: int) -> str:
        if await self.look_up(order) != "open":
            raise ToolError(f"order {order} is {self.orders[order]}")
        self.orders[order] = "cancelled"
        EVENTS.append(f"cancelled {order}")
        return "done"

    async def reply(self, text: str) -> str | None:
        self.num_told += 1
        if "bye" in text:
            return None
        return f"It is order {self.wanted}." if "which" in text.lower() else "Please go on."

    async def reward(self) -> Mapping[str, float]:
        right = dict.fromkeys((1, 2), "open") | {3: "sent", self.wanted: "cancelled"}
        return {"state": 0.9 * (self.orders == right), "brevity": 0.1 * (self.num_told <= 2)}

    async def close(self) -> None:
        EVENTS.append("closed")


class Forgetful(Shop):
    """A shop in which the same call twice does not do the same."""

    num_made = 0

    async def look_up(self, order: int) -> str:
        type(self).num_made += 1
        return f"{await super().look_up(order)} {self.num_made}"

    async def cancel(self, order: int) -> str:
        return "no"


class Unrepeatable(Shop):
    can_repeat = False


class Brief(Shop):
    """Closes for good with the first order that is cancelled; what is wanted is an option."""

    over = False

    def __init__(self, task: Task, *, wanted: int) -> None:
        super().__init__(task)
        self.wanted = wanted

    async def cancel(self, order: int) -> str:
        done = await super().cancel(order)
        self.over = True
        return done


class Broken(Shop):
    async def open(self) -> Sequence[Mapping[str, Any]]:
        await super().open()
        raise OSError("no shop today")


class Slow(Shop):
    async def reply(self, text: str) -> str | None:
        await asyncio.Event().wait()
        return None


class Stepwise(Shop):
    async def turn_rewards(self) -> list[float]:
        return [0.0, 0.0, 0.0, -0.5]


class Sticky(Shop):
    async def close(self) -> None:
        await super().close()
        await asyncio.Event().wait()


class BadReward(Shop):
    async def reward(self) -> Any:
        return "much"


def plain_number(task: Task) -> Shop:
    """A maker that is a function; its shop gives one number."""
    shop = Shop(task)

    async def reward() -> float:
        return 0.5

    shop.reward = reward
    return shop


NO_MAKER = 3
