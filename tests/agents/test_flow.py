"""The turn loop: planner and tools are scripted, the other modules are the real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import make
import pytest

from flowtrain.agents.agentflow.commands import NO_COMMAND, command_of
from flowtrain.agents.agentflow.executor import Executor
from flowtrain.agents.agentflow.flow import MALFORMED, Flow, FlowLimits
from flowtrain.agents.agentflow.generator import Answer, Generator
from flowtrain.agents.agentflow.memory import Memory, MemoryEntry
from flowtrain.agents.agentflow.planner import NO_TOOL, Plan
from flowtrain.agents.agentflow.verifier import RuleVerifier, Verification
from flowtrain.agents.policy import PromptTooLong, joined
from flowtrain.records import (
    Action,
    BranchPoint,
    BranchStart,
    Call,
    FinishReason,
    SamplingMask,
    Task,
    Trajectory,
    Turn,
    Verdict,
    VersionSpan,
)
from flowtrain.tools import ToolCard
from tests import virtual_time

TASK = Task("t", "What is the area of Chad?", ("1284",))
ECHO = Action("why", "what is known", "area of Chad", "Echo")

Script = Sequence[Action | Exception | None]


class FakePlanner:
    """Says what its script holds, in tokens that tell the turn, and remembers what it was asked."""

    def __init__(self, script: Script, seconds: float = 0.0) -> None:
        self.script, self.seconds = script, seconds
        self.asked: list[tuple[Memory, int, int, float]] = []
        self.prefixes: list[tuple[Call, int, int]] = []
        """Where branches took up."""

    async def plan(self, task: Task, *asked: Any) -> Plan:
        self.asked.append(asked)
        await asyncio.sleep(self.seconds)
        turn = asked[1]
        said = self.script[turn % len(self.script)]
        if isinstance(said, Exception):
            raise said
        return Plan(said_in(turn), said)

    async def resume(self, prefix: Call, turn: int, seed: int, deadline_s: float) -> Plan:
        self.prefixes.append((prefix, turn, seed))
        spans, mask = (VersionSpan(0, 2, 5),), SamplingMask.of([(70, 72), (71,)])
        rest = Call((), (70, 71), (-7.0, -7.1), spans, FinishReason.STOP, "branched", mask)
        return Plan(joined(prefix, rest), ECHO)


SPANS = (VersionSpan(0, 1, 3), VersionSpan(1, 3, 4))
KEPT = [(0, 1, 2), (8,), (9, 3)]
MASK = SamplingMask.of(KEPT)


def said_in(turn: int) -> Call:
    """Sampled by version 3 and, from the second token on, by version 4."""
    logprobs = (-0.1, -0.2, -0.3 * turn)
    reason, text = FinishReason.LENGTH, f"turn {turn}"
    return Call((turn, 1), (turn, 8, 9), logprobs, SPANS, reason, text, MASK)


def _raises(error: BaseException) -> Callable[[str], Any]:
    async def act(query: str) -> str:
        raise error

    return act


async def _hang(query: str) -> str:
    await asyncio.Event().wait()
    return "never"


ACTS: dict[str, Callable[[str], Any]] = {
    "Echo": lambda query: f"The {query} is 1284.",
    "Raise": _raises(ZeroDivisionError("the tool has a bug")),
    "Exit": _raises(SystemExit("no key given")),
    "Hang": _hang,
    "Flood": lambda query: "x" * 1_000_000,
    "Silent": lambda query: " \n",
    "Half": lambda query: "half a pair: \ud83d.",
    "Halferror": _raises(ValueError("\ude00 is the other half")),
}
TOOLS = {name: make.Tool(ToolCard(name, ""), act) for name, act in ACTS.items()}


def never(task: Task, memory: Memory) -> bool:
    return False


def always(task: Task, memory: Memory) -> bool:
    return True


def using(tool: str) -> Action:
    return Action("", "", "x", tool)


def flow(
    script: Script,
    is_enough: Callable[[Task, Memory], bool] = never,
    max_turns: int = 3,
    timeout_s: float = 30.0,
    tool_timeout_s: float = 5.0,
    seconds: float = 0.0,
) -> Flow:
    planner, executor = FakePlanner(script, seconds), Executor(TOOLS, tool_timeout_s, max_chars=100)
    limits = FlowLimits(max_turns, timeout_s)
    return Flow(planner, executor, RuleVerifier(is_enough), Generator(), limits)


def run(flow: Flow, seed: int = 11) -> Trajectory:
    return virtual_time.run(flow.run(TASK, seed))


def results(trajectory: Trajectory) -> list[str]:
    return [MemoryEntry.of(turn).result for turn in trajectory.turns]


# ---- how it ends


def test_stop_ends_the_rollout_with_the_answer() -> None:
    trajectory = run(flow([ECHO], lambda task, memory: len(memory.entries) == 2, max_turns=5))
    assert [turn.verdict for turn in trajectory.turns] == [Verdict.CONTINUE, Verdict.STOP]
    assert (trajectory.truncated, trajectory.answer, trajectory.reward) == ("", "1284", None)
    assert (trajectory.task, trajectory.seed) == (TASK, 11)


@pytest.mark.parametrize("max_turns", [1, 3])
def test_generator_answers_after_turn_limit(max_turns: int) -> None:
    trajectory = run(flow([ECHO], max_turns=max_turns))
    found = (len(trajectory.turns), trajectory.truncated, trajectory.answer)
    assert found == (max_turns, "turns", "1284")


def test_a_stop_in_the_last_turn_is_no_truncation() -> None:
    assert run(flow([ECHO], is_enough=always, max_turns=1)).truncated == ""


def test_the_time_limit_ends_it_between_turns() -> None:
    trajectory = run(flow([ECHO], max_turns=1000, timeout_s=15.0, seconds=4.0))
    assert (trajectory.truncated, len(trajectory.turns)) == ("time", 4)
    assert (trajectory.answer, trajectory.turns[-1].verdict) == ("1284", Verdict.CONTINUE)
    assert trajectory.seconds == 16.0


def test_a_planner_is_told_the_time_that_is_left() -> None:
    loop = flow([ECHO], max_turns=2, timeout_s=60.0, seconds=5.0)
    run(loop)
    assert [left_s for *_, left_s in loop.planner.asked] == [60.0, 55.0]


def test_a_running_turn_ends_with_the_time_of_the_rollout() -> None:
    """The tool that hangs gets what the planner leaves of it."""
    trajectory = run(flow([using("Hang")], timeout_s=8.0, tool_timeout_s=60.0, seconds=7.0))
    assert (len(trajectory.turns), trajectory.truncated) == (1, "time")
    assert results(trajectory) == ["Error: timed out after 1 s"]
    assert trajectory.seconds == 8.0


@pytest.mark.parametrize("num_turns", [0, 1])
def test_a_prompt_that_is_too_long_ends_the_rollout(num_turns: int) -> None:
    trajectory = run(flow([ECHO] * num_turns + [PromptTooLong("9999 tokens")]))
    assert (len(trajectory.turns), trajectory.truncated) == (num_turns, "prompt")
    assert trajectory.answer == ("1284" if num_turns else "")


def test_what_nobody_foresaw_is_not_swallowed() -> None:
    with pytest.raises(KeyError, match="a bug of ours"):
        run(flow([KeyError("a bug of ours")]))


# ---- what goes wrong inside a turn


def test_a_malformed_action_spends_its_turn_and_is_remembered() -> None:
    loop = flow([None, ECHO], always)
    trajectory = run(loop)
    first, second = trajectory.turns
    expected = (None, (), MALFORMED, Verdict.CONTINUE)
    assert (first.action, first.tool_calls, first.problem, first.verdict) == expected
    assert first.calls["planner"].response_ids == said_in(0).response_ids, "trained like any others"
    assert (second.verdict, trajectory.answer) == (Verdict.STOP, "1284")
    memory = loop.planner.asked[1][0]
    assert memory.entries == (MemoryEntry("None", "None", NO_COMMAND, f"Error: {MALFORMED}", True),)


def test_unknown_tool_spends_turn_with_error() -> None:
    trajectory = run(flow([using(NO_TOOL + "Calculator")], always, max_turns=1))
    (turn,) = trajectory.turns
    assert (turn.tool_calls, turn.problem) == ((), "tool 'Calculator' was not found")
    expected = (Verdict.CONTINUE, "turns", "")
    assert (turn.verdict, trajectory.truncated, trajectory.answer) == expected


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("Raise", "Error: ZeroDivisionError: the tool has a bug"),
        ("Exit", "Error: SystemExit: no key given"),
        ("Hang", "Error: timed out after 0.1 s"),
        ("Silent", "Error: no output"),
        # Half a pair of surrogates, which no tokenizer takes, would end the run.
        ("Halferror", "Error: ValueError: ? is the other half"),
    ],
)
def test_tool_failure_becomes_error_in_memory(tool: str, text: str) -> None:
    loop = flow([using(tool), ECHO], always, tool_timeout_s=0.1)
    trajectory = run(loop)
    assert results(trajectory) == [text, "The area of Chad is 1284."]
    assert [turn.verdict for turn in trajectory.turns] == [Verdict.CONTINUE, Verdict.STOP]
    assert trajectory.answer == "1284"
    (entry,) = loop.planner.asked[1][0].entries
    assert (entry.tool_name, entry.result, entry.is_error) == (tool, text, True)


def test_half_a_surrogate_pair_becomes_a_question_mark() -> None:
    assert results(run(flow([using("Half")], max_turns=1))) == ["half a pair: ?."]


def test_a_tool_that_floods_leaves_a_memory_of_bounded_size() -> None:
    (text,) = results(run(flow([using("Flood")], max_turns=1)))
    assert len(text) < 200 and "999900 characters left out" in text


QUERIES = [
    *('say "x"', "a\nb\r\tc\x00", "\\", "'''", '"""', "\u2028", "\U0001f600 \u0645", "#", "f{x}"),
    "x" * 100_000,
]


@pytest.mark.parametrize("sub_goal", QUERIES)
def test_the_sub_goal_reaches_the_tool_word_for_word(sub_goal: str) -> None:
    seen: list[str] = []

    async def note(query: str) -> str:
        seen.append(query)
        return "ok"

    action = Action("", "", sub_goal, "Note")
    executor = Executor({"Note": make.Tool(ToolCard("Note", "x"), note)}, 5.0, 100)
    used, _, _ = asyncio.run(executor.execute("q", action, 0, 5.0))
    assert used is not None and (seen, used.result.output) == ([sub_goal], "ok")
    command = command_of(used)
    assert command.startswith("execution = tool.execute(query=") and "\n" not in command


# ---- memory and records


def test_the_verifier_judges_the_new_entry() -> None:
    seen: list[tuple[str, list[str]]] = []

    def note(task: Task, memory: Memory) -> bool:
        seen.append((task.question, [entry.sub_goal for entry in memory.entries]))
        return False

    run(flow([ECHO, using("Echo")], note, max_turns=2))
    goals = ["area of Chad", "x"]
    assert seen == [(TASK.question, goals[:1]), (TASK.question, goals)]


def test_memory_entries_have_agentflows_four_fields() -> None:
    loop = flow([ECHO, using("Raise"), None])
    run(loop, seed=1)
    memory = loop.planner.asked[2][0].as_dict()
    assert memory == {
        "Action Step 1": {
            "tool_name": "Echo",
            "sub_goal": "area of Chad",
            "command": 'execution = tool.execute(query="area of Chad")',
            "result": "The area of Chad is 1284.",
        },
        "Action Step 2": {
            "tool_name": "Raise",
            "sub_goal": "x",
            "command": 'execution = tool.execute(query="x")',
            "result": "Error: ZeroDivisionError: the tool has a bug",
        },
    }
    assert list(memory["Action Step 1"]) == ["tool_name", "sub_goal", "command", "result"]


def test_the_same_actions_give_the_same_memory() -> None:
    def memories() -> list[Memory]:
        loop = flow([ECHO, None, using("Hang")], tool_timeout_s=0.05, max_turns=4)
        run(loop)
        return [memory for memory, *_ in loop.planner.asked]

    assert memories() == memories()


def test_a_memory_is_immutable_and_starts_empty() -> None:
    empty = Memory()
    longer = empty.add(MemoryEntry("a", "b", "c", "d"))
    assert (empty.entries, len(longer.entries)) == ((), 1)
    assert Memory().as_dict() == {}


def test_turns_carry_exactly_what_the_engine_sampled() -> None:
    trajectory = run(flow([ECHO, None, ECHO]))
    for index, turn in enumerate(trajectory.turns):
        assert turn.calls == {"planner": said_in(index)}
        assert isinstance(turn, Turn) and 0 <= turn.seconds <= trajectory.seconds


def test_planners_hear_turn_and_seed() -> None:
    loop = flow([ECHO])
    run(loop, seed=99)
    found = [(turn, seed, len(memory.entries)) for memory, turn, seed, _ in loop.planner.asked]
    assert found == [(0, 99, 0), (1, 99, 1), (2, 99, 2)]


def test_rollouts_wait_at_the_same_time() -> None:
    loop = flow([ECHO], max_turns=2, seconds=2.0)

    async def many() -> float:
        started = asyncio.get_running_loop().time()
        await asyncio.gather(*(loop.run(TASK, seed) for seed in range(50)))
        return asyncio.get_running_loop().time() - started

    assert virtual_time.run(many()) == 4.0, "one after another they take 200 s"


class NotingModule:
    """A verifier and a generator that note what they may take."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, float]] = []

    async def verify(self, task: Any, memory: Any, seed: int, deadline_s: float) -> Verification:
        self.told.append(("verify", seed, deadline_s))
        return Verification(Verdict.CONTINUE, "so far so good")

    async def answer(self, task: Any, memory: Any, seed: int, deadline_s: float) -> Answer:
        self.told.append(("answer", seed, deadline_s))
        return Answer("42", "it is 42")


@pytest.mark.parametrize(
    ("timeout_s", "module_timeout_s", "left"), [(60.0, 5.0, [5.0, 5.0]), (3.0, 20.0, [2.0, 1.0])]
)
def test_modules_get_own_seeds_and_time_left(
    timeout_s: float, module_timeout_s: float, left: list[float]
) -> None:
    """The answer gets its time also when the rollout's is up."""
    noting = NotingModule()
    executor = Executor(TOOLS, 5.0, max_chars=100)
    limits = FlowLimits(2, timeout_s, module_timeout_s)
    trajectory = run(Flow(FakePlanner([ECHO], seconds=1.0), executor, noting, noting, limits))
    *verdicts, (last, _, answer_s) = noting.told
    assert [name for name, *_ in verdicts] == ["verify"] * 2
    assert [deadline_s for *_, deadline_s in verdicts] == left
    assert (last, answer_s) == ("answer", module_timeout_s)
    assert len({seed for _, seed, _ in noting.told}) == 3
    expected = ("42", "it is 42", "so far so good")
    assert (trajectory.answer, trajectory.output, trajectory.turns[0].verdict_text) == expected


# ---- branches


def branch(root: Trajectory, turn: int, token: int) -> tuple[Trajectory, FakePlanner]:
    leaves, start = flow([ECHO]), BranchStart(root, BranchPoint(0, turn, token, 1.5))
    return asyncio.run(leaves.run(TASK, 12, start=start)), leaves.planner


@pytest.mark.parametrize("token", [0, 1, 2])
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_branch_keeps_prefix_and_samples_rest(turn: int, token: int) -> None:
    root = run(flow([ECHO], max_turns=3))
    trajectory, planner = branch(root, turn, token)
    assert trajectory.turns[:turn] == root.turns[:turn], "with results; nothing is run again"
    assert len(trajectory.turns) == 3 and trajectory.branch == BranchPoint(0, turn, token, 1.5)
    left, was = (each.turns[turn].calls["planner"] for each in (trajectory, root))
    assert left.prompt_ids == was.prompt_ids
    assert left.response_ids == (*was.response_ids[:token], 70, 71)
    assert left.logprobs == (*was.logprobs[:token], -7.0, -7.1)
    assert left.sampling_mask == SamplingMask.of([*KEPT[:token], (70, 72), (71,)])
    found = [(s.start, s.end, s.version) for s in left.spans]
    assert found == [*[(0, 1, 3), (1, 2, 4)][:token], (token, token + 2, 5)]
    ((prefix, at, seed),) = planner.prefixes
    assert (len(prefix.response_ids), at, seed) == (token, turn, 12)


def test_branch_memory_equals_parents_at_branch_point() -> None:
    root = run(flow([ECHO], max_turns=3))
    _, planner = branch(root, 1, 1)
    (memory, turn, _, _), *_ = planner.asked
    assert turn == 2 and len(memory.entries) == 2
    command, result = 'execution = tool.execute(query="area of Chad")', "The area of Chad is 1284."
    assert memory.entries[0] == MemoryEntry("Echo", "area of Chad", command, result)


def test_a_whole_rollout_is_no_branch() -> None:
    assert run(flow([ECHO])).branch is None
