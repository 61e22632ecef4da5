"""Messages with tools, calls and results in the words of the policy's chat template.

A template that knows neither tools nor a system message gets both in messages that it does know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowtrain.agents.chat.conversation import Conversation
from flowtrain.agents.chat.template import ChatTemplate, Message, TemplateRewrites
from flowtrain.agents.chat.tool_formats import FORMATS, ToolFormat, WrittenCall, format_of
from flowtrain.config import Config
from flowtrain.inference.token_chat import ChatTokenizer
from flowtrain.records import UserError
from flowtrain.utils.text import THINK_END


@dataclass(frozen=True, slots=True)
class Dialect:
    """How tools, calls and results stand in the conversations of a policy."""

    template: ChatTemplate
    format: ToolFormat
    encodes_anew: bool = False
    """A later prompt is what the template renders of all messages (agent.history = "as_deployed"),
    and holds no ids that were sampled."""

    @classmethod
    def of(cls, config: Config, tokenizer: ChatTokenizer, needed_by: str) -> Dialect:
        """Raises UserError for a chat template that `needed_by`, an option, cannot work with."""
        key, path = config.path_of(config.train.policy)
        if not tokenizer.chat_template:
            raise UserError(
                f"{key}={path!r} has no chat template, which {needed_by} requires for any "
                "agent.prompt"
            )
        try:
            template = ChatTemplate(tokenizer)
            name: str = config.agent.tool_format
            if name == "auto":
                tokens = getattr(tokenizer, "special_tokens_map", {})
                name = format_of(template.source, tokens) if template.takes_tools else "xml"
        except TemplateRewrites as error:
            raise UserError(
                f"{key}={path!r} cannot be combined with {needed_by}: {error}"
            ) from None
        if not name:
            raise UserError(
                f"agent.tool_format='auto': the chat template of {key}={path!r} writes tool calls "
                f"in none of the supported formats ({', '.join(FORMATS)}); if the model uses one "
                "of them anyway, set agent.tool_format to its name"
            )
        return cls(template, FORMATS[name], config.agent.history == "as_deployed")

    def start(self, messages: Sequence[Message], tools: Sequence[Message]) -> Conversation:
        """Begin a conversation. Raises TemplateRewrites."""
        return Conversation.start(self.template, *self._prepared(messages, tools))

    def reply_text(self, messages: Sequence[Message], tools: Sequence[Message]) -> str:
        """Return the last message, a reply, as the template writes it up to its end, after the
        prompt that asks for it. Raises TemplateRewrites.
        """
        template = self.template
        prompt = template.render(*self._prepared(messages[:-1], tools))
        conversation = template.render(*self._prepared(messages, tools), reply=False)
        closing = template.call_closing if messages[-1].get("tool_calls") else template.closing
        if not conversation.startswith(prompt) or not conversation.endswith(closing):
            raise TemplateRewrites(
                "the chat template writes a reply otherwise than it asks for one"
            )
        return conversation[len(prompt) :].removesuffix(closing)

    def end_of(self, message: Message) -> Any:
        """Return the token that ends a reply, which may be another one where it calls a tool."""
        template = self.template
        has_own = message.get("tool_calls") and template.call_closing != template.closing
        return template.encode(template.call_closing)[0] if has_own else template.end_id

    def _prepared(
        self, messages: Sequence[Message], tools: Sequence[Message]
    ) -> tuple[list[Message], Sequence[Message]]:
        """Return messages and tools that the template shows."""
        template = self.template
        result = self._shown(messages, messages)
        described = "" if template.takes_tools or not tools else self.format.describe(tools)
        system = [described] if described else []
        if result[0]["role"] == "system" and (described or not template.takes_system):
            system.insert(0, result.pop(0)["content"])
        if text := "\n\n".join(filter(None, system)):
            if template.takes_system or not result or result[0]["role"] != "user":
                result.insert(0, {"role": "system", "content": text})
            else:
                result[0] = {**result[0], "content": f"{text}\n\n{result[0]['content']}"}
        return result, () if described else tools

    def add(self, conversation: Conversation, messages: Sequence[Message]) -> Conversation:
        """Go on with new messages. Raises TemplateRewrites."""
        history = [*conversation.messages, *messages]
        if self.encodes_anew:
            return conversation.anew(self._shown(history, history))
        return conversation.add(self._shown(messages, history))

    def _shown(self, messages: Sequence[Message], history: Sequence[Message]) -> list[Message]:
        """Return messages that the template shows; `history` tells which calls are answered."""
        tool_names = {
            call["id"]: call["function"]["name"]
            for message in history
            for call in message.get("tool_calls", ())
        }
        if self.encodes_anew:
            messages = [self._served(message) for message in messages]
        result: list[Message] = []
        texts: list[str] = []
        knows_tools = self.template.takes_tools and self.template.takes_results
        for message in messages:
            name = tool_names.get(message.get("tool_call_id", ""), "")
            if knows_tools:
                result.append({"name": name, **message} if message["role"] == "tool" else message)
                continue
            if message["role"] == "tool":
                texts.append(f"Result of {name}:\n{message['content']}")
                continue
            result += _user_messages(texts)
            texts.clear()
            result.append(self._written(message))
        return result + _user_messages(texts)

    def _served(self, message: Message) -> Message:
        """Return a reply as a server does, its thinking under the key that the template reads."""
        key = self.template.thinking_key
        if message["role"] != "assistant" or not key or THINK_END not in (message["content"] or ""):
            return message
        thinking, _, content = message["content"].rpartition(THINK_END)
        thinking = thinking.lstrip().removeprefix("<think>").strip("\n")
        return {**message, "content": content.lstrip("\n"), key: thinking}

    def _written(self, message: Message) -> Message:
        """Write the calls of a message that nobody sampled here into its content."""
        if not (tool_calls := message.get("tool_calls")):
            return message
        calls = [
            WrittenCall(call["function"]["name"], call["function"]["arguments"])
            for call in tool_calls
        ]
        text = "\n".join(filter(None, [message["content"], self.format.write(calls)]))
        return {"role": "assistant", "content": text}


def _user_messages(texts: Sequence[str]) -> list[Mapping[str, Any]]:
    return [{"role": "user", "content": "\n\n".join(texts)}] if texts else []
