"""One running vLLM: an `AsyncLLM` on an event loop of its own thread, because every `collect` makes
a new loop.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import logging
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from flowtrain.config import Vllm
from flowtrain.engines.requests import Decodes, completion, kept_sets, stop_place
from flowtrain.engines.vllm_process import (
    ERROR_FILE,
    VllmModel,
    check_version,
    children,
    engine_args,
    environment,
    explain,
    without_main,
)
from flowtrain.types import Completion, FinishReason, Sampling, UserError
from flowtrain.utils.errors import user_error
from flowtrain.utils.threads import LoopThread
from flowtrain.weights.manifest import StoreError

T = TypeVar("T")

_log = logging.getLogger(__name__)
_ABORT_S = 5.0
"""Seconds until an abort is given up and its request answered without tokens."""
_CLOSE_S = 10.0
"""Seconds for vLLM to end by itself."""


class EngineDied(Exception):
    """A running vLLM has ended, and its requests are lost."""


class AsyncLLMRunner:
    """One running vLLM, which may die; another runner then takes its place. Public methods are for
    any thread, coroutines that begin with an underscore run on the runner's own loop.
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
        self._thread = LoopThread("vllm-engine")
        self._names = itertools.count()
        self._salt = "0"
        self._is_connected = False
        self._is_loading = False
        self._is_asleep = False
        self._labels: dict[str, list[tuple[int, int]]] = {}
        """(version, first token) of each span, by the name of a request under way."""
        self._aborts: set[asyncio.Task[None]] = set()
        self._label: int | None = None
        """The version that is sampled."""

    def start(self) -> None:
        """Start vLLM and wait for it. Raises UserError, or RuntimeError with vLLM's own reason."""
        before = children()
        self._errors.unlink(missing_ok=True)
        timeout_s = self._options.start_timeout_s
        try:
            self._thread.run(self._start(), time.monotonic() + timeout_s)
        except TimeoutError:
            problem = f"vLLM did not start within vllm.start_timeout_s={timeout_s}"
            raise UserError(problem) from None
        except UserError:
            raise
        except Exception as error:  # vLLM's own, of any class
            raise explain(error, self._errors) from error
        finally:
            self._processes = children() - before

    def kill(self) -> None:
        """End at once, without waiting; requests under way fail."""
        for process in self._processes:
            process.kill()
        self._thread.stop(self._shut_down)

    def close(self) -> None:
        """End in order, with a deadline."""
        self._thread.close(self._shut_down, _CLOSE_S)
        self.kill()

    def load(self, version: int) -> dict[str, float]:
        """Load a version of the weights and return the metrics of the update; wakes vLLM up."""
        return self._run(self._load(version), f"version {version} was not loaded")

    def sleep(self) -> None:
        """Give weights and cache up until the next `load`; no request may be under way."""
        self._run(self._sleep(), "it did not go to sleep")

    def _run(self, work: Coroutine[Any, Any, T], failure: str) -> T:
        """Run `work` on the loop. Raises EngineDied("failure: reason") when the work fails or takes
        too long; a UserError passes through.
        """
        timeout_s = self._options.load_timeout_s
        try:
            return self._thread.run(work, time.monotonic() + timeout_s)
        except UserError:
            raise
        except Exception as error:
            self.kill()
            reason = str(error)
            if isinstance(error, TimeoutError):
                reason = f"not within vllm.load_timeout_s={timeout_s}"
            raise EngineDied(f"{failure}: {reason}") from error

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, deadline: float
    ) -> Completion:
        """Sample one completion, for a caller on any loop.

        Raises:
            TimeoutError: not even an abort was answered.
            EngineDied: vLLM has ended. `Ended`: its thread has.
        """
        if time.monotonic() >= deadline:
            raise TimeoutError
        return await self._thread.call(
            self._sample(prompt_ids, sampling, deadline), deadline + _ABORT_S
        )

    async def _start(self) -> None:
        variables = {ERROR_FILE: str(self._errors), **self._model.environment}
        with environment(variables), without_main():
            self._llm = _make_llm(self._model, self._options)
        # Otherwise every full collection from now on would walk all that vLLM has imported, which
        # takes a third of a second.
        gc.freeze()
        # One token shows whether this model runs at all, before anything depends on it.
        await self._sample([0], Sampling(1), time.monotonic() + self._options.start_timeout_s)
        self._watcher = asyncio.create_task(self._watch())

    async def _shut_down(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        if self._llm is not None:
            self._llm.shutdown(timeout=1)

    async def _watch(self) -> None:
        """Kill a vLLM that does not answer: its requests fail and go to the next runner."""
        patience = self._options.hang_timeout_s
        while True:
            await asyncio.sleep(patience / 4)
            if self._is_loading:  # has a deadline of its own
                continue
            try:
                async with asyncio.timeout(patience):
                    await self._llm.is_paused()
            except TimeoutError:
                if not self._is_loading:
                    problem = "vLLM has not answered for vllm.hang_timeout_s=%s and is killed"
                    _log.error(problem, patience)
                    self.kill()
                    return
            except Exception as error:  # noqa: BLE001  # requests fail with it, too
                _log.error("vLLM does not answer any more: %s", error)
                return

    async def _load(self, version: int) -> dict[str, float]:
        """Fetch while vLLM samples; then requests wait, keep their tokens, and go on with the new
        weights.

        vLLM drops their KV cache and computes it again, so that the new weights alone sample every
        later token.
        """
        llm = self._llm
        self._is_loading = True
        try:
            if self._is_asleep:  # an update would write to memory that is not there
                await llm.wake_up()
                self._is_asleep = False
            await self._connect()
            await llm.start_weight_update(
                **_accepted(llm.start_weight_update, is_checkpoint_format=False)
            )
            await self._update(version, stage=True)
            while not all(await llm.collective_rpc("staged_weights")):
                await asyncio.sleep(0.01)
            started = time.monotonic()
            await llm.pause_generation(mode="keep", clear_cache=True)
            try:
                await self._update(version)
            except Exception as error:
                held = [report["version"] for report in await llm.collective_rpc("held_weights")]
                if self._label is not None and held != [self._label] * len(held):
                    raise
                await llm.resume_generation()
                raise StoreError(f"vLLM stays at version {self._label}: {error}") from error
            await llm.finish_weight_update(
                **_accepted(llm.finish_weight_update, weight_version=str(version))
            )
            self._salt = f"{version}.{time.monotonic_ns()}"
            self._label = version
            await self._begin_spans(version)
            await llm.resume_generation()
            pause_s = time.monotonic() - started
            report, *_ = await llm.collective_rpc("held_weights")
            metrics = {key: value for key, value in report.items() if key.startswith("weights_")}
            return {**metrics, "weights_pause_s": pause_s}
        finally:
            self._is_loading = False

    async def _sleep(self) -> None:
        if not self._is_asleep:  # where nodes sample, many steps pass between two loads
            await self._llm.sleep(level=1)
        self._is_asleep = True

    async def _connect(self) -> None:
        """Tell vLLM where the store is, once there is a version in it."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        info = {"location": self._model.store, "verify_every": self._model.verify_every}
        if not self._is_connected:
            request = WeightTransferInitRequest(init_info=info)
            with user_error("vLLM cannot take its weights from the store", Exception):
                await self._llm.init_weight_transfer_engine(request)
            self._is_connected = True

    async def _update(self, version: int, stage: bool = False) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        info = {"version": version, "stage": stage}
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))

    def _abort(self, llm: Any, name: str) -> None:
        """End a request with the tokens that it has. Repeats itself, because vLLM ignores the abort
        of a request that it is still taking in.
        """
        if name in self._labels:
            loop = asyncio.get_running_loop()
            task = loop.create_task(llm.abort(name))
            self._aborts.add(task)  # the loop itself keeps no reference
            task.add_done_callback(self._aborts.discard)
            loop.call_later(0.05, self._abort, llm, name)

    async def _begin_spans(self, version: int) -> None:
        """Note how many tokens each request has at the update; a request that vLLM is still taking
        in has none.
        """
        states = self._llm.output_processor.request_states
        before: dict[str, int] = {}
        while True:
            counts = {
                state.external_req_id: state.detokenizer.num_output_tokens()
                for state in states.values()
            }
            now = {name: counts.get(name, 0) for name in self._labels}
            if now == before:
                break
            before = now  # vLLM may still be handing out what it sampled before the pause
            await asyncio.sleep(0.001)
        for name, count in before.items():
            self._labels[name].append((version, count))

    async def _sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, deadline: float
    ) -> Completion:
        from vllm import TokensPrompt

        llm = self._llm
        name = str(next(self._names))
        prompt = TokensPrompt(prompt_token_ids=list(prompt_ids), cache_salt=self._salt)
        params = _params(sampling, self._model.stop_ids, llm.model_config.get_vocab_size())
        self._labels[name] = [(self._label or 0, 0)]
        loop = asyncio.get_running_loop()
        timer = loop.call_later(deadline - time.monotonic(), self._abort, llm, name)
        ids: list[int] = []
        logprobs: list[float] = []
        kept: list[list[int]] | None = [] if sampling.is_truncated else None
        stopped_at = 0
        try:
            async for output in llm.generate(prompt, params, name):
                (part,) = output.outputs
                ids += part.token_ids
                if flat := part.logprobs:
                    logprobs += [flat.logprobs[start] for start in flat.start_indices]
                    if kept is not None:
                        kept += kept_sets(flat)
                if sampling.stop_strings and not stopped_at:
                    num_before = len(ids) - len(part.token_ids)
                    stopped_at = stop_place(ids, num_before, sampling.stop_strings, self._tokenizer)
                    if stopped_at and part.finish_reason is None:
                        await llm.abort(name)
            end = stopped_at or len(ids)
            return completion(
                ids[:end],
                logprobs[:end],
                labels=self._labels[name],
                reason=FinishReason.STOP if stopped_at else _REASONS[part.finish_reason],
                kept=None if kept is None else kept[:end],
            )
        except Exception as error:
            if llm.errored:
                raise EngineDied("its process has ended") from error
            raise
        finally:
            timer.cancel()
            del self._labels[name]


_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.DEADLINE,
}


def _make_llm(model: VllmModel, options: Vllm) -> Any:
    import vllm
    from vllm.v1.engine.async_llm import AsyncLLM

    check_version(vllm.__version__)
    return AsyncLLM.from_engine_args(vllm.AsyncEngineArgs(**engine_args(model, options)))


def _params(sampling: Sampling, stop_ids: frozenset[int], num_vocab: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        # Those of the sampled token alone, or of all tokens that could be sampled: more than top_k,
        # because vLLM keeps tokens that tie with the last.
        logprobs=min(2 * sampling.top_k + 8, num_vocab) if sampling.is_truncated else 0,
        flat_logprobs=True,
        ignore_eos=True,  # our stop ids count, not those of the model's folder
        stop_token_ids=[] if sampling.ignore_end else sorted(stop_ids),
        detokenize=False,
        # A message per token costs vLLM a seventh of its speed.
        output_kind=RequestOutputKind.DELTA
        if sampling.stop_strings
        else RequestOutputKind.FINAL_ONLY,
    )


def _accepted(function: Any, **options: Any) -> dict[str, Any]:
    """Select the options that this version of vLLM knows."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in known}
