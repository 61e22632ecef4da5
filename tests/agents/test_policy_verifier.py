"""The verifier as a policy: what it reads and says, every way to get that wrong, its script."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from char_tokenizer import CharTokenizer, ChatChars, says
from hypothesis import assume, given
from hypothesis import strategies as st
from make import Engine, Planner, call
from toy_options import toy

from flowtrain.agents.agentflow.build import make_flow, make_policy, make_verifier
from flowtrain.agents.agentflow.executor import Executor
from flowtrain.agents.agentflow.flow import Flow, FlowLimits
from flowtrain.agents.agentflow.generator import Generator
from flowtrain.agents.agentflow.memory import Memory, MemoryEntry
from flowtrain.agents.agentflow.replies import cut_end_of_turn, read_verdict
from flowtrain.agents.agentflow.scripts import steps_left, verdict_script, with_script
from flowtrain.agents.agentflow.verifier import (
    CompactVerdictPrompt,
    FullVerdictPrompt,
    ModelVerifier,
    Verification,
)
from flowtrain.agents.policy import Moment, PromptTooLong
from flowtrain.config import Config
from flowtrain.inference.protocol import EngineError
from flowtrain.records import (
    Action,
    FinishReason,
    PlanStep,
    Sampling,
    SamplingMask,
    Task,
    Turn,
    UserError,
    Verdict,
)

PLAN = (
    PlanStep("area of Chad", "Search"),
    PlanStep("area of Mali", "Search"),
    PlanStep("1284 + 1240", "Python_Coder"),
)
TASK = Task("t", "What is the area of Chad plus the area of Mali?", ("2524",), plan=PLAN)
OWN = toy({"roles": {"verifier": "own"}})
MASK = SamplingMask.of([(1, 2)])


def memory(*entries: str) -> Memory:
    """Of steps "TOOL: SUB-GOAL"."""
    steps = (entry.split(": ") for entry in entries)
    return Memory(tuple(MemoryEntry(tool, sub_goal, "c", "found") for tool, sub_goal in steps))


HELD = memory("Search: area of Chad")


def verifier(
    engine: Engine,
    config: Config = OWN,
    temperature: float | None = None,
    tokenizer: CharTokenizer | None = None,
) -> ModelVerifier:
    own = tokenizer or CharTokenizer()
    return make_verifier(config, make_policy(config, "verifier", engine, own, temperature), {})


def verify(engine: Engine, deadline_s: float = 5.0, *how: Any) -> Verification:
    return asyncio.run(verifier(engine, *how).verify(TASK, HELD, 3, deadline_s))


def test_it_reads_the_question_and_the_steps() -> None:
    engine = says(" STOP", mask=MASK)
    verify(engine)
    found = [prompt for prompt, _ in engine.asked]
    assert found == [f"Question: {TASK.question}\n1. Search | area of Chad | found\nConclusion:"]


def test_it_keeps_the_tokens_that_were_sampled() -> None:
    engine = says(" CONTINUE", mask=MASK)
    done = verify(engine)
    prompt_ids, ids = tuple(map(ord, engine.asked[0][0])), tuple(map(ord, " CONTINUE"))
    expected = call(ids, prompt_ids, -0.5, 7, text=" CONTINUE", sampling_mask=MASK)
    assert done == Verification(Verdict.CONTINUE, "Conclusion: CONTINUE", expected)


@pytest.mark.parametrize(
    ("line", "verdict", "is_malformed"),
    [
        (" STOP", Verdict.STOP, False),
        (" STOP ", Verdict.STOP, False),
        (" CONTINUE\n", Verdict.CONTINUE, False),
        (" not yet\nConclusion: STOP", Verdict.STOP, False),
        ("", Verdict.CONTINUE, True),
        (" stop", Verdict.CONTINUE, True),
        ("STOP", Verdict.CONTINUE, True),
        (" STOP or CONTINUE", Verdict.CONTINUE, True),
        (" STOP\nor not", Verdict.CONTINUE, True),
        (" STOPCONTINUE", Verdict.CONTINUE, True),
    ],
)
def test_only_the_very_words_are_a_verdict(line: str, verdict: Verdict, is_malformed: bool) -> None:
    done = verify(says(line, mask=MASK))
    assert done.verdict is verdict
    assert (read_verdict(done.text) != (verdict, ())) == is_malformed


@given(st.text(max_size=40) | st.text("STOPCNIUE: \nocluin", max_size=40))
def test_any_text_has_a_verdict_only_in_its_last_line(text: str) -> None:
    assume(cut_end_of_turn(text) == text)
    assert read_verdict(f"{text}\nIt is.\nConclusion: STOP") == (Verdict.STOP, ())
    verdict, rules = read_verdict(text)
    assert (verdict is not None and not rules) == (
        text.strip().split("\n")[-1].strip() in ("Conclusion: STOP", "Conclusion: CONTINUE")
    )


def test_it_is_told_how_to_sample() -> None:
    own = {"verifier": {"temperature": 0.5, "max_new_tokens": 9}}
    told = {"policies": own, "rollout": {"request_timeout_s": 4}}
    config, engine = toy({"roles": {"verifier": "own"}, **told}), says(" STOP", mask=MASK)
    for temperature, deadline_s in ((None, 99.0), (0.0, 1.5)):
        verify(engine, deadline_s, config, temperature)
    assert [sampling for _, sampling in engine.asked] == [
        Sampling(9, 0.5, seed=3, deadline_s=4.0),
        Sampling(9, 0.0, seed=3, deadline_s=1.5),
    ]


def test_what_the_deadline_cut_is_kept_and_says_continue() -> None:
    for text in (" ST", ""):
        done = verify(says(text, reason=FinishReason.DEADLINE))
        assert done.verdict is Verdict.CONTINUE and len(done.call.response_ids) == len(text)
        assert (done.call.text, done.call.finish_reason) == (text, FinishReason.DEADLINE)


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    num_tokens = len(CompactVerdictPrompt().render(Moment(TASK, HELD))) + 48
    assert verify(says(" STOP", max_tokens=num_tokens)).verdict is Verdict.STOP
    with pytest.raises(PromptTooLong):
        verify(says(max_tokens=num_tokens - 1))


def test_a_reply_as_long_as_the_model_is_refused() -> None:
    told = r"rollout\.max_new_tokens=48 must be below the model's 48 positions"
    with pytest.raises(UserError, match=told):
        verifier(says(max_tokens=48))


def test_full_verdict_prompt_needs_chat_template() -> None:
    own = {"roles": {"verifier": "own"}, "policies": {"verifier": {"path": "v"}}}
    full, plain = toy({**own, "agent": {"prompt": "full"}}), CharTokenizer()
    plain.chat_template = None
    with pytest.raises(UserError, match=r"policies\.verifier\.path='v' has no chat template"):
        verifier(says(" STOP", mask=MASK), full, tokenizer=plain)
    engine = says("It is stated.\nConclusion: STOP", max_tokens=9000)
    assert verify(engine, 5.0, full, None, ChatChars()).verdict is Verdict.STOP
    assert engine.asked[0][0].startswith("<user>You check whether")
    assert '"sub_goal": "area of Chad"' in engine.asked[0][0]
    for verdict in Verdict:
        assert read_verdict(FullVerdictPrompt([]).write(verdict)) == (verdict, ())


# ---- in the flow


PLANNER_CALL = call((3,), (1, 2), version=4, reason=FinishReason.LENGTH, text="said")


def flow(engine: Engine) -> Flow:
    planner = Planner(lambda *_: Action("", "", "area of Chad", "X"), PLANNER_CALL)
    limits = FlowLimits(2, 30.0)
    return Flow(planner, Executor({}, 5.0, 100), verifier(engine), Generator(), limits)


def turns(engine: Engine) -> tuple[Turn, ...]:
    return asyncio.run(flow(engine).run(TASK, 5)).turns


def test_a_turn_holds_the_calls_of_both_policies() -> None:
    (turn,) = turns(says(" STOP", mask=MASK))
    assert (turn.verdict, turn.verdict_text) == (Verdict.STOP, "Conclusion: STOP")
    assert turn.calls["planner"] == PLANNER_CALL
    theirs = turn.calls["verifier"]
    assert (theirs.text, theirs.spans[0].version) == (" STOP", 7)


def test_turns_have_seeds_of_their_own() -> None:
    engine = says(" what", mask=MASK)
    assert len(turns(engine)) == 2
    assert len({sampling.seed for _, sampling in engine.asked}) == 2


def test_a_failure_of_the_engine_is_one_of_the_run() -> None:
    """A policy that cannot be sampled has nothing to train, as with the planner."""
    with pytest.raises(EngineError, match="gone"):
        turns(says(fails=True))


def test_a_verifier_that_is_too_small_ends_the_rollout() -> None:
    trajectory = asyncio.run(flow(says(max_tokens=60)).run(TASK, 5))
    assert (trajectory.truncated, trajectory.turns) == ("prompt", ())


def test_a_flow_without_its_verifier_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="no policy for verifier"):
        make_flow(OWN, verifier(says()).voice, {}, 3)


# ---- the script


@pytest.mark.parametrize(
    ("num_left", "entries"),
    [
        (3, []),
        (2, ["Search: area of Chad"]),
        (3, ["Base_Generator: area of Chad"]),
        (2, ["Search: area of Mali", "Search: area of Chad"]),
        (1, ["Search: area of Chad", "Base_Generator: x", "Search: area of Mali"]),
        (0, [*(f"{step.tool_name}: {step.sub_goal}" for step in PLAN), "Search: x"]),
    ],
)
def test_the_script_knows_what_is_left_of_the_plan(num_left: int, entries: list[str]) -> None:
    assert len(steps_left(TASK, memory(*entries))) == num_left
    script = with_script(verifier(says(" STOP", mask=MASK)), verdict_script(0.0))
    done = asyncio.run(script.verify(TASK, memory(*entries), 1, 1.0))
    assert done.verdict is (Verdict.CONTINUE if num_left else Verdict.STOP)


def test_the_script_says_it_in_the_policys_tokens() -> None:
    like = verifier(says(" STOP", mask=MASK))
    done = asyncio.run(with_script(like, verdict_script(0.0)).verify(TASK, HELD, 1, 1.0))
    prompt, said = like.voice.read(like.prompt, Moment(TASK, HELD)), " CONTINUE"
    assert done.call == call((*map(ord, said), 0), prompt, 0.0, text=said)
    assert read_verdict(done.text) == (done.verdict, ())


def test_the_script_stops_early_as_often_as_it_is_told() -> None:
    script = with_script(verifier(says(" STOP", mask=MASK)), verdict_script(0.3))
    verdicts = [asyncio.run(script.verify(TASK, HELD, seed, 1.0)).verdict for seed in range(1000)]
    assert 0.25 < verdicts.count(Verdict.STOP) / 1000 < 0.35
