"""The options of a multiple choice are in every prompt that asks its question."""

from __future__ import annotations

import asyncio

import pytest
import test_tool_calling
from char_tokenizer import says
from chat_templates import styled
from test_llm_flow import ROLES, llm_flow, role_of
from test_single_turn import agent

from flowtrain.records import Task
from flowtrain.utils.event_loop import run_to_end

OPTIONS = ("Rome", "Oslo")
LETTERED = "Which is the capital of Norway?\nA. Rome\nB. Oslo"


def task(question: str, choices: tuple[str, ...] = OPTIONS) -> Task:
    return Task("t", question, ("B",), scorer="choice", choices=choices)


def test_options_follow_the_question_by_letter() -> None:
    assert task("Which is the capital of Norway?").prompt == LETTERED
    assert task("Which is the capital of Norway?", ()).prompt == "Which is the capital of Norway?"


@pytest.mark.parametrize(
    "question",
    [
        LETTERED,
        "Which is the capital of Norway? (a) rome (b) oslo",
        "Which is the capital of Norway? {'A': 'Rome', 'B': 'Oslo'}",
        "Which one? A) Rome,\n   B)  Oslo",
    ],
)
def test_a_question_that_holds_its_options_stays(question: str) -> None:
    assert task(question).prompt == question


@pytest.mark.parametrize(
    "question",
    [
        "Is Rome or Oslo the capital of Norway?",  # without letters
        "Which one? A. Oslo B. Rome",  # with other letters
        "Which one? A. Rome",  # one of them
    ],
)
def test_a_question_that_only_speaks_of_them_gets_them(question: str) -> None:
    assert task(question).prompt == f"{question}\nA. Rome\nB. Oslo"


CHOICE = task("Which is the capital of Norway?")


def test_every_module_of_agentflow_reads_them() -> None:
    with llm_flow({}) as (flow, server, engine):
        run_to_end(flow.run(CHOICE, 5))
    prompts = [*server.prompts, *engine.prompts]
    assert {role_of(prompt) for prompt in prompts} == set(ROLES)
    for prompt in prompts:
        assert LETTERED in prompt, prompt


def test_the_agents_of_one_turn_and_of_tool_calls_read_them() -> None:
    engine = says("B")
    asyncio.run(agent(engine).run(CHOICE, 11))
    assert engine.asked[0][0] == f"<user>{LETTERED}<assistant>"
    rollout = test_tool_calling.Rollout(styled("qwen2.5"), "B", task=CHOICE)
    assert LETTERED in rollout.prompt(0)
