"""SmolLM2-135M-Instruct from the package index."""

from flowtrain.records import UserError


class NoWheel(UserError):
    """The package index does not give the wheel."""
