"""The refiner as a policy: what it reads, what the memory keeps, its failures and its script."""

from __future__ import annotations

import asyncio

import pytest
from batches import flow_grpo
from char_tokenizer import CharTokenizer, says
from make import Chat, Engine, Planner, Tool, group, rollout
from toy_options import toy

from flowtrain.agents.agentflow.build import make_flow, make_policy, make_refiner
from flowtrain.agents.agentflow.executor import Executor
from flowtrain.agents.agentflow.flow import Flow, FlowLimits
from flowtrain.agents.agentflow.generator import Generator
from flowtrain.agents.agentflow.memory import Memory, MemoryEntry
from flowtrain.agents.agentflow.refiner import Evidence, FullRefinerPrompt, ModelRefiner, Refiner
from flowtrain.agents.agentflow.scripts import passage_script, with_script
from flowtrain.agents.agentflow.verifier import RuleVerifier
from flowtrain.agents.agentflow.voices import ChatVoice
from flowtrain.agents.policy import Moment
from flowtrain.inference.protocol import EngineError
from flowtrain.records import (
    Action,
    Call,
    FilterReason,
    FinishReason,
    Task,
    Trajectory,
    Turn,
    UserError,
    VersionSpan,
)
from flowtrain.tools import ToolCard

OWN = toy({"roles": {"refiner": "own"}, "policies": {"refiner": {"max_new_tokens": 40}}})
KNOWN = Memory((MemoryEntry("Search", "area of Chad", "c", "The area of Chad is 1284."),))
PASSAGES = "The area of Mali is 1240.\nThe capital of Mali is Bamako."
TASK = Task("t", "How large are both?", ("x",))
FINDING = Moment(TASK, KNOWN, "area of Mali", PASSAGES)
LINE = " It is 1240. "


def refiner(
    engine: Engine, tokenizer: CharTokenizer | None = None, **agent: object
) -> ModelRefiner:
    config = toy(OWN.model_dump() | {"agent": {"tools": ["Search"], **agent}})
    policy = make_policy(config, "refiner", engine, tokenizer or CharTokenizer())
    return make_refiner(config, policy, {})


def refine(engine: Engine, **agent: object) -> Evidence:
    return asyncio.run(refiner(engine, **agent).refine(FINDING, seed=3, deadline_s=5.0))


def test_it_reads_the_question_the_steps_and_the_passages() -> None:
    engine = says(LINE)
    found = refine(engine)
    (prompt, sampling), ids = engine.asked[0], tuple(map(ord, LINE))
    assert prompt == (
        "Question: How large are both?\n1. Search | area of Chad | The area of Chad is 1284.\n"
        f"Looked for: area of Mali\n{PASSAGES}\nEvidence:"
    )
    assert (sampling.max_new_tokens, sampling.seed, sampling.deadline_s) == (40, 3, 5.0)
    assert found == Evidence(
        "It is 1240.",
        Call(
            tuple(map(ord, prompt)),
            ids,
            (-0.5,) * len(ids),
            (VersionSpan(0, len(ids), 7),),
            FinishReason.STOP,
            LINE,
        ),
    )


def test_the_memory_keeps_so_many_characters_and_training_all_tokens() -> None:
    found = refine(says(LINE), max_result_chars=5)
    assert found.text == "It is" and found.call is not None and len(found.call.response_ids) == 13


def test_passages_that_do_not_fit_stay_as_they_are() -> None:
    num_tokens = len(refiner(says(LINE)).prompt.render(FINDING)) + 40
    assert refine(says(LINE, max_tokens=num_tokens)).call is not None
    assert refine(says(LINE, max_tokens=num_tokens - 1)) == Evidence("")


def test_the_full_prompt_goes_through_the_chat_template() -> None:
    engine, plain = says(LINE, max_tokens=9000), CharTokenizer()
    asyncio.run(refiner(engine, prompt="full").refine(FINDING, 3, 5.0))
    assert engine.asked[0][0] == FullRefinerPrompt().render(FINDING)
    plain.chat_template = None
    with pytest.raises(UserError, match=r"policies\.refiner\.path='' has no chat template"):
        refiner(engine, plain, prompt="full")


def test_the_script_copies_the_passage_that_fits_or_any() -> None:
    lines = PASSAGES.split("\n")

    def said(error: float, seed: int) -> Evidence:
        script = with_script(refiner(says(LINE)), passage_script(error))
        return asyncio.run(script.refine(FINDING, seed, 5.0))

    right = said(0.0, 1)
    assert right.text == lines[0] and right.call is not None
    assert right.call.response_ids == (*map(ord, f" {lines[0]}"), 0)
    assert set(right.call.logprobs) == {0.0}
    assert {said(1.0, seed).text for seed in range(20)} == set(lines)


# ---- in the flow


def flow(refine: Refiner) -> Flow:
    tools = archive_and_clock()
    return Flow(
        Planner(lambda turn, seed: Action("", "", "area of Mali", ("Archive", "Clock")[turn])),
        Executor(tools, 5.0, 1000),
        RuleVerifier(lambda task, memory: False),
        Generator(),
        FlowLimits(2, 60.0),
        refiner=refine,
        passage_tools=frozenset({"Archive"}),
    )


def archive_and_clock() -> dict[str, Tool]:
    return {
        name: Tool(
            ToolCard(name, "", finds_passages=name == "Archive"),
            lambda query: f"{query}: {PASSAGES}",
        )
        for name in ("Archive", "Clock")
    }


def output(turn: Turn) -> str:
    return turn.tool_calls[0].result.output


def run(flow: Flow) -> Trajectory:
    return asyncio.run(flow.run(TASK, 0))


def test_a_search_has_its_call_and_other_turns_have_none() -> None:
    search, other = run(flow(refiner(says(LINE)))).turns
    assert (search.evidence, output(search)) == ("It is 1240.", f"area of Mali: {PASSAGES}")
    assert set(search.calls) == {"planner", "refiner"} and set(other.calls) == {"planner"}
    assert other.evidence == "" and output(other).startswith("area of Mali: ")


def test_an_empty_reply_leaves_the_passages_and_is_trained_all_the_same() -> None:
    search = run(flow(refiner(says("  ")))).turns[0]
    assert output(search).endswith(PASSAGES) and search.evidence == ""
    assert search.calls["refiner"].response_ids == (32, 32)


def test_an_engine_that_is_gone_ends_the_rollouts_and_a_frozen_one_leaves_the_passages() -> None:
    """As the planner's engine does, and as a frozen refiner always did."""
    with pytest.raises(EngineError):
        run(flow(refiner(says(fails=True))))

    gone = Chat(EngineError("no reply"))
    trajectory = run(flow(ModelRefiner(ChatVoice(gone), FullRefinerPrompt(), 100)))
    assert not trajectory.error and output(trajectory.turns[0]).endswith(PASSAGES)


def test_its_calls_are_the_samples_and_turns_without_a_search_are_not_missed() -> None:
    """Both rollouts searched once in two turns; a call that the deadline left empty is counted."""
    first, second = (run(flow(refiner(says(line)))) for line in (" right", " wrong"))
    cut = run(flow(refiner(says("", reason=FinishReason.DEADLINE))))
    scored = [
        rollout(*each.turns, task=TASK, reward=reward)
        for each, reward in ((first, 1.0), (second, 0.0), (cut, 0.0))
    ]
    batch = flow_grpo([group(*scored)], policy="refiner")
    expected = [" right", " wrong"]
    assert ["".join(map(chr, sample.response_ids)) for sample in batch.samples] == expected
    assert [sample.sample_id for sample in batch.samples] == [(0, 0, 0), (0, 1, 0)]
    assert batch.samples[0].advantages[0] > 0 > batch.samples[1].advantages[0]
    assert batch.num_filtered == {FilterReason.EMPTY: 1}


def test_a_flow_needs_its_refiner() -> None:
    policy = refiner(says(LINE)).voice
    with pytest.raises(AssertionError, match="no policy for refiner"):
        make_flow(OWN, policy, {}, 2)
    made = make_flow(OWN, policy, archive_and_clock(), 2, policies={"refiner": policy})
    assert isinstance(made.refiner, ModelRefiner) and made.passage_tools == {"Archive"}
