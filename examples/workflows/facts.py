"""A solver that looks things up step by step, and a verifier that says when there is enough: both
are trained, by `configs/facts.toml` (docs/agents/workflows.md).

The solver is the planner that comes with flowtrain, so its prompt is the one that it knows.
"""

from flowtrain.agents.session import Session, SessionAgent
from flowtrain.records import Call, Task, Trajectory
from flowtrain.rewards import ByPolicy
from flowtrain.rewards.scorers import by_rule


class SolverVerifier(SessionAgent):
    """The solver names a step and its tool, until the verifier believes what came of it."""

    async def answer(self, session: Session) -> str:
        known, number = f"Question: {session.task.prompt}", 1
        while True:
            call = await ask(session, "solver", f"{known}\nSub-Goal:")
            goal, _, tool = call.text.strip().partition("\nTool Name: ")
            result = await session.use_tool(call, tool, {"query": goal})
            known += f"\n{number}. {tool} | {goal} | {result.text}"
            session.answer_so_far, number = value(result.text), number + 1
            verdict = await ask(session, "verifier", f"{known}\nConclusion:")
            if believes(verdict):
                return session.answer_so_far


async def ask(session: Session, name: str, text: str) -> Call:
    policy = session.policy_of(name)
    return await session.sample(policy.encode_prompt(text), policy=name)


async def reward(task: Task, answer: str, trajectory: Trajectory) -> ByPolicy:
    """The solver is paid for a right answer, the verifier for having ended the rollout with one;
    for never ending it a little, or it would end those of which nothing comes.
    """
    solved, _ = await by_rule(task, answer)
    has_ended = bool(trajectory.turns) and believes(trajectory.turns[-1].call)
    return ByPolicy(solver=solved, verifier=solved if has_ended else 0.25)


def value(text: str) -> str:
    """Read "1284" from "The area of Chad is 1284."."""
    return text.rpartition(" is ")[2].removesuffix(".")


def believes(verdict: Call) -> bool:
    return verdict.text.strip() == "STOP"
