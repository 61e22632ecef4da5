"""The vendors' own clients behind the gateway, on every wire: what they see and what is trained."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gateway_runs import SEARCH, TASK, call_text, calls_of, check_grown, check_used, solved
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gateway_fidelity import Program

from flowtrain.agents.gateway.plain import Reply, ReplyCall
from flowtrain.agents.gateway.wires import messages as anthropics
from flowtrain.agents.gateway.wires import responses as openais

MESSAGES = """
import json
from anthropic import Anthropic

TOOLS = [{"name": "search", "input_schema": {"type": "object"}}]

def solve(task, base_url, api_key):
    client = Anthropic(base_url=base_url, api_key=api_key, max_retries=0)
    def ask(messages, **options):
        options = {"model": "policy", "max_tokens": 300, "messages": messages} | options
        if not STREAM:
            return client.messages.create(**options)
        with client.messages.stream(**options) as stream:
            return stream.get_final_message()
    def said(reply):
        return {"role": "assistant", "content": [each.model_dump() for each in reply.content]}
    def text(reply):
        return "".join(each.text for each in reply.content if each.type == "text")
    def calls(reply):
        uses = [each for each in reply.content if each.type == "tool_use"]
        return [(each.id, each.name, each.input) for each in uses]
    def results(reply):
        named = [(each[0], f"{each[2]['query']}: 1284") for each in calls(reply)]
        return [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": name, "content": text} for name, text in named]}]
"""
RESPONSES = """
import json
from openai import OpenAI

TOOLS = [{"type": "function", "name": "search", "parameters": {"type": "object"}}]
ENDS = ("response.completed", "response.incomplete")

def solve(task, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    def ask(items, **options):
        options = {"model": "policy", "input": items} | options
        if not STREAM:
            return client.responses.create(**options)
        with client.responses.stream(**options) as stream:  # which checks and adds the events up
            ends = [each for each in stream if each.type in ENDS]
        return ends[0].response
    def said(reply):
        return [each.model_dump(exclude={"parsed", "parsed_arguments"}) for each in reply.output]
    def text(reply):
        return reply.output_text
    def calls(reply):
        return [(each.call_id, each.name, json.loads(each.arguments))
                for each in reply.output if each.type == "function_call"]
    def results(reply):
        named = [(name, f"{given['query']}: 1284") for name, _, given in calls(reply)]
        return [{"type": "function_call_output", "call_id": name, "output": text}
                for name, text in named]
"""
HEADS = {"messages": MESSAGES, "responses": RESPONSES}
ANTHROPIC = pytest.mark.skipif(
    find_spec("anthropic") is None, reason="anthropic is not installed; make test-optional"
)
WIRES = pytest.mark.parametrize("wire", [pytest.param("messages", marks=ANTHROPIC), "responses"])
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def program(wire: str, body: str, stream: bool = False) -> str:
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return f"STREAM = {stream}\n{HEADS[wire]}{lines}"


TOOL_TURNS = """
history = [{"role": "user", "content": task.question}]
while True:
    reply = ask(history, tools=TOOLS)
    mine = said(reply)
    history += mine if isinstance(mine, list) else [mine]
    history += results(reply) if calls(reply) else []
    if not calls(reply):
        return text(reply)
"""


@WIRES
@STREAMS
def test_parallel_calls_of_tools_go_through_and_are_recorded(
    tmp_path: Path, wire: str, stream: bool
) -> None:
    asks = f"Let me see.\n{call_text('area of Chad', 'Chad')}"
    trajectory, engine = solved(tmp_path, program(wire, TOOL_TURNS, stream), asks, "1284")
    assert trajectory.answer == "1284"
    check_grown(engine.log)
    check_used(trajectory)


@WIRES
@STREAMS
def test_an_answer_says_how_it_ended_and_what_it_cost(
    tmp_path: Path, wire: str, stream: bool
) -> None:
    limit = {"messages": "max_tokens", "responses": "max_output_tokens"}[wire]
    source = f"""
hi = [{{"role": "user", "content": "Hi"}}]
found = [ask(hi, {limit}=3), ask(hi), ask(hi, tools=TOOLS)]
return json.dumps([each.model_dump(mode="json") for each in found])
"""
    replies = ("abcdef", "Yes.", call_text("Chad"))
    trajectory, engine = solved(tmp_path, program(wire, source, stream), *replies)
    short, whole, call = json.loads(trajectory.answer)
    if wire == "messages":
        reasons = [each["stop_reason"] for each in (short, whole, call)]
        assert reasons == ["max_tokens", "end_turn", "tool_use"]
        assert whole["content"][0]["text"] == "Yes." and whole["model"] == "policy"
        assert [each["type"] for each in call["content"]] == ["tool_use"]
    else:
        assert short["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [each["status"] for each in (short, whole)] == ["incomplete", "completed"]
        assert whole["output"][0]["content"][0]["text"] == "Yes."
        assert [each["type"] for each in call["output"]] == ["function_call"]
    for found, (prompt, said) in zip((short, whole, call), engine.log, strict=True):
        usage = found["usage"]
        assert (usage["input_tokens"], usage["output_tokens"]) == (len(prompt), len(said))
    assert [each.max_new_tokens for each in engine.asked] == [3, 300, 300]


@ANTHROPIC
@STREAMS
def test_a_stop_sequence_is_named(tmp_path: Path, stream: bool) -> None:
    source = """
reply = ask([{"role": "user", "content": "Hi"}], stop_sequences=["x", "cd"])
return json.dumps([reply.stop_reason, reply.stop_sequence, text(reply)])
"""
    trajectory, _ = solved(tmp_path, program("messages", source, stream), "abcdefx")
    assert json.loads(trajectory.answer) == ["stop_sequence", "cd", "ab"]


@ANTHROPIC
@STREAMS
@pytest.mark.parametrize("reply", ["<think>\nSo.\n</think>\n\nYes, {}", "So.</think>Yes, {}"])
@pytest.mark.parametrize("calls", ["1284.", f"one\n{call_text('Chad')}"])
def test_thinking_is_a_block_that_is_known_again(
    tmp_path: Path, stream: bool, reply: str, calls: str
) -> None:
    """In a style whose template leaves the thinking where it is."""
    source = """
history = [{"role": "user", "content": "Hi"}]
reply = ask(history, tools=TOOLS)
history += [said(reply), *(results(reply) if calls(reply) else [{"role": "user", "content": "?"}])]
ask(history, tools=TOOLS)
return json.dumps([each.thinking for each in reply.content if each.type == "thinking"])
"""
    source = program("messages", source, stream)
    trajectory, engine = solved(tmp_path, source, reply.format(calls), "Fine.")
    assert json.loads(trajectory.answer) == ["So."]
    check_grown(engine.log)


texts = st.text(st.sampled_from("ab \n<>/"), max_size=8)


@settings(max_examples=60)
@given(st.tuples(texts, texts, texts), st.booleans(), st.booleans())
def test_any_reply_comes_back_as_it_was(
    parts: tuple[str, str, str], opens: bool, has: bool
) -> None:
    before, thinking, text = parts
    whole = f"{'<think>' if opens else before}{thinking}{'</think>' if has else ''}{text}"
    reply = Reply("1", whole, (), "stop", 1, 1)
    asked = anthropics.read(_body(messages=[{"role": "user", "content": "Hi"}]))
    blocks = json.loads(anthropics.write(asked, reply))["content"]
    again = anthropics.read(_body(messages=[{"role": "assistant", "content": blocks}]))
    assert again.messages[-1]["content"].strip() == whole.strip()


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_json_to_python_alone_becomes_text(stream: bool) -> None:
    reply = Reply("1", "", (ReplyCall("a", "f", '{"x": [NaN, -Infinity, 1]}'),), "tool_calls", 1, 1)
    asked = anthropics.read(_body(messages=HI, stream=stream))
    written = anthropics.write(asked, reply).decode()
    assert "NaN" in written and re.search(r"[^\w\"]NaN", written) is None
    if not stream:
        (block,) = json.loads(written)["content"]
        assert block["input"] == {"x": ["NaN", "-Infinity", 1]}


def _body(**given: Any) -> bytes:
    return json.dumps({"model": "x", "max_tokens": 9, **given}).encode()


@ANTHROPIC
def test_tokens_are_counted_without_a_turn(tmp_path: Path) -> None:
    source = """
history = [{"role": "user", "content": "Hi"}]
options = {"model": "policy", "system": [{"type": "text", "text": "Be brief."}], "tools": TOOLS}
first = client.messages.count_tokens(messages=history, **options).input_tokens
reply = ask(history, system="Be brief.", tools=TOOLS)
history += [said(reply), {"role": "user", "content": "Sure?"}]
second = client.messages.count_tokens(messages=history, **options).input_tokens
ask(history, system="Be brief.", tools=TOOLS)
return json.dumps([first, second])
"""
    trajectory, engine = solved(tmp_path, program("messages", source), "Yes.", "Sure.")
    assert json.loads(trajectory.answer) == [len(prompt) for prompt, _ in engine.log]
    check_grown(engine.log)


@STREAMS
def test_a_response_goes_on_with_a_previous_one(tmp_path: Path, stream: bool) -> None:
    source = """
first = ask("What is it?", instructions="Be brief.", tools=TOOLS)
options = {"instructions": "Be brief.", "tools": TOOLS}
second = ask(results(first), previous_response_id=first.id, **options)
third = ask("Sure?", previous_response_id=second.id, **options)
assert third.previous_response_id == second.id
other = ask("Sure?", previous_response_id=second.id, tools=TOOLS)
return text(third)
"""
    replies = (call_text("Chad"), "1284.", "Yes.", "No.")
    trajectory, engine = solved(tmp_path, program("responses", source, stream), *replies)
    assert trajectory.answer == "Yes."
    check_grown(engine.log[:3])
    prompts = [engine.tokenizer.decode(prompt) for prompt, _ in engine.log]
    assert ["Be brief." in each for each in prompts] == [True, True, True, False]
    assert "Chad: 1284" in prompts[3] and trajectory.turns[0].tool_calls


REFUSED = {
    "messages": """
from anthropic import APIStatusError
try:
    ask(HISTORY, **OPTIONS)
except APIStatusError as error:
    assert error.body["type"] == "error", error.body
    told = error.body["error"]
    return json.dumps([error.status_code, told["type"], told["message"]])
""",
    "responses": """
from openai import APIStatusError
try:
    ask(HISTORY, **OPTIONS)
except APIStatusError as error:
    return json.dumps([error.status_code, error.param, error.message])
""",
}
HI = [{"role": "user", "content": "Hi"}]
USE = {"type": "tool_use", "id": "t1", "name": "s", "input": {}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}

BODY: dict[str, dict[str, Any]] = {
    "tool_choice": {"tool_choice": {"type": "any"}, "tools": [{"name": "s", "input_schema": {}}]},
    'messages.0.content.0: "image"': {"messages": [{"role": "user", "content": [IMAGE]}]},
    "messages.0.content: List": {"messages": [{"role": "user", "content": []}]},
    "the last message is the assistant's": {
        "messages": [*HI, {"role": "assistant", "content": "The answer is ("}]
    },
    "the call 't1' has no result": {
        "messages": [*HI, {"role": "assistant", "content": [USE]}, *HI]
    },
    "a result of 't2'": {
        "messages": [
            *HI,
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2"}]},
        ]
    },
    "'defer_loading'": {"tools": [{"name": "s", "input_schema": {}, "defer_loading": True}]},
    "messages": {"messages": []},
    "tools.0.type": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    "mcp_servers": {"mcp_servers": [{"url": "http://x"}]},
    "output_config.format": {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
    "stop_sequences": {"stop_sequences": [f"{n}" for n in range(257)]},
    "container": {"container": "x"},
}
ITEMS: dict[str, dict[str, Any]] = {
    "tool_choice": {"tool_choice": "required"},
    'input.0.content.0.type: "input_image"': {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
    },
    'input.1: "reasoning"': {"input": [*HI, {"type": "reasoning", "id": "r", "summary": []}]},
    "input.0.arguments": {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]},
    "the last message": {"input": [*HI, {"role": "assistant", "content": "The"}]},
    "a result of 'c'": {"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]},
    'tools.0.type: "web_search"': {"tools": [{"type": "web_search"}]},
    "'strict'": {"tools": [{"type": "function", "name": "f", "strict": True}]},
    "text": {"text": {"format": {"type": "json_object"}}},
    "background": {"background": True},
    "previous_response_id": {"previous_response_id": "resp_other"},
    "conversation": {"conversation": "conv_1"},
    "parallel_tool_calls": {"parallel_tool_calls": False},
    "max_tool_calls": {"max_tool_calls": 1},
}


@pytest.mark.parametrize(
    ("wire", "named", "options"),
    [
        *(pytest.param("messages", *each, marks=ANTHROPIC) for each in BODY.items()),
        *(("responses", *each) for each in ITEMS.items()),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, wire: str, named: str, options: dict[str, Any]
) -> None:
    source = REFUSED[wire].replace("OPTIONS", repr({"extra_body": options}))
    trajectory, _ = solved(tmp_path, program(wire, source.replace("HISTORY", repr(HI))))
    status, kind, message = json.loads(trajectory.answer)
    assert status == 400 and trajectory.turns == ()
    if wire == "messages":
        assert kind == "invalid_request_error" and named in message
    else:
        assert kind == named or named in message


@WIRES
def test_parts_of_a_text_are_told_apart(tmp_path: Path, wire: str) -> None:
    kind = "text" if wire == "messages" else "input_text"
    parts = [{"type": kind, "text": each} for each in ("One.", "Two.")]
    source = f"return text(ask([{{'role': 'user', 'content': {parts}}}]))"
    _, engine = solved(tmp_path, program(wire, source), "Yes.")
    assert "One.\nTwo." in engine.tokenizer.decode(engine.log[0][0])


@ANTHROPIC
def test_a_tool_that_failed_is_told(tmp_path: Path) -> None:
    source = f"""
for content in ([], "no such file"):
    result = {{"type": "tool_result", "tool_use_id": "t1", "content": content, "is_error": True}}
    use = {{"role": "assistant", "content": [{USE}]}}
    reply = ask([*{HI}, use, {{"role": "user", "content": [result]}}])
return text(reply)
"""
    _, engine = solved(tmp_path, program("messages", source), "Yes.", "Yes.")
    prompts = [engine.tokenizer.decode(prompt) for prompt, _ in engine.log]
    assert "Error: the tool failed" in prompts[0] and "Error: no such file" in prompts[1]


@WIRES
def test_a_wrong_key_and_a_rollout_that_is_over_are_told(tmp_path: Path, wire: str) -> None:
    source = """
found = []
for key in (api_key + "x", api_key):
    client.api_key = key
    try:
        while True:
            ask([{"role": "user", "content": "Hi"}])
    except Exception as error:
        found.append([error.status_code, str(error)])
return json.dumps(found)
"""
    trajectory, engine = solved(tmp_path, program(wire, source))
    assert trajectory.truncated == "turns" and len(engine.log) == 8
    (wrong, text), (over, other) = json.loads(trajectory.answer)
    assert (wrong, over) == (401, 410)
    assert "the key is missing or wrong" in text and "agent.max_turns" in other


@ANTHROPIC
def test_other_paths_are_not_there(tmp_path: Path) -> None:
    source = """
from anthropic import NotFoundError
try:
    client.models.list()
except NotFoundError as error:
    return error.body["error"]["message"]
"""
    trajectory, _ = solved(tmp_path, program("messages", source))
    assert trajectory.answer == "unknown path"


def test_wires_share_a_conversation() -> None:
    """A program may speak more than one: what it sends is the same history."""
    program = Program("qwen2.5", call_text("Chad"), "It is 1284.", "Yes.")
    function = SEARCH["function"]
    tool = {"name": "search", "description": function["description"]}
    tool["input_schema"] = function["parameters"]

    async def go() -> None:
        message = await program.ask(HI, tools=[SEARCH])
        name = message["tool_calls"][0]["id"]
        use = {"type": "tool_use", "id": name, "name": "search", "input": {"query": "Chad"}}
        result = {"type": "tool_result", "tool_use_id": name, "content": "Chad: 1284"}
        roles = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        asked = anthropics.read(_body(messages=[*HI, *roles], tools=[tool]))
        reply = await program.recorder.chat(asked)
        call = {"call_id": name, "name": "search", "arguments": '{"query":"Chad"}'}
        items = [
            *HI,
            {"type": "function_call", **call},
            {"type": "function_call_output", "call_id": name, "output": "Chad: 1284"},
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": "Sure?"},
        ]
        given = {"model": "x", "input": items, "tools": [{"type": "function", **function}]}
        await program.recorder.chat(openais.read(json.dumps(given).encode()))

    program.run(go)
    check_grown(program.engine.log)


@ANTHROPIC
def test_the_task_is_seen_by_all(tmp_path: Path) -> None:
    source = "return text(ask([{'role': 'user', 'content': task.question}]))"
    found = [solved(tmp_path, program(wire, source), "1284")[0] for wire in HEADS]
    assert [each.task for each in found] == [TASK, TASK]
    assert calls_of(found[0]) == calls_of(found[1])
