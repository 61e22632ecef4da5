"""An agent that calls tools through the model's own chat template, turn after turn.

The policy reads the question and the tools, writes calls, reads their results, and so on until it
writes a response without a call: that holds the answer. What it sampled stays in its prompts id by
id (`conversation.py`). A call that cannot be read, an unknown tool, wrong arguments and a failed
tool each give an error as the result, which the policy reads next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowtrain.agents.base import AgentContext
from flowtrain.agents.conversation import (
    ChatTemplate,
    Conversation,
    Message,
    TemplateRewrites,
)
from flowtrain.agents.environment import Environment, load_maker, opened
from flowtrain.agents.session import RolloutEnded, Session, SessionAgent
from flowtrain.agents.tool_formats import FORMATS, ToolFormat, WrittenCall, format_of
from flowtrain.config import Config
from flowtrain.engines.token_chat import ChatTokenizer
from flowtrain.tools import ToolCard
from flowtrain.types import Call, FinishReason, UserError
from flowtrain.utils.text import THINK_END, final_answer, without_thinking


@dataclass(frozen=True, slots=True)
class ToolChat:
    """How tools, calls and results stand in the conversations of a policy."""

    template: ChatTemplate
    format: ToolFormat
    instructions: str
    definitions: tuple[Message, ...]
    """The tools as OpenAI's chat completions have them."""

    @classmethod
    def of(cls, config: Config, tokenizer: ChatTokenizer, cards: Iterable[ToolCard]) -> ToolChat:
        """Raises UserError where calls cannot be read, TemplateRewrites for the template."""
        template = ChatTemplate(tokenizer)
        tools = tuple(definition(card) for card in cards)
        return cls(template, choose_format(config, template), config.agent.instructions, tools)

    def begin(self, first: Sequence[Message]) -> Conversation:
        """Begin with messages, the instructions, and tools that the template does not tell."""
        template, definitions = self.template, self.definitions
        has_system = first[0]["role"] == "system"
        system = [first[0]["content"] if has_system else "", self.instructions]
        if definitions and not template.takes_tools:
            system.append(self.format.describe(definitions))
            definitions = ()
        text = "\n\n".join(filter(None, system))
        messages = list(first[1:] if has_system else first)
        if text and template.takes_system:
            messages.insert(0, {"role": "system", "content": text})
        elif text:
            content = messages[0]["content"] if messages else ""
            messages[:1] = [{"role": "user", "content": f"{text}\n\n{content}"}]
        return Conversation.start(template, messages, definitions)

    def with_tools(self, cards: Iterable[ToolCard]) -> ToolChat:
        """Return the chat with these tools in the place of its own."""
        return replace(self, definitions=tuple(definition(card) for card in cards))

    def tell(self, message: Message, results: Sequence[str]) -> list[Message]:
        """Return the messages that answer one with calls; a user's where there are no tool's."""
        asked = [(call["function"]["name"], call["id"]) for call in message["tool_calls"]]
        if self.template.takes_tools and self.template.takes_results:
            return [
                {"role": "tool", "name": name, "content": text, "tool_call_id": call_id}
                for (name, call_id), text in zip(asked, results, strict=True)
            ]
        texts = [result_text(name, text) for (name, _), text in zip(asked, results, strict=True)]
        return [{"role": "user", "content": "\n\n".join(texts)}]


class ToolCallingAgent(SessionAgent):
    """See `Agent`."""

    can_branch = True

    def __init__(self, context: AgentContext) -> None:
        super().__init__(context)
        tokenizer = context.policies["planner"].tokenizer
        cards = (tool.card for tool in context.tools.values())
        self.chat = ToolChat.of(context.config, tokenizer, cards)
        self._maker = load_maker(context.config)

    @staticmethod
    def check(config: Config, tokenizer: ChatTokenizer) -> None:
        """Go through two calls, with a thinking where the template knows of any.

        Raises UserError for a chat template whose conversations cannot be trained.
        """
        key, path = config.path_of("planner")
        if not tokenizer.chat_template:
            raise UserError(f"{key}={path!r} has no chat template, which agent.name='tools' needs")
        try:
            chat = ToolChat.of(config, tokenizer, [ToolCard("Search", "finds")])
            thinking = f"<think>\nx\n{THINK_END}\n\n" if THINK_END in chat.template.source else ""
            calls = [WrittenCall("Search", "{}")]
            text = thinking + chat.format.write(calls) + chat.template.closing
            conversation = chat.begin([_user("x")])
            for number in range(2):
                message = _message(thinking, calls, number)
                replied = conversation.add_response(chat.template.encode(text), message)
                conversation = replied.add(chat.tell(message, ["x"]))
        except TemplateRewrites as error:
            raise UserError(
                f"{key}={path!r} does not go with agent.name='tools', whose prompts hold what was "
                f"sampled as it was: {error}"
            ) from error

    async def answer(self, session: Session) -> str:
        if self._maker is None:
            return await self._converse(session, self.chat.begin([_user(session.task.prompt)]))
        async with opened(self._maker, session) as (environment, messages):
            chat = self.chat.with_tools(tool.card for tool in session.tools.values())
            return await self._converse(session, chat.begin(messages), environment)

    async def _converse(
        self, session: Session, conversation: Conversation, environment: Environment | None = None
    ) -> str:
        """Take turns until a response calls no tool, and the user has nothing to say to it."""
        template = self.chat.template
        while True:
            call = await self.respond(session, conversation)
            if call.finish_reason is FinishReason.DEADLINE:
                raise RolloutEnded("time")
            ended = call.finish_reason is FinishReason.STOP
            said, calls = self.chat.format.parse(template.text_of(call.response_ids, ended))
            if calls:
                message = _message(said, calls, number=len(session.turns))
                results = await self._results(session, call, calls, message)
                new = self.chat.tell(message, results)
            else:
                text = without_thinking(said)
                reply = None if environment is None else await environment.reply(text.strip())
                if reply is None:
                    return final_answer(text)
                message, new = {"role": "assistant", "content": said}, [_user(reply)]
            conversation = conversation.add_response(call.response_ids, message, ended).add(new)

    async def respond(self, session: Session, conversation: Conversation) -> Call:
        """Sample the next message; a scripted expert or a teacher writes it instead."""
        return await session.sample(conversation.prompt_ids)

    async def _results(
        self, session: Session, call: Call, calls: Sequence[WrittenCall], message: Message
    ) -> list[str]:
        """Run the calls at once and return the text of each result, in order."""
        asked = zip(calls, message["tool_calls"], strict=True)
        wanted = [(each.name, each.values, it["id"]) for each, it in asked if not each.problem]
        if problems := [each.problem for each in calls if each.problem]:
            session.record_malformed(call, problems[0])
        results = iter(await session.use_tools(call, wanted) if wanted else [])
        return [f"Error: {each.problem}" if each.problem else next(results).text for each in calls]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def definition(card: ToolCard) -> dict[str, Any]:
    """Describe a tool as OpenAI's chat completions do, for chat templates."""
    text = " ".join(filter(None, [card.description, card.limits, card.advice]))
    function = {"name": card.name, "description": text, "parameters": card.json_schema()}
    return {"type": "function", "function": function}


def result_text(name: str, text: str) -> str:
    """Tell a result in a user's message, for templates that have none of tools."""
    return f"Result of {name}:\n{text}"


_UNREADABLE = "unreadable"
"""The name of the tool in a call that could not be read; templates want one."""


def _message(said: str, calls: Sequence[WrittenCall], number: int) -> Message:
    """Return a response with calls as a message; `number` is that of the response."""
    asked = [
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
    return {"role": "assistant", "content": said, "tool_calls": asked}


def _call_id(number: int, place: int) -> str:
    """Return nine digits, which the strictest templates take."""
    return f"{number:05}{place:04}"


def choose_format(config: Config, template: ChatTemplate) -> ToolFormat:
    """Choose the format that `agent.tool_format` asks for."""
    name: str = config.agent.tool_format
    if name == "auto" and not template.takes_tools:
        name = "xml"
    if name == "auto":
        name = format_of(template.source)
        if not name:
            key, path = config.path_of("planner")
            raise UserError(
                f"agent.tool_format='auto': how calls are written is not to be seen from the chat "
                f"template of {key}={path!r}; say one of {', '.join(FORMATS)}"
            )
    return FORMATS[name]
