"""What is trained is what the engine read and sampled, id for id, whatever programs do."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from chat_templates import TEMPLATES
from gateway_runs import SEARCH, TASK, call_text, check_grown, logging_engine
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowtrain.agents.base import AgentContext
from flowtrain.agents.chat.dialect import Dialect
from flowtrain.agents.chat.template import ChatTemplate
from flowtrain.agents.chat.tool_formats import FORMATS
from flowtrain.agents.gateway.recorder import Recorder
from flowtrain.agents.gateway.wires import chat as wire
from flowtrain.agents.policy import Policy
from flowtrain.agents.session import Session
from flowtrain.config import Config

FORMAT_OF = {"qwen2.5": "hermes", "qwen3": "hermes", "llama3.1": "llama3", "mistral": "mistral"}


class Program:
    """A recorder for requests that are made directly, and the histories of a program."""

    def __init__(self, style: str = "qwen2.5", *replies: str) -> None:
        self.engine = logging_engine(*replies, style=style)
        config = Config.model_validate({"agent": {"name": "gateway", "max_turns": 1000}})
        policy = Policy(self.engine, self.engine.tokenizer, 300, 1.0, request_timeout_s=20.0)
        context = AgentContext(config, {"planner": policy}, {}, {}, 1000)
        self.session = Session(TASK, 0, context)
        tool_format = FORMATS[FORMAT_OF.get(style, "xml")]
        chat = Dialect(ChatTemplate(self.engine.tokenizer), tool_format)
        self.recorder = Recorder(self.session, chat, 1000)

    async def ask(self, messages: Sequence[Any], **options: Any) -> dict[str, Any]:
        """The message of the response, as OpenAI's JSON has it."""
        body = {"model": "x", "messages": list(messages), **options}
        asked = wire.read(json.dumps(body).encode())
        reply = await self.recorder.chat(asked)
        message: dict[str, Any] = json.loads(wire.write(asked, reply))["choices"][0]["message"]
        return message

    def run(self, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """What a program asks, after which the records are checked."""
        asyncio.run(story())
        self.check()

    def check(self) -> None:
        """Recorded calls have the ids of the engine's log, whatever the order of answers."""
        calls = [turn.calls["planner"] for turn in self.session.turns]
        recorded = sorted(_digest(call.prompt_ids, call.response_ids) for call in calls)
        assert recorded == sorted(_digest(*each) for each in self.engine.log)

    def go_on(self, change: Callable[[Any], Any] = lambda reply: reply, **options: Any) -> None:
        """Ask, and ask again with the reply, which the program may change."""

        async def story() -> None:
            message = await self.ask([user("Hi")])
            await self.ask([user("Hi"), change(message), user("Sure?")], **options)

        self.run(story)


def _digest(*ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps([list(each) for each in ids]).encode()).hexdigest()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def result(name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": text}


texts = st.text(st.sampled_from('ab \n{}<>"é中'), max_size=12)
replies = texts | texts.map(lambda text: call_text(json.dumps(text)[1:-1]))
steps = st.lists(
    st.tuples(st.integers(0, 7), st.sampled_from(["go on", "again", "rewrite", "new"]), replies),
    min_size=1,
    max_size=10,
)


@settings(max_examples=40)
@given(steps=steps)
@example(steps=[(0, "go on", ""), (0, "go on", " "), (1, "go on", "")])
@example(steps=[(0, "go on", " "), (0, "go on", ""), (1, "go on", ""), (2, "go on", "")])
def test_random_histories_are_recorded_as_they_were_sampled(
    steps: list[tuple[int, str, str]],
) -> None:
    """A program keeps several histories, goes on with any, asks twice, and rewrites what was said.
    Where it goes on with a reply as it was, the prompt begins with what was read and sampled.
    """
    program = Program()
    histories: list[tuple[list[Any], tuple[int, ...]]] = [([user("Hi")], ())]

    async def run() -> None:
        for choice, how, reply in steps:
            messages, begun = histories[choice % len(histories)]
            if how == "new":
                messages, begun = [user(f"question {choice}")], ()
            elif messages[-1]["role"] == "assistant":
                if how == "rewrite":
                    changed = {"role": "assistant", "content": "changed here"}
                    messages, begun = [*messages[:-1], changed], ()
                calls = messages[-1].get("tool_calls") or []
                results = [result(call["id"], "1284") for call in calls]
                messages = [*messages, *(results or [user("And?")])]
            program.engine.replies.append(reply)
            message = await program.ask(messages, tools=[SEARCH])
            prompt, said = program.engine.log[-1]
            assert prompt[: len(begun)] == begun
            if how == "again":
                program.engine.replies.append(reply)
                await program.ask(messages, tools=[SEARCH])
                assert program.engine.log[-1][0] == prompt
                prompt, said = program.engine.log[-1]
            histories.append(([*messages, message], prompt + said))

    program.run(run)


@pytest.mark.parametrize("style", TEMPLATES)
def test_the_prompt_grows_in_every_style(style: str) -> None:
    program = Program(style, "It is 1284.", "Yes.", "Sure.")

    async def run() -> None:
        messages: list[Any] = [user("What is the area of Chad?")]
        for _ in range(3):
            messages += [await program.ask(messages), user("Are you sure?")]

    program.run(run)
    check_grown(program.engine.log)


@pytest.mark.parametrize(
    "change",
    [
        lambda message: {**message, "content": f"  {message['content']}\n"},
        lambda message: {**message, "content": [{"type": "text", "text": message["content"]}]},
        lambda message: {"role": "assistant", "content": message["content"]},
        lambda message: {**message, "annotations": None, "audio": None},
    ],
)
def test_a_reply_is_known_again_in_other_clothes(change: Any) -> None:
    program = Program("qwen2.5", "It is 1284.", "Yes.")
    program.go_on(change)
    check_grown(program.engine.log)


def test_the_same_messages_are_the_same_ids_though_a_reply_has_come_again_in_others() -> None:
    program = Program("qwen2.5", *["It is so."] * 4)

    async def run() -> None:
        messages: list[Any] = [user("Hi")]
        longer = [*messages, await program.ask(messages), user("Sure?")]
        await program.ask(longer)
        program.engine.spell = lambda tokenizer, text: tuple(tokenizer.encode(text))
        await program.ask(messages)
        await program.ask(longer)

    program.run(run)
    assert program.engine.log[0][1] != program.engine.log[2][1]
    assert program.engine.log[1][0] == program.engine.log[3][0]


def test_a_prompt_that_comes_again_but_for_white_space_is_the_same_ids() -> None:
    """Though an earlier reply in it is exact, and could be gone on from."""
    program = Program("qwen2.5", "It is 1284.", "Yes.", "Sure.", "Sure.")

    async def run() -> None:
        messages: list[Any] = [user("Hi")]
        messages += [await program.ask(messages), user("Sure?")]
        second = await program.ask(messages)
        await program.ask([*messages, second, user("Really?")])
        padded = {**second, "content": f"{second['content']}\n"}
        await program.ask([*messages, padded, user("Really?")])

    program.run(run)
    _, (prompt, said), (third, _), (again, _) = program.engine.log
    assert again == third and again[: len(prompt) + len(said)] == prompt + said


def test_other_tools_begin_another_conversation() -> None:
    program = Program("qwen2.5", "It is 1284.", "Yes.")
    program.go_on(tools=[SEARCH])
    assert "search" in program.engine.tokenizer.decode(program.engine.log[1][0])


def test_results_under_each_others_ids_are_another_prompt() -> None:
    calls = json.dumps([{"name": "search", "arguments": {"query": name}} for name in "ab"])
    program = Program("mistral", f"[TOOL_CALLS] {calls}", "Yes.", "No.")

    async def run() -> None:
        messages: list[Any] = [user("Hi")]
        message = await program.ask(messages, tools=[SEARCH])
        ids = [call["id"] for call in message["tool_calls"]]
        for named in (ids, ids[::-1]):
            results = map(result, named, ("one", "two"))
            await program.ask([*messages, message, *results], tools=[SEARCH])

    program.run(run)
    (_, _), (second, _), (third, _) = program.engine.log
    assert second != third


def test_a_history_that_the_template_would_rewrite_begins_anew() -> None:
    """Where Qwen 3's thinking cannot be cut from the ids, the whole is read as text."""
    program = Program("qwen3", "<think>\nI think\n</think>\n\nIt is 1284.", "Yes.")
    program.go_on()
    second = program.engine.tokenizer.decode(program.engine.log[1][0])
    assert "I think" not in second and "It is 1284." in second


def test_parallel_requests_of_a_rollout_stay_apart() -> None:
    together = asyncio.Barrier(4)
    program = Program()
    program.engine.wait = together.wait
    program.engine.reply = lambda prompt: prompt.rsplit("number ", 1)[1][0]

    async def run() -> None:
        histories: list[list[Any]] = [[user(f"number {n}")] for n in range(4)]
        for _ in range(3):
            said = await asyncio.gather(*map(program.ask, histories))
            assert [each["content"] for each in said] == ["0", "1", "2", "3"]
            for number, (history, message) in enumerate(zip(histories, said, strict=True)):
                history += [message, user(f"number {number}")]

    program.run(run)
