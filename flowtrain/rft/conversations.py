"""Imitate the replies of conversations in a file: rows {"messages": [...], "tools": [...]} as
OpenAI and TRL have them, `tools` where the replies call some.

Every reply is a sample of its own: what the model would read before it, with earlier replies as
`Conversation` keeps them, and then the reply as its chat template writes it, to its end. So no
other token is trained, and a template that takes the thinking out of earlier replies takes it out
of later prompts alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from flowtrain.agents.chat.conversation import Conversation
from flowtrain.agents.chat.dialect import Dialect
from flowtrain.agents.chat.template import Message, TemplateRewrites
from flowtrain.agents.gateway.plain import ChatRequest, Refusal
from flowtrain.agents.gateway.wires import chat
from flowtrain.config import Config
from flowtrain.config.command import Interrupt
from flowtrain.inference.token_chat import ChatTokenizer, pass_to_template
from flowtrain.records import Call, FinishReason, UserError
from flowtrain.rft.imitation import fit, listed, named, sample_of, trainable
from flowtrain.tasks.rows import Row, read_rows
from flowtrain.trainer.setup.components import LearnerComponents
from flowtrain.utils.waiting import waiting
from flowtrain.weights.ranks import on_all_ranks

_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")


def imitate_file(components: LearnerComponents, interrupt: Interrupt) -> int:
    """Imitate the replies of `rft.conversations`, without an agent, tools or rewards."""
    config, world = components.config, components.world
    started = time.monotonic()
    pass_to_template(components.tokenizer, config.model.chat_template_kwargs)
    replies: list[Call] = []

    def read() -> None:
        replies.extend(read_replies(config, components.tokenizer, world.rank, world.size))

    with waiting("reading the conversations", world.is_main):
        on_all_ranks(world, read, other_failed=UserError)
    samples = [sample_of(call, config.rft.prompt_weight) for call in replies]
    batch = trainable(components, samples)
    num_turns, *excluded_counts = world.sum([len(batch.samples), *batch.num_filtered.values()])
    num_excluded = named(list(batch.num_filtered), excluded_counts)
    key = f"rft.conversations={config.rft.conversations!r}"
    summary = f"{num_turns:.0f} replies{listed(', left out: {}', num_excluded)}"
    if world.max([not batch.samples])[0]:
        raise UserError(f"{key} leaves a rank without replies to train on: {summary}")
    if world.is_main:
        print(f"{key}: {summary}", flush=True)
    run_dir = components.open_run_dir()
    interrupt.defer()
    counts = {"num_turns": num_turns, "num_excluded": num_excluded}
    return fit(components, batch, counts, run_dir, interrupt, started)


def read_replies(
    config: Config, tokenizer: ChatTokenizer, rank: int = 0, num_ranks: int = 1
) -> list[Call]:
    """Return the replies of this rank's share of the rows of `rft.conversations`, as if they had
    been sampled.

    Raises UserError for a model without chat template, and for a row that cannot be imitated.
    """
    dialect = Dialect.of(config, tokenizer, "rft.conversations")
    rows = read_rows(Path(config.rft.conversations))
    return [
        call
        for _, where, row in islice(rows, rank, None, num_ranks)
        for call in _replies(dialect, _conversation(row, where), where)
    ]


def _conversation(row: Row, where: str) -> ChatRequest:
    """Read a row. Raises UserError for what is none, or has what nobody would read."""
    messages = row.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        items = message.items() if isinstance(message, dict) else ()
        if unread_key := next(
            (k for k, value in items if k not in _KEYS and value is not None), ""
        ):
            raise UserError(f"{where}: messages.{number}.{unread_key} is not supported; remove it")
    fields = {key: row[key] for key in ("messages", "tools") if key in row}
    if isinstance(messages, list):
        fields["messages"] = _with_ids(messages)
    try:
        request = chat.read(json.dumps(fields).encode())
    except Refusal as refusal:
        raise UserError(f"{where}: {refusal}") from None
    if all(message["role"] != "assistant" for message in request.messages):
        raise UserError(f"{where}: there is no message of the role 'assistant' to imitate")
    if request.messages[0]["role"] == "assistant":
        raise UserError(f"{where}: the first message is a reply without a preceding question")
    return request


def _with_ids(messages: Sequence[Any]) -> list[Any]:
    """Return messages as OpenAI has them: TRL's calls have objects as arguments and no ids, so that
    results go to the calls before them in their order, or by name.
    """
    completed: list[Any] = []
    pending: list[tuple[str, str]] = []
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            completed.append(message)
            continue
        message = {key: value for key, value in message.items() if value is not None}
        if isinstance(calls := message.get("tool_calls"), list):
            message["tool_calls"] = [
                _call(call, f"call{place}_{number}") for number, call in enumerate(calls)
            ]
            valid = [call for call in message["tool_calls"] if isinstance(call, dict)]
            pending = [(str(c.get("id")), str(c.get("function", {}).get("name"))) for c in valid]
        elif message.get("role") == "tool" and "tool_call_id" not in message and pending:
            name = message.get("name")
            answered = next((pair for pair in pending if pair[1] == name), pending[0])
            pending.remove(answered)
            message["tool_call_id"] = answered[0]
        completed.append(message)
    return completed


def _call(call: Any, id: str) -> Any:
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    if isinstance(arguments := function.get("arguments"), dict):
        function = {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
    fields = {key: value for key, value in call.items() if value is not None}
    return {"id": id, "type": "function", **fields, "function": function}


def _replies(dialect: Dialect, request: ChatRequest, where: str) -> Iterator[Call]:
    """Yield the replies of a conversation. Raises UserError for one that the template cannot show
    as it would be sampled.
    """
    messages, template = request.messages, dialect.template
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    conversation: Conversation | None = None
    num_read = 0
    for place in places:
        try:
            conversation = _asking(dialect, conversation, messages[:place], num_read, request.tools)
            text = dialect.reply_text(messages[: place + 1], request.tools)
        except TemplateRewrites as error:
            raise UserError(f"{where}: messages.{place}: {error}") from None
        end_id = dialect.end_of(messages[place])
        ids = (*template.encode(text), end_id)
        if end_id in ids[:-1]:
            end = template.decode([end_id])
            raise UserError(f"{where}: messages.{place} holds {end!r}, which would end the message")
        _check_calls(dialect, messages[place], template.text_of(ids, True), request.tools, where)
        zeros = (0.0,) * len(ids)
        yield Call(conversation.prompt_ids, ids, zeros, (), FinishReason.STOP, text)
        conversation = conversation.add_response(ids, messages[place], ended=True)
        num_read = place + 1


def _check_calls(
    dialect: Dialect, message: Message, text: str, tools: Sequence[Message], where: str
) -> None:
    """Raise UserError for calls that a rollout would not read in what is imitated."""
    names = [call["function"]["name"] for call in message.get("tool_calls", ())]
    if names and names != [call.name for call in dialect.format.parse(text, tools)[1]]:
        raise UserError(
            f"{where}: agent.tool_format does not read the calls that the chat template writes: "
            f"{text[:80]!r}. Set it to 'auto', or to the template's own format"
        )


def _asking(
    dialect: Dialect,
    previous: Conversation | None,
    messages: Sequence[Message],
    num_read: int,
    tools: Sequence[Message],
) -> Conversation:
    """Return the conversation that asks for the next reply. Raises TemplateRewrites."""
    if previous is not None:
        try:
            return dialect.add(previous, messages[num_read:])
        except TemplateRewrites:
            pass  # As a program would be answered: the whole is read as text.
    return dialect.start(messages, tools)
