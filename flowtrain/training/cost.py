"""FLOPs that a row needs: what a step is measured by, and what is spread evenly over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from flowtrain.training.tree import PackedRow


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """FLOPs of a forward pass through dense layers; a backward pass takes twice as many. Norms,
    rotations and softmax are left out.
    """

    per_token: float
    """Two per parameter of a layer."""
    per_pair: float
    """A token and one that it sees: two for the score and two for the value, per channel and layer.
    """
    per_target: float
    """Two per entry of the head."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ForwardCost:
        config = model.config
        head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        return cls(
            per_token=2.0 * sum(p.numel() for p in model.get_decoder().layers.parameters()),
            per_pair=4.0 * config.num_hidden_layers * config.num_attention_heads * head_dim,
            per_target=2.0 * config.vocab_size * config.hidden_size,
        )

    def flops(self, row: PackedRow) -> float:
        """A token at position p of its sample sees p + 1."""
        num_pairs = int(row.position_ids_N.sum()) + len(row.position_ids_N)
        return (
            self.per_token * len(row.input_ids_N)
            + self.per_pair * num_pairs
            + self.per_target * len(row.target_ids_T)
        )
