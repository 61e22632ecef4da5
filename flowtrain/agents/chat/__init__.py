"""A chat with a policy, for agents written as programs."""

from __future__ import annotations

from flowtrain.agents.chat.conversation import Conversation
from flowtrain.agents.chat.template import ChatTemplate, Message
from flowtrain.agents.session import Session
from flowtrain.records import Call, FinishReason, PolicyName, UserError


class Chat:
    """A conversation with a policy through its chat template; training covers every token of the
    replies.

    Example: chat = Chat(session); draft = await chat.ask("Name a prime above 90.")
    """

    def __init__(
        self, session: Session, instructions: str = "", *, policy: PolicyName = ""
    ) -> None:
        """
        Args:
            instructions: a message of the role "system".
            policy: name of the policy to ask; "": the run's first.
        """
        self._session, self._policy = session, policy
        tokenizer = session.policy_of(policy).tokenizer
        if not tokenizer.chat_template:
            raise UserError(
                f"the model of {policy or 'the policy'} has no chat template, which Chat "
                "requires: use a chat model (`make smollm2` builds a small one), or write the "
                "prompt yourself and call session.sample (docs/agents/custom.md)"
            )
        self._template = ChatTemplate(tokenizer)
        self._news: list[Message] = []
        self._conversation: Conversation | None = None
        if instructions:
            self._news.append({"role": "system", "content": instructions})

    async def ask(self, message: str, max_new_tokens: int | None = None) -> str:
        """Send a user message and return the reply. Raises the errors of `Session.sample`, and
        TemplateRewrites for a chat template that changes earlier messages.
        """
        return self.text_of(await self.call(message, max_new_tokens))

    async def call(self, message: str, max_new_tokens: int | None = None) -> Call:
        """Send a user message and return the call with the reply, for `Session.use_tool`."""
        news = [*self._news, {"role": "user", "content": message}]
        past = self._conversation
        chat = Conversation.start(self._template, news) if past is None else past.add(news)
        call = await self._session.sample(
            chat.prompt_ids, policy=self._policy, max_new_tokens=max_new_tokens
        )
        reply = {"role": "assistant", "content": self.text_of(call)}
        ended = call.finish_reason is FinishReason.STOP
        # Only now, so that a call that fails leaves the chat as it was.
        self._news, self._conversation = [], chat.add_response(call.response_ids, reply, ended)
        return call

    def text_of(self, call: Call) -> str:
        """Return the text of a reply without its end-of-message token."""
        ended = call.finish_reason is FinishReason.STOP
        return self._template.text_of(call.response_ids, ended).strip()
