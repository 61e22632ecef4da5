"""Prompts that the chat template renders anew each turn, as a server does: agent.history =
"as_deployed".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_templates import QWEN3_CALLS, R1, TEMPLATES, styled, tokenizer_of
from gateway_runs import SEARCH
from hypothesis import given, settings
from hypothesis import strategies as st
from test_environment import GOOD, play
from test_gateway_fidelity import Program, result, user
from test_tool_calling import FORMAT, FOUND, TASK, Rollout, Search, call
from tool_styles import STYLES, tokenizer_in
from transformers import PreTrainedTokenizerFast

from flowtrain.agents.chat.dialect import Dialect
from flowtrain.agents.chat.template import ChatTemplate
from flowtrain.agents.chat.tool_calling import definition
from flowtrain.agents.gateway.recorder import Recorder
from flowtrain.config import Config
from flowtrain.records import BranchPoint, BranchStart, FinishReason, UserError
from flowtrain.rft.conversations import read_replies

DEPLOYED: dict[str, Any] = {"history": "as_deployed"}
ASKS = call("hermes", "area of Chad")
THOUGHT = "<think>\nI think it is so.\n</think>\n\n"
TOOLS = [definition(Search.card)]


def rendered(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = TOOLS,
) -> list[int]:
    """What transformers alone makes of messages."""
    ids: list[int] = tokenizer.apply_chat_template(
        list(messages), tools=tools, add_generation_prompt=True, return_dict=False
    )
    return ids


def asks(id: str, query: str = "area of Chad", **fields: Any) -> dict[str, Any]:
    function = {"name": "Search", "arguments": {"query": query}}
    calls = [{"id": id, "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls, **fields}


def found(id: str) -> dict[str, Any]:
    return {"role": "tool", "name": "Search", "content": FOUND, "tool_call_id": id}


def played(tokenizer: PreTrainedTokenizerFast, *texts: str, **options: Any) -> Rollout:
    return Rollout(tokenizer, *texts, **{**DEPLOYED, **options})


@pytest.mark.parametrize("style", [*sorted(TEMPLATES.keys() - {"smollm2"}), *STYLES])
def test_each_prompt_is_what_the_template_renders_for_the_messages_so_far(style: str) -> None:
    """In whatever tokens a reply was sampled, and with white space that the template has not."""
    if style in STYLES:
        tokenizer, tool_format = tokenizer_in(style), style
        call_end = STYLES[style].call_end or STYLES[style].end
    else:
        tokenizer, tool_format = styled(style), FORMAT[style]
        call_end = tokenizer.eos_token
    text = f"\n{call(tool_format, 'area of Chad')}{call_end}".replace('": ', '":  ')
    rollout = played(tokenizer, text, text, f"1284{tokenizer.eos_token}", adds_end=False)
    first, second, last = rollout.done.turns
    messages: list[Mapping[str, Any]] = [user(TASK.prompt)]
    assert list(first.call.prompt_ids) == rendered(tokenizer, messages)
    for before, after in ((first, second), (second, last)):
        (used,) = before.tool_calls
        messages += [asks(used.id), found(used.id)]
        assert list(after.call.prompt_ids) == rendered(tokenizer, messages)
        assert before.call.response_ids in rollout.said, "what was sampled is trained as it was"
    assert rollout.done.answer == "1284" and not rollout.done.error


# ---- what a template takes out


def test_thinking_that_goes_out_of_tool_calls_ends_no_conversation() -> None:
    tokenizer = tokenizer_of(QWEN3_CALLS, "<|im_end|>")
    texts = (THOUGHT + ASKS, THOUGHT + ASKS, f"{THOUGHT}1284")
    with pytest.raises(UserError, match=r"agent\.history='growing'.*'as_deployed'.*tool calls$"):
        Rollout(tokenizer, *texts)
    rollout = played(tokenizer, *texts)
    assert (rollout.done.answer, rollout.done.error) == ("1284", "")
    first, second = (turn.tool_calls[0].id for turn in rollout.done.turns[:2])
    thinks = {"reasoning_content": "I think it is so."}
    messages = [user(TASK.prompt), asks(first, **thinks), found(first)]
    messages += [asks(second, **thinks), found(second)]
    prompts = [turn.call.prompt_ids for turn in rollout.done.turns]
    for number, prompt_ids in enumerate(prompts):
        assert list(prompt_ids) == rendered(tokenizer, messages[: 1 + 2 * number])
        assert "I think" not in tokenizer.decode(prompt_ids)
    assert [turn.call.response_ids for turn in rollout.done.turns] == rollout.said


def test_thinking_stays_while_tools_are_called_and_goes_with_the_next_question() -> None:
    """As Qwen3's template has it, in a shop whose user asks on."""
    tokenizer = styled("qwen3")
    looks_up, cancels, bye = GOOD[1:]
    done, engine = play(
        *("Which order?", THOUGHT + looks_up, THOUGHT + cancels, f"{THOUGHT}Anything else?", bye),
        tokenizer=tokenizer,
        **DEPLOYED,
    )
    assert done.error == "" and done.reported["state"] == 0.9
    assert [prompt.count("I think") for prompt in engine.prompts] == [0, 0, 1, 2, 0]
    assert engine.prompts[-1].partition("I want to cancel")[2].count("<tool_call>") == 2


@pytest.mark.parametrize(("history", "truncated"), [("growing", "prompt"), ("as_deployed", "")])
def test_room_is_counted_in_the_prompt_that_is_read(history: str, truncated: str) -> None:
    """Where the template takes 700 tokens of thinking out of each reply, two fit."""
    thought = f"<think>\n{'I think it is so. ' * 100}\n</think>\n\n"
    template = QWEN3_CALLS if history == "as_deployed" else TEMPLATES["qwen3"][0]
    texts = (thought + ASKS, thought + ASKS, "1284")
    options = {"history": history, "max_tokens": 3000}
    rollout = Rollout(tokenizer_of(template, "<|im_end|>"), *texts, **options)
    assert rollout.done.truncated == truncated


# ---- what stands for a reply


def test_a_template_that_looks_for_thinking_under_a_key_gets_it_there() -> None:
    keys = {style: ChatTemplate(styled(style)).thinking_key for style in TEMPLATES}
    assert not any(keys.values())
    for key in ("reasoning_content", "reasoning", "thinking"):
        source = TEMPLATES["qwen2.5"][0].replace(
            "assistant\\n' + content",
            f"assistant\\n' + (message.{key} or '') + content",
        )
        tokenizer = tokenizer_of(source, "<|im_end|>")
        # From 5.24 on transformers hands one of these keys on by the names of others, too.
        assert ChatTemplate(tokenizer).thinking_key in (key, "reasoning_content")
        rollout = played(tokenizer, THOUGHT + ASKS, "1284")
        (used,) = rollout.done.turns[0].tool_calls
        messages = [user(TASK.prompt), asks(used.id, **{key: "I think it is so."}), found(used.id)]
        assert rollout.engine.prompts[1] == tuple(rendered(tokenizer, messages))
        assert "\nI think it is so.<tool_call>" in rollout.prompt()


def test_a_prompt_that_opens_the_thinking_is_no_part_of_the_reply() -> None:
    tokenizer = tokenizer_of(R1, "<|im_end|>")
    rollout = played(tokenizer, f"I think\n</think>\n\n{ASKS}", "1284", tool_format="hermes")
    assert rollout.prompt(0).endswith("<|im_start|>assistant\n<think>\n")
    assert f"<|im_start|>assistant\n{ASKS}<|im_end|>" in rollout.prompt()


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_reply_whose_calls_cannot_be_read_is_its_text(reason: FinishReason) -> None:
    """As of a server; its other calls do not run, and the policy reads why."""
    tokenizer = styled("qwen3")
    text = f'{THOUGHT}{ASKS}\n<tool_call>\n{{"name": "Sea'
    sampled = text.replace("think>\n\n", "think>\n\n<|python_tag|>")
    rollout = played(tokenizer, sampled, "So.", reason=reason)
    turn = rollout.done.turns[0]
    assert turn.problem and not turn.tool_calls and rollout.tool.started == []
    messages = [user(TASK.prompt), {"role": "assistant", "content": text}]
    messages.append(user(f"Error: {turn.problem}"))
    assert rollout.engine.prompts[1] == tuple(rendered(tokenizer, messages))
    assert "I think" not in rollout.prompt() and '{"name": "Sea<|im_end|>' in rollout.prompt()


def test_a_template_without_tools_reads_calls_and_results_as_text() -> None:
    tokenizer = styled("smollm2")
    rollout = played(tokenizer, call("xml", "area of Chad"), call("xml", "Mali"), "1284")
    prompt = rollout.prompt()
    assert prompt.count("You can call tools.") == 1 and rollout.done.answer == "1284"
    assert f"{call('xml', 'Mali')}<|im_end|>" in prompt
    assert f"<|im_start|>user\nResult of Search:\n{FOUND}<|im_end|>" in prompt
    assert "<|im_start|>user\nResult of Search:\nnothing about Mali<|im_end|>" in prompt


def test_marks_of_ours_in_arguments_mean_nothing() -> None:
    """The text of a call is encoded again, which must neither fail nor make special tokens."""
    hostile = "\ue000999\ue001\ue0000\ue001"
    rollout = played(styled("qwen2.5"), call("hermes", hostile), "1284")
    assert not rollout.done.error and '"query": "9990"' in rollout.prompt()
    escaped = json.dumps({hostile: hostile})
    rollout = played(
        styled("qwen2.5"), f'<tool_call>{{"name": "x", "arguments": {escaped}}}</tool_call>', "1284"
    )
    assert not rollout.done.error and '{"9990": "9990"}' in rollout.prompt()


CALL = '{"name": "Search", "arguments": {"\ue00099\ue001": "<think>"}}'
pieces = st.sampled_from(
    ("<think>", "</think>", "\n", "So.", "<tool_call>", "</tool_call>", CALL, ASKS, "<|im_start|>")
)


@settings(max_examples=25)
@given(said=st.lists(pieces, max_size=8).map("".join))
def test_no_reply_makes_a_template_fail(said: str) -> None:
    rollout = played(tokenizer_of(QWEN3_CALLS, "<|im_end|>"), said, "1284")
    assert not rollout.done.error and 1 <= len(rollout.done.turns) <= 2


# ---- branches, templates that refuse, imitation, and the gateway


def test_a_branch_takes_over_calls_and_results() -> None:
    tokenizer = tokenizer_of(QWEN3_CALLS, "<|im_end|>")
    parent = played(tokenizer, THOUGHT + ASKS, THOUGHT + ASKS, "No.").done
    point = BranchPoint(parent=0, turn=1, token=3, score=0.0)
    rest = tokenizer.decode(parent.turns[1].call.response_ids[3:-1])
    branch = played(tokenizer, rest, "1284", start=BranchStart(parent, point))
    assert branch.done.turns[0] == parent.turns[0] and branch.done.answer == "1284"
    for number in (1, 2):
        ours, theirs = branch.done.turns[number].call, parent.turns[number].call
        assert ours.prompt_ids == theirs.prompt_ids


def test_a_history_that_the_template_refuses_fails_its_rollout_or_the_run() -> None:
    rollout = played(styled("llama3.1"), call("llama3", "Chad", "Mali"), "1284")
    assert "the chat template refuses the messages: only single" in rollout.done.error
    refuses = TEMPLATES["qwen2.5"][0].replace(
        "{%- elif message.role == 'tool' %}",
        "{%- elif loop.index0 > 3 %}{{- raise_exception('too long') }}"
        "{%- elif message.role == 'tool' %}",
    )
    with pytest.raises(UserError, match=r"agent\.history='as_deployed': .*too long"):
        played(tokenizer_of(refuses, "<|im_end|>"), ASKS, "1284")


def test_imitated_replies_stand_behind_what_the_template_renders(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(QWEN3_CALLS, "<|im_end|>")
    messages = [user("Hi"), asks("0" * 9, content=THOUGHT), found("0" * 9)]
    messages += [{"role": "assistant", "content": f"{THOUGHT}So."}, user("Sure?")]
    messages.append({"role": "assistant", "content": "Yes."})
    path = tmp_path / "shown.jsonl"
    path.write_text(json.dumps({"messages": messages, "tools": TOOLS}))
    agent = {"name": "tools", "tools": ["Search"], **DEPLOYED}
    config = Config.model_validate({"agent": agent, "rft": {"conversations": str(path)}})
    replies = read_replies(config, tokenizer)
    places = (1, 3, 5)
    assert [list(each.prompt_ids) for each in replies] == [
        rendered(tokenizer, messages[:place]) for place in places
    ]


def test_the_gateway_reads_what_a_program_sends() -> None:
    """Though the program has changed it; sampled ids, which are letters here, come in none."""
    tokenizer = styled("qwen3")
    program = Program("qwen3", THOUGHT + ASKS.replace("Search", "search"), "So.", "Yes.")
    config = Config.model_validate({"agent": {"name": "gateway", **DEPLOYED}})
    program.recorder = Recorder(program.session, Dialect.of(config, tokenizer, "it"), 1000)

    async def story() -> None:
        sent: list[Any] = [user("Hi")]
        reply = await program.ask(sent, tools=[SEARCH])
        sent += [reply, result(reply["tool_calls"][0]["id"], FOUND)]
        said = await program.ask(sent, tools=[SEARCH])
        sent += [{**said, "content": f"{said['content']} "}, user("Sure?")]
        await program.ask(sent, tools=[SEARCH])
        for (prompt_ids, _), num in zip(program.engine.log, (1, 3, 5), strict=True):
            plain = [_plain(message) for message in sent[:num]]
            assert list(prompt_ids) == rendered(tokenizer, plain, [SEARCH])

    program.run(story)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the arguments of its calls as objects."""
    calls = [
        {
            **each,
            "function": {
                **each["function"],
                "arguments": json.loads(each["function"]["arguments"]),
            },
        }
        for each in message.get("tool_calls") or ()
    ]
    return {
        **message,
        "content": message["content"] or "",
        **({"tool_calls": calls} if calls else {}),
    }
