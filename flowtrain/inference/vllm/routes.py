"""Routes out of vLLM: which experts read each token of a request.

On a GPU vLLM's newer runner returns them with the last output. On a CPU the older one's routers
tell what they choose for all tokens of a step. It is kept at the places that the tokens have in the
KV cache, for as long as their keys and values are: so a token that was found in the prefix cache,
and was not computed, has the routes of the pass that computed it. A request's routes are read when
it has ended, before its blocks can be given to another.

Where an update of the weights, or a lack of room, makes vLLM compute the tokens of a request again,
their routes are those of the last pass: under the weights that sampled the last token.

N: tokens of a step, S: places of the cache, L: layers with a router, C: experts chosen.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowtrain.records import Routes, UserError

Sizes = tuple[list[int], int, bool]
"""Layers with a router, experts per token, and whether an expert's number takes two bytes."""
_log = logging.getLogger(__name__)


class RouteTable:
    """Keeps the routes of one runner; from the moment that it is made."""

    def __init__(self, runner: Any) -> None:
        """Raises UserError for a model whose routes cannot be kept."""
        self._runner = runner
        config = runner.kv_cache_config
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        full = [i for i, spec in enumerate(specs) if getattr(spec, "sliding_window", None) is None]
        if not full:
            raise UserError(
                "routes are kept beside a cache of all tokens, and all layers of this model have a "
                "window; take rollout.engine = 'torch'"
            )
        self._group, self._block_size = full[0], specs[full[0]].block_size
        layers, num_chosen, is_wide = sizes_of(runner)
        # One more, the last, for the places -1 of tokens that only fill a step up.
        num_places = config.num_blocks * self._block_size + 1
        dtype = torch.int16 if is_wide else torch.uint8
        self._table_SLC = torch.zeros(num_places, len(layers), num_chosen, dtype=dtype)
        self._ended: dict[str, bytes] = {}
        """Routes of requests that have ended lately; the oldest first."""
        for i, layer in enumerate(_router_layers(runner)):
            layer.router.set_capture_fn(partial(self._note, i))
        self._update = runner._update_states
        runner._update_states = self._keep_ended

    def take(self, name: str, num_tokens: int) -> bytes | None:
        """Return `Routes.experts` of the first tokens of a request that ends or has ended, once;
        None where they are lost.
        """
        live = [request for request in self._runner.requests if _sent_name(request) == name]
        routes = self._read(live[0]) if live else self._ended.pop(name, None)
        size = num_tokens * self._table_SLC[0].nbytes
        return None if routes is None or len(routes) < size else routes[:size]

    def _note(self, layer: int, chosen_NC: Tensor) -> None:
        place_N = self._runner.input_batch.block_table[self._group].slot_mapping.gpu
        self._table_SLC[place_N[: len(chosen_NC)], layer] = chosen_NC.to(self._table_SLC.dtype)

    def _keep_ended(self, step: Any) -> Any:
        """Read the routes of requests that have ended, before the step gives their blocks away."""
        for request in step.finished_req_ids:
            if request in self._runner.requests and (routes := self._read(request)) is not None:
                self._ended[_sent_name(request)] = routes
        while len(self._ended) > 4 * self._runner.max_num_reqs:  # nobody waits for these
            del self._ended[next(iter(self._ended))]
        return self._update(step)

    def _read(self, request: str) -> bytes | None:
        """Read a request's routes; None where its blocks were taken away, and may be another's."""
        if request not in self._runner.input_batch.req_id_to_index:
            return None
        blocks = torch.tensor(self._runner.requests[request].block_ids[self._group])
        place_S = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        return self._table_SLC[place_S].numpy().tobytes()


def sizes_of(runner: Any) -> Sizes:
    """Return what a model of vLLM's has routes of. Raises UserError for one without routers."""
    layers = _router_layers(runner)
    if not layers:
        raise UserError("vLLM knows no router of this model, so there are no routes")
    is_wide = runner.model_config.get_num_experts() > 256
    return [layer.layer_id for layer in layers], layers[0].router.top_k, is_wide


async def routes_of(llm: Any, name: str, last: Any, num_tokens: int, sizes: Sizes) -> Routes | None:
    """Return the routes of the first tokens of a request to an `AsyncLLM`, whose last output is
    `last`; None where they are lost.
    """
    layers, num_chosen, is_wide = sizes
    if (array := getattr(last, "routed_experts", None)) is not None:  # [tokens, all layers, chosen]
        rows = array[:num_tokens, layers].astype("<u2" if is_wide else "u1")
        experts = rows.tobytes() if len(rows) == num_tokens else None
    else:
        experts, *_ = await llm.collective_rpc("take_routes", args=(name, num_tokens))
    if experts is None:
        _log.warning("the routes of a request of %d tokens are lost", num_tokens)
    return None if experts is None else Routes(experts, len(layers), num_chosen, is_wide)


def _router_layers(runner: Any) -> list[Any]:
    """Return the layers that have a router."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    return [layer for layer in runner.get_model().modules() if isinstance(layer, MoERunner)]


def _sent_name(request: str) -> str:
    """Return the name that a request was sent by: vLLM adds a random number."""
    return request.partition("-")[0]
