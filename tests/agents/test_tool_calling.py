"""The agent that calls tools: what it samples, runs, says and records."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import chain, pairwise, repeat

import pytest
from chat_templates import R1, SMOLLM2, TEMPLATES, styled, tokenizer_of
from make import Engine
from transformers import PreTrainedTokenizerFast

from flowtrain.agents.agentflow.build import make_policy
from flowtrain.agents.agentflow.prompts import CHAT_TEMPLATE
from flowtrain.agents.base import AgentContext
from flowtrain.agents.chat.tool_calling import ToolCallingAgent
from flowtrain.agents.chat.tool_formats import FORMATS, WrittenCall
from flowtrain.agents.registry import load_kind
from flowtrain.config import Config
from flowtrain.records import (
    BranchPoint,
    BranchStart,
    FinishReason,
    SubGoal,
    Task,
    Trajectory,
    UserError,
    Verdict,
)
from flowtrain.tasks.sub_goals import Hints
from flowtrain.tools.base import Parameter, ToolCard, ToolError, schema_of

TASK = Task("t-1", "What is the area of Chad?", ("1284",))
FOUND = "The area of Chad is 1284."


class Search:
    """Finds the area of Chad after those with longer queries; fails without a word."""

    card = ToolCard("Search", "Looks words up.", schema_of(Parameter("query", "what to find")))

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended: list[str] = []

    async def execute(self, query: str) -> str:
        self.started.append(query)
        for _ in range(20 - len(query)):
            await asyncio.sleep(0)
        self.ended.append(query)
        if not query:
            raise ToolError("empty query")
        return FOUND if query == "area of Chad" else f"nothing about {query}"

    def close(self) -> None: ...


def call(style_format: str, *queries: str, name: str = "Search") -> str:
    calls = [WrittenCall(name, json.dumps({"query": query})) for query in queries]
    return FORMATS[style_format].write(calls)


FORMAT = {
    "qwen2.5": "hermes",
    "qwen3": "hermes",
    "llama3.1": "llama3",
    "mistral": "mistral",
    "smollm2": "xml",
}


class Rollout:
    """One rollout in which the policy says these texts, each with the end token."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *texts: str,
        reason: FinishReason = FinishReason.STOP,
        start: BranchStart | None = None,
        adds_end: bool = True,
        task: Task = TASK,
        hints: Hints | None = None,
        max_tokens: int = 4000,
        **agent: object,
    ) -> None:
        self.tokenizer = tokenizer
        end = tokenizer.eos_token if adds_end and reason is FinishReason.STOP else ""
        said = [tokenizer.encode(text + end, add_special_tokens=False) for text in texts]
        self.said = [tuple(each) for each in said]
        rest = chain(said, repeat(said[-1]))
        self.engine = Engine(lambda *_: next(rest), 2, max_tokens, reason)
        self.tool = Search()
        config = Config.model_validate(
            {"agent": {"name": "tools", "tools": ["Search"], "max_turns": 4, **agent}}
        )
        ToolCallingAgent.check(config, tokenizer)
        policy = make_policy(config, "planner", self.engine, tokenizer)
        context = AgentContext(config, {"planner": policy}, {"Search": self.tool}, {}, 4)
        agent_made = ToolCallingAgent(context).with_hints(hints)
        self.done: Trajectory = asyncio.run(agent_made.run(task, 7, start=start))

    def prompt(self, number: int = -1) -> str:
        return self.tokenizer.decode(self.engine.prompts[number])


@pytest.mark.parametrize("style", TEMPLATES)
def test_it_calls_reads_and_answers(style: str) -> None:
    rollout = Rollout(styled(style), call(FORMAT[style], "area of Chad"), "<answer>1284</answer>")
    done = rollout.done
    assert (done.answer, done.truncated, done.error) == ("1284", "", "")
    (used,) = done.turns[0].tool_calls
    expected = ("Search", '{"query": "area of Chad"}', FOUND)
    assert (used.name, used.arguments, used.result.output) == expected
    assert [turn.verdict for turn in done.turns] == [Verdict.CONTINUE, Verdict.STOP]
    assert done.turns[1].tool_calls == () and not done.turns[0].problem
    assert FOUND in rollout.prompt() and "Looks words up." in rollout.prompt(0)


@pytest.mark.parametrize("style", TEMPLATES)
def test_a_stuck_rollout_reads_one_hint_behind_a_result(style: str) -> None:
    goals = (SubGoal(("Lagos",), 1.0, "largest city there"),)
    asks = call(FORMAT[style], "area of Chad")
    task = replace(TASK, sub_goals=goals)
    rollout = Rollout(styled(style), asks, asks, asks, "So.", task=task, hints=Hints(1.0, 2, 1))
    assert rollout.done.hint_turn == 2 and not rollout.done.error
    told = f"{FOUND}\n\nHint: largest city there"
    counts = [rollout.prompt(number).count("Hint:") for number in range(4)]
    assert counts == [0, 0, 1, 1]
    assert told in rollout.prompt(2) or json.dumps(told)[1:-1] in rollout.prompt(2)
    plain = Rollout(styled(style), asks, asks, asks, "So.", task=task)
    assert plain.done.hint_turn is None and "Hint:" not in plain.prompt()


@pytest.mark.parametrize("style", TEMPLATES)
def test_what_was_read_and_sampled_is_recorded_and_stays_in_the_next_prompt(style: str) -> None:
    text = call(FORMAT[style], "area of Chad")
    rollout = Rollout(styled(style), text, text, "1284")
    calls = [turn.calls["planner"] for turn in rollout.done.turns]
    assert [each.prompt_ids for each in calls] == rollout.engine.prompts
    assert [each.response_ids for each in calls] == rollout.said
    for one, after in pairwise(calls):
        before = one.prompt_ids + one.response_ids
        assert after.prompt_ids[: len(before)] == before


def test_calls_of_one_response_run_at_once_and_results_keep_their_order() -> None:
    rollout = Rollout(styled("qwen2.5"), call("hermes", "Chad", "area of Mali"), "So.")
    assert rollout.tool.started == ["Chad", "area of Mali"]
    assert rollout.tool.ended == ["area of Mali", "Chad"]
    results = [used.result.output for used in rollout.done.turns[0].tool_calls]
    assert results == ["nothing about Chad", "nothing about area of Mali"]
    prompt = rollout.prompt()
    assert 0 < prompt.index(results[0]) < prompt.index(results[1])
    ids = [used.id for used in rollout.done.turns[0].tool_calls]
    assert len(set(ids)) == 2 and all(len(each) == 9 for each in ids)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (call("hermes", "x", name="Look"), "Error: there is no tool 'Look'; there are: Search"),
        (call("hermes", "").replace("query", "text"), "Error: Search takes (query: str)"),
        (call("hermes", ""), "Error: empty query"),
        ("<tool_call>Search</tool_call>", "Error: no valid JSON"),
    ],
)
def test_errors_are_results_that_the_policy_reads(text: str, problem: str) -> None:
    rollout = Rollout(styled("qwen2.5"), text, "So.")
    assert problem in rollout.prompt()
    assert rollout.done.answer == "So." and rollout.done.error == ""


def test_a_malformed_call_is_counted_and_does_not_stop_the_others() -> None:
    text = "<tool_call>Search</tool_call>" + call("hermes", "area of Chad")
    rollout = Rollout(styled("qwen2.5"), text, "So.")
    turn = rollout.done.turns[0]
    assert turn.action is None and "no valid JSON" in turn.problem
    assert [used.result.output for used in turn.tool_calls] == [FOUND]
    prompt = rollout.prompt()
    assert prompt.index("no valid JSON") < prompt.index(FOUND)


def test_the_turns_are_bounded() -> None:
    rollout = Rollout(styled("qwen2.5"), call("hermes", "area of Chad"))
    assert len(rollout.done.turns) == 4
    assert (rollout.done.truncated, rollout.done.answer) == ("turns", "")


def test_a_response_that_had_no_time_to_end_is_not_read() -> None:
    text = call("hermes", "area of Chad")
    rollout = Rollout(styled("qwen2.5"), text, reason=FinishReason.DEADLINE)
    assert (rollout.done.truncated, rollout.tool.started) == ("time", [])


def test_another_end_token_of_the_model_is_no_part_of_a_call() -> None:
    text = call("llama3", "area of Chad") + "<|endoftext|>"
    rollout = Rollout(styled("llama3.1"), text, "1284", adds_end=False)
    assert rollout.tool.started == ["area of Chad"]
    assert "<|endoftext|><|start_header_id|>ipython" in rollout.prompt()


def test_thinking_is_neither_a_call_nor_the_answer() -> None:
    thought = f"<think>\n{call('hermes', 'x')} <answer>no</answer>\n</think>\n\n"
    rollout = Rollout(styled("qwen3"), thought + call("hermes", "area of Chad"), thought + " 1284")
    assert rollout.tool.started == ["area of Chad"] and rollout.done.answer == "1284"
    assert rollout.prompt().count("<think>") == 1


def test_thinking_that_the_template_drops_is_a_branch() -> None:
    tokenizer = tokenizer_of(R1, "<|im_end|>")
    text = "I think\n</think>\n\n" + call("hermes", "area of Chad")
    rollout = Rollout(tokenizer, text, "so\n</think>\n\n1284", tool_format="hermes")
    assert "I think" not in rollout.prompt() and FOUND in rollout.prompt()
    assert rollout.done.answer == "1284"
    assert "I think" in rollout.done.turns[0].calls["planner"].text


def test_a_template_without_tools_gets_them_as_text() -> None:
    rollout = Rollout(
        styled("smollm2"), call("xml", "area of Chad"), "1284", instructions="Be brief."
    )
    system = rollout.prompt(0).split("<|im_end|>")[0]
    assert "Be brief.\n\nYou can call tools." in system and '"Search"' in system
    assert f"<|im_start|>user\nResult of Search:\n{FOUND}<|im_end|>" in rollout.prompt()


def test_a_template_without_system_messages_gets_instructions_with_the_question() -> None:
    rollout = Rollout(styled("mistral"), "1284", instructions="Be brief.")
    assert f"[INST] Be brief.\n\n{TASK.question}[/INST]" in rollout.prompt()


def test_the_tiny_template_names_the_tools() -> None:
    rollout = Rollout(tokenizer_of(CHAT_TEMPLATE, "<|end|>"), call("xml", "area of Chad"), "1284")
    assert rollout.prompt() == (
        f"Tools: Search\nuser:{TASK.question}\n"
        f'assistant:<tool name="Search">{{"query": "area of Chad"}}</tool><|end|>\n'
        f"tool:{FOUND}\nassistant:"
    )


def test_a_branch_takes_over_calls_and_results() -> None:
    tokenizer = styled("qwen2.5")
    first, second = call("hermes", "Chad"), call("hermes", "Mali")
    parent = Rollout(tokenizer, first, second, "No.").done
    point = BranchPoint(parent=0, turn=1, token=3, score=0.0)
    rest = tokenizer.decode(tokenizer.encode(call("hermes", "area of Chad"))[3:])
    branch = Rollout(tokenizer, rest, "1284", start=BranchStart(parent, point))
    assert branch.tool.started == ["area of Chad"]
    assert branch.done.turns[0] == parent.turns[0] and branch.done.answer == "1284"
    left, taken = branch.done.turns[1].calls["planner"], parent.turns[1].calls["planner"]
    assert left.prompt_ids == taken.prompt_ids
    assert left.response_ids[:3] == taken.response_ids[:3]
    assert branch.engine.prompts[0] == taken.prompt_ids + taken.response_ids[:3]


# ---- what is refused


def refusal(template: str, end: str = "<|im_end|>", **agent: object) -> str:
    config = Config.model_validate({"agent": {"name": "tools", **agent}})
    with pytest.raises(UserError) as refused:
        load_kind(config).check(config, tokenizer_of(template, end))
    return str(refused.value)


def test_a_template_that_rewrites_is_refused_by_its_key() -> None:
    text = refusal(SMOLLM2.replace("message.role +", "('user' if loop.last else '') +"))
    assert text.startswith("model.path='tiny' cannot be combined with agent.name='tools'")


def test_thinking_that_would_have_to_be_encoded_again_is_refused() -> None:
    tokenizer = tokenizer_of(R1, "<|im_end|>", False)
    config = Config.model_validate({"agent": {"name": "tools", "tool_format": "hermes"}})
    with pytest.raises(UserError, match="is no single token"):
        ToolCallingAgent.check(config, tokenizer)


def test_calls_in_words_of_another_kind_need_a_choice() -> None:
    other = TEMPLATES["qwen2.5"][0].replace("tool_call>", "function=x>")
    assert "agent.tool_format='auto'" in refusal(other)


def test_no_template_at_all_is_refused() -> None:
    tokenizer = styled("qwen2.5")
    config = Config.model_validate({"agent": {"name": "tools"}})
    bare = type("Bare", (), {"chat_template": None, "encode": tokenizer.encode})()
    with pytest.raises(UserError, match="has no chat template"):
        ToolCallingAgent.check(config, bare)


@pytest.mark.parametrize(
    ("agent", "problem"),
    [
        ({"prompt": "compact"}, "agent.prompt='compact' cannot be combined with agent.name="),
        ({"tools": []}, "must name at least 1 tool"),
    ],
)
def test_options_that_do_not_go_with_it(agent: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Config.model_validate({"agent": {"name": "tools", **agent}})
