"""An agent of one turn: the policy reads the question and writes the answer.

It has neither tools nor roles, so Flow-GRPO on it is GRPO. The answer is the content of the last
`<answer>...</answer>` of the response, else the whole response.
"""

from __future__ import annotations

from flowtrain.agents.base import AgentContext
from flowtrain.agents.policy import check_prompt
from flowtrain.agents.session import Session, SessionAgent
from flowtrain.engines.token_chat import ChatTokenizer, chat_text
from flowtrain.types import Call
from flowtrain.utils.text import final_answer


class QuestionPrompt:
    """The question and, after an empty line, the instructions, as one message to the policy."""

    def __init__(self, instructions: str, tokenizer: ChatTokenizer | None) -> None:
        """Use the chat template of `tokenizer`; without one a label opens the answer."""
        self._instructions = instructions
        self._tokenizer = tokenizer

    def render(self, question: str) -> str:
        message = self.message(question)
        if self._tokenizer is None:
            return f"Question: {message}\nAnswer:"
        return chat_text(self._tokenizer, message)

    def message(self, question: str) -> str:
        """Return the message as other models read it, without a template or a label."""
        return "\n\n".join(filter(None, [question, self._instructions]))


class SingleTurn(SessionAgent):
    """See `Agent`."""

    can_branch = True
    check = staticmethod(check_prompt)

    def __init__(self, context: AgentContext) -> None:
        super().__init__(context)
        config, tokenizer = context.config, context.policies["planner"].tokenizer
        check_prompt(config, tokenizer)
        has_template = config.agent.prompt == "full"
        self.prompt = QuestionPrompt(config.agent.instructions, tokenizer if has_template else None)

    async def answer(self, session: Session) -> str:
        prompt = self.prompt.render(session.task.prompt)
        call = await self.respond(session, session.policy.encode(prompt))
        return final_answer(call.text)

    async def respond(self, session: Session, prompt_ids: tuple[int, ...]) -> Call:
        """Sample the response; a teacher writes it instead."""
        return await session.sample(prompt_ids)
