"""Agents whose trained policy is played by a teacher: a stronger model, behind a chat engine.

The teacher reads its own prompt and writes text. What it wrote becomes a response in the student's
tokens, after the prompt that the student would have read, so that the student can imitate it; its
log-probs are 0, because the student did not sample it. A reply stays as it is where the student's
own strict reader reads the same in it. Where only a lenient rule read it, or the student's prompt
asks for another form, the response is what the prompt's writer makes of what was read. A reply that
could not be read at all is a malformed turn, as a policy's would be, and nobody imitates it.

Special tokens in a reply are plain text to the student: it is what others sent.

Sources: the baseline that AgentFlow (arXiv 2510.05592) fine-tunes on traces of GPT-4o, and the
first phase of InfoFlow (arXiv 2510.26575).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flowtrain.agents.base import Agent
from flowtrain.agents.build import make_chat_planner
from flowtrain.agents.chat_planner import ChatPlanner
from flowtrain.agents.conversation import Conversation
from flowtrain.agents.flow import Flow
from flowtrain.agents.lenient import cut_end_of_turn
from flowtrain.agents.memory import Memory
from flowtrain.agents.planner import NO_TOOL, Plan, Planner, PolicyPlanner, parse_action
from flowtrain.agents.prompts import tools_text
from flowtrain.agents.refiner import Evidence, Finding, PolicyRefiner
from flowtrain.agents.session import Session
from flowtrain.agents.single_turn import SingleTurn
from flowtrain.agents.tool_calling import ToolCallingAgent
from flowtrain.agents.tool_formats import WrittenCall
from flowtrain.agents.verdicts import read_verdict, verdict_message
from flowtrain.agents.verifier import PolicyVerifier, Verification
from flowtrain.config import Config
from flowtrain.engines.chat import ChatEngine
from flowtrain.engines.special_tokens import special_tokens
from flowtrain.engines.token_chat import ChatTokenizer
from flowtrain.tools import Tool
from flowtrain.types import (
    Call,
    Completion,
    FinishReason,
    PolicyName,
    Task,
    Turn,
    UserError,
    Verdict,
)
from flowtrain.utils.seeds import derive_seed


class Scribe:
    """Writes a teacher's words in a student's tokens."""

    def __init__(self, tokenizer: ChatTokenizer, end_id: int) -> None:
        """`end_id`: the student's end-of-sequence token."""
        self._special = special_tokens(tokenizer)
        self._end_id = end_id

    def write(self, prompt_ids: tuple[int, ...], text: str) -> Call:
        """Return the call that answers `text`, whose special tokens become plain text."""
        return self.write_marked(prompt_ids, self.marked(text), text)

    def marked(self, text: str) -> str:
        """Return a text with marks for its special tokens, as `write_marked` takes it."""
        return str(self._special.marked(text))

    def write_marked(self, prompt_ids: tuple[int, ...], marked: str, text: str) -> Call:
        """Return the call that answers a text; special tokens that are not marked stay special."""
        ids = (*self._special.encode(marked), self._end_id)
        completion = Completion(ids, (0.0,) * len(ids), (), FinishReason.STOP)
        return Call.of(prompt_ids, completion, text)


@dataclass(frozen=True, slots=True)
class TaughtPlanner(Planner):
    """A planner that writes for `like`, the policy that learns from it."""

    teacher: ChatPlanner
    like: PolicyPlanner
    scribe: Scribe

    async def plan(
        self, task: Task, memory: Memory, turn: int, seed: int, deadline_s: float
    ) -> Plan:
        """Raises EngineError."""
        plan = await self.teacher.plan(task, memory, turn, seed, deadline_s)
        text = self._written(plan)
        return replace(plan, call=self.scribe.write(self.like.encode(task.prompt, memory), text))

    def measure(self, memory: Memory) -> int:
        return self.like.measure(memory)

    def _written(self, plan: Plan) -> str:
        """Return what the student is to write for a plan."""
        reply, prompt = plan.call.text.strip(), self.like.prompt
        if plan.action is None:
            return reply
        is_same_form = prompt.prefix == self.teacher.prompt.prefix
        if is_same_form and parse_action(reply, self.like.tool_names) == plan.action:
            return reply
        return prompt.write(plan.action)


@dataclass(frozen=True, slots=True)
class TaughtVerifier:
    """A verifier that writes for `like`, the policy that learns from it."""

    teacher: ChatEngine
    tools: str
    """The toolset as prompts show it."""
    timeout_s: float
    """Seconds per reply."""
    like: PolicyVerifier
    scribe: Scribe

    async def verify(
        self, task: Task, memory: Memory, seed: int, deadline_s: float
    ) -> Verification:
        """Raises EngineError. A reply without a verdict counts as CONTINUE, and its call has no
        response to imitate.
        """
        message = verdict_message(task.prompt, memory, self.tools)
        timeout_s = min(self.timeout_s, deadline_s)
        reply = (await self.teacher.ask(message, seed=seed, deadline_s=timeout_s)).strip()
        verdict, rules = read_verdict(reply)
        prompt, prompt_ids = self.like.prompt, self.like.encode(task.prompt, memory)
        if verdict is None:
            call = Call(prompt_ids, (), (), (), FinishReason.STOP, reply)
            return Verification(Verdict.CONTINUE, reply, call)
        text = prompt.write(verdict) if prompt.prefix or rules else reply
        call = self.scribe.write(prompt_ids, text)
        # Planners may read it later: they are to read what the student would have written.
        return Verification(verdict, prompt.prefix + text, call, rules)


@dataclass(frozen=True, slots=True)
class TaughtRefiner:
    """A refiner that writes for `like`, the policy that learns from it."""

    teacher: ChatEngine
    timeout_s: float
    """Seconds per reply."""
    like: PolicyRefiner
    scribe: Scribe

    async def refine(self, finding: Finding, seed: int, deadline_s: float) -> Evidence:
        """Raises EngineError. An empty reply leaves the passages, and nothing to imitate."""
        timeout_s = min(self.timeout_s, deadline_s)
        reply = await self.teacher.ask(finding.prompt(), seed=seed, deadline_s=timeout_s)
        evidence = cut_end_of_turn(reply).strip()
        if not evidence:
            return Evidence("")
        prompt_ids = self.like.policy.encode(self.like.prompt.render(finding))
        call = self.scribe.write(prompt_ids, self.like.prompt.write(evidence))
        return Evidence(evidence[: self.like.max_chars], call)


class TaughtSingleTurn(SingleTurn):
    """The agent of one turn, whose response a teacher writes."""

    def __init__(self, like: SingleTurn, teacher: ChatEngine, scribe: Scribe) -> None:
        super().__init__(like.context)
        self._teacher = teacher
        self._scribe = scribe
        # After the label "Answer:" of the compact prompt, a word begins with its space.
        self._before = " " if like.context.config.agent.prompt == "compact" else ""

    async def respond(self, session: Session, prompt_ids: tuple[int, ...]) -> Call:
        reply = await _asked(session, self._teacher, self.prompt.message(session.task.prompt))
        return session.record(self._scribe.write(prompt_ids, self._before + reply))


class TaughtCaller(ToolCallingAgent):
    """The agent that calls tools, whose messages a teacher writes.

    The teacher reads the conversation as JSON in one message, and writes calls as the student does.
    """

    def __init__(self, like: ToolCallingAgent, teacher: ChatEngine, scribe: Scribe) -> None:
        super().__init__(like.context)
        self._teacher = teacher
        self._scribe = scribe

    async def respond(self, session: Session, conversation: Conversation) -> Call:
        reply = await _asked(session, self._teacher, self._message(conversation))
        said, calls = self.chat.format.parse(reply)
        marked = self._scribe.marked
        if not calls or any(call.problem for call in calls):
            call = self._scribe.write(conversation.prompt_ids, reply)
        else:
            # Marked apart, because a format may begin calls with a special token of its own.
            plain = [WrittenCall(marked(each.name), marked(each.arguments)) for each in calls]
            text = marked(said) + self.chat.format.write(plain)
            call = self._scribe.write_marked(conversation.prompt_ids, text, reply)
        return session.record(call)

    def _message(self, conversation: Conversation) -> str:
        lines = [json.dumps(message, ensure_ascii=False) for message in conversation.messages]
        parts = ["You are the assistant of a conversation."]
        if conversation.tools:
            parts.append(self.chat.format.describe(conversation.tools))
        parts += [
            "The conversation so far, a JSON object per message:\n" + "\n".join(lines),
            "Write the assistant's next message, as plain text and nothing else.",
        ]
        return "\n\n".join(parts)


async def _asked(session: Session, teacher: ChatEngine, message: str) -> str:
    """Ask for the next response of a rollout. Raises EngineError, which fails the rollout."""
    number = session.next_call()
    timeout_s = min(session.policy.request_timeout_s, session.left_s())
    seed = derive_seed(session.seed, number)
    reply = await teacher.ask(message, seed=seed, deadline_s=timeout_s)
    return cut_end_of_turn(reply).strip()


def taught(
    agent: Agent, teacher: ChatEngine, config: Config, tools: Mapping[str, Tool], end_id: int
) -> Agent:
    """Return the agent with a teacher in the place of the policy that `config` trains.

    Args:
        tools: those of the agent, by name.
        end_id: the end-of-sequence token of that policy.

    Raises UserError for an agent that no teacher can play.
    """
    if isinstance(agent, ToolCallingAgent | SingleTurn):
        scribe = Scribe(agent.context.policies["planner"].tokenizer, end_id)
        if isinstance(agent, SingleTurn):
            return TaughtSingleTurn(agent, teacher, scribe)
        return TaughtCaller(agent, teacher, scribe)
    if not isinstance(agent, Flow):
        raise UserError(
            f"rft.expert={config.rft.expert!r} plays the policy of agent.name='agentflow', 'tools' "
            f"or 'single', and it is {config.agent.name!r}, so use 'policy'"
        )
    if config.train.policy == "verifier":
        assert isinstance(agent.verifier, PolicyVerifier), "the verifier is the trained policy"
        verifier = TaughtVerifier(
            teacher,
            tools_text(tools.values()),
            config.rollout.request_timeout_s,
            like=agent.verifier,
            scribe=Scribe(agent.verifier.policy.tokenizer, end_id),
        )
        return replace(agent, verifier=verifier)
    if config.train.policy == "refiner":
        assert isinstance(agent.refiner, PolicyRefiner), "the refiner is the trained policy"
        refiner = TaughtRefiner(
            teacher,
            config.rollout.request_timeout_s,
            like=agent.refiner,
            scribe=Scribe(agent.refiner.policy.tokenizer, end_id),
        )
        return replace(agent, refiner=refiner)
    assert isinstance(agent.planner, PolicyPlanner), "the planner is the trained policy"
    planner = TaughtPlanner(
        make_chat_planner(config, teacher, tools),
        like=agent.planner,
        scribe=Scribe(agent.planner.policy.tokenizer, end_id),
    )
    return replace(agent, planner=planner)


def is_readable(turn: Turn, policy: PolicyName) -> bool:
    """Tell whether what a teacher wrote in a turn as that policy could be read and obeyed.

    It could not where the reply names no action, a call that cannot be read, or a tool that is not
    there.
    """
    call = turn.calls.get(policy)
    if call is None or policy != "planner":
        return call is not None and bool(call.response_ids)
    if turn.action is None:
        return turn.result.error is None
    return not turn.action.tool_name.startswith(NO_TOOL)
