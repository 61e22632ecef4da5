"""A tool with a state that can be rewound, an example in a package of its own."""

from dataclasses import dataclass, field

from flowtrain.tools import Parameter, ToolCard, ToolContext, ToolError


@dataclass(frozen=True)
class Kept:
    """A state as it was; to free it is nothing here."""

    values: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return 100 * len(self.values)

    def close(self) -> None:
        """Release nothing."""


@dataclass
class Session:
    """The registers of one rollout."""

    values: dict[str, int] = field(default_factory=dict)

    async def execute(self, name: str, add: int) -> str:
        if len(self.values) >= 1000 and name not in self.values:
            raise ToolError("there are 1000 registers, use one of those")
        self.values[name] = self.values.get(name, 0) + add
        return f"{name} is {self.values[name]}"

    async def snapshot(self) -> Kept:
        return Kept(dict(self.values))

    def close(self) -> None:
        """Release nothing."""


class Registers:
    """Made once per process; what a rollout does stays in its session."""

    card = ToolCard(
        "Registers",
        "Adds a number to a named register and tells its value; registers begin with 0.",
        (Parameter("name", "of the register"), Parameter("add", "the number", int)),
        is_stateful=True,
    )

    def __init__(self, context: ToolContext) -> None:
        """It has no options."""

    def open_session(self) -> Session:
        return Session()

    async def restore(self, snapshot: Kept) -> Session:
        return Session(dict(snapshot.values))

    async def execute(self, name: str, add: int) -> str:
        return await Session().execute(name, add)

    def close(self) -> None:
        """Release nothing."""
