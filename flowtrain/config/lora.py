"""Options of low-rank adapters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from flowtrain.config.section import Section


class Lora(Section):
    rank: int = Field(0, ge=0)
    """train a low-rank adapter (LoRA) of this rank on a frozen model; 0: train all weights. LoRA
    needs a learning rate about ten times as high"""
    alpha: PositiveFloat = 32.0
    """the adapter's output is scaled by alpha / rank"""
    targets: tuple[str, ...] = ()
    """linear layers that get an adapter, by suffixes of their names ("q_proj"); empty: all linear
    layers of the decoder"""
    sync: Literal["merged", "adapter"] = "merged"
    """content of a published version. merged: the model's weights with the adapter added; adapter:
    the adapter alone, applied to the model that every engine has loaded from model.path"""
