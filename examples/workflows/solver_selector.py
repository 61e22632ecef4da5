"""A solver that answers three times, and a selector that picks one: two policies, one program.

python -m flowtrain.train --config configs/smollm2.toml \
    --agent.name examples/workflows/solver_selector.py:SolverSelector --agent.max_turns 4 \
    --reward.function examples/workflows/solver_selector.py:reward --train.policy selector \
    --policies.solver.path models/SmolLM2-135M-Instruct \
    --policies.selector.path models/SmolLM2-135M-Instruct

trains the selector beside a solver that stays as it is; docs/agents/workflows.md has the rest.
"""

import asyncio
import re
from statistics import fmean

from flowtrain.agents.chat import Chat
from flowtrain.agents.session import Session, SessionAgent
from flowtrain.records import Task, Trajectory
from flowtrain.rewards import ByPolicy
from flowtrain.rewards.scorers import by_rule
from flowtrain.utils.text import final_answer

NUM_DRAFTS = 3


class SolverSelector(SessionAgent):
    """Drafts are sampled at once; where they agree there is nothing to select."""

    async def answer(self, session: Session) -> str:
        question = session.task.prompt
        solvers = [Chat(session, policy="solver") for _ in range(NUM_DRAFTS)]
        drafts = await asyncio.gather(*(solver.ask(question) for solver in solvers))
        if len(set(map(final_answer, drafts))) == 1:
            return drafts[0]
        listed = "\n".join(f"{number}. {draft}" for number, draft in enumerate(drafts, 1))
        selector = Chat(session, "Say the number of the right answer.", policy="selector")
        chosen = re.search(f"[1-{NUM_DRAFTS}]", await selector.ask(f"{question}\n{listed}"))
        return drafts[int(chosen[0]) - 1] if chosen else ""


async def reward(task: Task, answer: str, trajectory: Trajectory) -> ByPolicy:
    """The solver is paid for its share of right drafts, the selector for a right choice."""
    drafts = [turn.call.text for turn in trajectory.turns if turn.policy == "solver"]
    found = [await by_rule(task, final_answer(draft)) for draft in drafts]
    (is_right, _) = await by_rule(task, answer)
    return ByPolicy(solver=fmean([right for right, _ in found] or [0.0]), selector=is_right)
