"""What an agent's policy read and sampled is what is trained, whichever agent it is.

The engine scores scripted replies with the model itself, in tokens that its tokenizer would not
choose, and logs what passes it.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_options
from batches import flow_grpo
from flowkernels import LossSpec
from gradients import TOLERANCE, Plain, distance, gradient_of
from transformers import AutoModelForCausalLM

from flowtrain.agents.agentflow.build import make_policy
from flowtrain.agents.agentflow.prompts import CHAT_TEMPLATE
from flowtrain.agents.base import AgentContext
from flowtrain.agents.collect import collect
from flowtrain.agents.registry import load_kind
from flowtrain.logging.rollouts import count_rollouts
from flowtrain.records import (
    Call,
    FinishReason,
    Group,
    PolicyName,
    Sample,
    Sampling,
    Task,
    VersionSpan,
)
from flowtrain.tools.search import Search
from flowtrain.trainer import toy
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.packing import pack_rows
from flowtrain.trainer.trainer import Trainer

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_agent.py"
PROGRAM = EXAMPLE.parent / "gateway" / "plain.py"
TASKS = [Task(f"t-{n}", f"What is the area of Chad, {n}?", ("1284",)) for n in range(2)]
CALL = '<tool name="Search">{"query": "area of Chad"}</tool>'
SEARCHES = " area of Chad\nTool Name: Search"
AGENTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "agentflow": (
        {"name": "agentflow", "tools": ["Search"]},
        [" area of Mali\nTool Name: None", SEARCHES],
    ),
    "single": ({"name": "single", "prompt": "compact"}, [" 1284", " 77", ""]),
    "tools": (
        {"name": "tools", "tools": ["Search"]},
        [CALL, f"{CALL}\n{CALL}", "<tool name=", "1284"],
    ),
    "tools as deployed": (
        {"name": "tools", "tools": ["Search"], "history": "as_deployed"},
        [f"<think>so</think>{CALL}", f"{CALL}{CALL}", "<think>so</think><tool name=", "1284"],
    ),
    "own": ({"name": f"{EXAMPLE}:MyAgent"}, ["It is 1284.", "1284"]),
    "gateway": ({"name": "gateway"}, [CALL, f"{CALL}\n{CALL}", "<tool name=", "1284"]),
}
FLOW_REPLIES: dict[PolicyName, list[str]] = {
    "planner": [
        " area of Mali\nTool Name: None",
        "Sub-Goal: area of Chad\nTool Name: None",
        f"Justification: x\nContext: y\nSub-Goal:{SEARCHES}",
        SEARCHES,
    ],
    "verifier": [" CONTINUE", "Conclusion: CONTINUE", " what?"],
    "refiner": [" The area of Chad is 1284.", "Evidence: nothing", " "],
}


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of many positions, for `make_trainer` too."""
    tokenizer = toy.new_tokenizer([f"{TASKS[0].question} {CALL} Tool Name: Search"], 320)
    tokenizer.add_tokens(["<think>", "</think>"])
    content = "message.content.split('</think>')[-1]"  # thinking goes from every earlier reply
    tokenizer.chat_template = CHAT_TEMPLATE.replace("message.content", content)
    torch.manual_seed(0)
    model = toy.new_model(tokenizer, hidden_size=32, num_layers=2, num_heads=4, max_positions=900)
    path = tmp_path_factory.mktemp("model")
    models.export(model, tokenizer, models.full_weights(model), path)
    return str(path)


@dataclass
class ScoringEngine:
    """Replies by a script, with the model's own log-probs."""

    model: Any
    tokenizer: Any
    replies: Sequence[str]
    log: Counter[bytes] = field(default_factory=Counter)
    version: int = 0
    max_tokens: int = 900

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Call:
        rng = random.Random(sampling.seed)
        ids = (*self.in_other_tokens(rng.choice(self.replies), rng), self.tokenizer.eos_token_id)
        ids = ids[: sampling.max_new_tokens]
        logits = self.model(torch.tensor([[*prompt_ids, *ids]])).logits[0, len(prompt_ids) - 1 : -1]
        found = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        self.log[digest(prompt_ids, ids)] += 1
        reason = (
            FinishReason.STOP if ids[-1] == self.tokenizer.eos_token_id else FinishReason.LENGTH
        )
        spans = (VersionSpan(0, len(ids), 0),)
        return Call(tuple(prompt_ids), ids, tuple(found.tolist()), spans, reason)

    def in_other_tokens(self, text: str, rng: random.Random) -> tuple[int, ...]:
        """Encode a text piece by piece, where the tokenizer would have taken larger tokens."""
        ids: list[int] = []
        while text:
            cut = rng.randint(1, 4)
            ids += self.tokenizer.encode(text[:cut], add_special_tokens=False)
            text = text[cut:]
        return tuple(ids)


def digest(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> bytes:
    ids = array("q", [len(prompt_ids), *prompt_ids, *response_ids])
    return hashlib.sha256(ids.tobytes()).digest()


def roll_out(
    path: str, options: Mapping[str, Any], replies: Sequence[str], trained: PolicyName | None = None
) -> tuple[list[Group], ScoringEngine]:
    """Roll out with rewards that differ; with `trained` that policy's engine is returned."""
    sections: dict[str, Any] = {"agent": options, "rollout": {"max_new_tokens": 160}}
    if trained is not None:
        sections["roles"] = {"verifier": "own", "refiner": "own"}
    if options["name"] == "gateway":
        sections["gateway"] = {"function": f"{PROGRAM}:solve"}
    config = toy_options.toy(sections)
    tokenizer = models.load_tokenizer(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).requires_grad_(False)
    engines = {
        name: ScoringEngine(
            model, tokenizer, FLOW_REPLIES[name] if trained is not None else replies
        )
        for name in config.policy_names
    }
    policies = {
        name: make_policy(config, name, engine, tokenizer) for name, engine in engines.items()
    }
    tools = {"Search": Search(["The area of Chad is 1284.", "The area of Mali is 55."])}
    context = AgentContext(config, policies, tools, {}, config.agent.max_turns)
    agent = load_kind(config).make(context)
    groups = collect(agent, TASKS, group_size=4, seed=3)
    agent.close()
    assert not [t.error for group in groups for t in group.trajectories if t.error]
    return [rewarded(group) for group in groups], engines[trained or "planner"]


def rewarded(group: Group) -> Group:
    rollouts = enumerate(group.trajectories)
    return replace(group, trajectories=tuple(replace(t, reward=n % 3 / 2) for n, t in rollouts))


@pytest.mark.parametrize("name", AGENTS)
def test_what_was_sampled_is_what_is_trained(
    name: str, tiny_path: str, make_trainer: Callable[..., Trainer]
) -> None:
    """The same ids by hash of each call; the trainer's log-probs; the gradient of one by one."""
    groups, engine = roll_out(tiny_path, *AGENTS[name])
    check_training(flow_grpo(groups).samples, engine, tiny_path, make_trainer)


@pytest.mark.parametrize("name", ["planner", "verifier", "refiner"])
def test_each_policy_of_a_flow_is_trained_on_its_own_calls(
    name: PolicyName, tiny_path: str, make_trainer: Callable[..., Trainer]
) -> None:
    """With an engine per policy, so that no call of another's is among them. Some turns search."""
    options = {"name": "agentflow", "tools": ["Search"], "num_passages": 2}
    groups, engine = roll_out(tiny_path, options, FLOW_REPLIES["planner"], trained=name)
    samples = flow_grpo(groups, policy=name).samples
    turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
    searched = [
        turn for turn in turns if turn.tool_calls and turn.tool_calls[0].result.error is None
    ]
    assert 0 < len(searched) < len(turns)
    assert len(samples) == len(searched if name == "refiner" else turns)
    check_training(samples, engine, tiny_path, make_trainer)


def check_training(
    samples: Sequence[Sample],
    engine: ScoringEngine,
    tiny_path: str,
    make_trainer: Callable[..., Trainer],
) -> None:
    """The same ids by hash of each call; the trainer's log-probs; the gradient of one by one."""
    assert Counter(digest(s.prompt_ids, s.response_ids) for s in samples) == engine.log
    plain = Plain(tiny_path, LossSpec(), 1.0)
    for sample in samples:
        (logits,) = plain.logits(plain.model, [sample])
        mine = logits.log_softmax(-1).gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        assert (mine - torch.tensor(sample.logprobs)).abs().max() < 1e-4
    _, truth = plain.gradient([[sample] for sample in samples])
    rows = pack_rows(samples, 1)
    assert distance(gradient_of(make_trainer(grad_clip=0.0), rows), truth) < TOLERANCE
    num_packed = sum(len(row.input_ids_N) for row in rows)
    assert num_packed < sum(len(s.prompt_ids) + len(s.response_ids) - 1 for s in samples)


def test_a_rewritten_history_is_trained_as_each_of_its_calls_alone(
    tiny_path: str, make_trainer: Callable[..., Trainer]
) -> None:
    """By one tree, and by a row for each call."""
    groups, engine = roll_out(tiny_path, *AGENTS["tools as deployed"])
    counts = count_rollouts([t for group in groups for t in group.trajectories], ())
    assert counts["rewritten"] > 0 and counts["turns"] == engine.log.total()
    samples = flow_grpo(groups).samples
    assert len(samples) == counts["turns"], "nothing that was sampled is lost"
    _, truth = Plain(tiny_path, LossSpec(), 1.0).gradient([[sample] for sample in samples])
    alone = [row for sample in samples for row in pack_rows([sample], 1)]
    for rows in (pack_rows(samples, 1), alone):
        assert distance(gradient_of(make_trainer(grad_clip=0.0), rows), truth) < TOLERANCE


@pytest.mark.parametrize("name", ["tools", "own", "gateway"])
def test_later_prompts_hold_what_was_sampled(name: str, tiny_path: str) -> None:
    """The tokens of a reply are none that its text would be encoded to."""
    groups, engine = roll_out(tiny_path, *AGENTS[name])
    num_odd = 0
    for trajectory in (t for group in groups for t in group.trajectories):
        calls = [turn.calls["planner"] for turn in trajectory.turns]
        for before, after in pairwise(calls):
            whole = before.prompt_ids + before.response_ids
            assert after.prompt_ids[: len(whole)] == whole
            text = engine.tokenizer.decode(before.response_ids[:-1])
            num_odd += tuple(engine.tokenizer.encode(text)) != before.response_ids[:-1]
    assert num_odd
