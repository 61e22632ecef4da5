"""Programs with OpenAI's own client behind the gateway: what they see, and what is recorded."""

from __future__ import annotations

import gc
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from gateway_runs import call_text, check_grown, check_used, function_agent, roll_out, solved
from openai.types.chat import ChatCompletion

from flowtrain.agents.gateway import server
from flowtrain.records import Verdict

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
    trajectory, engine = solved(tmp_path, TWO_TURNS, "It is 1284, I think.", "Yes, 1284.")
    assert trajectory.answer == "Yes, 1284."
    check_grown(engine.log)
    assert [turn.verdict for turn in trajectory.turns] == [Verdict.CONTINUE, Verdict.STOP]


def test_an_answer_has_the_shape_of_openais(tmp_path: Path) -> None:
    source = program("""
reply = ask([{"role": "user", "content": "Hi"}])
return reply.model_dump_json()
""")
    trajectory, engine = solved(tmp_path, source, "Yes.")
    found, ((prompt, said),) = json.loads(trajectory.answer), engine.log
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
    trajectory, engine = solved(tmp_path, source, f"Let me see.\n{call_text('Chad')}")
    text, calls, reason, num_tokens = json.loads(trajectory.answer)
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
    asks = call_text("area of Chad", "Chad")
    trajectory, engine = solved(tmp_path, TOOL_TURNS, asks, "1284")
    assert trajectory.answer == "1284" and trajectory.turns[1].tool_calls == ()
    check_grown(engine.log)
    check_used(trajectory)
    prompt = engine.tokenizer.decode(engine.log[1][0])
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
    check_used(solved(tmp_path, source, call_text("area of Chad", "Chad"), "1284")[0])


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
    replies = call_text("area", "Chad"), call_text("size", "land")
    trajectory, _ = solved(tmp_path, source, *replies)
    assert trajectory.answer == "2"
    used = [[(c.arguments, c.result.output) for c in turn.tool_calls] for turn in trajectory.turns]
    assert used == [
        [('{"query": "area"}', "1284"), ('{"query": "Chad"}', "1284")],
        [('{"query": "size"}', ""), ('{"query": "land"}', "")],
    ]


def test_a_long_result_is_recorded_without_its_middle(tmp_path: Path) -> None:
    source = TOOL_TURNS.replace('f"{query}: 1284"', '"1284" * 9999')
    trajectory, _ = solved(tmp_path, source, call_text("Chad"), "1284")
    (used,) = trajectory.turns[0].tool_calls
    assert 8000 < len(used.result.output) < 8100 and used.result.output.endswith("1284")


def test_without_tool_choice_a_call_is_text(tmp_path: Path) -> None:
    source = program("""
message = ask([{"role": "user", "content": "Hi"}], tools=TOOLS, tool_choice="none").choices[0]
return json.dumps([message.message.content, message.finish_reason])
""")
    answer = solved(tmp_path, source, call_text("Chad"))[0].answer
    assert json.loads(answer) == [call_text("Chad"), "stop"]


def test_a_malformed_call_is_text_and_is_counted(tmp_path: Path) -> None:
    broken = '<tool_call>\n{"name": "search", "arg\n</tool_call>'
    trajectory, _ = solved(tmp_path, TOOL_TURNS, broken)
    assert trajectory.answer == broken and "JSON" in trajectory.turns[0].problem


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
    _, engine = solved(tmp_path, source, "a", "b", "c", "d")
    check_grown(engine.log[::2])
    check_grown(engine.log[1::2])
    assert engine.log[0][0] != engine.log[1][0]


def test_a_history_that_the_program_rewrote_begins_a_new_conversation(tmp_path: Path) -> None:
    source = program("""
messages = [{"role": "user", "content": "Hi"}]
said = ask(messages).choices[0].message.content
messages += [{"role": "assistant", "content": f"(summary of {said})"}]
messages += [{"role": "user", "content": "Go on"}]
return ask(messages).choices[0].message.content
""")
    trajectory, engine = solved(tmp_path, source, "something long", "fine")
    assert trajectory.answer == "fine"
    assert "(summary of something long)" in engine.tokenizer.decode(engine.log[1][0])


def test_asked_twice_alike_the_policy_reads_the_same_ids(tmp_path: Path) -> None:
    source = program("""
messages = [{"role": "user", "content": "Hi"}]
messages.append(ask(messages).choices[0].message.model_dump())
messages.append({"role": "user", "content": "Go on"})
return json.dumps([ask(messages).choices[0].message.content for _ in range(2)])
""")
    trajectory, engine = solved(tmp_path, source, "a b", "c", "d")
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
    trajectory, engine = solved(tmp_path, source, "abcdef", "y")
    assert json.loads(trajectory.answer) == ["abc", "length"]
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
    ("param", "options"),
    [
        ("n", {"n": 2}),
        ("logprobs", {"logprobs": True}),
        ("frequency_penalty", {"frequency_penalty": 0.5}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("tool_choice", {"tools": "TOOLS", "tool_choice": "required"}),
        ("parallel_tool_calls", {"parallel_tool_calls": False}),
        ("logit_bias", {"logit_bias": {"5": 1}}),
        ("max_tokens", {"max_tokens": 0}),
        ("top_k", {"extra_body": {"top_k": 5}}),
        ("stop", {"extra_body": {"stop": ["a", "b", "c", "d", "e"]}}),
        ("max_tokens", {"extra_body": {"max_tokens": "3"}}),
        ("stream_options", {"extra_body": {"stream_options": 3}}),
        ("tools", {"extra_body": {"tools": [{"type": "custom", "custom": {"name": "x"}}]}}),
        *(
            ("messages", {"extra_body": {"messages": messages}})
            for messages in (
                [],
                [{"role": "nobody", "content": ""}],
                [{"role": "tool", "content": ""}],
                [{"role": "user"}],
                ["Hi"],
                [{"role": "user", "content": [IMAGE]}],
                [{"role": "assistant", "tool_calls": [{}]}],
            )
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, options: dict[str, object], param: str
) -> None:
    source = program(REFUSED.replace("OPTIONS", repr(options).replace("'TOOLS'", "TOOLS")))
    trajectory, _ = solved(tmp_path, source)
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
        r"models\x0a\x1b[2J: unknown path",
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
    asks = '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "Chad"}}]'
    one, two = (solved(tmp_path, TOOL_TURNS, asks, "1284", style="mistral")[1] for _ in range(2))
    assert one.log == two.log and len(one.log) == 2
