"""The policy that a run trains, before it is sharded: loaded, or made."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from flowtrain.agents.prompts import CHAT_TEMPLATE
from flowtrain.config import Config
from flowtrain.engines.factory import ModelSpec
from flowtrain.tasks.sets import TaskSet
from flowtrain.training import model as models
from flowtrain.training.lora import add_adapter
from flowtrain.utils.seeds import derive_seed


def load_trained_policy(
    config: Config, tasks: TaskSet, with_weights: bool
) -> tuple[PreTrainedTokenizerFast, PreTrainedModel]:
    """Load the tokenizer and the model that `[model]` names, or make new ones; with the adapter of
    `[lora]`, if it asks for one. Without weights, the model is on the meta device, and what it
    computes in the end is the same.
    """
    tokenizer, model = _load(config, tasks, with_weights)
    if config.lora.rank:
        torch.manual_seed(derive_seed(config.run.seed, "new adapter"))
        add_adapter(model, config.lora, config.model.path)
    return tokenizer, model


def _load(
    config: Config, tasks: TaskSet, with_weights: bool
) -> tuple[PreTrainedTokenizerFast, PreTrainedModel]:
    path = config.model.path
    if path != "tiny":
        spec = ModelSpec.load("model.path", path)
        if not with_weights:
            return spec.tokenizer, spec.without_weights()
        dtype = getattr(torch, config.model.dtype) if config.lora.rank else torch.float32
        return spec.tokenizer, models.load_model(path, dtype)
    tiny = config.tiny
    talks = config.agent.name not in ("agentflow", "single")
    corpus = _chat_corpus(tasks) if talks else _tokenizer_corpus(config, tasks)
    tokenizer = models.new_tokenizer(corpus, tiny.vocab_size)
    if talks:
        tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(derive_seed(config.run.seed, "new model"))
    model = models.new_model(
        tokenizer,
        hidden_size=tiny.hidden_size,
        num_layers=tiny.num_layers,
        num_heads=tiny.num_heads,
        max_positions=tiny.max_positions,
    )
    return tokenizer, model


def _tokenizer_corpus(config: Config, tasks: TaskSet) -> list[str]:
    """Texts that a new tokenizer learns from: prompts and answers of training tasks."""
    closing = {
        "planner": "Tool Name: Base_Generator",
        "verifier": "Conclusion: STOP\nConclusion: CONTINUE",
        "refiner": "Looked for: \nEvidence: The",
    }[config.train.policy]
    texts = []
    for task in tasks.train[:5000]:
        actions = "\n".join(f"Sub-Goal: {s.sub_goal}\nTool Name: {s.tool_name}" for s in task.plan)
        results = "\n".join(
            f"1. {s.tool_name} | {s.sub_goal} | The {s.sub_goal} is" for s in task.plan
        )
        texts.append(f"Question: {task.question}\n{results}\n{actions}\n{closing}")
    return texts


def _chat_corpus(tasks: TaskSet) -> list[str]:
    """Texts that the tokenizer of an agent with a chat template learns from."""
    texts = []
    for task in tasks.train[:5000]:
        lines = ["Tools: Search Python_Coder Base_Generator", f"user:{task.question}"]
        for step in task.plan:
            lines.append(f'assistant:<tool name="{step.tool_name}">')
            lines.append(f'">{{"query": "{step.sub_goal}"}}</tool>')
            lines.append(f"tool:The {step.sub_goal} is")
        texts.append("\n".join(lines))
    return texts
