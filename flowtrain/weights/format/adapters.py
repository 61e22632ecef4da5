"""Low-rank adapters as versions of a store hold them: A and B of every adapted layer, whole, by the
names under which peft saves them. Their digests, snapshots and deltas are those of any weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowtrain.weights.format.layout import Layout

PREFIX = "base_model.model."
"""The text that peft puts before the names of an adapter's tensors."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """The low-rank adapters of one model: W becomes W + alpha / rank * B A, with A [rank, in] and
    B [out, rank].
    """

    rank: int
    alpha: float
    layout: Layout
    """A and B of every adapted layer, as each version of a store holds them."""

    @property
    def modules(self) -> list[str]:
        """Names of the adapted layers, as the model has them."""
        names = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in self.layout}
        return sorted(names)

    @property
    def targets(self) -> list[str]:
        """Ends of their names."""
        return sorted({name.rpartition(".")[2] for name in self.modules})
