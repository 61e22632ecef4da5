"""One life of vLLM: an `AsyncLLM` on a thread with an event loop of its own, because every
`collect` makes a new loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import itertools
import logging
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from flowtrain.config import Vllm
from flowtrain.engines.requests import Decodes, completion, kept_sets, stop_place
from flowtrain.engines.supervisor import EngineDied
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
from flowtrain.utils.threads import Caller, Ended, Mailbox
from flowtrain.weights.manifest import StoreError

T = TypeVar("T")

_log = logging.getLogger(__name__)
_ABORT_S, _CLOSE_S = 5.0, 10.0
"""Seconds until an abort is given up and its request answered without tokens, and for vLLM to end
by itself."""


class AsyncLLMRunner:
    """One life of vLLM. Methods are for any thread; coroutines that begin with an underscore run on
    the loop of its own thread.
    """

    def __init__(self, model: VllmModel, options: Vllm, tokenizer: Decodes, errors: Path) -> None:
        self._model, self._options, self._tokenizer, self._errors = (
            model,
            options,
            tokenizer,
            errors,
        )
        self._llm: Any = None
        self._processes: set[Any] = set()
        self._ready: Future[None] = Future()
        self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
        self._mailbox = Mailbox(self._loop)
        self._caller = Caller(self._mailbox)
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)
        self._names = itertools.count()
        self._salt = "0"
        self._is_connected, self._is_loading, self._is_asleep = False, False, False
        self._labels: dict[str, list[tuple[int, int]]] = {}
        """Of requests under way: (version, first token) of each span."""
        self._aborts: set[asyncio.Task[None]] = set()
        self._label: int | None = None
        """The version that is sampled."""

    def start(self) -> None:
        before = children()
        self._errors.unlink(missing_ok=True)
        self._thread.start()
        try:
            self._ready.result(self._options.start_timeout_s)
        except TimeoutError:
            raise UserError(
                f"vLLM did not start within vllm.start_timeout_s={self._options.start_timeout_s}"
            ) from None
        except UserError:
            raise
        except Exception as error:  # vLLM's own, of any class
            raise explain(error, self._errors) from error
        finally:
            self._processes = children() - before
            if not self._ready.done() or self._ready.exception() is not None:
                self.kill()

    def kill(self) -> None:
        """End at once; those that wait for an answer are told."""
        for process in self._processes:
            process.kill()
        self._end()

    def close(self) -> None:
        self._end()
        self._thread.join(_CLOSE_S)
        self.kill()

    def _end(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._stop.set)

    def load(self, version: int) -> dict[str, float]:
        """What the update did. One that sleeps wakes up for it."""
        return self._run_there(self._load(version), f"version {version} was not loaded")

    def sleep(self) -> None:
        """Give weights and cache up until the next `load`; no request may be under way."""
        self._run_there(self._sleep(), "it did not go to sleep")

    def _run_there(self, work: Coroutine[Any, Any, T], failure: str) -> T:
        """On the loop of the other thread; raises EngineDied, with `failure` in its text, when it
        fails or takes too long.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:
            work.close()
            raise EngineDied("its thread has ended") from error
        try:
            return future.result(self._options.load_timeout_s)
        except TimeoutError:
            self.kill()
            raise EngineDied(
                f"{failure} within vllm.load_timeout_s={self._options.load_timeout_s}"
            ) from None
        except (StoreError, UserError):
            raise
        except Exception as error:
            self.kill()
            raise EngineDied(f"{failure}: {error}") from error

    async def answer(
        self, prompt_ids: Sequence[int], sampling: Sampling, deadline: float
    ) -> Completion:
        """Runs on the caller's loop. Raises TimeoutError when not even an abort was answered."""
        if time.monotonic() >= deadline:
            raise TimeoutError
        try:
            return await self._caller.call(
                self._sample(prompt_ids, sampling, deadline), deadline + _ABORT_S
            )
        except Ended as error:
            raise EngineDied(str(error)) from error

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        watch = None
        try:
            with (
                environment({ERROR_FILE: str(self._errors), **self._model.environment}),
                without_main(),
            ):
                self._llm = _make_llm(self._model, self._options)
            # or every full collection from now on would walk all that vLLM has imported: a third of
            # a second
            gc.freeze()
            # One token shows whether this model runs at all, before anything depends on it.
            await self._sample([0], Sampling(1), time.monotonic() + self._options.start_timeout_s)
            watch = asyncio.create_task(self._watch())
            self._ready.set_result(None)
            await self._stop.wait()
        except Exception as error:  # noqa: BLE001  # told to `start`
            self._ready.set_exception(error)
        finally:
            self._mailbox.close()
            if watch is not None:
                watch.cancel()
            if self._llm is not None:
                self._llm.shutdown(timeout=1)
                self._llm = None

    async def _watch(self) -> None:
        """Kill a vLLM that does not answer: that ends its requests, and whoever waits for them
        starts the next one.
        """
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
                    _log.error(
                        "vLLM has not answered for vllm.hang_timeout_s=%s and is killed", patience
                    )
                    self.kill()
                    return
            except Exception as error:  # noqa: BLE001  # whoever waits for an answer gets it too
                _log.error("vLLM does not answer any more: %s", error)
                return

    async def _load(self, version: int) -> dict[str, float]:
        """Fetch while vLLM samples; then requests wait, keep their tokens, and go on with the new
        weights.

        Their KV cache is dropped and computed anew, so that every later token is sampled by the new
        weights alone.
        """
        llm, self._is_loading = self._llm, True
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
            self._salt, self._label = f"{version}.{time.monotonic_ns()}", version
            await self._begin_spans(version)
            await llm.resume_generation()
            pause_s = time.monotonic() - started
            (report, *_) = await llm.collective_rpc("held_weights")
            return {
                **{key: value for key, value in report.items() if key.startswith("weights_")},
                "weights_pause_s": pause_s,
            }
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
            try:
                await self._llm.init_weight_transfer_engine(
                    WeightTransferInitRequest(init_info=info)
                )
            except Exception as error:
                raise UserError(f"vLLM cannot take its weights from the store: {error}") from error
            self._is_connected = True

    async def _update(self, version: int, stage: bool = False) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.update_weights(
            WeightTransferUpdateRequest(update_info={"version": version, "stage": stage})
        )

    def _abort(self, llm: Any, name: str) -> None:
        """End a request with what it has; repeated, because one that vLLM is still taking in does
        not hear it.
        """
        if name in self._labels:
            task = self._loop.create_task(llm.abort(name))
            self._aborts.add(task)  # the loop itself would let go of it
            task.add_done_callback(self._aborts.discard)
            self._loop.call_later(0.05, self._abort, llm, name)

    async def _begin_spans(self, version: int) -> None:
        """Note how many tokens each request has at the update; one that vLLM is still taking in has
        none.
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

        name, llm = str(next(self._names)), self._llm
        prompt = TokensPrompt(prompt_token_ids=list(prompt_ids), cache_salt=self._salt)
        self._labels[name] = [(self._label or 0, 0)]
        timer = self._loop.call_later(deadline - time.monotonic(), self._abort, llm, name)
        ids: list[int] = []
        logprobs: list[float] = []
        kept: list[list[int]] | None = [] if sampling.is_truncated else None
        stopped_at = 0
        try:
            async for output in llm.generate(
                prompt,
                _params(sampling, self._model.stop_ids, llm.model_config.get_vocab_size()),
                name,
            ):
                (part,) = output.outputs
                ids += part.token_ids
                if part.logprobs:
                    logprobs += [
                        part.logprobs.logprobs[start] for start in part.logprobs.start_indices
                    ]
                if part.logprobs and kept is not None:
                    kept += kept_sets(part.logprobs)
                if sampling.stop_strings and not stopped_at:
                    stopped_at = stop_place(
                        ids, len(ids) - len(part.token_ids), sampling.stop_strings, self._tokenizer
                    )
                    if stopped_at and part.finish_reason is None:
                        await llm.abort(name)
            reason = FinishReason.STOP if stopped_at else _REASONS[part.finish_reason]
            end = stopped_at or len(ids)
            return completion(
                ids[:end],
                logprobs[:end],
                self._labels[name],
                reason,
                None if kept is None else kept[:end],
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
        seed=sampling.seed,
        # The sampled token's alone; or those of all that could be sampled: more than top_k, because
        # vLLM keeps what ties with the last.
        logprobs=min(2 * sampling.top_k + 8, num_vocab) if sampling.is_truncated else 0,
        flat_logprobs=True,
        # the tokens that end a response are these, whatever the model's folder says
        ignore_eos=True,
        stop_token_ids=[] if sampling.ignore_end else sorted(stop_ids),
        detokenize=False,
        # A message per token costs vLLM a seventh of its speed.
        output_kind=RequestOutputKind.DELTA
        if sampling.stop_strings
        else RequestOutputKind.FINAL_ONLY,
    )


def _accepted(function: Any, **options: Any) -> dict[str, Any]:
    """The options that this version of vLLM knows."""
    return {
        name: value
        for name, value in options.items()
        if name in inspect.signature(function).parameters
    }
