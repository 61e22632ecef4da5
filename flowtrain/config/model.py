"""Options of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainSerializer, PositiveInt

from flowtrain.config.section import Section
from flowtrain.config.shipped import PLANNER


def _resolved(path: str) -> str:
    if path in ("tiny", "quickstart") and Path(path).is_dir():
        raise ValueError(
            f"{path!r} is the name of a built-in model and of a folder here: write './{path}' for "
            "the folder"
        )
    return str(PLANNER) if path == "quickstart" else path


def _portable(path: str) -> str:
    """Name the planner by its word, for a node whose flowtrain lies elsewhere."""
    return "quickstart" if path == str(PLANNER) else path


ModelPath = Annotated[str, AfterValidator(_resolved), PlainSerializer(_portable)]
"""A folder, a hub name, or a word for a model of flowtrain's own."""


class Model(Section):
    path: ModelPath = "tiny"
    """folder or hub name of a Hugging Face causal LM; "tiny": a new decoder with random weights, as
    specified in [tiny]; "quickstart": the pretrained planner shipped with flowtrain"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the forward and backward pass and of the engine's weights; master weights are
    float32 unless train.optimizer is a bf16 one"""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """variables passed to the policies' chat templates, e.g. {enable_thinking = false} for Qwen3"""


class Tiny(Section):
    vocab_size: PositiveInt = 512
    """vocabulary size of the byte-level BPE trained on the training tasks; at least 258"""
    hidden_size: PositiveInt = 96
    """hidden size of the decoder; a multiple of num_heads"""
    num_layers: PositiveInt = 3
    """decoder layers"""
    num_heads: PositiveInt = 6
    """attention heads"""
    family: Literal["qwen3", "qwen3_moe", "gpt_oss", "qwen3_5"] = "qwen3"
    """qwen3_moe, gpt_oss: 2 of 8 experts a token, as wide together as qwen3's MLP; gpt_oss has
    sinks, and windows of 64 tokens in every other layer; qwen3_5: Gated DeltaNet in every other"""
    max_positions: PositiveInt = 256
    """largest total number of prompt and response tokens"""
