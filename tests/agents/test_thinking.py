"""What a model thought is no part of its answer, in any agent; and it can be told not to think."""

from __future__ import annotations

import asyncio

import pytest
from test_single_turn import Speaker, agent

from flowtrain.rewards import score
from flowtrain.types import Group, Task
from flowtrain.utils.text import final_answer

TASK = Task("t-1", "What is 2 + 3?", ("5",), scorer="math")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>\n2 and 3 are 6, or \\boxed{6}\n</think>\n\n5", "5"),
        ("2 and 3 are <answer>6</answer></think>5", "5"),
        ("<think>is it <answer>6</answer>?</think><answer>5</answer>", "5"),
        ("<think>a</think>6<think>b</think> 5 ", "5"),
        ("<think>it may be 5", ""),  # cut while it thought
        ("5", "5"),
        ("the tag <think> opens it: 5", "the tag <think> opens it: 5"),
    ],
)
def test_an_answer_begins_behind_the_thinking(text: str, answer: str) -> None:
    assert final_answer(text) == answer


def test_the_agent_of_one_turn_answers_without_it_and_is_scored_so() -> None:
    done = asyncio.run(agent(Speaker("<think>\\boxed{6}</think> 5")).run(TASK, 11))
    assert done.answer == "5"
    (group,) = score([Group(0, (done,))])
    assert group.trajectories[0].reward == 1.0
