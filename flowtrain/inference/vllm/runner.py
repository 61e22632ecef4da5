"""One running vLLM: an `AsyncLLM` on an event loop of its own thread. Its start blocks for minutes,
which must hold up no rollout, and what rollouts' code blocks must not pass for its own silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import logging
import os
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from flowtrain.config import Vllm
from flowtrain.inference.requests import Decodes, answer, kept_sets, stop_place
from flowtrain.inference.vllm.process import (
    ERROR_FILE,
    VllmModel,
    check_version,
    children,
    engine_args,
    environment,
    explain,
    sampling_args,
    without_main,
)
from flowtrain.inference.vllm.routes import Sizes, routes_of
from flowtrain.inference.vllm.sampler_entropies import decode
from flowtrain.inference.vllm.updates import Weights, policies
from flowtrain.records import Call, FinishReason, Sample, Sampling, UserError
from flowtrain.utils.threads import LoopThread
from flowtrain.weights.format.manifest import StoreError

T = TypeVar("T")

_log = logging.getLogger(__name__)
START_S = 600.0
"""Seconds until vLLM must be ready."""
LOAD_S = 300.0
"""Seconds for a weight update, or for scores; then vLLM is restarted."""
FIRST_LOAD_S = 3600.0
"""Seconds for the first, which reads and checks every weight and proves where the model has it."""
HANG_S = 120.0
"""Seconds without a sign of life; then vLLM is restarted."""
_ABORT_S = 5.0
"""Seconds until an abort is given up and its request answered without tokens."""
_CLOSE_S = 10.0
"""Seconds for vLLM to end by itself."""


class EngineDied(Exception):
    """A running vLLM has ended, and its requests are lost."""


class AsyncLLMRunner:
    """One running vLLM, which may die; another runner then takes its place. Public methods are for
    any thread, coroutines that begin with an underscore run on the runner's own loop.

    A policy is named by its adapter; "" is the policy of an engine without adapters.
    """

    def __init__(self, model: VllmModel, options: Vllm, tokenizer: Decodes, errors: Path) -> None:
        """`errors`: the file where vLLM's processes write what went wrong."""
        self._model = model
        self._options = options
        self._tokenizer = tokenizer
        self._errors = errors
        self._llm: Any = None
        self._watcher: asyncio.Task[None] | None = None
        self._processes: set[Any] = set()
        self._prior: set[Any] | None = None
        """Processes of other vLLMs, while this one gets its own."""
        self._thread = LoopThread("vllm-engine")
        self._names = itertools.count()
        self._weights: dict[str, Weights] = {}
        """By policy."""
        self._loading = asyncio.Lock()
        self._is_asleep = False
        self._has_seeds = True
        """Each request has its own random generator."""
        self._route_sizes: Sizes | None = None
        """None where routes are not recorded."""
        self._aborts: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start vLLM and wait for it. Raises UserError, or RuntimeError with vLLM's own reason."""
        self._errors.unlink(missing_ok=True)
        timeout_s = START_S
        try:
            self._thread.run(self._start(), timeout_s)
        except TimeoutError:
            problem = f"vLLM did not start within {timeout_s:g} s"
            raise UserError(problem) from None
        except UserError:
            raise
        except Exception as error:  # vLLM's own, of any class
            raise explain(error, self._errors) from error
        finally:
            if (prior := self._prior) is not None:  # it still starts; no other one can meanwhile
                self._processes = children() - prior

    def kill(self) -> None:
        """End at once, without waiting; requests under way fail."""
        for process in self._processes:
            process.kill()
        self._thread.stop(self._shut_down)

    def close(self) -> None:
        """End in order, with a deadline."""
        self._thread.close(self._shut_down, _CLOSE_S)
        self.kill()

    def load(self, version: int, policy: str = "") -> dict[str, float]:
        """Load a version of the weights and return the metrics of the update; wakes vLLM up."""
        timeout_s = FIRST_LOAD_S if self._weights[policy].label is None else LOAD_S
        failure = f"version {version} was not loaded"
        return self._run(self._load(version, policy), failure, timeout_s)

    def sleep(self) -> None:
        """Give weights and cache up until the next load or request; none may be under way."""
        self._run(self._sleep(), "it did not go to sleep", LOAD_S)

    def _run(self, work: Coroutine[Any, Any, T], failure: str, timeout_s: float) -> T:
        """Run `work` on the loop. Raises EngineDied("failure: reason") when the work fails or takes
        too long; a UserError passes through.
        """
        try:
            return self._thread.run(work, timeout_s)
        except UserError:
            raise
        except Exception as error:  # vLLM's own, of any class: it may hold half a version
            self.kill()
            reason = str(error)
            if isinstance(error, TimeoutError):
                reason = f"not within {timeout_s:g} s"
            raise EngineDied(f"{failure}: {reason}") from error

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, deadline: float, policy: str = ""
    ) -> Call:
        """Sample one response, for a caller on any loop.

        Raises:
            TimeoutError: not even an abort was answered.
            EngineDied: vLLM has ended. `Ended`: its thread has.
        """
        if time.monotonic() >= deadline:
            raise TimeoutError
        return await self._thread.call(
            self._sample(prompt_ids, sampling, deadline, policy), deadline + _ABORT_S
        )

    async def score(
        self, samples: Sequence[Sample], deadline: float, policy: str = ""
    ) -> tuple[int, list[tuple[float, ...]]]:
        """Score responses at temperature 1, for a caller on any loop; raises as `generate` does."""
        return await self._thread.call(self._score(samples, policy), deadline)

    async def _start(self) -> None:
        variables = {ERROR_FILE: str(self._errors), **self._model.environment}
        with environment(variables), without_main():
            self._prior = children()
            try:
                self._llm = _make_llm(self._model, self._options)
            finally:
                self._processes, self._prior = children() - self._prior, None
        self._weights = policies(self._llm, self._model)
        # For every token of a seeded request vLLM's older runner starts a kernel of its own.
        is_v2 = getattr(self._llm.vllm_config, "use_v2_model_runner", False)
        is_invariant = os.environ.get("VLLM_BATCH_INVARIANT") == "1"
        self._has_seeds = is_v2 or is_invariant or self._model.is_cpu
        if self._model.records_entropies:
            await self._llm.collective_rpc("record_entropies")
        if self._model.records_routes:
            self._route_sizes, *_ = await self._llm.collective_rpc("record_routes")
        # Otherwise every full collection from now on would walk all that vLLM has imported, which
        # takes a third of a second.
        gc.freeze()
        # One token shows whether this model runs at all, before anything depends on it.
        deadline = time.monotonic() + START_S
        await self._sample([0], Sampling(1), deadline, next(iter(self._weights)))
        self._watcher = asyncio.create_task(self._watch())

    async def _shut_down(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        if self._llm is not None:
            self._llm.shutdown(timeout=1)

    async def _watch(self) -> None:
        """Kill a vLLM that does not answer: its requests fail and go to the next runner."""
        patience = HANG_S
        while True:
            await asyncio.sleep(patience / 4)
            if self._loading.locked():  # has a deadline of its own
                continue
            try:
                async with asyncio.timeout(patience):
                    await self._llm.is_paused()
            except TimeoutError:
                if not self._loading.locked():
                    problem = "vLLM has not answered for %g s and is killed"
                    _log.error(problem, patience)
                    self.kill()
                    return
            except Exception as error:  # noqa: BLE001  # requests fail with it, too
                _log.error("vLLM does not answer any more: %s", error)
                return

    async def _load(self, version: int, policy: str) -> dict[str, float]:
        """Fetch while vLLM samples; then requests wait, keep their tokens, and go on with the new
        weights.

        vLLM drops their KV cache and computes it again, so that the new weights alone sample every
        later token. That of other policies' requests is computed again as it was.
        """
        llm, weights = self._llm, self._weights[policy]
        updates = weights.updates
        assert updates is not None, "a frozen policy has no versions"
        async with self._loading:
            await self._wake_up()  # an update would write to memory that is not there
            prefix = f"vLLM stays at version {weights.label}"
            try:
                await updates.stage(version)
            except StoreError as error:
                raise StoreError(f"{prefix}: {error}") from error
            started = time.monotonic()
            await llm.pause_generation(mode="keep", clear_cache=True)
            try:
                await updates.apply(version)
            except Exception as error:  # of any worker: what they hold tells whether vLLM can go on
                held = await updates.held()
                if weights.label is not None and held != [weights.label] * len(held):
                    raise
                await llm.resume_generation()
                raise StoreError(f"{prefix}: {error}") from error
            await updates.finish(version)
            # Before generation resumes: a prompt must not reuse keys of the old weights.
            weights.salt = f"{policy}.{version}.{time.monotonic_ns()}"
            weights.label = version
            if weights.adapter is not updates.adapter:
                weights.bare |= weights.labels.keys()
            weights.adapter = updates.adapter
            await weights.begin_spans(llm, version)
            await llm.resume_generation()
            pause_s = time.monotonic() - started
            return {**await updates.metrics(), "weights_pause_s": pause_s}

    async def _sleep(self) -> None:
        async with self._loading:
            if not self._is_asleep:  # where nodes sample, many steps pass between two loads
                await self._llm.sleep(level=1)
            self._is_asleep = True

    async def _wake_up(self) -> None:
        """Wake vLLM up if it sleeps; `_loading` is held."""
        if self._is_asleep:
            await self._llm.wake_up()
            self._is_asleep = False

    async def _ensure_awake(self) -> None:
        """Wake up for a request: an engine whose weights never change is never loaded."""
        if self._is_asleep:
            async with self._loading:
                await self._wake_up()

    def _abort(self, llm: Any, name: str) -> None:
        """End a request with the tokens that it has. Repeats itself, because vLLM ignores the abort
        of a request that it is still taking in.
        """
        if any(name in weights.labels for weights in self._weights.values()):
            loop = asyncio.get_running_loop()
            task = loop.create_task(llm.abort(name))
            self._aborts.add(task)  # the loop itself keeps no reference
            task.add_done_callback(self._aborts.discard)
            loop.call_later(0.05, self._abort, llm, name)

    async def _sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, deadline: float, policy: str
    ) -> Call:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        await self._ensure_awake()
        llm, weights = self._llm, self._weights[policy]
        name = str(next(self._names))
        prompt = TokensPrompt(prompt_token_ids=list(prompt_ids), cache_salt=weights.salt)
        params = SamplingParams(
            **sampling_args(sampling, self._model.stop_ids, llm.model_config.get_vocab_size()),
            seed=sampling.seed if self._has_seeds else None,
            # A message per token costs vLLM a seventh of its speed.
            output_kind=RequestOutputKind.DELTA
            if sampling.stop_strings
            else RequestOutputKind.FINAL_ONLY,
        )
        weights.labels[name] = [(weights.label or 0, 0)]
        loop = asyncio.get_running_loop()
        timer = loop.call_later(deadline - time.monotonic(), self._abort, llm, name)
        ids: list[int] = []
        logprobs: list[float] = []
        kept: list[list[int]] | None = [] if sampling.is_truncated else None
        entropies: list[float] = []
        stopped_at = 0
        with ExitStack() as cleanup:
            cleanup.callback(weights.labels.pop, name)
            cleanup.callback(weights.bare.discard, name)
            cleanup.callback(timer.cancel)
            cleanup.enter_context(_unless_dead(llm))
            async for output in llm.generate(prompt, params, name, lora_request=weights.adapter):
                (part,) = output.outputs
                ids += part.token_ids
                if flat := part.logprobs:
                    logprobs += [flat.logprobs[start] for start in flat.start_indices]
                    if self._model.records_entropies:
                        entropies += [decode(flat.ranks[start]) for start in flat.start_indices]
                    if kept is not None:
                        kept += kept_sets(flat)
                if sampling.stop_strings and not stopped_at:
                    num_before = len(ids) - len(part.token_ids)
                    stopped_at = stop_place(ids, num_before, sampling.stop_strings, self._tokenizer)
                    if stopped_at and part.finish_reason is None:
                        await llm.abort(name)
            end = stopped_at or len(ids)
            call = answer(
                prompt_ids,
                ids[:end],
                logprobs[:end],
                labels=weights.labels[name],
                reason=FinishReason.STOP if stopped_at else _REASONS[part.finish_reason],
                kept=None if kept is None else kept[:end],
                entropies=entropies[:end],
            )
        # Only now, because an update counts the tokens of requests that have a label.
        if self._route_sizes and call.response_ids:
            with _unless_dead(llm):
                sizes, num_tokens = self._route_sizes, len(prompt_ids) + end - 1
                routes = await routes_of(llm, name, part, num_tokens, sizes)
            call = replace(call, routes=routes)
        return call

    async def _score(
        self, samples: Sequence[Sample], policy: str
    ) -> tuple[int, list[tuple[float, ...]]]:
        """Score until no update of the weights came in between."""
        await self._ensure_awake()
        weights = self._weights[policy]
        while True:
            version = weights.label
            score = functools.partial(self._prompt_logprobs, weights)
            logprobs = await asyncio.gather(*map(score, samples))
            if version == weights.label and not self._loading.locked():
                return version or 0, logprobs

    async def _prompt_logprobs(self, weights: Weights, sample: Sample) -> tuple[float, ...]:
        """Return log-probs of a response, which vLLM reads as the end of a prompt and then samples
        once more: the last of all positions has no room for that, its token keeps the sampler's.
        """
        from vllm import SamplingParams, TokensPrompt

        ids = [*sample.prompt_ids, *sample.response_ids][: self._model.max_tokens - 1]
        prompt = TokensPrompt(prompt_token_ids=ids, cache_salt=weights.salt)
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, flat_logprobs=True)
        with _unless_dead(llm := self._llm):
            stream = llm.generate(
                prompt, params, str(next(self._names)), lora_request=weights.adapter
            )
            outputs = [out async for out in stream]
        (flat,) = filter(None, (out.prompt_logprobs for out in outputs))
        logprobs = [flat.logprobs[i] for i in flat.start_indices[len(sample.prompt_ids) :]]
        return (*logprobs, *sample.logprobs[len(logprobs) :])


@contextlib.contextmanager
def _unless_dead(llm: Any) -> Iterator[None]:
    """Let errors of requests to a vLLM that has ended be EngineDied."""
    try:
        yield
    except Exception as error:  # of any class: vLLM itself tells whether it has ended
        if llm.errored:
            raise EngineDied("its process has ended") from error
        raise


_ENDS = FinishReason.STOP, FinishReason.LENGTH, FinishReason.DEADLINE
_REASONS = dict(zip(("stop", "length", "abort"), _ENDS, strict=True))


def _make_llm(model: VllmModel, options: Vllm) -> Any:
    import vllm
    from vllm.v1.engine.async_llm import AsyncLLM

    check_version(vllm.__version__)
    return AsyncLLM.from_engine_args(vllm.AsyncEngineArgs(**engine_args(model, options)))
