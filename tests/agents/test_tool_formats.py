"""Tool calls in the formats of several model families."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any, get_args

import pytest
from chat_templates import LLAMA31, MISTRAL, QWEN3, QWEN25, SMOLLM2
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowtrain.agents.chat.tool_formats import FORMATS, MAX_CALLS, WrittenCall, format_of, tools_of
from flowtrain.config.agents import ToolFormatName

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = {"query": "area of Chad"}
JSON = json.dumps(ARGUMENTS)
TEXT = json.dumps(JSON)
"""As Granite 4 writes arguments."""
OBJECT = f'{{"name": "Search", "arguments": {JSON}}}'
CALL = WrittenCall("Search", JSON)

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
MARKS = [
    *("</tool>", "</tool_call>", "<tool_call>", "[TOOL_CALLS]", "; {", "}", "</parameter>"),
    *("</arg_value>", "</function>", "<tool_call|>", "<|tool_call_end|>", "</invoke>", "</think>"),
    *("<think>", "<|call|>", "<|message|>", "```", "\n</parameter>\n", "'", '"', "\\"),
]
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True)
CALLS = st.lists(
    st.builds(
        lambda name, values: WrittenCall(name, json.dumps(values, ensure_ascii=False)),
        NAMES,
        st.dictionaries(
            NAMES | st.text() | st.sampled_from(MARKS),
            JSON_VALUES | st.sampled_from(MARKS),
            max_size=3,
        ),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda call: call.name,
)
BARE_KEYS = {
    *("qwen3_coder", "seed_oss", "glm", "minimax_m2", "deepseek_v32", "muse", "gemma4", "pythonic"),
}
"""Formats that write the names of arguments without quotes, which takes names only."""


PIECES = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", '<tool name="', '">', "</tool>", "[TOOL_CALLS]"),
            *('{"name": "f", "arguments": {}}', '{"name": "f", "parameters": 3}', "[", "]", ","),
            *("<|python_tag|>", "{", "}", '"', "NaN", "\\ud800", "<think>", "</think>", ";", "["),
            *("[ARGS]", "f{}", " ", "\n", "x", "<function=f>", "<parameter=q>", "</parameter>"),
            *("</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</invoke>"),
            *(
                '<invoke name="f">',
                '<parameter name="q">',
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁sep｜>",
            ),
            *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "```json\n", "```", "<tool_call|>"),
            *("<|tool_call>", "call:f", '<|"|>', "<|tool_call_start|>", "f(q='", "'", ")", "\\"),
            *("<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "<|call|>"),
            *(" to=functions.f", "<|channel|>", "<|message|>", "<|start|>", "analysis", "<|end|>"),
        ]
    )
    | st.text(max_size=5),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("name", FORMATS)
@given(text=PIECES)
@example(text='{"name":' * 100_000)
@example(text="<tool_call>" + "[" * 100_000)
@example(text='<tool_call>{"name": "f", "arguments": {"x": ' + "9" * 10_000 + "}}</tool_call>")
def test_no_text_makes_a_parser_raise(name: str, text: str) -> None:
    content, calls = FORMATS[name].parse(text)
    assert len(calls) <= MAX_CALLS
    assert len(content) <= len(text)
    for call in calls:
        assert call.problem or _is_object(call)
        (call.name + call.arguments + call.problem).encode()


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40)
@given(calls=CALLS, share=st.floats(0, 1))
def test_what_was_cut_is_read_as_it_was_meant_or_as_broken(
    name: str, calls: list[WrittenCall], share: float
) -> None:
    if name in BARE_KEYS:
        calls = [WrittenCall(each.name, json.dumps(_with_names(each.values))) for each in calls]
    text = FORMATS[name].write(calls)
    _, read = FORMATS[name].parse(text[: int(len(text) * share)], tools_of(calls))
    whole = [(call.name, call.values) for call in read if not call.problem]
    assert whole == [(call.name, call.values) for call in calls[: len(whole)]]
    assert len(read) - len(whole) <= 1


HOSTILE = [
    *("<tool_call>", "<tool_call>\n<function=", "<function=", "<parameter=q>", "</parameter>"),
    *("<function=f><parameter=q>", "<arg_key>", "<tool_call>f<arg_key>q</arg_key><arg_value>"),
    *("<tool_calls>", "<invoke ", '<invoke name="', '<parameter name="', "</invoke>", "</think>"),
    *("<think>", "<think></think>", " to=", " to=functions.f", "<|channel|>analysis<|message|>"),
    *(
        "<|start|>assistant",
        "<|start|>assistant<|channel|>a to=f",
        "<|tool_call>",
        "<|tool_call>call:",
    ),
    *(
        '<|"|>',
        "'",
        '"',
        "'\\",
        "\\'",
        "f(",
        "a=",
        "a",
        " ",
        "\n",
        "a:",
        "{",
        "[",
        "(",
        "[TOOL_CALLS]",
    ),
    *("[TOOL_CALLS]a ", "<|tool_call_start|>", "<|tool_call_start|>['", "<｜tool▁calls▁begin｜>"),
    *(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n",
        "<|tool_call_begin|>a",
    ),
    *('{"name": "f", "arguments": {}}', "<|python_tag|>", "<tool_call>{}", "; ", "</parameter>\n"),
    *("</arg_value> ", "<minimax:tool_call>", "<｜DSML｜invoke", "<a_calls>"),
]


@pytest.mark.parametrize("name", FORMATS)
def test_the_time_is_linear_in_the_length_of_a_response(name: str) -> None:
    """What is quadratic takes a second here, and what is linear a millisecond or two."""
    parse, shape = FORMATS[name].parse, FORMATS[name].shape
    heads = {"", "</think>", *(shape.partition(end)[0] for end in ("NAME", "{...", "..."))}

    def is_slow(text: str) -> bool:
        begun = time.process_time()
        parse(text)
        return time.process_time() - begun > 0.1

    slow = [
        (head, piece)
        for head in heads
        for piece in HOSTILE
        for tail in ("", "<")
        # Other work may take the processor from one try, but not from each.
        if all(is_slow(head + piece * (10_000 // len(piece)) + tail) for _ in range(3))
    ]
    assert not slow


def _with_names(value: Any) -> Any:
    """The value with names for keys."""
    if isinstance(value, dict):
        return {f"key_{n}": _with_names(item) for n, item in enumerate(value.values())}
    return list(map(_with_names, value)) if isinstance(value, list) else value


def _is_object(call: WrittenCall) -> bool:
    try:
        return isinstance(json.loads(call.arguments), dict)
    except (ValueError, RecursionError):
        return False


@pytest.mark.parametrize("name", FORMATS)
@given(calls=CALLS, said=st.sampled_from(["", "I look.\n"]))
def test_what_is_written_is_read(name: str, calls: list[WrittenCall], said: str) -> None:
    if name in ("json", "llama3"):
        said = ""  # a response with a call has nothing else
    if name in BARE_KEYS:
        calls = [WrittenCall(each.name, json.dumps(_with_names(each.values))) for each in calls]
    content, read = FORMATS[name].parse(said + FORMATS[name].write(calls), tools_of(calls))
    assert [call.problem for call in read] == [""] * len(calls)
    assert [call.name for call in read] == [call.name for call in calls] and content == said
    assert [call.values for call in read] == [json.loads(call.arguments) for call in calls]


@pytest.mark.parametrize(
    ("name", "text", "content", "num_calls"),
    [
        ("hermes", f"I look.\n<tool_call>\n{OBJECT}\n</tool_call>", "I look.\n", 1),
        ("hermes", f'<tool_call>{{"arguments": {JSON}, "name": "Search"}}', "", 1),
        ("hermes", f'<tool_call>{{"name": "Search", "arguments": {JSON}}}</tool_call>' * 2, "", 2),
        ("hermes", "It is 12.", "It is 12.", 0),
        ("llama3", f'<|python_tag|>{{"name": "Search", "parameters": {JSON}}}', "", 1),
        ("llama3", f' {{"name": "Search", "arguments": {JSON}}}', "", 1),
        ("llama3", f'{{"type": "function", "name": "Search", "parameters": {JSON}}}', "", 1),
        ("llama3", f'{{"name": "Search", "parameters": {JSON}}}; ' * 2, "", 2),
        ("llama3", 'It is {"name": 1}.', 'It is {"name": 1}.', 0),
        ("llama3", f'<|python_tag|>{{"name": "Search", "parameters": {JSON}}}' * 2, "", 2),
        ("llama3", f'A.<|python_tag|>{{"name": "Search", "parameters": {JSON}}}', "A.", 1),
        ("mistral", f"[TOOL_CALLS]Search[CALL_ID]123456789[ARGS]{JSON}" * 2, "", 2),
        ("hermes", f'<tool_call>{{"name": "Search", "arguments": {TEXT}}}</tool_call>', "", 1),
        ("mistral", f'[TOOL_CALLS] [{OBJECT[:-1]}, "id": "abc"}}]', "", 1),
        ("mistral", f"I look.[TOOL_CALLS]Search{JSON}[TOOL_CALLS]Search{JSON}", "I look.", 2),
        ("mistral", f"[TOOL_CALLS]Search[ARGS]{JSON}", "", 1),
        ("xml", f'I look. <tool name="Search">{JSON}</tool>', "I look. ", 1),
        ("xml", f'<tool name="Search">\n{JSON}', "", 1),
        ("json", f'{{"name": "Search", "arguments": {JSON}}}\n', "", 1),
        ("json", '{"answer": 4}', '{"answer": 4}', 0),
    ],
)  # fmt: skip
def test_calls_as_models_write_them(name: str, text: str, content: str, num_calls: int) -> None:
    assert FORMATS[name].parse(text) == (content, (CALL,) * num_calls)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("hermes", '<tool_call>{"name": "Search"</tool_call>', "no valid JSON"),
        ("hermes", '<tool_call>{"name": "Search"}</tool_call>', 'no "arguments"'),
        ("hermes", '<tool_call>{"name": "Search", "arguments": 3}</tool_call>', "no JSON object"),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "a call is"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{} x"}</tool_call>', "no JSON object"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "3"}</tool_call>', "no JSON object"),
        ("hermes", '<tool_call>["Search"]</tool_call>', "a call is"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} x</tool_call>', "follows"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN"),
        ("llama3", '{"name": "Search", "parameters": {', "no valid JSON"),
        ("llama3", "<|python_tag|>print(3)", "no valid JSON"),
        ("llama3", "<|python_tag|>", "no valid JSON"),
        ("mistral", "[TOOL_CALLS]", "no valid JSON"),
        ("mistral", "[TOOL_CALLS] []", "no call"),
        ("mistral", "[TOOL_CALLS]Search[1]", "no JSON object"),
        ("xml", '<tool name="Search">area</tool>', "no valid JSON"),
        ("json", '{"name": "f", "arguments": {}} and so on', "follows"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=q>\nChad", "no end"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=q>\nx\n</parameter>\n", "no end"),
        ("qwen3_coder", "<tool_call>\n<func", "no end"),
        ("qwen3_coder", "<tool_call>\n", "no end"),
        ("qwen3_coder", "<function=>\n</function>", "no name"),
        ("qwen3_coder", "<function=f>\nChad\n</function>\n</tool_call>", "malformed"),
        ("glm", "<tool_call>f\n<arg_key>q</arg_key>\n<arg_value>Chad", "no end"),
        ("glm", "<tool_call>f\n<arg_key>q</arg_key>\nChad</tool_call>", "malformed"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter', "no end"),
        ("deepseek_v32", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n', "no end"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{", "no valid"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f", "no valid JSON"),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0", "no valid JSON"),
        ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json", "no valid JSON"),
        ("harmony", " to=functions.f<|channel|>commentary json<|message|>{", "no valid JSON"),
        ("gemma4", '<|tool_call>call:f{q:<|"|>Chad', "no valid value"),
        ("pythonic", "<|tool_call_start|>[f(q='Chad", "no valid value"),
        ("pythonic", "[f(q=__import__('os'))]", "no valid value"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 17, "more than 16"),
    ],
)  # fmt: skip
def test_malformed_calls_stay_calls_with_a_problem(name: str, text: str, problem: str) -> None:
    _, (call, *_) = FORMATS[name].parse(text)
    assert problem in call.problem and not call.name


def test_a_tag_of_llama_in_an_argument_is_text() -> None:
    text = '<|python_tag|>{"name": "f", "parameters": {"query": "what is <|python_tag|>?"}}'
    (call,) = FORMATS["llama3"].parse(text)[1]
    assert call.values == {"query": "what is <|python_tag|>?"}


def test_a_broken_call_does_not_hide_the_next() -> None:
    text = f'<tool_call>{{oh</tool_call><tool_call>{{"name": "Search", "arguments": {JSON}}}'
    _, (broken, good) = FORMATS["hermes"].parse(text)
    assert broken.problem and good == CALL


def test_text_after_a_call_in_the_newer_form_of_mistral_is_malformed() -> None:
    _, calls = FORMATS["mistral"].parse(f"[TOOL_CALLS]Search{JSON} and so on")
    assert [call.problem for call in calls] == ["something other than a call follows the value"]


def test_calls_within_a_thinking_do_not_count() -> None:
    hermes = FORMATS["hermes"]
    thought = "<think>\nI write <tool_call>{}</tool_call>\n</think>\n\n"
    assert hermes.parse(f"{thought}It is 12.") == (f"{thought}It is 12.", ())
    assert hermes.parse(thought + hermes.write([CALL])) == (thought, (CALL,))
    assert hermes.parse("<think>\nI write <tool_call>{}</tool_call>")[1] == ()


CALL_ID = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[CALL_ID]"
    "{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}{{ tools | tojson }}"
)
"""As Mistral Small 3.2's."""
WRITTEN = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
AS_TEXT = WRITTEN.replace("| tojson", "| tojson | tojson")


def written(before: str, call: str = WRITTEN, after: str = "") -> str:
    """A template that writes calls in these words."""
    return (
        f"{{{{ tools | tojson }}}} say CALL"
        "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}{% for c in m.tool_calls %}"
        f"{before}{call}{after}{{% endfor %}}{{% else %}}{{{{ m.content }}}}{{% endif %}}<|end|>"
        "{% endfor %}"
    )


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (written("<tool_call>", after="</tool_call>"), "hermes"),
        (written("<tool_call>", AS_TEXT, "</tool_call>"), "hermes"),
        (written("<tool_call>", WRITTEN.replace('"arguments"', '"input"')), ""),
        (CALL_ID, "mistral"),
        (CALL_ID.replace("[CALL_ID]{{ c.id }}", ""), "mistral"),
        (CALL_ID.replace("[TOOL_CALLS]", "[CALLS]"), ""),
        (written("<|python_tag|>"), "llama3"),
        (written(""), "llama3"),
        (written("", after=";"), "llama3"),
        (written("<function_call> "), ""),
        (written("functools[", after="]"), ""),
        (written("<tool_calls>[", after="]</tool_calls>"), "tool_calls"),
        (written("<tool_call>", "<invoke name='{{ c.function.name }}'>", "</tool_call>"), ""),
        (written("<tool_call>", "<function={{ c.function.name }}>", "</function></tool_call>"), ""),
        (
            written(
                '<tool name="{{ c.function.name }}">',
                "{{ c.function.arguments | tojson }}",
                "</tool>",
            ),
            "xml",
        ),
        ("{{ tools | tojson }}<tool_call></tool_call>", ""),
        ("{% for m in messages %}{{ m.content }}{{ nobody.knows }}{% endfor %}<tool_call>", ""),
        ("{% if", ""),
    ],
)
def test_auto_is_the_format_that_reads_what_the_template_writes(template: str, name: str) -> None:
    assert format_of(template) == name


def test_the_format_is_read_off_the_template() -> None:
    templates = (QWEN25, QWEN3, LLAMA31, MISTRAL, SMOLLM2, "<tool_call><function=", "")
    found = [format_of(each) for each in templates]
    assert found == [*("hermes", "hermes", "llama3", "mistral", "", "", "")]


@pytest.mark.parametrize("name", FORMATS)
def test_the_description_shows_tools_and_form(name: str) -> None:
    tool = {"type": "function", "function": {"name": "Search", "description": "Looks é up."}}
    text = FORMATS[name].describe([tool])
    assert "Looks é up." in text and FORMATS[name].shape in text


def test_the_page_shows_every_format_and_names_tests_that_there_are() -> None:
    page = (ROOT / "docs" / "agents" / "tools.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*`) \| [^|]+ \|$", page, re.MULTILINE)
    shown = {name: re.findall(r"`` (.*?) ``|`([^`]+)`", shape) for name, shape in rows}
    shapes = {
        name: "\n".join(map("".join, lines)).replace("\\|", "|") for name, lines in shown.items()
    }
    assert shapes == {name: form.shape for name, form in FORMATS.items()}
    assert set(get_args(ToolFormatName)) == {"auto", *FORMATS}
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_tool_f*.py"))
    assert not [name for name in re.findall(r"`(test_\w+)`", page) if f"def {name}(" not in tests]
