"""A tool with a state that can be rewound, an example in a package of its own."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from flowtrain.tools import Parameter, ToolCard, ToolContext, ToolError, schema_of
from flowtrain.types import ToolCall


@dataclass
class Session:
    """The registers of one rollout."""

    values: dict[str, int] = field(default_factory=dict)

    async def execute(self, name: str, add: int) -> str:
        if len(self.values) >= 1000 and name not in self.values:
            raise ToolError("there are 1000 registers, use one of those")
        self.values[name] = self.values.get(name, 0) + add
        return f"{name} is {self.values[name]}"

    def close(self) -> None:
        """Release nothing."""


class Registers:
    """Made once per process; what a rollout does stays in its session."""

    card = ToolCard(
        "Registers",
        "Adds a number to a named register and tells its value; registers begin with 0.",
        schema_of(Parameter("name", "of the register"), Parameter("add", "the number", int)),
        is_stateful=True,
    )

    def __init__(self, context: ToolContext) -> None:
        """It has no options."""

    async def open_session(self, history: Sequence[ToolCall]) -> Session:
        session = Session()
        for call in history:
            if call.result.error is None:
                await session.execute(**json.loads(call.arguments))
        return session

    async def execute(self, name: str, add: int) -> str:
        return await Session().execute(name, add)

    def close(self) -> None:
        """Release nothing."""
