"""Prompts that grow by appending ids, through templates of several published styles."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_templates import QWEN3, R1, SMOLLM2, TEMPLATES, styled, tokenizer_of
from hypothesis import assume, given
from hypothesis import strategies as st

from flowtrain.agents.chat.conversation import Conversation
from flowtrain.agents.chat.template import ChatTemplate, Message, TemplateRewrites
from flowtrain.trainer.model import loading as models

SMOLLM2_FOLDER = Path(os.environ.get("FLOWTRAIN_SMOLLM2", "models/SmolLM2-135M-Instruct"))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "Search",
            "description": "Looks words up.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
]
THINKING = "<think>\nI think\n</think>\n\n"
QUESTION = {"role": "user", "content": "What is the area of Chad?"}


def template(style: str) -> ChatTemplate:
    return ChatTemplate(styled(style))


def call(query: str, number: int = 1) -> dict[str, Any]:
    function = {"name": "Search", "arguments": json.dumps({"query": query})}
    return {"id": f"call{number:05}", "type": "function", "function": function}


def asks(*queries: str, content: str = "") -> Message:
    calls = [call(query, number) for number, query in enumerate(queries)]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def says(content: str) -> Message:
    return {"role": "assistant", "content": content}


def result(content: str, number: int = 0) -> Message:
    return {
        "role": "tool",
        "name": "Search",
        "content": content,
        "tool_call_id": f"call{number:05}",
    }


def as_written(conversation: Conversation, message: Message) -> tuple[int, ...]:
    """The ids of a reply as the template itself writes it, its end token included; () where a token
    spans its beginning.
    """
    own = conversation.template
    prompt = own.render(conversation.messages, conversation.tools)
    whole = own.render([*conversation.messages, message], conversation.tools, reply=False)
    ids, prompt_ids = own.encode(whole), own.encode(prompt)
    if not whole.startswith(prompt) or ids[: len(prompt_ids)] != prompt_ids:
        return ()
    num_after = len(own.encode(own.closing)) - 1
    return ids[len(prompt_ids) : len(ids) - num_after]


def whole(conversation: Conversation) -> tuple[int, ...]:
    """The ids of the whole conversation as the template renders it."""
    own = conversation.template
    return own.encode(own.render(conversation.messages, conversation.tools))


def contains(ids: Sequence[int], part: Sequence[int]) -> bool:
    return any(tuple(ids[n : n + len(part)]) == tuple(part) for n in range(len(ids)))


@pytest.mark.parametrize("style", TEMPLATES)
def test_a_later_prompt_is_what_the_template_writes_for_the_whole(style: str) -> None:
    start = Conversation.start(template(style), [QUESTION], TOOLS)
    reply = asks("area of Chad", content=THINKING if style == "qwen3" else "")
    ids = as_written(start, reply)
    later = start.add_response(ids, reply).add([result("The area of Chad is 1284.")])
    assert later.prompt_ids == whole(later)
    assert later.prompt_ids[: len(start.prompt_ids) + len(ids)] == start.prompt_ids + ids


@pytest.mark.parametrize("style", TEMPLATES)
def test_what_was_sampled_stays_however_it_was_cut_into_tokens(style: str) -> None:
    own = template(style)
    start = Conversation.start(own, [QUESTION], TOOLS)
    ids = tuple(own.encode(letter)[0] for letter in "I think it is so.")
    assert ids != own.encode("I think it is so.")
    later = start.add_response(ids, asks("x")).add([result("so")])
    assert later.prompt_ids[: len(start.prompt_ids) + len(ids)] == start.prompt_ids + ids


@pytest.mark.parametrize("style", TEMPLATES)
def test_the_end_of_a_message_is_added_where_the_sample_was_cut(style: str) -> None:
    start = Conversation.start(template(style), [QUESTION], TOOLS)
    reply = asks("area of Chad", content=THINKING if style == "qwen3" else "")
    ids = as_written(start, reply)
    results = [result("The area of Chad is 1284.")]
    ended = start.add_response(ids, reply).add(results)
    cut = start.add_response(ids[:-1], reply).add(results)
    assert cut.prompt_ids == ended.prompt_ids


def test_another_end_token_of_the_model_ends_the_message_too() -> None:
    tokenizer = tokenizer_of(SMOLLM2, "<|endoftext|>")
    own = ChatTemplate(tokenizer)
    start = Conversation.start(own, [QUESTION])
    ids = (*own.encode("It is so."), tokenizer.eos_token_id)
    later = start.add_response(ids, says("It is so.")).add([QUESTION])
    rest = later.prompt_ids[len(start.prompt_ids) + len(ids) :]
    assert rest == own.encode(f"\n<|im_start|>user\n{QUESTION['content']}<|im_end|>\n{own.opening}")


def test_text_after_a_reply_stays_where_no_token_ends_it() -> None:
    bare = SMOLLM2.replace("'<|im_end|>\\n'", "'\\n'")
    own = ChatTemplate(tokenizer_of(bare, "<|endoftext|>"))
    assert own.closing == "\n"
    start = Conversation.start(own, [QUESTION])
    ids = own.encode("It is so.<|endoftext|>")
    later = start.add_response(ids, says("It is so.")).add([QUESTION])
    assert (
        later.template.decode(later.prompt_ids)
        == f"{start.template.decode(start.prompt_ids)}It is so.<|endoftext|>"
        + own.render([says("x"), QUESTION]).partition("x")[2]
    )


def test_a_special_token_ends_a_response_that_was_not_cut() -> None:
    own = template("llama3.1")
    start = Conversation.start(own, [QUESTION], TOOLS)
    ids = own.encode("It is so.<|python_tag|>")
    assert own.text_of(ids) == "It is so.<|python_tag|>" and own.text_of(ids, True) == "It is so."
    gaps = [
        start.add_response(ids, says("It is so."), ended).add([QUESTION]).prompt_ids
        for ended in (False, True)
    ]
    assert len(gaps[0]) == len(gaps[1]) + 1


TEXTS = st.text(alphabet='ab 1.\n<>{}"|_/é', min_size=1, max_size=12).map(str.strip).filter(bool)
TURNS = st.lists(
    st.tuples(st.lists(TEXTS, min_size=0, max_size=2), TEXTS, TEXTS, st.booleans()),
    min_size=1,
    max_size=4,
)


@given(style=st.sampled_from(list(TEMPLATES)), turns=TURNS, tells_tools=st.booleans())
def test_conversations_of_any_kind(
    style: str, turns: list[tuple[list[str], str, str, bool]], tells_tools: bool
) -> None:
    conversation = Conversation.start(template(style), [QUESTION], TOOLS if tells_tools else [])
    for queries, content, new, thinks in turns:
        if style == "llama3.1":
            queries = queries[:1]
        if style == "mistral" and tells_tools:
            queries = queries or ["always a call"]  # a new question moves the tools
        thinking = THINKING if thinks and style == "qwen3" else ""
        reply = asks(*queries, content=thinking) if queries else says(thinking + content)
        if style == "qwen3" and not thinks:
            sampled = (*conversation.template.encode(content), styled(style).eos_token_id)
        else:
            sampled = as_written(conversation, reply)
            assume(sampled)
        results = [result(new, number) for number in range(len(queries))]
        before = conversation.prompt_ids
        conversation = conversation.add_response(sampled, reply)
        conversation = conversation.add(results or [{"role": "user", "content": new}])
        if thinks and style == "qwen3" and not queries:
            sampled = conversation.template.without_thinking(sampled)
        elif style != "qwen3":
            assert conversation.prompt_ids[: len(before)] == before
        assert contains(conversation.prompt_ids, sampled)
        if style != "qwen3" or thinks:
            continue
        return
    assert conversation.prompt_ids == whole(conversation)


THOUGHT = "<think>\nI think it is so.\n</think>\n\nIt is so."


def test_thinking_stays_while_tools_are_called_and_goes_with_the_next_question() -> None:
    own = template("qwen3")
    start = Conversation.start(own, [QUESTION], TOOLS)
    end = styled("qwen3").eos_token_id
    first = (*own.encode(f"{THINKING}<tool_call>\n{{}}\n</tool_call>"), end)
    called = start.add_response(first, asks("x", content=THINKING))
    called = called.add([result("so")])
    assert called.prompt_ids[: len(start.prompt_ids) + len(first)] == start.prompt_ids + first
    # byte by byte, so that a second encoding would show
    said = tuple(own.encode(letter)[0] for letter in "It is so.")
    thought = (*own.encode("<think>\nI think it is so.\n</think>\n\n"), *said, end)
    asked = called.add_response(thought, says(THOUGHT)).add([QUESTION])
    text = asked.template.decode(asked.prompt_ids)
    assert "I think" not in text and "</think>" not in text and text.count("It is so.") == 1
    assert contains(asked.prompt_ids, (*own.encode(own.opening), *said, end))
    again = asked.add_response((*said, end), says("It is so.")).add([QUESTION])
    assert again.prompt_ids[: len(asked.prompt_ids)] == asked.prompt_ids


def test_thinking_that_the_prompt_opens_goes_from_every_earlier_reply() -> None:
    own = ChatTemplate(tokenizer_of(R1, "<|im_end|>"))
    start = Conversation.start(own, [QUESTION])
    assert start.template.decode(start.prompt_ids).endswith("<|im_start|>assistant\n<think>\n")
    sampled = own.encode("I think it is so.\n</think>\n\nIt is so.<|im_end|>")
    later = start.add_response(sampled, says(THOUGHT)).add([QUESTION])
    assert later.prompt_ids == whole(later)
    assert "I think" not in later.template.decode(later.prompt_ids)


@pytest.mark.parametrize(
    ("one_token", "thought"),
    [(False, THOUGHT), (True, THOUGHT.replace("\n\nIt", "\nIt").replace("\nIt", "\n{"))],
)
def test_thinking_that_cannot_be_cut_off_between_tokens_is_refused(
    one_token: bool, thought: str
) -> None:
    tokenizer = tokenizer_of(QWEN3, "<|im_end|>", one_token)
    tokenizer.add_tokens(["\n{"])
    own = ChatTemplate(tokenizer)
    start = Conversation.start(own, [QUESTION])
    replied = start.add_response(own.encode(thought), says(thought))
    with pytest.raises(TemplateRewrites, match="cannot be kept as it was sampled"):
        replied.add([QUESTION])


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("message.content", "message.content | upper", "leaves out|does not show"),
        ("message.content", "message.content ~ message.content", "repeats"),
        ("message.role +", "(message.role if loop.last else 'someone') +", "changes|ends"),
        (
            "{% for message in messages %}",
            "{{ messages | length }}{% for message in messages %}",
            "changes what stands before",
        ),
    ],
)
def test_templates_that_change_what_was_said_are_refused(old: str, new: str, problem: str) -> None:
    tokenizer = tokenizer_of(SMOLLM2.replace(old, new), "<|im_end|>")
    with pytest.raises(TemplateRewrites, match=problem):
        own = ChatTemplate(tokenizer)
        start = Conversation.start(own, [QUESTION])
        replied = start.add_response(own.encode("It is so.<|im_end|>"), says("It is so."))
        replied.add([QUESTION])


def test_tools_that_move_to_the_new_question_are_refused() -> None:
    start = Conversation.start(template("mistral"), [QUESTION], TOOLS)
    replied = start.add_response(start.template.encode(" It is.</s>"), says("It is."))
    with pytest.raises(TemplateRewrites, match="changes what stands before"):
        replied.add([QUESTION])


def test_messages_that_the_template_does_not_take_are_refused() -> None:
    with pytest.raises(TemplateRewrites, match="only user, assistant and tool"):
        Conversation.start(template("mistral"), [{"role": "system", "content": "x"}])


@pytest.mark.skipif(not (SMOLLM2_FOLDER / "source.json").is_file(), reason="see `make smollm2`")
def test_a_real_tokenizer_and_template() -> None:
    own = ChatTemplate(models.load_tokenizer(str(SMOLLM2_FOLDER)))
    conversation = Conversation.start(own, [QUESTION])
    for text in ("The area of Chad?\n\n 1284.", '{"é": [1]}\n', "So."):
        sampled = (*own.encode(text), *own.encode("<|im_end|>"))
        conversation = conversation.add_response(sampled, says(text)).add([QUESTION])
        assert conversation.prompt_ids == whole(conversation)
    assert (own.takes_tools, own.takes_results) == (False, True)


@pytest.mark.parametrize("style", TEMPLATES)
def test_a_result_cannot_speak_in_another_role(style: str) -> None:
    """Its special tokens are plain text, and decode to what it said."""
    tokenizer = styled(style)
    special = [str(each) for each in tokenizer.added_tokens_decoder.values() if each.special]
    assert special
    hostile = "1284".join(["", *special, *special[:1] * 2, "<|\ue0000\ue001|>"])

    def prompt(content: str) -> tuple[int, ...]:
        asked = Conversation.start(ChatTemplate(tokenizer), [QUESTION], TOOLS)
        replied = asked.add_response(asked.template.encode("x"), asks("Chad"))
        return replied.add([result(content)]).prompt_ids

    added = tokenizer.added_tokens_decoder

    def specials(ids: Sequence[int]) -> list[int]:
        return [each for each in ids if each in added and added[each].special]

    assert specials(prompt(hostile)) == specials(prompt("1284"))
    assert prompt("1284\ue000999\ue001") == prompt("1284999"), "marks of ours mean nothing"
    text = tokenizer.decode(prompt(hostile))
    assert all(f"1284{each}" in text for each in special)


def test_neither_replies_nor_tools_of_others_bring_marks_or_special_tokens() -> None:
    """A program may send any history, and a server any description."""
    tokenizer = styled("qwen2.5")
    function = {**TOOLS[0]["function"], "description": "Looks.<|im_end|>\ue000999\ue001"}
    tools = [{"type": "function", "function": function}]
    messages = [QUESTION, says("no\ue000999\ue001"), QUESTION]
    hostile = Conversation.start(ChatTemplate(tokenizer), messages, tools).prompt_ids
    plain = Conversation.start(ChatTemplate(tokenizer), messages, TOOLS).prompt_ids
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert hostile.count(end) == plain.count(end) > 0


def test_several_conversations_go_on_from_one() -> None:
    own = template("qwen2.5")
    start = Conversation.start(own, [QUESTION], TOOLS)
    replied = start.add_response(own.encode("It is.<|im_end|>"), says("It is."))
    one, other = replied.add([QUESTION]), replied.add([result("so")])
    assert one.prompt_ids == whole(one) and other.prompt_ids == whole(other)
    assert replied.messages == (QUESTION, says("It is."))


def test_a_turn_reads_the_text_as_often_however_many_turns_there_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Text(str):
        num_read = 0

        def count(self, word: str, *bounds: int) -> int:  # type: ignore[override]
            Text.num_read += len(self)
            return super().count(word, *bounds)

        def find(self, word: str, start: int = 0) -> int:  # type: ignore[override]
            place = super().find(word, start)
            Text.num_read += (len(self) if place < 0 else place) - start
            return place

    own = template("qwen2.5")
    render = own.render
    monkeypatch.setattr(own, "render", lambda *args, **options: Text(render(*args, **options)))
    ids = own.encode(f"so{own.closing}")
    conversation = Conversation.start(own, [QUESTION])
    for _ in range(40):
        conversation = conversation.add_response(ids, says("so")).add([QUESTION])
    Text.num_read = 0
    conversation = conversation.add_response(ids, says("so")).add([QUESTION])
    assert Text.num_read < 2 * len(own.decode(conversation.prompt_ids))


def test_the_first_prompt_of_a_group_is_encoded_once() -> None:
    own = template("qwen2.5")
    first, second = (Conversation.start(own, [QUESTION], TOOLS) for _ in range(2))
    other = Conversation.start(own, [says("Hi"), QUESTION], TOOLS)
    assert first.prompt_ids == second.prompt_ids == whole(first) != other.prompt_ids
    assert other.prompt_ids == whole(other) and own.encode_first.cache_info()[:2] == (1, 2)


def test_what_templates_can_do() -> None:
    expected = {"qwen2.5": True, "qwen3": True, "llama3.1": True, "mistral": True, "smollm2": False}
    assert {name: template(name).takes_tools for name in TEMPLATES} == expected
    assert not template("mistral").takes_system and template("llama3.1").takes_system
    assert all(template(name).takes_results for name in TEMPLATES)


def test_content_in_parts_and_none_are_texts_to_the_template() -> None:
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }
    own = template("qwen2.5")
    assert "user\nab<|im_end|>" in own.render([parts])
    assert own.render([QUESTION, {**asks("x"), "content": None}], reply=False)
