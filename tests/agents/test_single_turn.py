"""The agent of one turn: what its policy reads, what its answer is, how it ends and branches."""

from __future__ import annotations

import asyncio
import copy

import pytest
from batches import flow_grpo
from char_tokenizer import ChatChars, says
from chat_templates import tokenizer_of
from make import Engine
from tokenizers.processors import TemplateProcessing
from toy_options import toy

from flowtrain.agents.agentflow.build import make_policy
from flowtrain.agents.base import AgentContext
from flowtrain.agents.chat.single_turn import QuestionPrompt, SingleTurn
from flowtrain.agents.collect import collect
from flowtrain.agents.deadlines import Cutoff
from flowtrain.agents.policy import Moment
from flowtrain.config import Config
from flowtrain.inference.protocol import NoEngine
from flowtrain.records import (
    BranchPoint,
    BranchStart,
    FinishReason,
    Task,
    Trajectory,
    UserError,
    Verdict,
    VersionSpan,
)
from flowtrain.rewards import score

TASK = Task("t-1", "What is 2 + 3?", ("5",))


def config(**agent: object) -> Config:
    return toy({"agent": {"name": "single", **agent}})


def agent(engine: Engine, temperature: float | None = None, **options: object) -> SingleTurn:
    return make(config(**options), engine, ChatChars(), temperature)


def make(
    config: Config, engine: Engine, tokenizer: ChatChars, temperature: float | None = None
) -> SingleTurn:
    policy = make_policy(config, "planner", engine, tokenizer, temperature)
    return SingleTurn(AgentContext(config, {"planner": policy}, {}, {}, max_turns=1))


def roll_out(engine: Engine, **options: object) -> Trajectory:
    return asyncio.run(agent(engine, **options).run(TASK, 11))


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({}, "<user>What is 2 + 3?<assistant>"),
        ({"instructions": "Be brief."}, "<user>What is 2 + 3?\n\nBe brief.<assistant>"),
        ({"prompt": "compact"}, "Question: What is 2 + 3?\nAnswer:"),
        (
            {"prompt": "compact", "instructions": "Be brief."},
            "Question: What is 2 + 3?\n\nBe brief.\nAnswer:",
        ),
    ],
)
def test_the_prompt_is_question_then_instructions(options: dict[str, str], prompt: str) -> None:
    engine = says("5")
    trajectory = roll_out(engine, **options)
    (call,) = [turn.calls["planner"] for turn in trajectory.turns]
    assert [asked for asked, _ in engine.asked] == [prompt]
    assert "".join(map(chr, call.prompt_ids)) == prompt


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (" 5\n", "5"),
        ("2 and 3 make <answer> 5 </answer>, I think", "5"),
        ("<answer>4</answer> no, <answer>5</answer>", "5"),
        ("", ""),
    ],
)
def test_the_answer_is_what_stands_in_the_last_tags_or_all(response: str, answer: str) -> None:
    trajectory = roll_out(says(response))
    assert trajectory.answer == answer
    assert trajectory.turns[0].calls["planner"].text == response


def test_the_turn_holds_the_sampled_tokens_and_no_error() -> None:
    trajectory = roll_out(says("so: 5"))
    (turn,) = trajectory.turns
    call = turn.calls["planner"]
    assert call.response_ids == tuple(map(ord, "so: 5")) and call.logprobs == (-0.5,) * 5
    assert call.spans == (VersionSpan(0, 5, 7),)
    assert turn.action is None and not turn.problem and turn.verdict is Verdict.STOP
    assert trajectory.truncated == "" and trajectory.seed == 11


def test_sampling_is_that_of_rollout_or_of_the_evaluation() -> None:
    engine = says("5")
    asyncio.run(agent(engine).run(TASK, 1))
    asyncio.run(agent(engine, temperature=0.0).run(TASK, 1))
    asyncio.run(agent(engine).run(TASK, 2))
    first, greedy, other = [sampling for _, sampling in engine.asked]
    assert (first.max_new_tokens, first.temperature, greedy.temperature) == (48, 1.0, 0.0)
    assert first.seed == greedy.seed != other.seed


def test_a_prompt_that_the_model_cannot_hold_gives_an_empty_rollout() -> None:
    trajectory = roll_out(says("5", max_tokens=60))
    assert (trajectory.truncated, trajectory.turns, trajectory.answer) == ("prompt", (), "")


def test_a_response_that_time_cut_is_kept_and_counted() -> None:
    trajectory = roll_out(says("5", reason=FinishReason.DEADLINE))
    assert (trajectory.truncated, trajectory.answer, len(trajectory.turns)) == ("time", "5", 1)


def test_a_straggler_ends_at_the_cutoff() -> None:
    async def late() -> Trajectory:
        cutoff = Cutoff()
        cutoff.set(asyncio.get_running_loop().time())
        return await agent(says("5", hangs=True)).run(TASK, 1, cutoff)

    trajectory = asyncio.run(late())
    assert (trajectory.truncated, trajectory.turns) == ("straggler", ())


def test_a_branch_goes_on_from_its_parents_tokens() -> None:
    parent = roll_out(says("it is 4"))
    engine = says("5")
    start = BranchStart(parent, BranchPoint(0, 0, 6, 1.5))
    branch = asyncio.run(agent(engine).run(TASK, 12, start=start))
    call = branch.turns[0].calls["planner"]
    assert engine.asked[0][0].endswith("<assistant>it is ")
    assert call.text == "it is 5" and branch.branch == start.point
    assert call.prompt_ids == parent.turns[0].calls["planner"].prompt_ids
    assert branch.num_sampled_tokens == 1


def test_groups_of_one_turn_train_every_token_by_its_rollout() -> None:
    """Flow-GRPO on one turn is GRPO."""
    groups = collect(agent(says("5", "44")), [TASK], group_size=8, seed=0)
    (group,) = score(groups)
    rewards = [trajectory.reward for trajectory in group.trajectories]
    assert {0.0, 1.0} == set(rewards)
    mean = sum(map(float, rewards)) / 8
    std = (mean * (1 - mean)) ** 0.5
    for sample, reward in zip(flow_grpo([group]).samples, rewards, strict=True):
        num_tokens = len(sample.response_ids)
        assert num_tokens == (1 if reward else 2)
        assert sample.advantages == pytest.approx([(reward - mean) / (std + 1e-6)] * num_tokens)
        assert sample.loss_weights == pytest.approx([1 / 8 / num_tokens] * num_tokens)


# ---- options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"agent": {"name": "single", "tools": ["Search"]}}, ("agent.tools", "Search", "single")),
        ({"agent": {"name": "single", "max_turns": 2}}, ("agent.max_turns=2", "single")),
        ({"agent": {"tools": []}}, ("agent.tools", "at least 1")),
        ({"agent": {"instructions": "x"}}, ("agent.instructions='x'", "agentflow")),
        (
            {"agent": {"name": "single"}, "roles": {"verifier": "policy"}},
            ("roles.verifier='policy'", "single"),
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: dict[str, object], words: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as refusal:
        toy(options)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_one_turn_has_neither_tools_nor_further_turns() -> None:
    chosen = config()
    assert (chosen.agent.tools, chosen.agent.max_turns, chosen.agent.prompt) == ((), 1, "full")
    assert toy(chosen.model_dump()) == chosen


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    tokenizer = ChatChars()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"chat template.*agent\.prompt='compact'"):
        make(config(), says("5"), tokenizer)
    plain = config(prompt="compact")
    make(plain, says("5"), tokenizer)


def test_a_response_longer_than_the_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"rollout\.max_new_tokens=48"):
        agent(says("5", max_tokens=48))


@pytest.mark.parametrize("begins", ["<s> $A", "<s> $A </s>", "$A </s>", "$A"])
def test_a_prompt_begins_as_the_tokenizer_begins_a_text_and_once(begins: str) -> None:
    template = "{{ '<s>[INST]' + messages[0].content + '[/INST]' }}"
    tokenizer = copy.deepcopy(tokenizer_of(template, "</s>"))
    first, end = tokenizer.convert_tokens_to_ids(["<s>", "</s>"])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=begins, special_tokens=[("<s>", first), ("</s>", end)]
    )
    policy = make_policy(config(), "planner", NoEngine(99), tokenizer)
    moment = Moment(Task("t-1", "<s>2 + 3?</s>", ("5",)))
    plain, chat = (policy.read(QuestionPrompt("", message), moment) for message in (False, True))
    own = policy.encode("Question: <s>2 + 3?</s>\nAnswer:")
    assert plain == ((first,) if begins.startswith("<s>") else ()) + own
    assert not {first, end} & set(own), "what stands in a question is plain text"
    assert chat[0] == first and chat.count(first) == 1 and end not in chat
    assert first not in policy.imitate(plain, " 5", is_message=False).response_ids
