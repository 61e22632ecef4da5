"""The policy that a run trains, before it is sharded: loaded, or made."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from flowtrain.config import Config
from flowtrain.engines.factory import ModelSpec
from flowtrain.tasks.sets import TaskSet
from flowtrain.toy.policy import new_policy
from flowtrain.training.lora import add_adapter
from flowtrain.training.model import load_model
from flowtrain.utils.seeds import derive_seed


def load_trained_policy(
    config: Config, tasks: TaskSet, with_weights: bool
) -> tuple[PreTrainedTokenizerFast, PreTrainedModel]:
    """Load the tokenizer and the model that `[model]` names, or make new ones; with the adapter of
    `[lora]`, if it asks for one. Without weights, the model is on the meta device, and what it
    computes in the end is the same.
    """
    path = config.model.path
    if path == "tiny":
        tokenizer, model = new_policy(config, tasks)
    else:
        spec = ModelSpec.load("model.path", path)
        tokenizer = spec.tokenizer
        dtype = getattr(torch, config.model.dtype) if config.lora.rank else torch.float32
        model = load_model(path, dtype) if with_weights else spec.without_weights()
    if config.lora.rank:
        torch.manual_seed(derive_seed(config.run.seed, "new adapter"))
        add_adapter(model, config.lora, path)
    return tokenizer, model
