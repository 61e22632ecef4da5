"""The verifier as a policy: what it reads, what it says, every way to get that wrong, and its
script.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from char_tokenizer import CharTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.agents.build import make_flow, make_policy, make_verifier
from flowtrain.agents.executor import RuleExecutor
from flowtrain.agents.expert import ScriptedVerifier, steps_left
from flowtrain.agents.flow import Flow, FlowLimits
from flowtrain.agents.generator import RuleGenerator, last_result
from flowtrain.agents.memory import Memory, MemoryEntry
from flowtrain.agents.planner import Plan
from flowtrain.agents.policy import PromptTooLong, ResponsePrefix
from flowtrain.agents.verdicts import CompactVerdictPrompt, FullVerdictPrompt, read_verdict
from flowtrain.agents.verifier import PolicyVerifier, Verification
from flowtrain.config import Config
from flowtrain.engines.protocol import EngineError
from flowtrain.types import (
    Action,
    Call,
    Completion,
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
OWN = Config.model_validate({"roles": {"verifier": "own"}})
MASK = SamplingMask.of([(1, 2)])


class Engine:
    """Says one line, with the weights of version 7, and notes what it was asked."""

    version = 7

    def __init__(
        self, line: str = " STOP", max_tokens: int = 1000, reason: FinishReason = FinishReason.STOP
    ) -> None:
        self.line, self.max_tokens, self.reason = line, max_tokens, reason
        self.asked: list[tuple[str, Sampling]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.asked.append(("".join(map(chr, prompt_ids)), sampling))
        ids = tuple(map(ord, self.line))
        return Completion(
            ids, (-0.5,) * len(ids), (VersionSpan(0, len(ids), 7),), self.reason, MASK
        )


def memory(*entries: tuple[str, str]) -> Memory:
    return Memory(tuple(MemoryEntry(tool, sub_goal, "c", "found") for tool, sub_goal in entries))


def verifier(
    engine: Engine, config: Config = OWN, temperature: float | None = None
) -> PolicyVerifier:
    return make(config, engine, CharTokenizer(), temperature)


def make(
    config: Config, engine: Engine, tokenizer: CharTokenizer, temperature: float | None = None
) -> PolicyVerifier:
    policy = make_policy(config, "verifier", engine, tokenizer, temperature)  # type: ignore[arg-type]
    return make_verifier(config, policy, {})


def verify(engine: Engine, deadline_s: float = 5.0) -> Verification:
    return asyncio.run(
        verifier(engine).verify(TASK, memory(("Search", "area of Chad")), 3, deadline_s)
    )


def test_it_reads_the_question_and_the_steps() -> None:
    engine = Engine()
    verify(engine)
    assert [prompt for prompt, _ in engine.asked] == [
        f"Question: {TASK.question}\n1. Search | area of Chad | found\nConclusion:"
    ]


def test_it_keeps_the_tokens_that_were_sampled() -> None:
    engine = Engine(" CONTINUE")
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
    done = verify(Engine(line))
    assert done.verdict is verdict
    assert (read_verdict(done.text) is None) == is_malformed


@settings(derandomize=True, deadline=None)
@given(st.text(max_size=40) | st.text("STOPCNIUE: \nocluin", max_size=40))
def test_any_text_has_a_verdict_only_in_its_last_line(text: str) -> None:
    assert read_verdict(f"{text}\nConclusion: STOP") is Verdict.STOP
    assert (read_verdict(text) is not None) == (
        text.strip().split("\n")[-1].strip() in ("Conclusion: STOP", "Conclusion: CONTINUE")
    )


def test_it_is_told_how_to_sample() -> None:
    config = Config.model_validate(
        {
            "roles": {"verifier": "own"},
            "policies": {"verifier": {"temperature": 0.5, "max_new_tokens": 9}},
            "rollout": {"request_timeout_s": 4},
        }
    )
    engine = Engine()
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
    done = verify(Engine(" ST", reason=FinishReason.DEADLINE))
    assert done.verdict is Verdict.CONTINUE and done.call is not None
    assert (done.call.text, done.call.finish_reason) == (" ST", FinishReason.DEADLINE)
    none = verify(Engine("", reason=FinishReason.DEADLINE))
    assert (
        none.verdict is Verdict.CONTINUE and none.call is not None and none.call.response_ids == ()
    )


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    num_tokens = (
        len(CompactVerdictPrompt().render(TASK.question, memory(("Search", "area of Chad")))) + 48
    )
    assert verify(Engine(max_tokens=num_tokens)).verdict is Verdict.STOP
    with pytest.raises(PromptTooLong):
        verify(Engine(max_tokens=num_tokens - 1))


def test_a_reply_as_long_as_the_model_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"policies\.verifier\.max_new_tokens=48 must be below the model's 48 positions",
    ):
        verifier(Engine(max_tokens=48))


class Templated(CharTokenizer):
    """A tokenizer with a chat template of two brackets."""

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        return f"<user>{conversation[0]['content']}<assistant>"


def test_full_verdict_prompt_needs_chat_template() -> None:
    full = Config.model_validate(
        {
            "roles": {"verifier": "own"},
            "agent": {"prompt": "full"},
            "policies": {"verifier": {"path": "v"}},
        }
    )
    plain = CharTokenizer()
    plain.chat_template = None
    with pytest.raises(UserError, match=r"policies\.verifier\.path='v' has no chat template"):
        make(full, Engine(), plain)
    engine = Engine("It is stated.\nConclusion: STOP", max_tokens=9000)
    made = make(full, engine, Templated())
    assert (
        asyncio.run(made.verify(TASK, memory(("Search", "area of Chad")), 3, 5.0)).verdict
        is Verdict.STOP
    )
    assert (
        engine.asked[0][0].startswith("<user>You check whether")
        and '"sub_goal": "area of Chad"' in engine.asked[0][0]
    )
    assert all(
        read_verdict(FullVerdictPrompt("", Templated()).write(verdict)) is verdict
        for verdict in Verdict
    )


# ---- in the flow


PLANNER_CALL = Call((1, 2), (3,), (-1.0,), (VersionSpan(0, 1, 4),), FinishReason.LENGTH, "said")


class Planner:
    """Searches; in tokens of its own."""

    async def plan(
        self, task: Task, memory: Memory, turn: int, seed: int, deadline_s: float
    ) -> Plan:
        return Plan(PLANNER_CALL, Action("", "", "area of Chad", "X"))

    def measure(self, memory: Memory) -> int:
        return 0

    async def resume(self, prefix: ResponsePrefix, turn: int, seed: int, deadline_s: float) -> Plan:
        raise AssertionError("nobody branches")


def flow(engine: Engine) -> Flow:
    return Flow(
        Planner(),
        RuleExecutor({}, 5.0, 100),
        verifier(engine),
        RuleGenerator(last_result),
        FlowLimits(2, 30.0),
    )


def turns(engine: Engine) -> tuple[Turn, ...]:
    return asyncio.run(flow(engine).run(TASK, 5)).turns


def test_a_turn_holds_the_calls_of_both_policies() -> None:
    (turn,) = turns(Engine(" STOP"))
    assert (turn.verdict, turn.verdict_text) == (Verdict.STOP, "Conclusion: STOP")
    assert turn.calls["planner"] == PLANNER_CALL
    theirs = turn.calls["verifier"]
    assert (theirs.text, theirs.spans[0].version) == (" STOP", 7)


def test_turns_have_seeds_of_their_own() -> None:
    engine = Engine(" what")
    assert len(turns(engine)) == 2
    assert len({sampling.seed for _, sampling in engine.asked}) == 2


def test_a_failure_of_the_engine_is_one_of_the_run() -> None:
    """A policy that cannot be sampled has nothing to train, as with the planner."""

    class Broken(Engine):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
            raise EngineError("gone")

    with pytest.raises(EngineError, match="gone"):
        turns(Broken())


def test_a_verifier_that_is_too_small_ends_the_rollout() -> None:
    trajectory = asyncio.run(flow(Engine(max_tokens=60)).run(TASK, 5))
    assert (trajectory.truncated, trajectory.turns) == ("prompt", ())


def test_a_flow_without_its_verifier_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="made before the flow"):
        make_flow(OWN, Planner(), {}, 3)


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
    script = ScriptedVerifier(verifier(Engine()), 0.0, end_id=0)
    done = asyncio.run(script.verify(TASK, memory(*entries), 1, 1.0))
    assert done.verdict is (Verdict.CONTINUE if num_left else Verdict.STOP)


def test_the_script_says_it_in_the_policys_tokens() -> None:
    like = verifier(Engine())
    held = memory(("Search", "area of Chad"))
    done = asyncio.run(ScriptedVerifier(like, 0.0, end_id=0).verify(TASK, held, 1, 1.0))
    assert done.call == Call(
        like.encode(TASK.question, held),
        (*map(ord, " CONTINUE"), 0),
        (0.0,) * 10,
        (),
        FinishReason.STOP,
        text=" CONTINUE",
    )
    assert read_verdict(done.text) is done.verdict


def test_the_script_stops_early_as_often_as_it_is_told() -> None:
    script = ScriptedVerifier(verifier(Engine()), 0.3, end_id=0)
    held = memory(("Search", "area of Chad"))
    stops = [
        asyncio.run(script.verify(TASK, held, seed, 1.0)).verdict is Verdict.STOP
        for seed in range(1000)
    ]
    assert 0.25 < sum(stops) / 1000 < 0.35
