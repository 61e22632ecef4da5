"""A solver that answers, and a verifier that tells whether to try again: two policies, one program.

python -m flowtrain.train --config configs/smollm2.toml \
    --agent.name examples/workflows/solver_verifier.py:SolverVerifier --agent.max_turns 4 \
    --reward.function examples/workflows/solver_verifier.py:reward \
    --policies.solver.path models/SmolLM2-135M-Instruct \
    --policies.verifier.path models/SmolLM2-135M-Instruct

trains the solver beside a verifier that stays as it is, and with `--policies.verifier.trained true`
both; docs/agents/workflows.md has the rest.
"""

from flowtrain.agents.chat import Chat
from flowtrain.agents.session import Session, SessionAgent
from flowtrain.records import Task, Trajectory
from flowtrain.rewards import ByPolicy
from flowtrain.rewards.scorers import by_rule
from flowtrain.utils.text import final_answer


class SolverVerifier(SessionAgent):
    """The solver answers, and once more where the verifier does not believe it."""

    async def answer(self, session: Session) -> str:
        question = session.task.prompt
        solver = Chat(session, policy="solver")
        answer = await solver.ask(question)
        verifier = Chat(session, "Say yes or no.", policy="verifier")
        if not agrees(await verifier.ask(f"{question}\nSomebody says: {answer}\nIs that right?")):
            answer = await solver.ask("Is that so? Answer once more.")
        return answer


async def reward(task: Task, answer: str, trajectory: Trajectory) -> ByPolicy:
    """The solver is paid for a right answer, the verifier for a verdict that the rule shares."""
    texts = [turn.call.text for turn in trajectory.turns]
    is_right, _ = await by_rule(task, answer)
    if len(texts) < 2:  # a limit came first
        return ByPolicy(solver=is_right)
    was_right, _ = await by_rule(task, final_answer(texts[0]))
    return ByPolicy(solver=is_right, verifier=float(agrees(texts[1]) == bool(was_right)))


def agrees(verdict: str) -> bool:
    return "yes" in verdict.lower()
