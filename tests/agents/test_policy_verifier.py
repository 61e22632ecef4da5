"""The verifier as a policy: what it reads, what it says, every way to get that wrong, and its
script.
"""

from __future__ import annotations

import asyncio

import pytest
from char_tokenizer import CharTokenizer, ChatChars, says
from hypothesis import assume, given
from hypothesis import strategies as st
from make import Engine, Planner, call
from toy_options import toy

from flowtrain.agents.agentflow.build import make_flow, make_policy, make_verifier
from flowtrain.agents.agentflow.executor import Executor
from flowtrain.agents.agentflow.expert import steps_left, verdict_script, with_script
from flowtrain.agents.agentflow.flow import Flow, FlowLimits
from flowtrain.agents.agentflow.generator import Generator
from flowtrain.agents.agentflow.lenient import cut_end_of_turn
from flowtrain.agents.agentflow.memory import Memory, MemoryEntry
from flowtrain.agents.agentflow.verdicts import (
    CompactVerdictPrompt,
    FullVerdictPrompt,
    read_verdict,
)
from flowtrain.agents.agentflow.verifier import ModelVerifier, Verification
from flowtrain.agents.policy import Moment, PromptTooLong
from flowtrain.config import Config
from flowtrain.engines.protocol import EngineError
from flowtrain.types import (
    Action,
    Call,
    FinishReason,
    PlanStep,
    Sampling,
    SamplingMask,
    Task,
    Turn,
    UserError,
    Verdict,
    VersionSpan,
)

PLAN = (
    PlanStep("area of Chad", "Search"),
    PlanStep("area of Mali", "Search"),
    PlanStep("1284 + 1240", "Python_Coder"),
)
TASK = Task("t", "What is the area of Chad plus the area of Mali?", ("2524",), plan=PLAN)
OWN = toy({"roles": {"verifier": "own"}})
MASK = SamplingMask.of([(1, 2)])


def memory(*entries: tuple[str, str]) -> Memory:
    return Memory(tuple(MemoryEntry(tool, sub_goal, "c", "found") for tool, sub_goal in entries))


def verifier(
    engine: Engine, config: Config = OWN, temperature: float | None = None
) -> ModelVerifier:
    return make(config, engine, CharTokenizer(), temperature)


def make(
    config: Config, engine: Engine, tokenizer: CharTokenizer, temperature: float | None = None
) -> ModelVerifier:
    policy = make_policy(config, "verifier", engine, tokenizer, temperature)  # type: ignore[arg-type]
    return make_verifier(config, policy, {})


def verify(engine: Engine, deadline_s: float = 5.0) -> Verification:
    return asyncio.run(
        verifier(engine).verify(TASK, memory(("Search", "area of Chad")), 3, deadline_s)
    )


def test_it_reads_the_question_and_the_steps() -> None:
    engine = says(" STOP", mask=MASK)
    verify(engine)
    assert [prompt for prompt, _ in engine.asked] == [
        f"Question: {TASK.question}\n1. Search | area of Chad | found\nConclusion:"
    ]


def test_it_keeps_the_tokens_that_were_sampled() -> None:
    engine = says(" CONTINUE", mask=MASK)
    done = verify(engine)
    prompt_ids, ids = tuple(map(ord, engine.asked[0][0])), tuple(map(ord, " CONTINUE"))
    spans = (VersionSpan(0, len(ids), 7),)
    assert done.call == Call(
        prompt_ids, ids, (-0.5,) * len(ids), spans, FinishReason.STOP, " CONTINUE", MASK
    )
    assert (done.verdict, done.text) == (Verdict.CONTINUE, "Conclusion: CONTINUE")


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
    config = toy(
        {
            "roles": {"verifier": "own"},
            "policies": {"verifier": {"temperature": 0.5, "max_new_tokens": 9}},
            "rollout": {"request_timeout_s": 4},
        }
    )
    engine = says(" STOP", mask=MASK)
    for temperature, deadline_s in ((None, 99.0), (0.0, 1.5)):
        asyncio.run(
            verifier(engine, config, temperature).verify(
                TASK, memory(("Search", "x")), 3, deadline_s
            )
        )
    assert [sampling for _, sampling in engine.asked] == [
        Sampling(9, 0.5, seed=3, deadline_s=4.0),
        Sampling(9, 0.0, seed=3, deadline_s=1.5),
    ]


def test_what_the_deadline_cut_is_kept_and_says_continue() -> None:
    done = verify(says(" ST", reason=FinishReason.DEADLINE))
    assert done.verdict is Verdict.CONTINUE and done.call is not None
    assert (done.call.text, done.call.finish_reason) == (" ST", FinishReason.DEADLINE)
    none = verify(says("", reason=FinishReason.DEADLINE))
    assert (
        none.verdict is Verdict.CONTINUE and none.call is not None and none.call.response_ids == ()
    )


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    moment = Moment(TASK, memory(("Search", "area of Chad")))
    num_tokens = len(CompactVerdictPrompt().render(moment)) + 48
    assert verify(says(" STOP", max_tokens=num_tokens)).verdict is Verdict.STOP
    with pytest.raises(PromptTooLong):
        verify(says(max_tokens=num_tokens - 1))


def test_a_reply_as_long_as_the_model_is_refused() -> None:
    told = r"policies\.verifier\.max_new_tokens=48 must be below the model's 48 positions"
    with pytest.raises(UserError, match=told):
        verifier(says(max_tokens=48))


def test_full_verdict_prompt_needs_chat_template() -> None:
    full = toy(
        {
            "roles": {"verifier": "own"},
            "agent": {"prompt": "full"},
            "policies": {"verifier": {"path": "v"}},
        }
    )
    plain = CharTokenizer()
    plain.chat_template = None
    with pytest.raises(UserError, match=r"policies\.verifier\.path='v' has no chat template"):
        make(full, says(" STOP", mask=MASK), plain)
    engine = says("It is stated.\nConclusion: STOP", max_tokens=9000)
    made = make(full, engine, ChatChars())
    found = asyncio.run(made.verify(TASK, memory(("Search", "area of Chad")), 3, 5.0)).verdict
    assert found is Verdict.STOP
    assert engine.asked[0][0].startswith("<user>You check whether")
    assert '"sub_goal": "area of Chad"' in engine.asked[0][0]
    assert all(
        read_verdict(FullVerdictPrompt([]).write(verdict)) == (verdict, ()) for verdict in Verdict
    )


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
    ("entries", "num_left"),
    [
        ((), 3),
        ((("Search", "area of Chad"),), 2),
        ((("Base_Generator", "area of Chad"),), 3),
        ((("Search", "area of Mali"), ("Search", "area of Chad")), 2),
        ((("Search", "area of Chad"), ("Base_Generator", "x"), ("Search", "area of Mali")), 1),
        (
            (
                ("Search", "area of Chad"),
                ("Search", "area of Mali"),
                ("Python_Coder", "1284 + 1240"),
                ("Search", "x"),
            ),
            0,
        ),
    ],
)
def test_the_script_knows_what_is_left_of_the_plan(
    entries: tuple[tuple[str, str], ...], num_left: int
) -> None:
    assert len(steps_left(TASK, memory(*entries))) == num_left
    script = with_script(verifier(says(" STOP", mask=MASK)), verdict_script(0.0))
    done = asyncio.run(script.verify(TASK, memory(*entries), 1, 1.0))
    assert done.verdict is (Verdict.CONTINUE if num_left else Verdict.STOP)


def test_the_script_says_it_in_the_policys_tokens() -> None:
    like = verifier(says(" STOP", mask=MASK))
    held = memory(("Search", "area of Chad"))
    script = with_script(like, verdict_script(0.0))
    done = asyncio.run(script.verify(TASK, held, 1, 1.0))
    assert done.call == Call(
        like.voice.read(like.prompt, Moment(TASK, held)),  # type: ignore[attr-defined]
        (*map(ord, " CONTINUE"), 0),
        (0.0,) * 10,
        (),
        FinishReason.STOP,
        text=" CONTINUE",
    )
    assert read_verdict(done.text) == (done.verdict, ())


def test_the_script_stops_early_as_often_as_it_is_told() -> None:
    script = with_script(verifier(says(" STOP", mask=MASK)), verdict_script(0.3))
    held = memory(("Search", "area of Chad"))
    stops = [
        asyncio.run(script.verify(TASK, held, seed, 1.0)).verdict is Verdict.STOP
        for seed in range(1000)
    ]
    assert 0.25 < sum(stops) / 1000 < 0.35
