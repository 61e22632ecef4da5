"""Flows whose trained policy is played by a teacher: a stronger model, behind a chat engine.

The teacher reads its own prompt and writes text. The teacher's text becomes a response in the
student's tokens after the student's own prompt, ready for imitation. Its log-probs are 0, because
the student did not sample it. A reply stays as it is where the student's own strict reader reads
the same in it. Where only a lenient rule read it, or the student's prompt asks for another form,
the response is what the prompt's writer makes of what was read. A reply that could not be read at
all is a malformed turn, as a policy's would be, and nobody imitates it.

Special tokens in a reply are plain text to the student: it is what others sent.

Sources: the baseline that AgentFlow (arXiv 2510.05592) fine-tunes on traces of GPT-4o, and the
first phase of InfoFlow (arXiv 2510.26575).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from flowtrain.agents.agentflow.build import make_planner, make_refiner, make_verifier
from flowtrain.agents.agentflow.flow import Flow
from flowtrain.agents.agentflow.planner import NO_TOOL, ModelPlanner, parse_action, read_action
from flowtrain.agents.agentflow.refiner import ModelRefiner
from flowtrain.agents.agentflow.replies import cut_end_of_turn, read_verdict
from flowtrain.agents.agentflow.verifier import ModelVerifier
from flowtrain.agents.agentflow.voices import ChatVoice
from flowtrain.agents.base import Agent
from flowtrain.agents.policy import Moment, Policy, Prompt
from flowtrain.config import Config
from flowtrain.inference.chat import ChatEngine
from flowtrain.records import Action, Call, FinishReason, PolicyName, Turn, UserError, Verdict
from flowtrain.tools import Tool


@dataclass(frozen=True, slots=True)
class TeacherVoice:
    """Says what a teacher replied to its own prompt, in the tokens of `policy`, which learns it.

    A reply that could not be read leaves a call without a response, and nothing to imitate.
    """

    is_frozen: ClassVar[bool] = False

    teacher: ChatVoice
    prompt: Prompt
    """The full one, whatever the student's is."""
    policy: Policy
    read: Callable[[str], tuple[object, bool]]
    """Reads a reply for the student's prompt to write, and tells whether the student reads the same
    in it as it is; None: it could not be read."""

    async def reply(self, prompt: Prompt, moment: Moment, *, seed: int, deadline_s: float) -> Call:
        call = await self.teacher.reply(self.prompt, moment, seed=seed, deadline_s=deadline_s)
        reply = cut_end_of_turn(call.text).strip()
        prompt_ids = self.policy.read(prompt, moment)
        content, is_same = self.read(reply)
        if content is None:
            return Call(prompt_ids, (), (), (), FinishReason.STOP, reply)
        keeps = is_same and prompt.prefix == self.prompt.prefix
        text = reply if keeps else prompt.write(content)
        return self.policy.imitate(prompt_ids, text, prompt.is_message)

    def measure(self, text: str) -> int:
        return self.policy.measure(text)


def taught(agent: Agent, teacher: ChatEngine, config: Config, tools: Mapping[str, Tool]) -> Agent:
    """Return the flow with a teacher in the place of the policy that `config` trains.

    Args:
        tools: those of the agent, by name.

    Raises UserError for another agent.
    """
    if not isinstance(agent, Flow):
        raise UserError(
            f"rft.expert={config.rft.expert!r} requires agent.name='agentflow', which is "
            f"{config.agent.name!r}; use rft.expert='policy' or rft.conversations"
        )
    voice = ChatVoice(teacher, config.rollout.request_timeout_s)
    role = config.train.policy
    make, reader = _ROLES[role]
    module = getattr(agent, role)
    teacher_voice = TeacherVoice(
        voice, make(config, voice, tools).prompt, module.voice, partial(reader, module)
    )
    return replace(agent, **{role: replace(module, voice=teacher_voice)})


def _read_plan(planner: ModelPlanner, reply: str) -> tuple[Action | None, bool]:
    action, _ = read_action(reply, planner.tool_names, planner.spellings)
    if action is None:
        return None, False
    is_same = parse_action(reply, planner.tool_names) == action
    return replace(action, tool_name=action.tool_name.removeprefix(NO_TOOL)), is_same


def _read_verdict(verifier: ModelVerifier, reply: str) -> tuple[Verdict | None, bool]:
    verdict, rules = read_verdict(reply)
    return verdict, not rules


def _read_evidence(refiner: ModelRefiner, reply: str) -> tuple[str | None, bool]:
    return reply or None, False


_ROLES: Mapping[PolicyName, tuple[Callable[..., Any], Callable[..., tuple[object, bool]]]] = {
    "planner": (make_planner, _read_plan),
    "verifier": (make_verifier, _read_verdict),
    "refiner": (make_refiner, _read_evidence),
}
"""By role: who makes a module of a frozen model, and the reader of its replies."""


def is_readable(turn: Turn, policy: PolicyName) -> bool:
    """Return whether a teacher's reply in the role of this policy could be parsed and executed.

    A reply without an action or with an unknown tool cannot.
    """
    call = turn.calls.get(policy)
    if call is None or policy != "planner":
        return call is not None and bool(call.response_ids)
    return turn.action is not None and not turn.action.tool_name.startswith(NO_TOOL)
