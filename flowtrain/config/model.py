"""Options of the model."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from flowtrain.config.section import Section


class Model(Section):
    path: str = "tiny"
    """folder or hub name of a Hugging Face causal LM; "tiny": a new decoder with random weights,
    built as [tiny] says"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """type of the forward and backward pass and of the engine's weights; master weights are float32
    unless train.optimizer has bf16 in its name"""


class Tiny(Section):
    vocab_size: PositiveInt = 512
    """tokens of the byte-level BPE that is trained on the training tasks; at least 258"""
    hidden_size: PositiveInt = 96
    """width of the decoder; num_heads divides it"""
    num_layers: PositiveInt = 3
    """decoder layers"""
    num_heads: PositiveInt = 6
    """attention heads"""
    max_positions: PositiveInt = 256
    """tokens of prompt and response together"""
