"""A tool of your own: a plain function, whose card comes from its signature and docstring."""

from flowtrain.tools import ToolError

METRES = {"mm": 0.001, "cm": 0.01, "m": 1.0, "km": 1000.0, "foot": 0.3048, "mile": 1609.344}


def convert(length: float, unit: str, to: str = "m") -> str:
    """Converts a length from one unit to another.

    >>> convert(length=3.0, unit="mile", to="km")

    Args:
        length: how many of the unit.
        unit: mm, cm, m, km, foot or mile.
        to: another one of those.
    """
    for name in (unit, to):
        if name not in METRES:
            raise ToolError(f"there is no unit {name!r}; there are {', '.join(METRES)}")
    return f"{length * METRES[unit] / METRES[to]:.6g} {to}"
