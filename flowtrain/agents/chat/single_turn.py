"""An agent of one turn: the policy reads the question and writes the answer.

The agent has neither tools nor roles, so Flow-GRPO reduces to GRPO. The answer is the content of
the last `<answer>...</answer>` of the response, else the whole response.
"""

from __future__ import annotations

from flowtrain.agents.base import AgentContext
from flowtrain.agents.policy import Moment, check_prompt
from flowtrain.agents.session import Session, SessionAgent


class QuestionPrompt:
    """The question, an empty line, the instructions and, without a template, a label."""

    prefix = ""

    def __init__(self, instructions: str, is_message: bool) -> None:
        self._instructions = instructions
        self.is_message = is_message

    def render(self, moment: Moment) -> str:
        message = "\n\n".join(filter(None, [moment.task.prompt, self._instructions]))
        return message if self.is_message else f"Question: {message}\nAnswer:"

    def write(self, answer: str) -> str:
        return answer if self.is_message else f" {answer}"


class SingleTurn(SessionAgent):
    """See `Agent`."""

    can_branch = True
    trains = ()
    check = staticmethod(check_prompt)

    def __init__(self, context: AgentContext) -> None:
        super().__init__(context)
        config = context.config
        check_prompt(config, context.first_policy.tokenizer)
        self.prompt = QuestionPrompt(config.agent.instructions, config.agent.prompt == "full")

    async def answer(self, session: Session) -> str:
        prompt_ids = session.policy.read(self.prompt, Moment(session.task))
        return (await session.sample(prompt_ids)).text
