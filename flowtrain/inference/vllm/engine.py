"""Sampling by vLLM in separate processes, which are replaced when they die.

An `AsyncLLMRunner` is one running vLLM. When its process dies, or does not answer for
`runner.HANG_S` seconds, the `Supervisor` starts the next one, which loads the same version from the
store, and requests without an answer are sent once more.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from flowtrain.config import Vllm
from flowtrain.inference.protocol import EngineError
from flowtrain.inference.requests import Decodes, answer, check_request
from flowtrain.inference.vllm.process import VllmModel, check_installed
from flowtrain.inference.vllm.runner import LOAD_S, AsyncLLMRunner, EngineDied
from flowtrain.records import Call, FinishReason, Sample, Sampling
from flowtrain.utils.errors import on_failure
from flowtrain.utils.threads import Ended, background, within

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Supervisor:
    """Keeps one runner alive. Starting a runner takes long, so it happens on a thread, and requests
    that need the runner wait for it.
    """

    def __init__(self, start: Callable[[], AsyncLLMRunner]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._is_closed = False
        self.num_restarts = 0
        self.runner = self._start_next()
        """The current runner, or what kept it from starting."""

    def replace(self, dead: AsyncLLMRunner, reason: str) -> None:
        """Start the next runner, once: every request that finds the current one dead calls this."""
        with self._lock:
            current = self.runner
            if self._is_closed or not current.done() or current.exception():
                return
            if current.result() is not dead:
                return
            self.num_restarts += 1
            _log.warning("restart %d: %s", self.num_restarts, reason)
            dead.kill()
            self.runner = self._start_next()

    def close(self) -> None:
        """End the runner; one that is starting ends as soon as it has, and no other is started."""
        with self._lock:
            self._is_closed = True
            if self.runner.done():
                _end(self.runner)
            else:
                self.runner.add_done_callback(_end)

    def _start_next(self) -> Future[AsyncLLMRunner]:
        return background(self._start, "engine-start")


def _end(runner: Future[AsyncLLMRunner]) -> None:
    if runner.exception() is None:
        runner.result().close()


class VllmEngine:
    """See `Engine`. Weights change in place while requests are under way.

    Where the model has adapters, each `policy` has one; `AdapterEngine` is the engine of one.
    """

    def __init__(self, model: VllmModel, tokenizer: Decodes, options: Vllm) -> None:
        """Starts vLLM and waits for it. Raises UserError when it is missing, too old, or cannot run
        the model in the memory it may use.
        """
        check_installed()
        self._model = model
        self._tokenizer = tokenizer
        self._options = options
        self._folder = tempfile.TemporaryDirectory(prefix="flowtrain-vllm-")
        if not isinstance(model.source, str):
            model.source.save_pretrained(self._folder.name)
            self._model = replace(model, source=self._folder.name)
        self._versions: dict[str, int] = {}
        """By policy; one that has loaded nothing is left out."""
        self.num_requeued = 0
        """Requests that were sent once more because vLLM died or hung."""
        self._load_metrics: dict[str, dict[str, float]] = {}
        """By policy."""
        self.supervisor = Supervisor(self._start)
        with on_failure(self.close):
            self.supervisor.runner.result()

    @property
    def version(self) -> int:
        return self.version_of("")

    def version_of(self, policy: str) -> int:
        return self._versions.get(policy, 0)

    @property
    def max_tokens(self) -> int:
        return self._model.max_tokens

    def metrics(self, policy: str = "") -> dict[str, float]:
        return {
            **self._load_metrics.get(policy, {}),
            "engine_restarts": self.supervisor.num_restarts,
            "engine_requeued": self.num_requeued,
        }

    def close(self) -> None:
        self.supervisor.close()
        self._folder.cleanup()

    def load(self, version: int, policy: str = "") -> None:
        """Raises StoreError when the store does not lead to the version: the engine then goes on
        with the version that it had.
        """
        self._load_metrics[policy] = self._with_restart(
            lambda runner: runner.load(version, policy), f"it loaded version {version}"
        )
        self._versions[policy] = version

    def sleep(self) -> None:
        """Move vLLM's weights to the host and drop its cache until the next load or request, if
        vllm.sleep is set.
        """
        if self._options.sleep:
            self._with_restart(AsyncLLMRunner.sleep, "it went to sleep")

    def _with_restart(self, call: Callable[[AsyncLLMRunner], T], action: str) -> T:
        """Return the result of a call, repeated on the next runner if the first one dies."""
        error: Exception | None = None
        for _ in range(2):
            runner = self.supervisor.runner.result()
            try:
                return call(runner)
            except EngineDied as died:
                error = died
                self.supervisor.replace(runner, str(died))
        raise EngineError(f"vLLM died twice while {action}") from error

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, policy: str = ""
    ) -> Call:
        """Raises UserError for a request that `check_request` refuses, EngineError when vLLM died
        over it twice.
        """
        check_request(prompt_ids, sampling, self.max_tokens)
        deadline = time.monotonic() + sampling.deadline_s
        try:
            return await self._ask(
                lambda runner: runner.generate(prompt_ids, sampling, deadline, policy),
                deadline,
                f"a prompt of {len(prompt_ids)} tokens",
            )
        except TimeoutError:
            labels = [(self.version_of(policy), 0)]
            return answer(prompt_ids, (), (), labels=labels, reason=FinishReason.DEADLINE)

    async def score(
        self, samples: Sequence[Sample], temperature: float, policy: str = ""
    ) -> tuple[int, list[tuple[float, ...]]]:
        """See `Scorer`; at temperature 1. Raises EngineError when vLLM died over it twice."""
        assert temperature == 1.0, "vLLM tells log-probs of prompts at temperature 1"
        timeout_s = LOAD_S
        deadline = time.monotonic() + timeout_s
        try:
            return await self._ask(
                lambda runner: runner.score(samples, deadline, policy),
                deadline,
                f"scoring {len(samples)} responses",
            )
        except TimeoutError:
            message = f"vLLM did not score within {timeout_s:g} s"
            raise EngineError(message) from None

    async def _ask(
        self, ask: Callable[[AsyncLLMRunner], Awaitable[T]], deadline: float, subject: str
    ) -> T:
        """Return the answer to a request, which is sent once more if vLLM dies or hangs over it."""
        error: Exception | None = None
        for _ in range(2):
            self.num_requeued += error is not None
            runner = await within(self.supervisor.runner, deadline)
            try:
                return await ask(runner)
            except (EngineDied, Ended) as died:
                error = died
                self.supervisor.replace(runner, str(died))
        raise EngineError(f"vLLM died twice over {subject}") from error

    def _start(self) -> AsyncLLMRunner:
        errors = Path(self._folder.name) / "errors.log"
        runner = AsyncLLMRunner(self._model, self._options, self._tokenizer, errors)
        with on_failure(runner.kill):
            runner.start()
            for policy, version in self._versions.items():
                runner.load(version, policy)
        return runner


@dataclass(slots=True)
class AdapterEngine:
    """One policy of a `VllmEngine` whose policies are adapters of one model; see `Engine`.

    A load of one policy pauses the requests of all, and only its own change.
    """

    shared: VllmEngine
    policy: str
    open_policies: set[str]
    """Policies of the shared engine that are not closed, which the last one to close ends."""

    @classmethod
    def start(cls, model: VllmModel, tokenizer: Decodes, options: Vllm) -> dict[str, AdapterEngine]:
        """Start one vLLM for all policies of the model; raises as `VllmEngine` does."""
        shared, policies = VllmEngine(model, tokenizer, options), set(model.adapter_stores)
        return {policy: cls(shared, policy, policies) for policy in model.adapter_stores}

    @property
    def version(self) -> int:
        return self.shared.version_of(self.policy)

    @property
    def max_tokens(self) -> int:
        return self.shared.max_tokens

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Call:
        return await self.shared.generate(prompt_ids, sampling, self.policy)

    async def score(
        self, samples: Sequence[Sample], temperature: float
    ) -> tuple[int, list[tuple[float, ...]]]:
        return await self.shared.score(samples, temperature, self.policy)

    def load(self, version: int) -> None:
        self.shared.load(version, self.policy)

    def sleep(self) -> None:
        """All policies sleep until the next load of one of them, or the next request to one."""
        self.shared.sleep()

    def metrics(self) -> dict[str, float]:
        return self.shared.metrics(self.policy)

    def close(self) -> None:
        """End vLLM with the last of its policies."""
        if self.policy in self.open_policies:
            self.open_policies.remove(self.policy)
            if not self.open_policies:
                self.shared.close()
