"""What a teacher writes becomes the student's response: as it is where the student reads it so, in
its canonical form where not, and never with a special token in it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from chat_templates import styled
from hypothesis import given, settings
from hypothesis import strategies as st
from make import Chat, Tool
from toy_options import toy
from transformers import PreTrainedTokenizerFast

from flowtrain.agents.agentflow.build import make_policy
from flowtrain.agents.agentflow.memory import Memory
from flowtrain.agents.agentflow.planner import ModelPlanner, Plan
from flowtrain.agents.agentflow.refiner import FullRefinerPrompt
from flowtrain.agents.agentflow.teacher import TeacherVoice, is_readable, taught
from flowtrain.agents.base import Agent, AgentContext
from flowtrain.agents.policy import Moment, Policy
from flowtrain.agents.registry import load_kind
from flowtrain.inference.protocol import EngineError, NoEngine
from flowtrain.records import Call, Task, Turn, UserError, Verdict
from flowtrain.tools.base import Parameter, ToolCard, schema_of

TASK = Task("t-1", "What is the area of Chad?", ("1284",))
EXACT = "Justification: j\nContext: c\nSub-Goal: area of Chad\nTool Name: Search"
LOOSE = "## Sub-Goal\narea of Chad\n\n## Tool Name\nSearch, because it finds\n"
OPTIONS: dict[str, Any] = {"engines": {"gpt": {"model": "m"}}, "rft": {"expert": "gpt"}}


def teach(*replies: str) -> Chat:
    gone = EngineError("engines.gpt: HTTP 500")
    return Chat([gone if reply == "fails" else reply for reply in replies], "teacher")


CARD = ToolCard("Search", "Looks words up.", schema_of(Parameter("query", "what to find")))
SEARCH = Tool(CARD, lambda query: f"The {query} is 1284.")


def student(teacher: Chat, tokenizer: PreTrainedTokenizerFast, **sections: dict[str, Any]) -> Agent:
    """An agent with a teacher in the place of its trained policy; nobody samples."""
    config = toy({**OPTIONS, **sections})
    engine = NoEngine(4000)
    policies = {name: make_policy(config, name, engine, tokenizer) for name in config.policy_names}
    tools = {"Search": SEARCH} if config.agent.tools else {}
    context = AgentContext(config, policies, tools, {}, 3)
    made = load_kind(config).make(context)
    return taught(made, teacher, config, tools)


def flow(teacher: Chat, prompt: str = "full", **agent: Any) -> Agent:
    options = {"tools": ["Search"], "prompt": prompt, **agent}
    return student(teacher, styled("qwen2.5"), agent=options)


def plan(reply: str, prompt: str = "full", **agent: Any) -> tuple[Plan, ModelPlanner]:
    planner = flow(teach(reply), prompt, **agent).planner
    return asyncio.run(planner.plan(TASK, Memory(), 0, 7, 50.0)), planner


def prompt_ids(module: Any, moment: Moment) -> tuple[int, ...]:
    """The ids that the student reads."""
    assert isinstance(module.voice, TeacherVoice)
    return module.voice.policy.read(module.prompt, moment)


def text_of(call: Call) -> str:
    """The response without its end token."""
    tokenizer = styled("qwen2.5")
    assert call.response_ids[-1] == tokenizer.eos_token_id
    assert call.logprobs == (0.0,) * len(call.response_ids)
    return tokenizer.decode(call.response_ids[:-1])


# ---- the planner


@pytest.mark.parametrize(
    ("reply", "prompt", "written"),
    [
        (f"  {EXACT}\n", "full", EXACT),
        (LOOSE, "full", "Justification: \nContext: \nSub-Goal: area of Chad\nTool Name: Search"),
        (EXACT, "compact", " area of Chad\nTool Name: Search"),
        (LOOSE, "compact", " area of Chad\nTool Name: Search"),
    ],
)
def test_a_reply_becomes_what_the_student_reads(reply: str, prompt: str, written: str) -> None:
    found, planner = plan(reply, prompt)
    assert text_of(found.call) == found.call.text == written
    assert found.action is not None and found.action.sub_goal == "area of Chad"
    assert (found.action.tool_name, found.rescued) == ("Search", ())
    assert found.call.prompt_ids == prompt_ids(planner, Moment(TASK))


def turn_of(found: Plan) -> Turn:
    return Turn({"planner": found.call}, found.action, Verdict.STOP, 0)


@pytest.mark.parametrize(
    ("reply", "readable"),
    [
        (EXACT, True),
        (LOOSE, True),
        ("I would search.", False),
        (EXACT.replace("Search", "Oracle"), False),
    ],
)
def test_only_what_names_a_tool_of_the_run_is_imitated(reply: str, readable: bool) -> None:
    found, _ = plan(reply)
    assert is_readable(turn_of(found), "planner") is readable


def test_the_teacher_reads_the_full_prompt_with_its_own_seed_and_deadline() -> None:
    teacher = teach(EXACT)
    planner = flow(teacher, "compact").planner
    for seed in (1, 2):
        asyncio.run(planner.plan(TASK, Memory(), 0, seed, 5.0))
    (prompt, seed, deadline_s), (_, other, _) = teacher.asked
    assert "Looks words up." in prompt and TASK.question in prompt
    assert deadline_s == 5.0 and seed != other


# ---- the verifier


def verdict(reply: str, prompt: str = "full") -> tuple[Verdict, Call]:
    agent = student(
        teach(reply),
        styled("qwen2.5"),
        agent={"tools": ["Search"], "prompt": prompt},
        roles={"verifier": "own"},
        train={"policy": "verifier"},
    )
    verifier = agent.verifier
    done = asyncio.run(verifier.verify(TASK, Memory(), 1, 5.0))
    assert done.text == verifier.prompt.prefix + done.call.text
    assert done.call.prompt_ids == prompt_ids(verifier, Moment(TASK))
    return done.verdict, done.call


@pytest.mark.parametrize(
    ("reply", "prompt", "written"),
    [
        ("All is there.\nConclusion: STOP", "full", "All is there.\nConclusion: STOP"),
        ("**Final Determination: STOP**", "full", "Conclusion: STOP"),
        ("All is there.\nConclusion: STOP", "compact", " STOP"),
    ],
)
def test_a_verdict_is_written_as_the_student_reads_it(
    reply: str, prompt: str, written: str
) -> None:
    found, call = verdict(reply, prompt)
    assert found is Verdict.STOP and text_of(call) == written


def test_a_reply_without_a_verdict_leaves_nothing_to_imitate() -> None:
    found, call = verdict("Who knows?")
    turn = Turn({"planner": call, "verifier": call}, None, found, 0.0)
    assert found is Verdict.CONTINUE and not is_readable(turn, "verifier")


# ---- the refiner


@pytest.mark.parametrize(
    ("prompt", "written"),
    [("full", "Evidence: 1284.\nNext: -"), ("compact", " Evidence: 1284.\nNext: -")],
)
def test_evidence_is_written_after_the_students_prompt(prompt: str, written: str) -> None:
    teacher = teach(" Evidence: 1284.\nNext: -<|im_end|> more", "<|im_end|>")
    agent = student(
        teacher,
        styled("qwen2.5"),
        agent={"tools": ["Search"], "prompt": prompt, "max_result_chars": 10},
        roles={"refiner": "own"},
        train={"policy": "refiner"},
    )
    refiner = agent.refiner
    moment = Moment(TASK, Memory(), "area of Chad", "The area of Chad is 1284.")
    found = asyncio.run(refiner.refine(moment, 1, 5.0))
    asked = FullRefinerPrompt().render(moment)
    assert teacher.asked == [(asked, 1, 5.0)] and found.text == "Evidence: "
    assert found.call is not None and text_of(found.call) == written
    assert found.call.prompt_ids == prompt_ids(refiner, moment)
    nothing = asyncio.run(refiner.refine(moment, 1, 5.0))
    assert nothing.text == "" and nothing.call is not None and nothing.call.response_ids == ()


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "a", "<|", "\ue0000\ue001", " "])))
def test_no_text_makes_a_special_token(parts: list[str]) -> None:
    tokenizer = styled("qwen2.5")
    policy = Policy(NoEngine(9), tokenizer, 9, 1.0, 1.0)
    call = policy.imitate((1,), "".join(parts), is_message=True)
    assert not set(call.response_ids[:-1]) & set(tokenizer.all_special_ids)
    plain = "".join(parts).replace("\ue000", "").replace("\ue001", "")
    assert tokenizer.decode(call.response_ids[:-1]) == plain


def test_agents_of_others_are_refused() -> None:
    config = toy({**OPTIONS, "agent": {"name": "x.py:Mine"}})
    with pytest.raises(UserError, match=r"rft.expert='gpt' requires .* which is 'x.py:Mine'"):
        taught(object(), teach(""), config, {})
