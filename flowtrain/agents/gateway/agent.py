"""The agent `gateway`: trains an external program token by token.

The program needs no knowledge of training. For every rollout the program gets a task, the URL of an
endpoint and a separate key; this process samples the responses and records them under the key.
"""

from __future__ import annotations

import asyncio
import threading

from flowtrain.agents.base import AgentContext
from flowtrain.agents.chat.dialect import Dialect
from flowtrain.agents.deadlines import Cutoff, TurnsEnded
from flowtrain.agents.gateway.programs import Command, Function, Program
from flowtrain.agents.gateway.recorder import Recorder
from flowtrain.agents.gateway.rollout import Outcome, Rollout
from flowtrain.agents.gateway.server import Gateway, new_key
from flowtrain.agents.session import RolloutEnded, Session, SessionAgent
from flowtrain.config import Config
from flowtrain.inference.token_chat import ChatTokenizer
from flowtrain.records import BranchStart, Task, Trajectory, UserError
from flowtrain.tasks.verifiers import COLUMN as VERIFIERS


class GatewayAgent(SessionAgent):
    """The agent of an external program; implements `Agent`. The server starts with the first
    rollout.
    """

    trains = ()

    def __init__(self, context: AgentContext) -> None:
        """Raises UserError for a missing program."""
        super().__init__(context)
        self._options = context.config.gateway
        self._dialect = _dialect(context.config, context.first_policy.tokenizer)
        self._program = _program(context.config)
        self._gateway: Gateway | None = None
        self._lock = threading.Lock()
        self._places = asyncio.Semaphore(self._options.max_programs)

    @staticmethod
    def check(config: Config, tokenizer: ChatTokenizer) -> None:
        """Raises UserError for a missing program, unused options, and a chat template that changes
        replies.
        """
        for key in ("tools", "instructions"):
            if value := getattr(config.agent, key):
                raise UserError(
                    f"agent.{key}={value!r} cannot be combined with agent.name='gateway', whose "
                    "program has its own"
                )
        _dialect(config, tokenizer)
        _program(config).close()

    @property
    def gateway(self) -> Gateway:
        """Return the server, starting it on first use."""
        with self._lock:
            if self._gateway is None:
                self._gateway = Gateway()
            return self._gateway

    async def run(
        self, task: Task, seed: int, cutoff: Cutoff | None = None, start: BranchStart | None = None
    ) -> Trajectory:
        """Wait for a free slot, which does not count as rollout time, then run."""
        if not self._program.is_bounded:
            return await super().run(task, seed, cutoff, start)
        cutoff = cutoff or Cutoff()
        try:
            async with cutoff():
                await self._places.acquire()
        except TurnsEnded:
            return Trajectory(task, (), "", seconds=0.0, seed=seed, truncated="straggler")
        try:
            return await super().run(task, seed, cutoff, start)
        finally:
            self._places.release()

    async def answer(self, session: Session) -> str:
        gateway = self.gateway
        session.must_report = VERIFIERS in session.task.extra
        recorder = Recorder(session, self._dialect, self.context.config.agent.max_result_chars)
        rollout = Rollout(session, recorder, key=new_key())
        with gateway.serving(rollout):
            try:
                outcome = await self._solve(rollout, gateway)
            except RolloutEnded:
                raise
            except Exception:
                # The program may have failed because of what it was answered.
                if reason := rollout.ended or rollout.failure:
                    raise reason from None
                raise
            finally:
                await rollout.close()
        if rollout.failure is not None:
            raise rollout.failure
        session.report(**outcome.reward)
        session.answer_so_far = outcome.answer
        if rollout.ended is not None and rollout.ended.reason != "prompt":
            raise rollout.ended
        return outcome.answer  # where a prompt was too long, the program has found another one

    async def _solve(self, rollout: Rollout, gateway: Gateway) -> Outcome:
        solving = asyncio.ensure_future(self._program.solve(rollout, gateway.base_url))
        try:
            await asyncio.wait({solving}, timeout=rollout.session.left_s())
            if not solving.done():
                raise RolloutEnded("time")
            return solving.result()
        finally:
            solving.cancel()
            await asyncio.wait({solving})  # a command ends its processes while it is cancelled

    def close(self) -> None:
        with self._lock:
            gateway, self._gateway = self._gateway, None
        if gateway is not None:
            gateway.close()
        self._program.close()


def _program(config: Config) -> Program:
    options = config.gateway
    if options.command:
        return Command(options)
    if options.function:
        return Function(options)
    raise UserError("agent.name='gateway' needs gateway.command or gateway.function")


def _dialect(config: Config, tokenizer: ChatTokenizer) -> Dialect:
    return Dialect.of(config, tokenizer, "agent.name='gateway'")
