"""An agent of your own: it works the question out in one turn, and writes the result in another.

python -m flowtrain.train --config configs/smollm2.toml --agent.name examples/my_agent.py:MyAgent \
    --agent.max_turns 2 --agent.eval_max_turns 2 --agent.prompt full --rollout.max_new_tokens 24
"""

from flowtrain.agents.chat import Chat
from flowtrain.agents.session import Session, SessionAgent


class MyAgent(SessionAgent):
    """Two turns of one chat; both are trained by the reward of the second."""

    can_branch = True  # the same task and seed say the same again, so APPO may rewind it

    async def answer(self, session: Session) -> str:
        chat = Chat(session)
        await chat.ask(session.task.prompt)
        return await chat.ask("So what is the result? Write the number alone.", max_new_tokens=6)
