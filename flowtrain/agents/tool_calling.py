"""An agent that calls tools through the model's own chat template, turn after turn.

The policy reads the question and the tools, writes calls, reads their results, and so on until it
writes a response without a call: that holds the answer. What it sampled stays in its prompts id by
id (`conversation.py`). A call that cannot be read, an unknown tool, wrong arguments and a failed
tool each give an error as the result, which the policy reads next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowtrain.agents.base import AgentContext
from flowtrain.agents.conversation import (
    THINK_END,
    ChatTemplate,
    Conversation,
    Message,
    TemplateRewrites,
)
from flowtrain.agents.policy import check_template
from flowtrain.agents.session import RolloutEnded, Session, SessionAgent
from flowtrain.agents.tool_formats import FORMATS, ToolFormat, WrittenCall, format_of
from flowtrain.config import Config
from flowtrain.tools import ToolCard
from flowtrain.types import Call, FinishReason, Task, UserError
from flowtrain.utils.text import final_answer


class ToolCallingAgent(SessionAgent):
    """See `Agent`."""

    can_branch = True

    def __init__(self, context: AgentContext) -> None:
        """Raises UserError for a chat template whose conversations cannot be trained."""
        super().__init__(context)
        config = context.config
        tokenizer = context.policies["planner"].tokenizer
        check_template(config, "planner", tokenizer)
        key, path = config.path_of("planner")
        try:
            self.template = ChatTemplate(tokenizer)
            self.format = _format(config, self.template)
            self._definitions = [definition(tool.card) for tool in context.tools.values()]
            self._try()
        except TemplateRewrites as error:
            raise UserError(
                f"{key}={path!r} does not go with agent.name='tools', which needs a chat template "
                f"that leaves what was said as it was: {error}"
            ) from error

    async def answer(self, session: Session) -> str:
        conversation = self.begin(session.task)
        while True:
            call = await self.respond(session, conversation)
            if call.finish_reason is FinishReason.DEADLINE:
                raise RolloutEnded("time")
            ended = call.finish_reason is FinishReason.STOP
            said, calls = self.format.parse(self.template.text_of(call.response_ids, ended))
            if not calls:
                return final_answer(said.rpartition(THINK_END)[2])
            results = await self._results(session, call, calls)
            message = _message(said, calls, number=len(session.turns))
            conversation = conversation.add_response(call.response_ids, message, ended)
            conversation = conversation.add(self._told(message, results))

    def begin(self, task: Task) -> Conversation:
        """Begin the conversation about a task."""
        return self._start(task.question)

    async def respond(self, session: Session, conversation: Conversation) -> Call:
        """Sample the next message; an expert writes it instead."""
        return await session.sample(conversation.prompt_ids)

    def _start(self, question: str) -> Conversation:
        template, definitions = self.template, self._definitions
        system = [self.context.config.agent.instructions]
        if not template.takes_tools:
            system.append(self.format.describe(definitions))
            definitions = []
        text = "\n\n".join(filter(None, system))
        messages: list[Message] = [{"role": "user", "content": question}]
        if text and template.takes_system:
            messages.insert(0, {"role": "system", "content": text})
        elif text:
            messages = [{"role": "user", "content": f"{text}\n\n{question}"}]
        return Conversation.start(template, messages, definitions)

    async def _results(
        self, session: Session, call: Call, calls: Sequence[WrittenCall]
    ) -> list[tuple[str, str]]:
        """Run the calls at once; return the tool's name and the text of each result, in order."""
        good = [each for each in calls if not each.problem]
        number = len(session.turns)
        wanted = [
            (each.name, each.values, _call_id(number, place))
            for place, each in enumerate(calls)
            if not each.problem
        ]
        if problems := [each.problem for each in calls if each.problem]:
            session.record_malformed(call, problems[0])
        outcomes = iter(await session.use_tools(call, wanted) if good else [])
        return [
            (each.name, f"Error: {each.problem}" if each.problem else next(outcomes).text)
            for each in calls
        ]

    def _told(self, message: Message, results: Sequence[tuple[str, str]]) -> list[Message]:
        """Return the messages that tell the policy the results."""
        if not (self.template.takes_tools and self.template.takes_results):
            text = "\n\n".join(f"Result of {name or 'the call'}:\n{text}" for name, text in results)
            return [{"role": "user", "content": text}]
        return [
            {
                "role": "tool",
                "name": name or _UNREADABLE,
                "content": text,
                "tool_call_id": asked["id"],
            }
            for asked, (name, text) in zip(message["tool_calls"], results, strict=True)
        ]

    def _try(self) -> None:
        """Go through two calls, with a thinking where the template knows of any."""
        thinking = "<think>\nx\n</think>\n\n" if THINK_END in self.template.source else ""
        calls = [WrittenCall(next(iter(self.context.tools)), "{}")]
        ids = self.template.encode(thinking + self.format.write(calls) + self.template.closing)
        conversation = self._start("x")
        for number in range(2):
            message = _message(thinking, calls, number)
            conversation = conversation.add_response(ids, message)
            conversation = conversation.add(self._told(message, [(calls[0].name, "x")]))


def definition(card: ToolCard) -> dict[str, Any]:
    """Describe a tool as OpenAI's chat completions do, for chat templates."""
    text = " ".join(filter(None, [card.description, card.limits, card.advice]))
    function = {"name": card.name, "description": text, "parameters": card.json_schema()}
    return {"type": "function", "function": function}


_UNREADABLE = "unreadable"
"""The name of the tool in a call that could not be read; templates want one."""


def _message(said: str, calls: Sequence[WrittenCall], number: int) -> Mapping[str, Any]:
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


def _format(config: Config, template: ChatTemplate) -> ToolFormat:
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
