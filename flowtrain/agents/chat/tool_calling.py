"""An agent that calls tools through the model's own chat template, turn after turn.

The policy reads the question and the tools, writes calls, reads their results, and so on until it
writes a response without a call: that holds the answer. What it sampled stays in its prompts id by
id (`conversation.py`), unless `agent.history` is "as_deployed". A call that cannot be read, an
unknown tool, wrong arguments and a failed tool each give an error as the result, which the policy
reads next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowtrain.agents.base import AgentContext
from flowtrain.agents.chat.dialect import Dialect
from flowtrain.agents.chat.environment import Environment, load_maker, opened
from flowtrain.agents.chat.template import Message, TemplateRewrites
from flowtrain.agents.chat.tool_formats import WrittenCall
from flowtrain.agents.session import RolloutEnded, Session, SessionAgent
from flowtrain.config import Config
from flowtrain.inference.token_chat import ChatTokenizer
from flowtrain.records import Call, FinishReason, UserError
from flowtrain.tools import ToolCard
from flowtrain.utils.text import THINK_END, without_thinking


class ToolCallingAgent(SessionAgent):
    """See `Agent`."""

    can_branch = True
    takes_hints = True
    trains = ()

    def __init__(self, context: AgentContext) -> None:
        super().__init__(context)
        self.dialect = _dialect(context.config, context.first_policy.tokenizer)
        self._maker = load_maker(context.config)

    @staticmethod
    def check(config: Config, tokenizer: ChatTokenizer) -> None:
        """Go through two calls, with a thinking where the template knows of any.

        Raises UserError for a chat template whose conversations cannot be trained.
        """
        dialect = _dialect(config, tokenizer)
        template = dialect.template
        thinking = f"<think>\nx\n{THINK_END}\n\n" if THINK_END in template.source else ""
        calls = [WrittenCall("Search", "{}")]
        ids = template.encode(thinking + dialect.format.write(calls) + template.closing)
        messages = with_instructions(config, [_user("x")])
        try:
            conversation = dialect.start(messages, [definition(ToolCard("Search", "finds"))])
            for number in range(2):
                message = _message(thinking, calls, number)
                replied = conversation.add_response(ids, message)
                conversation = dialect.add(replied, _tool_messages(message, ["x"]))
        except TemplateRewrites as error:
            key, path = config.path_of(config.first_policy)
            options = f"agent.name='tools' and agent.history={config.agent.history!r}"
            if not dialect.encodes_anew:
                options += (
                    ", whose prompts hold what was sampled as it was ('as_deployed': as text)"
                )
            raise UserError(f"{key}={path!r} cannot be combined with {options}: {error}") from error

    async def answer(self, session: Session) -> str:
        if self._maker is None:
            return await self._converse(session, [_user(session.task.prompt)])
        async with opened(self._maker, session) as (environment, messages):
            return await self._converse(session, messages, environment)

    async def _converse(
        self, session: Session, opening: Sequence[Message], environment: Environment | None = None
    ) -> str:
        """Take turns until a response calls no tool, and the user has nothing to say to it."""
        template = self.dialect.template
        tools = [definition(tool.card) for tool in session.tools.values()]
        messages = with_instructions(self.context.config, opening)
        conversation = self.dialect.start(messages, tools)
        while True:
            call = await session.sample(conversation.prompt_ids)
            if call.finish_reason is FinishReason.DEADLINE:
                raise RolloutEnded("time")
            ended = call.finish_reason is FinishReason.STOP
            text = template.text_of(call.response_ids, ended)
            content, calls = self.dialect.format.parse(text, tools)
            problem = next((call.problem for call in calls if call.problem), "")
            if problem and self.dialect.encodes_anew:
                # As a server, and the gateway, that cannot read all calls: the whole is text.
                session.record_malformed(call, problem)
                message = _says(call.text)
                new_messages = [_user(*_with_hint([f"Error: {problem}"], session.hint()))]
            elif calls:
                message = _message(content, calls, number=len(session.turns))
                results = await self._results(session, call, calls, message)
                if getattr(environment, "over", False):
                    return content
                new_messages = _tool_messages(message, _with_hint(results, session.hint()))
            else:
                text = without_thinking(content)
                reply = None if environment is None else await environment.reply(text.strip())
                if reply is None:
                    return text
                message, new_messages = _says(content), [_user(reply)]
            replied = conversation.add_response(call.response_ids, message, ended)
            conversation = self.dialect.add(replied, new_messages)

    async def _results(
        self, session: Session, response: Call, calls: Sequence[WrittenCall], message: Message
    ) -> list[str]:
        """Run the calls at once and return the text of each result, in order."""
        ids = (tool_call["id"] for tool_call in message["tool_calls"])
        pairs = zip(calls, ids, strict=True)
        requests = [(call.name, call.values, id) for call, id in pairs if not call.problem]
        if problems := [call.problem for call in calls if call.problem]:
            session.record_malformed(response, problems[0])
        results = iter(await session.use_tools(response, requests) if requests else [])
        return [f"Error: {call.problem}" if call.problem else next(results).text for call in calls]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def definition(card: ToolCard) -> dict[str, Any]:
    """Describe a tool as OpenAI's chat completions do, for chat templates."""
    text = " ".join(filter(None, [card.description, card.limits, card.advice]))
    function = {"name": card.name, "description": text, "parameters": dict(card.schema)}
    return {"type": "function", "function": function}


def _dialect(config: Config, tokenizer: ChatTokenizer) -> Dialect:
    return Dialect.of(config, tokenizer, "agent.name='tools'")


def with_instructions(config: Config, messages: Sequence[Message]) -> list[Message]:
    """Add `agent.instructions` to the system message of first messages, or put one before them."""
    if not config.agent.instructions:
        return list(messages)
    has_system = messages[0]["role"] == "system"
    system_text = messages[0]["content"] if has_system else ""
    text = "\n\n".join(filter(None, [system_text, config.agent.instructions]))
    return [{"role": "system", "content": text}, *messages[has_system:]]


def _tool_messages(message: Message, results: Sequence[str]) -> list[Message]:
    """Return the messages that answer one with calls."""
    return [
        {"role": "tool", "content": text, "tool_call_id": call["id"]}
        for call, text in zip(message["tool_calls"], results, strict=True)
    ]


def _with_hint(results: list[str], hint: str) -> list[str]:
    """Append a hint to the last result; not every template accepts a separate message there."""
    return [*results[:-1], f"{results[-1]}\n\nHint: {hint}"] if hint else results


_UNREADABLE = "unreadable"
"""The name of the tool in a call that could not be read; templates want one."""


def _message(content: str, calls: Sequence[WrittenCall], number: int) -> Message:
    """Return a response with calls as a message; `number` counts responses."""
    tool_calls = [
        {
            "id": _call_id(number, place),
            "type": "function",
            "function": {
                "name": call.name or _UNREADABLE,
                "arguments": "{}" if call.problem else call.arguments,
            },
        }
        for place, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": content.strip(), "tool_calls": tool_calls}


def _call_id(number: int, place: int) -> str:
    """Return nine digits, which the strictest templates take."""
    return f"{number:05}{place:04}"
