"""Options of low-rank adapters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from flowtrain.config.section import Section


class Lora(Section):
    rank: int = Field(0, ge=0)
    """train a low-rank adapter (LoRA) of this rank over a frozen model; 0: train all weights. A
    learning rate about ten times as high fits"""
    alpha: PositiveFloat = 32.0
    """the adapter's output is scaled by alpha / rank"""
    targets: tuple[str, ...] = ()
    """linear layers that get an adapter, by the ends of their names ("q_proj"); empty: all of the
    decoder"""
    sync: Literal["merged", "adapter"] = "merged"
    """what a version holds for the engines: merged: the model's weights with the adapter added;
    adapter: the adapter alone, over the model that every engine has loaded from model.path"""
