"""Newer families of models call tools: in rollouts, in demonstrations and through the gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from gateway_runs import SEARCH, check_grown
from test_gateway_fidelity import Program, result, user
from test_tool_calling import FOUND, Rollout, call
from tool_styles import STYLES, tokenizer_in

from flowtrain.agents.chat.dialect import Dialect
from flowtrain.agents.chat.tool_formats import FORMATS, WrittenCall
from flowtrain.agents.gateway.recorder import Recorder
from flowtrain.agents.gateway.wires import chat, messages, responses
from flowtrain.config import Config
from flowtrain.records import FinishReason

FAMILIES = pytest.mark.parametrize("family", STYLES)
SEVERAL = pytest.mark.parametrize("family", sorted(STYLES.keys() - {"harmony"}))
"""Those that take more than one call in a response."""
CONFIG = Config.model_validate({"agent": {"name": "tools", "tools": ["Search"]}})


def rollout(family: str, *texts: str, **options: Any) -> Rollout:
    """A rollout whose responses end as the family's do."""
    style = STYLES[family]
    said = [*(text + (style.call_end or style.end) for text in texts[:-1]), texts[-1] + style.end]
    return Rollout(tokenizer_in(family), *said, adds_end=False, **options)


def program_of(family: str, *replies: str) -> Program:
    """A program whose requests the family answers with these."""
    program = Program("qwen2.5", *replies)
    program.engine.tokenizer = tokenizer_in(family)
    dialect = Dialect.of(CONFIG, tokenizer_in(family), "it")
    program.recorder = Recorder(program.session, dialect, 1000)
    return program


@FAMILIES
def test_calls_are_written_as_the_template_does_and_read_back(family: str) -> None:
    """The next prompt has the ids that the template and the tokenizer alone would give it."""
    dialect = Dialect.of(CONFIG, tokenizer_in(family), "it")
    assert dialect.format is FORMATS[family]
    arguments = json.dumps({"query": 'area of "Chad" é', "n": "5", "deep": {"a": [1, None]}})
    asks = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "0" * 9, "function": {"name": "Search", "arguments": arguments}},
        ],
    }
    search = {"name": "Search", "parameters": {"properties": {"n": {"type": "string"}}}}
    tools = [{"type": "function", "function": search}]
    question = [user("Find.")]
    text = dialect.reply_text([*question, asks], tools)
    content, (read,) = dialect.format.parse(text, tools)
    assert (content.strip(), read) == ("", WrittenCall("Search", read.arguments))
    assert read.values == json.loads(arguments)
    style = STYLES[family]
    end = style.call_end or style.end
    if family != "glm":  # whose template leaves the ends of replies to the next turn
        assert dialect.template.decode([dialect.end_of(asks)]) == end
    ids = dialect.template.encode(text + end)
    started = dialect.start(question, tools)
    grown = dialect.add(started.add_response(ids, asks, ended=True), [result("0" * 9, "1284")])
    again = {"role": "tool", "tool_call_id": "0" * 9, "name": "Search", "content": "1284"}
    whole = dialect.template.render([*question, asks, again], tools)
    assert grown.prompt_ids == dialect.template.encode(whole)


@FAMILIES
def test_a_rollout_calls_reads_and_answers(family: str) -> None:
    text = call(family, "area of Chad")
    done = rollout(family, f"I look.{text}", text, "<answer>1284</answer>")
    assert (done.done.answer, done.done.error) == ("1284", "")
    assert [used.result.output for used in done.done.turns[0].tool_calls] == [FOUND]
    assert done.prompt().count(FOUND) == 2
    log = list(zip(map(tuple, done.engine.prompts), done.said, strict=True))
    check_grown(log)


@FAMILIES
def test_a_text_that_looks_like_a_number_stays_a_text(family: str) -> None:
    done = rollout(family, call(family, "5"), "So.")
    assert done.tool.started == ["5"] and not done.done.turns[0].problem


@SEVERAL
def test_several_calls_of_a_response_run_at_once(family: str) -> None:
    done = rollout(family, call(family, "Chad", "area of Mali"), "So.")
    assert done.tool.started == ["Chad", "area of Mali"] and not done.done.error
    assert done.prompt().index("about Chad") < done.prompt().index("about area of Mali")


@FAMILIES
def test_a_call_that_was_cut_is_told_to_the_policy(family: str) -> None:
    text = call(family, "area of Chad")
    cut = text[: text.index("Chad")]
    done = Rollout(tokenizer_in(family), cut, "So.", reason=FinishReason.LENGTH).done
    assert done.turns[0].problem and not done.turns[0].tool_calls and not done.error


@FAMILIES
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_gateway_tells_calls_on_every_wire(family: str, stream: bool) -> None:
    text = FORMATS[family].write([WrittenCall("search", '{"query": "5"}')])
    program = program_of(family, text + STYLES[family].call_end, "It is 1284.")

    async def run() -> None:
        body = {"model": "x", "messages": [user("Hi")], "tools": [SEARCH], "stream": stream}
        asked = chat.read(json.dumps(body).encode())
        reply = await program.recorder.chat(asked)
        for wire in (chat, messages, responses):
            told = wire.write(asked, reply).decode().replace("\\", "")
            assert '{"query": "5"}' in told
        assert '"finish_reason": "tool_calls"' in chat.write(asked, reply).decode()
        (asks,) = reply.calls
        assert (reply.text, asks.name, asks.arguments) == ("", "search", '{"query": "5"}')
        said = [user("Hi"), reply.message(), result(asks.id, "1284")]
        assert (await program.ask(said, tools=[SEARCH]))["content"] == "It is 1284."

    asyncio.run(run())
    check_grown(program.engine.log)


THOUGHT = "<|channel|>analysis<|message|>So it is.<|end|><|start|>assistant"
ANSWER = f"{THOUGHT}<|channel|>final<|message|>1284"


def test_gpt_oss_says_its_thoughts_and_its_answer() -> None:
    done = rollout("harmony", THOUGHT + call("harmony", "area of Chad"), ANSWER)
    assert done.tool.started == ["area of Chad"] and done.done.answer.strip() == "1284"


@pytest.mark.parametrize("tools", [[], [SEARCH]], ids=["without tools", "with tools"])
def test_a_program_reads_the_answer_of_gpt_oss_without_its_marks(tools: list[Any]) -> None:
    program = program_of("harmony", f"{ANSWER}<|return|>")
    message = asyncio.run(program.ask([user("Hi")], tools=tools))
    assert message["content"] == "<think>\nSo it is.\n</think>\n\n1284"
