"""The new policy of a run with model.path = "tiny"."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from flowtrain.agents.agentflow.prompts import CHAT_TEMPLATE
from flowtrain.config import Config
from flowtrain.tasks.sets import TaskSet
from flowtrain.trainer.toy import new_model, new_tokenizer
from flowtrain.utils.seeds import derive_seed


def new_policy(config: Config, tasks: TaskSet) -> tuple[PreTrainedTokenizerFast, PreTrainedModel]:
    """Return a tokenizer trained on the tasks, and a model with random weights as `[tiny]`
    specifies.
    """
    tiny = config.tiny
    has_chat_template = config.agent.name not in ("agentflow", "single")
    corpus = _chat_corpus(tasks) if has_chat_template else _tokenizer_corpus(config, tasks)
    tokenizer = new_tokenizer(corpus, tiny.vocab_size)
    if has_chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(derive_seed(config.run.seed, "new model"))
    model = new_model(
        tokenizer,
        hidden_size=tiny.hidden_size,
        num_layers=tiny.num_layers,
        num_heads=tiny.num_heads,
        max_positions=tiny.max_positions,
        family=tiny.family,
    )
    return tokenizer, model


def _tokenizer_corpus(config: Config, tasks: TaskSet) -> list[str]:
    """Write texts that a new tokenizer learns from: prompts and answers of training tasks."""
    closing_text = {
        "planner": "Tool Name: Base_Generator",
        "verifier": "Conclusion: STOP\nConclusion: CONTINUE",
        "refiner": "Looked for: \nEvidence: The",
    }.get(config.train.policy, "")
    texts = []
    for task in tasks.train[:5000]:
        actions = "\n".join(f"Sub-Goal: {s.sub_goal}\nTool Name: {s.tool_name}" for s in task.plan)
        results = "\n".join(
            f"1. {s.tool_name} | {s.sub_goal} | The {s.sub_goal} is" for s in task.plan
        )
        texts.append(f"Question: {task.prompt}\n{results}\n{actions}\n{closing_text}")
    return texts


def _chat_corpus(tasks: TaskSet) -> list[str]:
    """Write texts that the tokenizer of an agent with a chat template learns from."""
    texts = []
    for task in tasks.train[:5000]:
        lines = ["Tools: Search Python_Coder Base_Generator", f"user:{task.prompt}"]
        for step in task.plan:
            lines.append(f'assistant:<tool name="{step.tool_name}">')
            lines.append(f'">{{"query": "{step.sub_goal}"}}</tool>')
            lines.append(f"tool:The {step.sub_goal} is")
        texts.append("\n".join(lines))
    return texts
