"""A rollout behind the gateway: its key, the requests under the key, and its end.

The rollout lives on the event loop that collects, the server on a loop of its own. All that is
asked crosses over here, and nothing is left hanging when either of the two ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flowtrain.agents.gateway.plain import ChatRequest, Refusal, Reply
from flowtrain.agents.gateway.recorder import Recorder
from flowtrain.agents.session import RolloutEnded, Session
from flowtrain.records import Task
from flowtrain.records.checks import part_problem

T = TypeVar("T")

MAX_ANSWER = 1 << 20
"""Characters of an answer."""
_MAX_KEPT = 64
"""Answers that are kept for retries."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a rollout as its program tells it."""

    answer: str
    reward: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward; {} where the program leaves that to others."""

    @classmethod
    def of(cls, value: object) -> Outcome:
        """Read an answer, or {"answer": ..., "reward": number or parts}; else raise ValueError."""
        if isinstance(value, Outcome):
            return value
        if not isinstance(value, Mapping):
            return cls(_answer(value))
        if unknown_keys := [key for key in value if key not in ("answer", "reward")]:
            raise ValueError(f"{str(unknown_keys[0])[:100]!r} is neither answer nor reward")
        reward = value.get("reward")
        if reward is None:
            return cls(_answer(value.get("answer", "")))
        parts = reward if isinstance(reward, Mapping) else {"reward": reward}
        return cls(_answer(value.get("answer", "")), _checked_reward(parts))


def _answer(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the answer is a {type(value).__name__}, not a text")
    if len(value) > MAX_ANSWER:
        raise ValueError(f"the answer has more than {MAX_ANSWER} characters")
    return value


def _checked_reward(parts: Mapping[Any, Any]) -> dict[str, float]:
    for name, part in parts.items():
        is_number = isinstance(part, int | float) and not isinstance(part, bool)
        if not isinstance(name, str) or not is_number:
            raise ValueError("the parts of a reward are numbers by name")
    numbers = {name: float(part) for name, part in parts.items()}
    if problem := "a reward has a part" if not numbers else part_problem(numbers):
        raise ValueError(problem)
    return numbers


@dataclass(slots=True)
class _Attempt:
    """A response that is sampled or was, for all requests that ask for it."""

    task: asyncio.Task[Reply]
    num_waiting: int = 0

    @property
    def is_lost(self) -> bool:
        """Return whether it has no response and will have none."""
        if not self.task.done():
            return self.task.cancelling() > 0
        return self.task.cancelled() or self.task.exception() is not None


class Rollout:
    """A rollout whose program works."""

    def __init__(self, session: Session, recorder: Recorder, *, key: str) -> None:
        self.session = session
        self.recorder = recorder
        self.key = key
        self.num_requests = 0
        """Requests that the server reads or answers; its own count."""
        self.ended: RolloutEnded | None = None
        """The limit that a request has met."""
        self.failure: Exception | None = None
        """A failure of the gateway itself, not of the program."""
        self._loop = asyncio.get_running_loop()
        self._attempts: dict[bytes, _Attempt] = {}
        self._lock = threading.Lock()
        self._under_way: set[Future[Any]] = set()
        self._is_over = False

    @property
    def task(self) -> Task:
        return self.session.task

    def ask(
        self, request: ChatRequest, body: bytes, *, retry_of: bytes | None
    ) -> asyncio.Future[Reply]:
        """Answer a request; from any event loop. Raises Refusal once the rollout is over.

        A request that is cancelled is not recorded, unless its response was sampled already or a
        retry waits for it, too.

        Args:
            retry_of: the request may have been made before; under this key, or with the same body
                where it is empty.
        """
        return self._on_loop(self._answer(request, body, retry_of))

    def count(self, request: ChatRequest) -> asyncio.Future[int]:
        """Count the tokens of a prompt; as `ask`."""
        return self._on_loop(self._guarded(self.recorder.count(request)))

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run it on the loop of the rollout. Raises Refusal once that is over."""
        # `close` takes the same lock, so it waits for every request that is let in here.
        with self._lock:
            if self._is_over:
                work.close()
                raise over()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._under_way.add(future)
        future.add_done_callback(self._forget)
        return asyncio.wrap_future(future)

    async def close(self) -> None:
        """Take no more requests, and end those under way."""
        with self._lock:
            self._is_over = True
            under_way = tuple(self._under_way)
        tasks = [attempt.task for attempt in self._attempts.values()]
        for task in tasks:
            task.cancel()
        # Those whose turn has not come yet on this loop are answered, too.
        waiting = map(asyncio.wrap_future, under_way)
        await asyncio.gather(*tasks, *waiting, return_exceptions=True)
        self.recorder.finish()

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._under_way.discard(future)

    async def _answer(self, request: ChatRequest, body: bytes, retry_of: bytes | None) -> Reply:
        """Wait for an attempt, which is cancelled when all that wait have left."""
        if self._is_over:
            raise over()
        attempt = self._attempt(request, body, retry_of)
        attempt.num_waiting += 1
        try:
            # Shielded: a retry of this request may wait for the same response.
            return await asyncio.shield(attempt.task)
        except asyncio.CancelledError:
            if self._is_over:
                raise over() from None
            raise
        finally:
            attempt.num_waiting -= 1
            if not attempt.num_waiting:
                attempt.task.cancel()

    def _attempt(self, request: ChatRequest, body: bytes, retry_of: bytes | None) -> _Attempt:
        """Return the attempt that a retry repeats, or a new one."""
        digest = hashlib.sha256(body).digest()
        name = hashlib.sha256(retry_of).digest() + digest if retry_of else digest
        previous = None if retry_of is None else self._attempts.get(name)
        if previous is not None and not previous.is_lost:
            return previous
        sampling = self._guarded(self.recorder.chat(request))
        attempt = _Attempt(asyncio.get_running_loop().create_task(sampling))
        self._attempts.pop(name, None)  # so that it counts as the youngest
        self._attempts[name] = attempt
        done_keys = [key for key, entry in self._attempts.items() if entry.task.done()]
        for key in done_keys[: max(0, len(self._attempts) - _MAX_KEPT)]:
            del self._attempts[key]
        return attempt

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work of the recorder; raise Refusal in place of what ends the rollout."""
        try:
            return await work
        except RolloutEnded as ended:
            self.ended = self.ended or ended
            raise _refusal(ended) from None
        except Refusal:
            raise
        # Whatever the engine or a template raises ends this rollout, and not the server.
        except Exception as error:
            self.failure = self.failure or error
            _log.debug("a request failed", exc_info=error)
            text = f"the policy failed: {type(error).__name__}"
            raise Refusal(text, status=500, code="policy_failed") from error


def over() -> Refusal:
    return Refusal("the rollout has ended, and this key with it", status=410, code="rollout_ended")


def _refusal(limit: RolloutEnded) -> Refusal:
    if limit.reason == "prompt":
        return Refusal(
            "the messages and the response do not fit into the model's positions",
            param="messages",
            code="context_length_exceeded",
        )
    cause = {"turns": "all turns are used up (agent.max_turns)"}.get(limit.reason, "time is up")
    return Refusal(f"the rollout has ended: {cause}", status=410, code="rollout_ended")
