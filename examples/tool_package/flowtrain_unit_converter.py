"""A tool that converts lengths, an example of a tool in a package of its own."""

from flowtrain.tools import ToolCard, ToolContext, ToolError

METRES = {"mm": 0.001, "cm": 0.01, "m": 1.0, "km": 1000.0, "foot": 0.3048, "mile": 1609.344}


class LengthConverter:
    """Made once per process and shared by all rollouts, so it keeps nothing of a call."""

    card = ToolCard(
        "Length_Converter",
        "Converts a length from one unit to another.",
        limits=f"It knows {', '.join(METRES)}.",
        advice="Write it as in the example: number, unit, to, unit.",
        examples=({"query": "3 mile to km"},),
    )

    def __init__(self, context: ToolContext) -> None:
        self.digits = int(context.options.get("digits", 6))  # [plugins.Length_Converter] digits = 3

    async def execute(self, query: str) -> str:
        match query.split():
            case [number, unit, "to", wanted] if unit in METRES and wanted in METRES:
                return f"{float(number) * METRES[unit] / METRES[wanted]:.{self.digits}g} {wanted}"
        raise ToolError(f"write '3 mile to km', with units of {', '.join(METRES)}; got {query!r}")

    def close(self) -> None:
        """Release nothing."""
