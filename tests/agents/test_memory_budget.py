"""The memory's budget: what is cut, what never is, and that a planner always has room."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from make import Engine, Tool

from flowtrain.agents.agentflow.executor import Executor
from flowtrain.agents.agentflow.flow import Flow, FlowLimits
from flowtrain.agents.agentflow.generator import Generator
from flowtrain.agents.agentflow.memory import Budget, Memory, MemoryEntry
from flowtrain.agents.agentflow.planner import ModelPlanner
from flowtrain.agents.agentflow.prompts import CompactPrompt, FullPrompt, PlannerPrompt
from flowtrain.agents.agentflow.verifier import RuleVerifier
from flowtrain.agents.policy import Moment, Policy
from flowtrain.records import Task
from flowtrain.tools import ToolCard
from flowtrain.trainer.toy import new_tokenizer

TOKENIZER = new_tokenizer(
    ["The area of Chad is 1284 square kilometres. Search | area of Chad"], 400
)
TASK = Task("t", "What is the area of Chad?", ("x",))
TOKENIZER.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


FLOOD = Tool(
    ToolCard("Flood", "Says much."), lambda query: f"{query} " + "The area of Chad is 1284. " * 2000
)


PROMPTS: list[PlannerPrompt] = [CompactPrompt(), FullPrompt([FLOOD])]


def measure(prompt: PlannerPrompt, memory: Memory) -> int:
    return len(TOKENIZER.encode(prompt.steps(memory), add_special_tokens=False))


words = st.text(st.characters(codec="utf-8"), max_size=30)
results = st.one_of(
    words,
    st.builds(
        lambda text, times: text * times, st.text(min_size=1, max_size=12), st.integers(1, 400)
    ),
)
entries = st.builds(MemoryEntry, words, words, words, results)
memories = st.builds(Memory, st.lists(entries, max_size=5).map(tuple), words)


def at_least(text: str) -> bool:
    """Return whether a result can get no shorter."""
    found = re.search(r"\n\.\.\. \d+ characters left out \.\.\.\n", text)
    return len(text) <= 200 or (found is not None and len(text) - len(found[0]) == 100)


def coarse(memory: Memory) -> int:
    """Count as a tokenizer whose parts together take more: seven characters are a token."""
    return len(PROMPTS[0].steps(memory)) // 7


MEASURES = [partial(measure, PROMPTS[0]), partial(measure, PROMPTS[1]), coarse]


@settings(max_examples=100)
@given(memories, st.integers(1, 1500), st.sampled_from(MEASURES))
@example(Memory((MemoryEntry("", "", "", "x" * 1101),) * 3), 475, coarse)
@example(
    Memory((MemoryEntry("", "", "", "x" * 5000), MemoryEntry("", "", "", "y" * 500))), 60, coarse
)
def test_the_budget_holds_or_nothing_is_left_to_cut(
    memory: Memory, budget: int, measure: Callable[[Memory], int]
) -> None:
    cut = Budget(budget, measure).bounded(memory)
    assert measure(cut) <= budget or all(at_least(entry.result) for entry in cut.entries)
    grown = Budget(budget, measure)
    for number in range(len(memory.entries)):
        grown.bounded(replace(memory, entries=memory.entries[:number]))
    assert cut == grown.bounded(memory), "the same each time"
    assert cut.analysis == memory.analysis
    found = [replace(e, result="") for e in cut.entries]
    assert found == [replace(e, result="") for e in memory.entries], "names, goals, commands stay"
    if (
        measure(memory) <= budget
        and sum(len(entry.result) for entry in memory.entries) <= 8 * budget
    ):
        assert cut == memory
    was_cut = [a != b for a, b in zip(cut.entries, memory.entries, strict=True)]
    for index, entry in enumerate(cut.entries):
        if was_cut[index]:
            before = memory.entries[index].result
            note = re.search(r"\n\.\.\. (\d+) characters left out \.\.\.\n", entry.result)
            assert note is not None and len(before) > 200
            head, tail = entry.result[: note.start()], entry.result[note.end() :]
            assert before.startswith(head)
            assert before.endswith(tail)
            assert len(head) + len(tail) + int(note[1]) == len(before)
            older = [
                e.result
                for e, b in zip(cut.entries[:index], memory.entries, strict=False)
                if len(b.result) > 200
            ]
            assert all(at_least(result) for result in older), "the oldest give way first"


def test_no_more_is_cut_than_is_needed() -> None:
    memory = Memory(
        tuple(
            MemoryEntry(
                "Search", f"goal {n}", "command", f"{n} " + "The area of Chad is 1284. " * 200
            )
            for n in range(3)
        )
    )
    whole = measure(PROMPTS[0], memory)
    cut = Budget(whole - 300, partial(measure, PROMPTS[0])).bounded(memory)
    assert cut.entries[1:] == memory.entries[1:]
    assert whole - 300 - 150 < measure(PROMPTS[0], cut) <= whole - 300


def test_an_error_is_still_seen_as_one() -> None:
    memory = Memory((MemoryEntry("Search", "x", "c", "Error: " + "it broke " * 1000, True),))
    (entry,) = Budget(1, partial(measure, PROMPTS[0])).bounded(memory).entries
    assert entry.is_error and len(entry.result) < 150


def talking(max_tokens: int) -> Engine:
    """Always says the same action."""
    action = "Sub-Goal: area of Chad\nTool Name: Flood"
    ids = TOKENIZER.encode(action, add_special_tokens=False)
    return Engine(lambda *_: ids, max_tokens=max_tokens)


@pytest.mark.parametrize(("budget", "truncated"), [(900, "turns"), (0, "prompt")])
def test_memory_budget_keeps_prompt_within_model(budget: int, truncated: str) -> None:
    constant = len(TOKENIZER.encode(PROMPTS[1].render(Moment(TASK))))
    engine = talking(constant + 900 + 60)
    planner = ModelPlanner(Policy(engine, TOKENIZER, 60, 1.0, 30.0), PROMPTS[1], ("Flood",))
    tools = {"Flood": FLOOD}
    limits = FlowLimits(4, 60.0, memory_tokens=budget)
    flow = Flow(
        planner,
        Executor(tools, 5.0, 100_000),
        RuleVerifier(lambda task, memory: False),
        Generator(),
        limits,
    )
    trajectory = asyncio.run(flow.run(TASK, 0))
    assert trajectory.truncated == truncated
    assert len(trajectory.turns) == (4 if budget else 1)
    assert all(len(turn.tool_calls[0].result.output) > 50_000 for turn in trajectory.turns), (
        "the record keeps all; the prompts do not"
    )
    if budget:
        assert max(map(len, engine.prompts)) + 60 <= engine.max_tokens and len(engine.asked) == 4


def test_a_turn_tokenises_little_more_than_what_its_prompt_shows() -> None:
    """What earlier turns have measured is not measured again."""
    counted: list[int] = []

    class Counting(ModelPlanner):
        def measure(self, memory: Memory) -> int:
            counted.append(super().measure(memory))
            return counted[-1]

    budget, engine = 2000, talking(100_000)
    policy = Policy(engine, TOKENIZER, 60, 1.0, 30.0)
    flow = Flow(
        Counting(policy, PROMPTS[1], ("Flood",)),
        Executor({"Flood": FLOOD}, 5.0, 1500),
        RuleVerifier(lambda task, memory: False),
        Generator(),
        FlowLimits(8, 60.0, memory_tokens=budget),
    )
    trajectory = asyncio.run(flow.run(TASK, 0))
    assert max(map(len, engine.prompts)) > budget, "the budget is spent"
    assert sum(counted) < 2.5 * budget * len(trajectory.turns)
