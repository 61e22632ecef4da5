"""Conversations of a file: what is trained is the assistant's tokens, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowtrain.config import Config
from flowtrain.config.options import parse
from flowtrain.records import Call, UserError
from flowtrain.rft.conversations import _with_ids, read_replies
from flowtrain.rft.loop import rft
from tests.agents.chat_templates import TEMPLATES, styled, tokenizer_of

SEARCH = {
    "type": "function",
    "function": {
        "name": "Search",
        "description": "Looks words up.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
USER = {"role": "user", "content": "What is the area of Chad?"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "Search", "arguments": '{"query": "area of Chad"}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "It is 1284."}
ANSWER = {"role": "assistant", "content": "<answer>1284</answer>"}
ROW = {"messages": [USER, CALL, RESULT, ANSWER], "tools": [SEARCH]}
IMAGE = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
WRITTEN = {
    "qwen2.5": '<tool_call>\n{"name": "Search", "arguments": {"query": "area of Chad"}}\n'
    "</tool_call>",
    "llama3.1": '{"name": "Search", "parameters": {"query": "area of Chad"}}',
    "mistral": '[TOOL_CALLS] [{"name": "Search", "arguments": {"query": "area of Chad"}, '
    '"id": "call00001"}]',
}


def replies_of(tmp_path: Path, tokenizer: Any, *rows: Any, **share: int) -> list[Call]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config.model_validate({"rft": {"conversations": str(path)}})
    return read_replies(config, tokenizer, **share)


def rendered(tokenizer: Any, messages: list[Any], tools: list[Any]) -> str:
    plain = json.loads(json.dumps(messages))
    for call in (call for message in plain for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    text: str = tokenizer.apply_chat_template(plain, tools=tools, tokenize=False)
    return text


@pytest.mark.parametrize("style", WRITTEN)
def test_the_trained_tokens_are_the_assistants(tmp_path: Path, style: str) -> None:
    tokenizer, end = styled(style), TEMPLATES[style][1]
    first, second = replies_of(tmp_path, tokenizer, ROW)
    assert tokenizer.decode(first.response_ids) == WRITTEN[style] + end
    assert tokenizer.decode(second.response_ids).lstrip(" ") == "<answer>1284</answer>" + end
    begun = first.prompt_ids + first.response_ids
    assert second.prompt_ids[: len(begun)] == begun
    # All that is not trained is the template's, the user's and the tool's.
    whole = tokenizer.decode(second.prompt_ids + second.response_ids)
    assert whole == rendered(tokenizer, [*ROW["messages"]], [SEARCH]).removesuffix("\n")
    gap = tokenizer.decode(second.prompt_ids[len(begun) :])
    assert "It is 1284." in gap and "area of Chad" not in gap
    assert "Looks words up." in tokenizer.decode(first.prompt_ids)


def test_thinking_is_trained_where_it_stands_and_goes_from_later_prompts(tmp_path: Path) -> None:
    said = "<think>\nI think\n</think>\n\nIt is 1284."
    again = {"role": "user", "content": "Are you sure?"}
    row = {"messages": [USER, {"role": "assistant", "content": said}, again, ANSWER]}
    tokenizer = styled("qwen3")
    first, second = replies_of(tmp_path, tokenizer, row)
    assert tokenizer.decode(first.response_ids) == f"{said}<|im_end|>"
    prompt = tokenizer.decode(second.prompt_ids)
    assert "I think" not in prompt and "It is 1284.<|im_end|>" in prompt
    assert tokenizer.decode(second.response_ids).endswith("<answer>1284</answer><|im_end|>")
    kept = first.response_ids[-5:]
    places = range(len(second.prompt_ids))
    assert any(second.prompt_ids[place : place + 5] == kept for place in places), (
        "as it was trained"
    )


def test_thinking_that_goes_from_a_call_makes_the_whole_a_text(tmp_path: Path) -> None:
    """What was trained before cannot be kept id by id there, and stands as the template has it."""
    thinks = {**CALL, "content": "<think>\nI think\n</think>\n\n"}
    again = {"role": "user", "content": "Are you sure?"}
    tokenizer = styled("qwen3")
    row = {**ROW, "messages": [USER, thinks, RESULT, ANSWER, again, ANSWER]}
    first, second, third = replies_of(tmp_path, tokenizer, row)
    assert "I think" in tokenizer.decode(first.response_ids)
    assert "I think" in tokenizer.decode(second.prompt_ids)
    assert "I think" not in tokenizer.decode(third.prompt_ids)
    assert "area of Chad" in tokenizer.decode(third.prompt_ids)


def test_a_template_without_tools_gets_them_in_words(tmp_path: Path) -> None:
    tokenizer = styled("smollm2")
    first, second = replies_of(tmp_path, tokenizer, ROW)
    assert "Looks words up." in tokenizer.decode(first.prompt_ids)
    written = tokenizer.decode(first.response_ids)
    assert "Search" in written and written.endswith("<|im_end|>")
    assert "Result of Search:\nIt is 1284." in tokenizer.decode(second.prompt_ids)


def without(message: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in keys}


def test_calls_as_trl_writes_them_are_those_of_openai(tmp_path: Path) -> None:
    tokenizer = styled("qwen2.5")
    openai = replies_of(tmp_path, tokenizer, ROW)
    (call,) = CALL["tool_calls"]
    function = {**call["function"], "arguments": {"query": "area of Chad"}}
    for changed in (
        {**call, "function": function},
        without(call, "id"),
        {"function": function},
        {"id": None, "type": "function", "function": function},
    ):
        asks = {"role": "assistant", "content": None, "tool_calls": [changed]}
        result = (
            RESULT if changed.get("id") else {**without(RESULT, "tool_call_id"), "name": "Search"}
        )
        row = {"messages": [USER, asks, result, ANSWER], "tools": [SEARCH]}
        assert replies_of(tmp_path, tokenizer, row) == openai


def test_results_without_ids_go_to_calls_by_name_and_then_in_order() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {}}}

    asks = {"role": "assistant", "tool_calls": [call("a"), call("b"), call("a")]}
    results = [{"role": "tool", "content": "", "name": name} for name in ("b", "a", "c")]
    found = _with_ids([USER, asks, *results, {**asks, "tool_calls": [call("a")]}, results[2]])
    assert [each["id"] for each in found[1]["tool_calls"]] == ["call1_0", "call1_1", "call1_2"]
    told = [each["tool_call_id"] for each in found if each["role"] == "tool"]
    assert told == ["call1_1", "call1_0", "call1_2", "call5_0"]


def test_ranks_share_the_rows(tmp_path: Path) -> None:
    rows = [{"messages": [USER, {**ANSWER, "content": f"{n}"}]} for n in range(5)]
    tokenizer = styled("qwen2.5")
    shares = [
        [
            tokenizer.decode(call.response_ids, skip_special_tokens=True)
            for call in replies_of(tmp_path, tokenizer, *rows, rank=rank, num_ranks=2)
        ]
        for rank in (0, 1)
    ]
    assert shares == [["0", "2", "4"], ["1", "3"]]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "?"}, "messages: Field required"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [USER]}, "there is no message of the role 'assistant'"),
        ({"messages": [ANSWER]}, "the first message is a reply"),
        ({"messages": [USER, {**ANSWER, "role": "bot"}]}, "messages.1.role: "),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "messages.1.weight is not supported"),
        ({"messages": [USER, {**ANSWER, "reasoning": "x"}]}, "reasoning is not supported"),
        ({"messages": [USER, {**ANSWER, "content": [IMAGE]}]}, "messages.1.content"),
        ({"messages": [USER, {**RESULT, "tool_call_id": None}, ANSWER]}, "tool_call_id"),
        ({"messages": [USER, ANSWER], "tools": [{"type": "custom"}]}, "tools.0.type: "),
        (
            {"messages": [USER, {**ANSWER, "content": "a<|im_end|>b"}]},
            "messages.1 holds '<|im_end|>', which would end the message",
        ),
    ],
)
def test_a_row_that_cannot_be_imitated_is_refused_by_name(
    tmp_path: Path, row: dict[str, Any], problem: str
) -> None:
    good = {"messages": [USER, ANSWER], "id": 3}
    with pytest.raises(UserError) as refused:
        replies_of(tmp_path, styled("qwen2.5"), good, row)
    assert str(refused.value).startswith(f"{tmp_path / 'rows.jsonl'}, line 2: ")
    assert problem in str(refused.value) and "\n" not in str(refused.value)


def test_calls_that_a_rollout_would_not_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW))
    sections = {"rft": {"conversations": str(path)}, "agent": {"tool_format": "qwen3_coder"}}
    with pytest.raises(UserError, match=r"line 1: agent\.tool_format does not read the calls"):
        read_replies(Config.model_validate(sections), styled("qwen2.5"))


def test_a_template_that_changes_replies_is_refused(tmp_path: Path) -> None:
    template = TEMPLATES["qwen2.5"][0].replace("+ content }}", "+ content | upper }}")
    with pytest.raises(UserError, match="chat template"):
        replies_of(tmp_path, tokenizer_of(template, "<|im_end|>"), ROW)
    plain = tokenizer_of("", "<|im_end|>")
    with pytest.raises(UserError, match=r"has no chat template, which rft\.conversations requires"):
        replies_of(tmp_path, plain, ROW)


def test_a_file_is_imitated_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(ROW) + "\n" for _ in range(4)))
    config = parse(
        [
            *("--config", "configs/tools.toml", "--run.dir", str(tmp_path / "run")),
            *("--rft.conversations", str(path), "--rft.num_steps", "20", "--rft.batch_size", "4"),
            *("--tiny.hidden_size", "32", "--tiny.num_layers", "1", "--tiny.num_heads", "2"),
            *("--tasks.num_train", "100", "--run.device", "cpu", "--run.threads", "1"),
        ]
    )
    assert config is not None and rft(config) == 0
    assert "8 replies" in capsys.readouterr().out
    facts = json.loads((tmp_path / "run" / "model" / "rft.json").read_text())
    assert (facts["num_turns"], facts["num_steps"]) == (8, 20)
    losses = [
        json.loads(line)["loss"]
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert losses[1] < losses[0]
