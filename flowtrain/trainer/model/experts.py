"""Mixtures of experts: which experts read each token, recorded and replayed.

A sampler and a trainer choose other experts for some tokens, because a rounding moves a score past
its neighbour's; their log-probs then differ by far more than a rounding. So the experts that the
sampler chose come with the tokens (`records.Routes`), and a pass over a row reads along them
(R3, arXiv:2510.11370). The experts' weights are taken from the pass's own scores, so that the
router learns as ever. Every pass over a row that has routes does so: training, its rescoring, and
the reference policy, whose KL to a policy of equal weights is then exactly 0.

No family is known by name. transformers says which class a family's router is, and a router is
tried: where its weights are, on small random tensors, those of a `Form` bit for bit, it is
understood. Its parameters and their names stay as they are.

N: tokens, D: hidden size, E: experts, C: experts chosen per token, L: layers with a router.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flowtrain.trainer.distributed import World
from flowtrain.trainer.model import grouped_experts
from flowtrain.trainer.packing import PackedRow

IMPLEMENTATION = grouped_experts.NAME
"""The way to compute experts, on a CPU too."""
_Score = Literal["softmax", "sigmoid", "softmax of chosen"]
_OF_ALL: tuple[_Score, ...] = ("softmax", "sigmoid")
_ROWS = 64


@dataclass(frozen=True, slots=True)
class Form:
    """The weights of chosen experts as a function of a router's logits, and its sizes."""

    score: _Score
    """softmax: over all experts, in fp32 (Qwen3-MoE, OLMoE); sigmoid: of each (GLM-4.5, DeepSeek
    V3); or softmax over the chosen ones alone (gpt-oss)."""
    is_normalised: bool
    """Scores are divided by their sum over the chosen experts."""
    scale: float
    """Factor of the scores."""
    is_fp32: bool
    """Scores stay in fp32, whatever the dtype of the logits."""
    num_experts: int = 0
    """E"""
    num_chosen: int = 0
    """C"""

    @property
    def is_wide(self) -> bool:
        """An expert's number takes two bytes."""
        return self.num_experts > 256

    def weights(self, logits_NE: Tensor, chosen_NC: Tensor) -> Tensor:
        """Return the weights [N, C] of int64 experts, in fp32 or in the dtype of the logits."""
        if self.score == "softmax of chosen":
            return logits_NE.gather(1, chosen_NC).softmax(-1, dtype=logits_NE.dtype)
        is_softmax = self.score == "softmax"
        score_NE = logits_NE.softmax(-1, dtype=torch.float) if is_softmax else logits_NE.sigmoid()
        score_NC = score_NE.gather(1, chosen_NC)
        if self.is_normalised:
            # The constant counts where all sigmoids are 0; the sum of softmaxes is far above it.
            score_NC = score_NC / (score_NC.sum(-1, keepdim=True) + 1e-20)
        return (score_NC * self.scale).to(torch.float if self.is_fp32 else logits_NE.dtype)


class ReplayedRouter(nn.Module):
    """Before a router: takes the experts that it is given and keeps those that it chose."""

    form: Form
    given_NC: Tensor | None = None
    """uint8 or int16, set by `replaying`; tokens beyond its end, which fill a row up, take their
    own."""
    chosen_NC: Tensor | None = None
    """The router's own choice in the last pass, in the same dtype."""

    @torch.compiler.disable  # what it is given changes with every row
    def forward(self, hidden_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_NE, weight_NC, chosen_NC = super().forward(hidden_ND)
        self.chosen_NC = chosen_NC.to(torch.int16 if self.form.is_wide else torch.uint8)
        if self.given_NC is None:
            return logits_NE, weight_NC, chosen_NC
        given_NC = self.given_NC.long()
        chosen_NC = torch.cat([given_NC, chosen_NC[len(given_NC) :]])
        return logits_NE, self.form.weights(logits_NE, chosen_NC), chosen_NC


def equip(model: PreTrainedModel) -> None:
    """Make the routers of a mixture `ReplayedRouter`s, in place; before the model is sharded,
    whether or not it has weights. A dense model stays as it is.
    """
    found = find_routers(model)
    if not found or routers(model):
        return
    form = form_of(found)
    assert form is not None, "`problem` is for models of unknown routers"
    for router in found:
        kind = type(router)
        router.__class__ = type(kind.__name__, (ReplayedRouter, kind), {})
    for each in routers(model):
        each.form = form
    model.set_experts_implementation(IMPLEMENTATION)


def routers(model: nn.Module) -> list[ReplayedRouter]:
    """Return the routers of a model that was equipped, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, ReplayedRouter)]


def sizes_of(model: nn.Module) -> tuple[int, int, int]:
    """Return (L, C, E) of a model that was equipped; zeros for a dense one."""
    forms = [router.form for router in routers(model)]
    return (len(forms), forms[0].num_chosen, forms[0].num_experts) if forms else (0, 0, 0)


@contextmanager
def replaying(model: nn.Module, routes_NLC: Tensor | None) -> Iterator[None]:
    """Let the passes over a row within a block, the backward pass and what it computes again among
    them, read its tokens by these experts; None: by those that the routers choose.
    """
    given = [] if routes_NLC is None else routes_NLC.unbind(1)
    found = routers(model) if given else []
    for router, given_NC in zip(found, given, strict=True):
        router.given_NC = given_NC
    try:
        yield
    finally:
        for router in found:
            router.given_NC = None


def chosen(of: Sequence[ReplayedRouter]) -> Tensor:
    """Return what the routers themselves chose in their last pass, uint8 or int16 [N, L, C]."""
    return torch.stack([each.chosen_NC for each in of if each.chosen_NC is not None], 1)


def shares_of(model: PreTrainedModel) -> dict[nn.Parameter, float]:
    """Return the share C / E of the stacked parameters of experts [E, ...] by which a token is
    multiplied.
    """
    found = find_routers(model)
    form = form_of(found) if found else None
    if form is None:
        return {}
    share = form.num_chosen / form.num_experts
    stacked = [
        module
        for parent in model.modules()
        if {*found} & {*parent.children()}
        for module in parent.children()
        if any(p.dim() == 3 for p in module.parameters(recurse=False))
    ]
    return {p: share for module in stacked for p in module.parameters(recurse=False)}


class RouteMetrics:
    """Statistics of the routes of a batch, summed on the device; nothing for a dense model."""

    def __init__(self, model: nn.Module) -> None:
        self._routers = routers(model)
        self._num_layers, _, self._num_experts = sizes_of(model)
        self._counts: list[Tensor] = []
        """int64 of each row [L E + L]: tokens of each expert, and tokens that the routers would
        have sent to the sampler's experts."""
        self._tokens = [0] * 5

    def add(self, row: PackedRow, replays: bool) -> None:
        """Add a row after its backward pass. `replays`: its routes were followed."""
        if not self._routers:
            return
        num_tokens, has_routes = len(row.input_ids_N), row.routes_NLC is not None
        own_NLC = chosen(self._routers)[:num_tokens]  # without those that fill a row up
        known_NLC = own_NLC if row.routes_NLC is None else row.routes_NLC
        used_LN = (known_NLC if replays else own_NLC).transpose(0, 1).flatten(1).long()
        zero_LE = used_LN.new_zeros(self._num_layers, self._num_experts)
        count_LE = zero_LE.scatter_add_(1, used_LN, torch.ones_like(used_LN))
        is_equal_NL = (own_NLC.sort(-1).values == known_NLC.sort(-1).values).all(-1)
        self._counts.append(torch.cat([count_LE.flatten(), is_equal_NL.sum(0) * has_routes]))
        num_known = num_tokens * has_routes
        num_shared = (row.num_unshared_tokens - num_tokens) * has_routes
        numbers = num_tokens, num_known, num_known * replays, num_shared, row.num_route_conflicts
        self._tokens = [a + b for a, b in zip(self._tokens, numbers, strict=True)]

    def reduce(self, world: World) -> dict[str, float]:
        """Return the metrics of all ranks; {} for a dense model; collective."""
        if not self._routers:
            return {}
        size = self._num_layers * (self._num_experts + 1)
        counts = torch.stack(self._counts).sum(0).tolist() if self._counts else [0] * size
        summed = world.sum([*self._tokens, *counts])
        num_tokens, num_known, num_replayed, num_shared, num_conflicts = summed[:5]
        count_LE = torch.tensor(summed[5 : -self._num_layers]).view(self._num_layers, -1)
        equal_L = torch.tensor(summed[-self._num_layers :]) / max(num_known, 1)
        found = {
            "expert_load_max": float((count_LE.amax(1) / count_LE.mean(1).clamp(min=1e-9)).max()),
            "expert_dead_share": float((count_LE == 0).float().mean()),
            "routes_replayed": num_replayed / max(num_tokens, 1),
        }
        return (
            found
            if not num_known
            else {
                **found,
                "routes_equal": float(equal_L.mean()),
                "routes_equal_min": float(equal_L.min()),
                "route_conflict_share": num_conflicts / max(num_shared, 1),
            }
        )


# ---- what a router computes


def problem(model: PreTrainedModel) -> str:
    """Return why the routes of a mixture cannot be replayed; "" if they can."""
    found = find_routers(model)
    if not found:
        return "transformers does not name its routers"
    if not model._can_set_experts_implementation():
        return "its experts do not support grouped matrix products"
    return "" if form_of(found) else f"{type(found[0]).__name__} uses unsupported expert weights"


def find_routers(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose logits transformers records as those of routers."""
    recorded = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorded, "target_class", recorded)
    return [m for m in model.modules() if isinstance(m, kind)] if isinstance(kind, type) else []


def form_of(found: Sequence[nn.Module]) -> Form | None:
    """Return the form of the weights that a model's routers give, whether or not these have
    parameters yet; None where it is none that is known, or not one for all.
    """
    router, *others = found
    if isinstance(router, ReplayedRouter):
        return router.form
    if any(_options(other) != _options(router) for other in others):
        return None
    scales = sorted({1.0, *(v for v in _options(router).values() if isinstance(v, float))})
    kinds = product(_OF_ALL, (False, True), scales, (False, True))
    forms = [*(Form(*kind) for kind in kinds), Form("softmax of chosen", True, 1.0, False)]
    sizes = 0, 0
    for dtype in (torch.bfloat16, torch.float32):
        if (out := _tried(router, dtype)) is None:
            return None
        logits_NE, weight_NC, chosen_NC = out
        sizes = logits_NE.shape[1], chosen_NC.shape[1]
        forms = [f for f in forms if _same(f.weights(logits_NE, chosen_NC), weight_NC)]
    return replace(forms[0], num_experts=sizes[0], num_chosen=sizes[1]) if forms else None


def _options(router: nn.Module) -> dict[str, int | float]:
    options = {k: v for k, v in vars(router).items() if isinstance(v, int | float)}
    return {k: v for k, v in options.items() if k != "layer_idx"}


@torch.no_grad()
def _tried(router: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return (logits, weights, experts) of a router with other weights for a few tokens; None where
    it gives something else.
    """
    rng = torch.Generator().manual_seed(0)  # on the CPU, whatever the default device is

    def drawn(like: Tensor) -> Tensor:
        scale = like.shape[-1] ** -0.5 if like.dim() > 1 else 1.0  # no score is near 0 or 1
        return (scale * torch.randn(like.shape, generator=rng, device="cpu")).to(dtype)

    def other(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        return {k: None if v is None else nn.Parameter(drawn(v)) for k, v in tensors.items()}

    twin = copy.copy(router)
    vars(twin).update(_parameters=other(router._parameters), _buffers=other(router._buffers))
    sizes = [w.shape[-1] for w in router._parameters.values() if w is not None and w.dim() == 2]
    try:
        hidden_ND = torch.randn(_ROWS, *sizes[:1], generator=rng, device="cpu").to(dtype)
        out = twin(hidden_ND)
    except (AttributeError, RuntimeError, TypeError):  # it wants more than hidden states
        return None
    is_known = isinstance(out, tuple) and len(out) == 3 and out[2].dtype == torch.int64
    return out if is_known else None


def _same(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)
