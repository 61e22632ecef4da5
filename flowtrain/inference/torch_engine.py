"""The embedded engine: any Hugging Face causal LM in this process, on CPU or GPU.

Waiting requests share a batch, and equal prompts (the G rollouts of a question) share keys and
values (`shared_cache.py`). The loop replaces `model.generate` to share prompts, drop finished rows
and seed each request separately: `bench/rollout.py` measures both.

N: tokens of a forward pass, B: rows still sampling, V: vocabulary.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from flowtrain.inference.requests import answer, check_request, hits_stop_string, stop_ids
from flowtrain.inference.row_states import RowStates
from flowtrain.inference.shared_cache import NAME, SharedCache
from flowtrain.records import Call, FinishReason, Routes, Sample, Sampling
from flowtrain.trainer.attention import registration as attention
from flowtrain.trainer.model import delta_net, experts
from flowtrain.trainer.model.loading import weights_in_one_dtype
from flowtrain.trainer.model.lora import adapter_weights
from flowtrain.trainer.packing import pack_row
from flowtrain.trainer.reading import score_walk
from flowtrain.trainer.walk import passes
from flowtrain.weights import Loaded, Source, WeightReader

_SCORED_TOKENS = 4096
"""Largest number of tokens per scoring pass."""


@dataclass(slots=True, eq=False)
class _Request:
    """A waiting or running request."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    deadline: float
    """Deadline of the request, in time.monotonic()."""
    answer: asyncio.Future[Call]
    version: int
    """Version of the weights that sample it."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    """The tokens that each id was sampled from; empty for all tokens."""
    entropies: list[float] = field(default_factory=list)
    """Empty unless the engine records them."""
    routes: bytearray = field(default_factory=bytearray)
    """`Routes.experts` of the tokens that were read so far; empty for a dense model."""
    finish_reason: FinishReason | None = None


class TorchEngine:
    """An engine in this process; implements `Engine`. The model must pass `model_check`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        store: Source | None,
        *,
        version: int = 0,
        max_batch_size: int = 256,
        verify_every: int = 0,
        records_entropies: bool = False,
    ) -> None:
        """
        Args:
            store: the store of later weights; None: fixed weights.
            version: of the model's current weights.
            verify_every: see `WeightReader`.
            records_entropies: fill `Call.entropies`.
        """
        self._model = model.eval()
        experts.equip(model)
        self._routers = experts.routers(model)
        delta_net.equip(model)
        self._is_recurrent = bool(delta_net.find_layers(model))
        model.set_attn_implementation(NAME)
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids(model.generation_config, tokenizer)
        self._reader = None
        if store is not None:
            weights = adapter_weights(model) or weights_in_one_dtype(model)
            self._reader = WeightReader(store, weights, torch.get_num_threads(), verify_every)
        self._loaded: Loaded | None = None
        self._version = version
        self._max_batch_size = max_batch_size
        self._records_entropies = records_entropies
        self._waiting: list[_Request] = []
        self._batcher: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torch-engine")

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_tokens(self) -> int:
        return int(self._model.config.max_position_embeddings)

    def load(self, version: int) -> None:
        """Update the model's weights to a version in place: fetches during sampling, writes between
        two batches.
        """
        assert self._reader is not None, "a model without a weight store is frozen at its version"
        wait([self._reader.stage(version)])
        self._thread.submit(self._load, self._reader, version).result()

    def _load(self, reader: WeightReader, version: int) -> None:
        try:
            self._loaded = reader.load(version)
        finally:
            if reader.version is not None:
                self._version = reader.version

    def sleep(self) -> None:
        """Do nothing: the engine keeps its weights and has no cache between batches."""

    def metrics(self) -> dict[str, float]:
        return {} if self._loaded is None else self._loaded.metrics()

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Call:
        """Raises UserError for a request that `check_request` rejects."""
        check_request(prompt_ids, sampling, self.max_tokens)
        loop = asyncio.get_running_loop()
        request = _Request(
            tuple(prompt_ids),
            sampling,
            time.monotonic() + sampling.deadline_s,
            loop.create_future(),
            self._version,
        )
        self._waiting.append(request)
        if self._batcher is None or self._batcher.done():
            self._batcher = loop.create_task(self._run_batches())
        timer = loop.call_later(sampling.deadline_s, self._expire, request)
        try:
            return await request.answer
        except asyncio.CancelledError:
            if request in self._waiting:  # nobody listens any longer
                self._waiting.remove(request)
            raise
        finally:
            timer.cancel()

    async def score(
        self, samples: Sequence[Sample], temperature: float
    ) -> tuple[int, list[tuple[float, ...]]]:
        """See `Scorer`; runs between two batches."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._score, samples, temperature)

    @torch.inference_mode()
    def _score(
        self, samples: Sequence[Sample], temperature: float
    ) -> tuple[int, list[tuple[float, ...]]]:
        if not samples:
            return self._version, []
        device = self._model.device
        # Scoring reads the rows as training does: by the trainer's attention.
        self._model.set_attn_implementation(attention.NAME)
        try:
            walk = passes(pack_row(samples), _SCORED_TOKENS)
            scores = score_walk(self._model, walk, temperature, device)
        finally:
            self._model.set_attn_implementation(NAME)
        parts = scores.logprob_T.split([len(sample.response_ids) for sample in samples])
        return self._version, [tuple(part.tolist()) for part in parts]

    def _expire(self, request: _Request) -> None:
        """Answer a request whose deadline passed before its batch; a running request ends by
        itself.
        """
        if request in self._waiting:
            self._waiting.remove(request)
            request.finish_reason = FinishReason.DEADLINE
            request.answer.set_result(self._answer(request))

    async def _run_batches(self) -> None:
        """Sample batches until no request waits, in one task at a time."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            await asyncio.sleep(0)  # lets every rollout that is ready to ask join this batch
            batch = self._waiting[: self._max_batch_size]
            self._waiting = self._waiting[self._max_batch_size :]
            if not batch:  # the time of the last request ran out meanwhile
                return
            sampled = loop.run_in_executor(self._thread, self._sample, batch)
            await asyncio.wait({sampled})
            if (error := sampled.exception()) is not None:
                # Requests that came meanwhile fail too: no task would answer them.
                unanswered = [*batch, *self._waiting]
                self._waiting = []
                for request in unanswered:
                    if not request.answer.done():
                        request.answer.set_exception(error)
                return
            for request in batch:
                if not request.answer.done():  # a cancelled rollout no longer listens
                    request.answer.set_result(self._answer(request))

    @torch.inference_mode()
    def _sample(self, requests: list[_Request]) -> None:
        """Fill ids, logprobs and finish_reason of every request."""
        for request in requests:
            request.version = self._version  # a load may come before this, or before the answer
        device = self._model.device
        cache = SharedCache([request.prompt_ids for request in requests], device)
        if self._is_recurrent:
            cache.states = RowStates(cache.tree, cache.prompt_B)
        tree = cache.tree
        logits_QV = self._forward(tree.input_ids_N, tree.position_ids_N, cache, tree.target_row_T)
        paths = [cache.paths[prompt] for prompt in cache.prompt_B.tolist()]
        self._note_routes(requests, paths)
        logits_BV = logits_QV[cache.prompt_B]
        position_B = torch.tensor([len(request.prompt_ids) for request in requests], device=device)
        longest = max(request.sampling.max_new_tokens for request in requests)
        uniforms = np.stack([_uniforms(request.sampling, longest) for request in requests])
        uniform_BT = torch.from_numpy(uniforms).to(device)
        temperature_B = torch.tensor([r.sampling.temperature for r in requests], device=device)
        rows = list(range(len(requests)))
        penalties = _FrequencyPenalties(requests, logits_BV)
        for step in range(uniform_BT.shape[1]):
            active = [requests[i] for i in rows]
            logits_BV = penalties.subtract(logits_BV, rows)
            logprob_BV = _logprobs(logits_BV, temperature_B[rows])
            if self._records_entropies:
                entropies = _entropies(logprob_BV).tolist()
                for request, entropy in zip(active, entropies, strict=True):
                    request.entropies.append(entropy)
            if any(request.sampling.is_truncated for request in active):
                logprob_BV = _truncate(logprob_BV, active)
            ids_B, logprob_B = _choose(logprob_BV, temperature_B[rows] == 0, uniform_BT[rows, step])
            self._append(active, ids_B.tolist(), logprob_B.tolist())
            penalties.count(ids_B, rows)
            # `rows` are indices in the batch, `alive` indices in what is left of it.
            alive = [k for k, i in enumerate(rows) if requests[i].finish_reason is None]
            if not alive:
                return
            if len(alive) < len(rows):
                alive_B = torch.tensor(alive, device=device)
                cache.keep(alive_B)
                ids_B, position_B = ids_B[alive_B], position_B[alive_B]
                rows = [rows[k] for k in alive]
            logits_BV = self._forward(ids_B, position_B, cache)
            self._note_routes([requests[i] for i in rows], range(len(rows)))
            position_B = position_B + 1

    def _forward(
        self, ids_N: Tensor, position_N: Tensor, cache: SharedCache, kept: Tensor | int = 0
    ) -> Tensor:
        """Return the fp32 logits that follow the `kept` tokens (0: all), [kept tokens, V]."""
        out = self._model(
            input_ids=ids_N[None],
            position_ids=position_N[None],
            use_cache=False,
            logits_to_keep=kept,
            shared=cache,
            **({} if cache.states is None else {"recurrence": cache.states}),
        )
        return out.logits[0].float()

    def _note_routes(self, requests: Sequence[_Request], positions: Iterable[Any]) -> None:
        """Append the routes of the last pass to each request."""
        if self._routers:
            routes_NLC = experts.chosen(self._routers).cpu()
            for request, position in zip(requests, positions, strict=True):
                request.routes += routes_NLC[position].numpy().tobytes()

    def _answer(self, request: _Request) -> Call:
        assert request.finish_reason is not None
        routes = None
        if request.routes:
            form = self._routers[0].form
            sizes = len(self._routers), form.num_chosen, form.is_wide
            routes = Routes(bytes(request.routes), *sizes)
        return answer(
            request.prompt_ids,
            request.ids,
            request.logprobs,
            labels=[(request.version, 0)],
            reason=request.finish_reason,
            kept=request.kept if request.sampling.is_truncated else None,
            entropies=request.entropies,
            routes=routes,
        )

    def _append(self, requests: list[_Request], ids: list[int], logprobs: list[float]) -> None:
        now = time.monotonic()
        for request, token, logprob in zip(requests, ids, logprobs, strict=True):
            request.ids.append(token)
            request.logprobs.append(logprob)
            sampling = request.sampling
            is_end = token in self._stop_ids and not sampling.ignore_end
            if is_end or hits_stop_string(request.ids, sampling.stop_strings, self._tokenizer):
                request.finish_reason = FinishReason.STOP
            elif len(request.ids) >= sampling.max_new_tokens:
                request.finish_reason = FinishReason.LENGTH
            elif now >= request.deadline or request.answer.done():  # its rollout was cancelled
                request.finish_reason = FinishReason.DEADLINE


class _FrequencyPenalties:
    """Subtracts frequency penalties from the logits of a batch."""

    def __init__(self, requests: Sequence[_Request], like_BV: Tensor) -> None:
        penalties = [request.sampling.frequency_penalty for request in requests]
        self._is_used = any(penalties)
        self._penalty_B = like_BV.new_tensor(penalties)
        self._penalties_BV = like_BV.new_zeros(like_BV.shape if self._is_used else 0)

    def subtract(self, logits_RV: Tensor, rows: list[int]) -> Tensor:
        """Return the logits of some rows minus the penalties."""
        return logits_RV - self._penalties_BV[rows] if self._is_used else logits_RV

    def count(self, ids_R: Tensor, rows: list[int]) -> None:
        """Count the tokens that these rows have sampled."""
        if self._is_used:
            row_R = torch.tensor(rows, device=ids_R.device)
            self._penalties_BV[row_R, ids_R] += self._penalty_B[row_R]


def _logprobs(logits_BV: Tensor, temperature_B: Tensor) -> Tensor:
    """Return the log-probs at each row's temperature; at temperature 1 for a greedy row."""
    divisor_B = torch.where(temperature_B == 0, 1.0, temperature_B)
    return (logits_BV / divisor_B[:, None]).log_softmax(-1)


def _entropies(logprob_BV: Tensor) -> Tensor:
    """Return the entropy of each row in nats, [B]."""
    return torch.special.entr(logprob_BV.exp()).sum(-1)


def _truncate(logprob_BV: Tensor, requests: Sequence[_Request]) -> Tensor:
    """Return the log-probs over the tokens that top-k and then top-p keep, -inf elsewhere; records
    each truncated request's kept tokens.
    """
    bounds = [
        (r.sampling.top_k, r.sampling.top_p) if r.sampling.is_truncated else (0, 1.0)
        for r in requests
    ]
    top_k_B1, top_p_B1 = torch.tensor(bounds, device=logprob_BV.device).T[:, :, None]
    best_BK, ids_BK = logprob_BV.topk(min(int(top_k_B1.max()), logprob_BV.shape[1]))
    is_kept_BK = torch.arange(best_BK.shape[1], device=logprob_BV.device) < top_k_B1
    share_BK = best_BK.where(is_kept_BK, -torch.inf).softmax(-1)
    # The token with which the sum reaches top_p is kept as well.
    is_kept_BK &= share_BK.cumsum(-1) - share_BK < top_p_B1
    kept_logprob_BK = best_BK.where(is_kept_BK, -torch.inf).log_softmax(-1)
    kept_rows = zip(requests, ids_BK.tolist(), is_kept_BK.tolist(), strict=True)
    for request, ids_K, is_kept_K in kept_rows:
        if request.sampling.is_truncated:
            request.kept.append(list(itertools.compress(ids_K, is_kept_K)))
    truncated_BV = torch.full_like(logprob_BV, -torch.inf).scatter(1, ids_BK, kept_logprob_BK)
    return torch.where(top_k_B1 > 0, truncated_BV, logprob_BV)


def _choose(logprob_BV: Tensor, is_greedy_B: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return sampled tokens, by inverting the distribution function at one uniform number per row,
    or the most likely token of a greedy row.
    """
    cumulative_BV = logprob_BV.exp().cumsum(-1)
    # Stay below the last entry, which rounding can move off 1: then the index is in range, and its
    # token can be sampled.
    end_B1 = cumulative_BV[:, -1:]
    threshold_B1 = (uniform_B[:, None] * end_B1).minimum(end_B1.nextafter(torch.zeros_like(end_B1)))
    sampled_B = torch.searchsorted(cumulative_BV, threshold_B1, right=True)[:, 0]
    ids_B = torch.where(is_greedy_B, logprob_BV.argmax(-1), sampled_B)
    return ids_B, logprob_BV.gather(1, ids_B[:, None])[:, 0]


def _uniforms(sampling: Sampling, length: int) -> np.ndarray:
    """Return the request's random numbers, fp32 [length], which do not depend on the batch."""
    return np.random.Generator(np.random.Philox(key=sampling.seed)).random(length, dtype=np.float32)
