"""Programs with OpenAI's own client behind the gateway: what they see, and what is recorded."""

from __future__ import annotations

import gc
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from gateway_runs import TASK, call_text, calls_of, function_agent, logging_engine, roll_out
from openai.types.chat import ChatCompletion

from flowtrain.agents.gateway import server
from flowtrain.types import Verdict

CHAT = """
import json
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk

TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]

def solve(task, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    def ask(messages, **options):
        return client.chat.completions.create(model="policy", messages=messages, **options)
"""


def program(body: str) -> str:
    return CHAT + "".join(f"    {line}\n" for line in body.strip().splitlines())


TWO_TURNS = program("""
messages = [{"role": "user", "content": task.question}]
for _ in range(2):
    message = ask(messages).choices[0].message
    messages += [message.model_dump(), {"role": "user", "content": "Are you sure?"}]
return message.content
""")


def test_the_second_prompt_begins_with_what_was_read_and_sampled(tmp_path: Path) -> None:
    engine = logging_engine("It is 1284, I think.", "Yes, 1284.")
    with function_agent(tmp_path, TWO_TURNS, engine) as agent:
        trajectory = roll_out(agent)
    assert trajectory.error == "" and trajectory.answer == "Yes, 1284."
    assert calls_of(trajectory) == engine.log
    (first, said), (second, _) = engine.log
    assert second[: len(first) + len(said)] == first + said
    assert [turn.verdict for turn in trajectory.turns] == [Verdict.CONTINUE, Verdict.STOP]


def test_an_answer_has_the_shape_of_openais(tmp_path: Path) -> None:
    source = program("""
reply = ask([{"role": "user", "content": "Hi"}])
return reply.model_dump_json()
""")
    engine = logging_engine("Yes.")
    with function_agent(tmp_path, source, engine) as agent:
        found = json.loads(roll_out(agent).answer)
    ((prompt, said),) = engine.log
    ChatCompletion.model_validate(found)
    assert found["object"] == "chat.completion" and found["model"] == "policy"
    (choice,) = found["choices"]
    assert choice["message"]["content"] == "Yes." and choice["finish_reason"] == "stop"
    assert found["usage"]["prompt_tokens"] == len(prompt)
    assert found["usage"]["completion_tokens"] == len(said)


def test_a_stream_says_the_same(tmp_path: Path) -> None:
    source = program("""
options = {"stream": True, "stream_options": {"include_usage": True}, "tools": TOOLS}
texts, calls, reasons, usage = [], [], [], None
for chunk in ask([{"role": "user", "content": "Hi"}], **options):
    ChatCompletionChunk.model_validate(chunk.model_dump())
    usage = chunk.usage or usage
    for choice in chunk.choices:
        texts.append(choice.delta.content or "")
        calls += choice.delta.tool_calls or []
        reasons.append(choice.finish_reason)
called = [(call.function.name, call.function.arguments) for call in calls]
return json.dumps(["".join(texts), called, reasons[-1], usage.completion_tokens])
""")
    engine = logging_engine(f"Let me see.\n{call_text('Chad')}")
    with function_agent(tmp_path, source, engine) as agent:
        text, calls, reason, num_tokens = json.loads(roll_out(agent).answer)
    assert text == "Let me see." and reason == "tool_calls"
    assert calls == [["search", '{"query": "Chad"}']]
    assert num_tokens == len(engine.log[0][1])


TOOL_TURNS = program("""
messages = [{"role": "user", "content": task.question}]
while True:
    message = ask(messages, tools=TOOLS).choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or []:
        query = json.loads(call.function.arguments)["query"]
        # As LangChain sends it back: parsed and written again.
        call.function.arguments = json.dumps({"query": query}, separators=(",", ":"))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{query}: 1284"})
    if not message.tool_calls:
        return message.content
""")


def test_parallel_calls_of_tools_go_through_and_are_recorded(tmp_path: Path) -> None:
    engine = logging_engine(call_text("area of Chad", "Chad"), "1284")
    with function_agent(tmp_path, TOOL_TURNS, engine) as agent:
        trajectory = roll_out(agent)
    assert trajectory.error == "" and trajectory.answer == "1284"
    assert calls_of(trajectory) == engine.log
    (first, said), (second, _) = engine.log
    assert second[: len(first) + len(said)] == first + said
    used = trajectory.turns[0].tool_calls
    assert [each.arguments for each in used] == ['{"query": "area of Chad"}', '{"query": "Chad"}']
    assert [each.result.output for each in used] == ["area of Chad: 1284", "Chad: 1284"]
    assert trajectory.turns[1].tool_calls == ()
    prompt = engine.tokenizer.decode(second)
    assert "area of Chad: 1284" in prompt and prompt.count("What is the area") == 1


def test_results_are_told_apart_by_their_ids_and_not_their_order(tmp_path: Path) -> None:
    source = program("""
messages = [{"role": "user", "content": task.question}]
message = ask(messages, tools=TOOLS).choices[0].message
messages.append(message.model_dump(exclude_none=True))
for call in reversed(message.tool_calls):
    query = json.loads(call.function.arguments)["query"]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{query}: 1284"})
return ask(messages, tools=TOOLS).choices[0].message.content
""")
    engine = logging_engine(call_text("area of Chad", "Chad"), "1284")
    with function_agent(tmp_path, source, engine) as agent:
        trajectory = roll_out(agent)
    assert trajectory.error == "" and calls_of(trajectory) == engine.log
    used = trajectory.turns[0].tool_calls
    assert [each.arguments for each in used] == ['{"query": "area of Chad"}', '{"query": "Chad"}']
    assert [each.result.output for each in used] == ["area of Chad: 1284", "Chad: 1284"]


def test_calls_without_a_result_are_recorded(tmp_path: Path) -> None:
    """A program may end before it calls."""
    source = program("""
messages = [{"role": "user", "content": task.question}]
message = ask(messages, tools=TOOLS).choices[0].message
messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls:
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "1284"})
message = ask(messages, tools=TOOLS).choices[0].message
return str(len(message.tool_calls))
""")
    engine = logging_engine(call_text("area", "Chad"), call_text("size", "land"))
    with function_agent(tmp_path, source, engine) as agent:
        trajectory = roll_out(agent)
    assert trajectory.error == "" and trajectory.answer == "2"
    assert [
        [(each.arguments, each.result.output) for each in turn.tool_calls]
        for turn in trajectory.turns
    ] == [
        [('{"query": "area"}', "1284"), ('{"query": "Chad"}', "1284")],
        [('{"query": "size"}', ""), ('{"query": "land"}', "")],
    ]


def test_without_tool_choice_a_call_is_text(tmp_path: Path) -> None:
    source = program("""
message = ask([{"role": "user", "content": "Hi"}], tools=TOOLS, tool_choice="none").choices[0]
return json.dumps([message.message.content, message.finish_reason])
""")
    with function_agent(tmp_path, source, logging_engine(call_text("Chad"))) as agent:
        assert json.loads(roll_out(agent).answer) == [call_text("Chad"), "stop"]


def test_a_malformed_call_is_text_and_is_counted(tmp_path: Path) -> None:
    broken = '<tool_call>\n{"name": "search", "arg\n</tool_call>'
    with function_agent(tmp_path, TOOL_TURNS, logging_engine(broken)) as agent:
        trajectory = roll_out(agent)
    assert trajectory.answer == broken
    assert "JSON" in (trajectory.turns[0].result.error or "")


def test_two_agents_in_one_rollout_are_two_conversations(tmp_path: Path) -> None:
    source = program("""
ends = {"solver": "again", "critic": "more"}
histories = {name: [{"role": "system", "content": f"You are the {name}."}] for name in ends}
for turn in range(2):
    for name, history in histories.items():
        history.append({"role": "user", "content": f"{ends[name]} {turn}"})
        history.append(ask(history).choices[0].message.model_dump())
return "done"
""")
    engine = logging_engine("a", "b", "c", "d")
    with function_agent(tmp_path, source, engine) as agent:
        trajectory = roll_out(agent)
    assert calls_of(trajectory) == engine.log
    for first, second in ((0, 2), (1, 3)):
        prompt, said = engine.log[first]
        assert engine.log[second][0][: len(prompt) + len(said)] == prompt + said
    assert engine.log[0][0] != engine.log[1][0]


def test_a_history_that_the_program_rewrote_begins_a_new_conversation(tmp_path: Path) -> None:
    source = program("""
messages = [{"role": "user", "content": "Hi"}]
said = ask(messages).choices[0].message.content
messages += [{"role": "assistant", "content": f"(summary of {said})"}]
messages += [{"role": "user", "content": "Go on"}]
return ask(messages).choices[0].message.content
""")
    engine = logging_engine("something long", "fine")
    with function_agent(tmp_path, source, engine) as agent:
        trajectory = roll_out(agent)
    assert trajectory.answer == "fine" and calls_of(trajectory) == engine.log
    assert "(summary of something long)" in engine.tokenizer.decode(engine.log[1][0])


def test_asked_twice_alike_the_policy_reads_the_same_ids(tmp_path: Path) -> None:
    source = program("""
messages = [{"role": "user", "content": "Hi"}]
messages.append(ask(messages).choices[0].message.model_dump())
messages.append({"role": "user", "content": "Go on"})
return json.dumps([ask(messages).choices[0].message.content for _ in range(2)])
""")
    engine = logging_engine("a b", "c", "d")
    with function_agent(tmp_path, source, engine) as agent:
        trajectory = roll_out(agent)
    assert json.loads(trajectory.answer) == ["c", "d"] and len(trajectory.turns) == 3
    assert engine.log[1][0] == engine.log[2][0]
    assert engine.asked[1].seed != engine.asked[2].seed


def test_the_limits_of_a_request_count_and_ours_are_the_greatest(tmp_path: Path) -> None:
    source = program("""
hi = [{"role": "user", "content": "Hi"}]
short = ask(hi, max_tokens=3, stop="x").choices[0]
ask(hi, max_completion_tokens=100000, temperature=0.1, top_p=0.5, seed=3)
return json.dumps([short.message.content, short.finish_reason])
""")
    engine = logging_engine("abcdef", "y")
    with function_agent(tmp_path, source, engine) as agent:
        assert json.loads(roll_out(agent).answer) == ["abc", "length"]
    assert [each.max_new_tokens for each in engine.asked] == [3, 300]
    assert engine.asked[0].stop_strings == ("x",)
    assert engine.asked[1].temperature == 1.0 and engine.asked[1].top_p == 1.0


REFUSED = """
from openai import APIStatusError
try:
    ask([{"role": "user", "content": "Hi"}], **OPTIONS)
except APIStatusError as error:
    return json.dumps([error.status_code, error.param, error.message])
"""


IMAGE = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": "TOOLS", "tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"extra_body": {"top_k": 5}}, "top_k"),
        ({"extra_body": {"stop": ["a", "b", "c", "d", "e"]}}, "stop"),
        ({"extra_body": {"max_tokens": "3"}}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"messages": []}}, "messages"),
        ({"extra_body": {"messages": [{"role": "nobody", "content": ""}]}}, "messages"),
        ({"extra_body": {"messages": [{"role": "tool", "content": ""}]}}, "messages"),
        ({"extra_body": {"messages": [{"role": "user"}]}}, "messages"),
        ({"extra_body": {"messages": ["Hi"]}}, "messages"),
        ({"extra_body": {"messages": [{"role": "user", "content": [IMAGE]}]}}, "messages"),
        ({"extra_body": {"messages": [{"role": "assistant", "tool_calls": [{}]}]}}, "messages"),
        ({"extra_body": {"stream_options": 3}}, "stream_options"),
        ({"extra_body": {"tools": [{"type": "custom", "custom": {"name": "x"}}]}}, "tools"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, options: dict[str, object], param: str
) -> None:
    source = program(REFUSED.replace("OPTIONS", repr(options).replace("'TOOLS'", "TOOLS")))
    with function_agent(tmp_path, source) as agent:
        trajectory = roll_out(agent)
    status, named, message = json.loads(trajectory.answer)
    assert (status, named) == (400, param)
    assert param in message or param == "tools"
    assert trajectory.turns == ()


def test_what_programs_ask_in_vain_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = program(REFUSED.replace("OPTIONS", "{'n': 2}"))
    with function_agent(tmp_path, source) as agent:
        for seed in (1, 2):
            assert roll_out(agent, seed=seed).turns == ()
        url = f"{agent.gateway.base_url}/models%0A%1b[2J"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == [
        "the gateway refused a program's request: chat/completions: n=2 is not supported, only 1",
        "the gateway refused a program's request: "
        r"models\x0a\x1b[2J: there is no such path",
    ]


def test_garbage_is_not_looked_for_in_what_is_loaded(tmp_path: Path) -> None:
    gc.unfreeze()  # the tests themselves had frozen it
    server._freeze_heap.cache_clear()
    frozen = []
    for _ in range(2):
        with function_agent(tmp_path, TWO_TURNS) as agent:
            assert agent.gateway.base_url
            frozen.append(gc.get_freeze_count())
    first, second = frozen
    assert first > 100_000 and second <= first, "once per process, not what comes later"


def test_the_same_seed_gives_the_same_ids(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        engine = logging_engine(call_text("area of Chad", "Chad"), "1284", style="mistral")
        engine.replies[0] = '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "Chad"}}]'
        with function_agent(tmp_path, TOOL_TURNS, engine) as agent:
            trajectory = roll_out(agent, seed=3, task=TASK)
        assert trajectory.error == ""
        found.append(engine.log)
    assert found[0] == found[1] and len(found[0]) == 2
