"""What a model thought is no part of its answer, in any agent; and it can be told not to think."""

from __future__ import annotations

import asyncio
import copy
from contextlib import ExitStack
from pathlib import Path

import pytest
from char_tokenizer import says
from chat_templates import styled
from test_single_turn import agent

from flowtrain.agents.chat.template import ChatTemplate
from flowtrain.config.options import parse
from flowtrain.inference.token_chat import chat_text, pass_to_template
from flowtrain.records import Group, Task
from flowtrain.rewards import score
from flowtrain.trainer.distributed import World
from flowtrain.trainer.setup.components import RunComponents
from flowtrain.trainer.setup.placement import Placement
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
    done = asyncio.run(agent(says("<think>\\boxed{6}</think> 5")).run(TASK, 11))
    assert done.answer == "5"
    (group,) = score([Group(0, (done,))])
    assert group.trajectories[0].reward == 1.0


def test_a_template_is_given_what_the_config_says(tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(styled("qwen2.5"))
    tokenizer.chat_template += "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    assert chat_text(tokenizer, "x").endswith("assistant\n")
    pass_to_template(tokenizer, {"enable_thinking": False})
    pass_to_template(tokenizer, {"enable_thinking": False})  # by a second policy that has it
    assert chat_text(tokenizer, "x").endswith("assistant\nFalse")
    assert ChatTemplate(tokenizer).render([{"role": "user", "content": "x"}]).endswith("False")
    tokenizer.save_pretrained(tmp_path)
    saved = (tmp_path / "chat_template.jinja").read_text()
    assert saved == tokenizer.chat_template


def test_every_policy_of_a_run_has_them(tmp_path: Path) -> None:
    kwargs = "{enable_thinking = false}"
    argv = ["--config", "quickstart", "--model.path", "quickstart"]
    config = parse([*argv, "--model.chat_template_kwargs", kwargs])
    with ExitStack() as cleanup:
        world = World.join("cpu")
        cleanup.callback(world.leave)
        components = RunComponents.prepare(config, Placement.colocated(world))
        cleanup.callback(components.close)
        renders = components.policies["planner"].tokenizer.apply_chat_template
        assert renders.keywords == {"enable_thinking": False}
