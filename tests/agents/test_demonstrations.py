"""Demonstrations of a refiner are exactly its prompt and its reply."""

from __future__ import annotations

import asyncio

import pytest
from char_tokenizer import CharTokenizer
from make import Chat, Planner, Tool

from flowtrain.agents.agentflow.demonstrations import refinements
from flowtrain.agents.agentflow.executor import Executor
from flowtrain.agents.agentflow.flow import Flow, FlowLimits
from flowtrain.agents.agentflow.generator import Generator
from flowtrain.agents.agentflow.memory import Memory
from flowtrain.agents.agentflow.refiner import FullRefinerPrompt, ModelRefiner, Refiner
from flowtrain.agents.agentflow.verifier import RuleVerifier
from flowtrain.agents.agentflow.voices import ChatVoice
from flowtrain.records import Action, Task, Trajectory
from flowtrain.tools import ToolCard

TASK = Task("t", "How large are Chad and Mali?", ("x",))
GOALS = (
    ("area of Chad", "Archive"),
    ("nonsense", "Nothing"),
    ("area of Mali", "Archive"),
    ("area of Niger", "Clock"),
)


class Following(Planner):
    """Follows GOALS; the second turn is malformed."""

    def measure(self, memory: Memory) -> int:
        return sum(len(entry.result) for entry in memory.entries)


def model() -> Chat:
    return Chat([f"Evidence {number}: " + "1284 " * 60 for number in (1, 2)])


def frozen(model: Chat, max_chars: int) -> Refiner:
    return ModelRefiner(ChatVoice(model), FullRefinerPrompt(), max_chars)


def make(refiner: Refiner | None, memory_tokens: int) -> tuple[Flow, Trajectory]:
    tools = {
        name: Tool(
            ToolCard(name, "", finds_passages=name == "Archive"),
            lambda query: f"The {query} is 1284. " * 30,
        )
        for name in ("Archive", "Clock")
    }
    limits = FlowLimits(4, 60.0, memory_tokens=memory_tokens)
    rules = RuleVerifier(lambda task, memory: False), Generator()
    flow = Flow(
        Following(lambda turn, _: None if turn == 1 else Action("", "", *GOALS[turn])),
        Executor(tools, 5.0, 1000),
        *rules,
        limits,
        refiner=refiner,
        passage_tools=frozenset({"Archive"}),
    )
    return flow, asyncio.run(flow.run(TASK, 0))


@pytest.mark.parametrize("memory_tokens", [0, 250])
def test_samples_have_what_the_refiner_read_and_wrote(memory_tokens: int) -> None:
    """Only searches are imitated; under a memory budget the refiner has read what was left."""
    chat, tokenizer = model(), CharTokenizer()
    flow, rollout = make(frozen(chat, 1000), memory_tokens)
    samples = refinements(flow, [rollout], tokenizer, 1000)
    read = [tokenizer.decode(sample.prompt_ids) for sample in samples]
    assert read == chat.prompts and len(read) == 2
    found = [tokenizer.decode(sample.response_ids) for sample in samples]
    assert found == [f"Evidence {n}: {'1284 ' * 60}".strip() + "\0" for n in (1, 2)]
    assert all(
        set(sample.loss_weights) == {1.0} and len(sample.loss_weights) == len(sample.response_ids)
        for sample in samples
    )
    assert ("characters left out" in chat.prompts[1]) == bool(memory_tokens)


def test_a_reply_that_may_have_been_cut_is_not_imitated() -> None:
    flow, rollout = make(frozen(model(), 40), 0)
    assert refinements(flow, [rollout], CharTokenizer(), 40) == []
    assert len(refinements(flow, [rollout], CharTokenizer(), 41)) == 2


def test_without_a_refiner_there_is_nothing_to_imitate() -> None:
    flow, rollout = make(None, 0)
    assert any(turn.tool_calls[0].result.output for turn in rollout.turns)
    assert refinements(flow, [rollout], CharTokenizer(), 1000) == []
