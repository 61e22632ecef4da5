"""AdamW over the shards of a rank: torch's in fp32, and smaller ones by torchao.

Bytes per parameter of a rank's share:

    train.optimizer       weights  gradient  moments
    adamw                 4        4         8       torch's fused AdamW
    adamw_8bit            4        4         2.03    moments are codes of 8 bits, scales by 256
    adamw_bf16_sr         2        2         4       weights in bf16, rounded stochastically

torchao (and not bitsandbytes) because it has both ideas, in torch alone: bitsandbytes' kernels take
no DTensor, and it rounds to the nearest only, which loses updates below 2^-9 of a bf16 weight. The
optimizers see each rank's shard as a plain tensor, because torchao's 8-bit state on bf16 DTensors
fails (0.18).

Rounding takes its random bits from (step, rank), so there is no random state to save. Checkpoints
hold the state itself, which any number of ranks reads, but for codes and scales: they are each
rank's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowtrain.records import UserError
from flowtrain.trainer.distributed import World
from flowtrain.utils.seeds import derive_seed

Part = tuple[Tensor, torch.Size | None]
"""This rank's rows of a tensor and the size of the whole; None: there is no more of it."""
_BLOCK = 256
"""Numbers that share a scale in torchao's 8-bit state."""


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """The optimizer that a value of `train.optimizer` stands for."""

    is_8bit: bool
    """Moments are codes of 8 bits; tensors below 4096 numbers stay as they are."""
    weight_dtype: torch.dtype
    """Of master weights and their gradients; also of moments that are no codes."""

    @property
    def moment_bytes(self) -> float:
        """Bytes per parameter of both moments."""
        return 2 * (1 + 4 / _BLOCK) if self.is_8bit else 2.0 * self.weight_dtype.itemsize


KINDS = {
    "adamw": OptimizerKind(False, torch.float32),
    "adamw_8bit": OptimizerKind(True, torch.float32),
    "adamw_bf16_sr": OptimizerKind(False, torch.bfloat16),
}


class ShardOptimizer:
    """Steps over this rank's shards of the parameters that are trained."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        *,
        kind: str = "adamw",
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        decay_all: bool = False,
    ) -> None:
        """
        Args:
            decay_all: weights decay that are no matrices, too: norms, biases and the like.
        """
        self._world, self._kind = world, kind
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._shards = {n: nn.Parameter(_local(p.detach())) for n, p in self._parameters.items()}
        groups: dict[float, list[nn.Parameter]] = {}
        for name, shard in self._shards.items():
            decays = decay_all or _is_matrix(name, shard)
            groups.setdefault(weight_decay if decays else 0.0, []).append(shard)
        options = {"lr": lr, "betas": betas}
        by_decay = [{"params": shards, "weight_decay": x} for x, shards in groups.items()]
        self._inner = _make(kind, by_decay, options)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._inner.param_groups

    @property
    def state(self) -> dict[str, dict[str, Any]]:
        """The state of each parameter's shard; empty before its first step."""
        return {name: self._inner.state.get(x, {}) for name, x in self._shards.items()}

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)  # torchao compiles its step around this tensor
            else:
                group["lr"] = lr

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    # Where gradients are off `to_local` hands out the shard itself; else the host would ask DTensor
    # about each parameter in turn, which takes longer than a GPU steps.

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """Compute the norm of this rank's shards of the gradients, a scalar on their device."""
        return torch.nn.utils.get_total_norm(self._gradients().values())

    @torch.no_grad()
    def clip(self, norm: float, limit: float) -> None:
        """Scale gradients, whose shards on all ranks have this `norm`, down to a `limit`."""
        if norm > limit:
            torch._foreach_mul_(list(self._gradients().values()), limit / norm)

    @torch.no_grad()
    def step(self) -> None:
        """Step on the gradients that the model's parameters have."""
        for name, parameter in self._parameters.items():
            self._shards[name].data = _local(parameter)  # FSDP may have laid it out anew
        self._step({self._shards[name]: gradient for name, gradient in self._gradients().items()})

    def _gradients(self) -> dict[str, Tensor]:
        """Return this rank's shards of the gradients that there are."""
        return {n: _local(p.grad) for n, p in self._parameters.items() if p.grad is not None}

    def _step(self, gradients: Mapping[Tensor, Tensor]) -> None:
        for shard, gradient in gradients.items():
            shard.grad = gradient
        with self._rounding(), self._compiling():
            self._inner.step()
        for shard in gradients:
            shard.grad = None

    def _compiling(self) -> AbstractContextManager[None]:
        """torchao compiles a step for each shape, in every process: on a CPU that takes longer than
        the steps of a model that is trained there.
        """
        if KINDS[self._kind] == KINDS["adamw"] or self._world.device.type != "cpu":
            return nullcontext()
        stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
        return stance

    @contextmanager
    def _rounding(self) -> Iterator[None]:
        """Draw the random bits of a step from its number and the rank."""
        if KINDS[self._kind].weight_dtype == torch.float32:
            yield
            return
        steps = [int(state["step"]) for state in self._inner.state.values() if state]
        device = self._world.device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(derive_seed("rounding", max(steps, default=0), self._world.rank))
            yield

    # ---- checkpoints

    def tensors(self) -> dict[str, Part]:
        """Name this rank's parts of the state: "parameter.exp_avg" and so on.

        An 8-bit optimizer has names for each rank, because blocks of codes do not end with rows:
        "parameter.exp_avg.RANK.codes" and ".scale", or ".plain" where it is too small for codes.
        """
        return {
            place: part
            for name, state in self.state.items()
            for key, value in state.items()
            for place, part in self._parts(name, key, value).items()
        }

    def _parts(self, name: str, key: str, value: Any) -> dict[str, Part]:
        if not (KINDS[self._kind].is_8bit and value.dim()):
            parameter = self._parameters[name]
            is_sharded = value.dim() and isinstance(parameter, DTensor)
            return {f"{name}.{key}": (value, parameter.shape if is_sharded else None)}
        place = f"{name}.{key}.{self._world.rank}"
        if not hasattr(value, "codes"):
            return {f"{place}.plain": (value, None)}
        return {f"{place}.codes": (value.codes, None), f"{place}.scale": (value.scale, None)}

    def load(
        self, saved: Mapping[str, torch.Size], read: Callable[[Mapping[str, Part]], None]
    ) -> None:
        """Take the state of a checkpoint; collective.

        Args:
            saved: the sizes of its tensors by name.
            read: fills parts with what the checkpoint has under their names.

        Raises UserError where that state is laid out otherwise.
        """
        self._make_state()
        own = self.tensors()
        for place, (part, whole) in own.items():
            if saved.get(place) != (whole or part.shape):
                raise UserError(
                    f"the checkpoint has no {place!r} of {tuple(whole or part.shape)}: resume "
                    "with the train.optimizer that wrote it and, for 8-bit moments, with the same "
                    "number of ranks"
                )
        read(own)

    def _make_state(self) -> None:
        """Step on zeros with a learning rate of 0, which changes no weight.

        Steps one shard at a time, so that the gradients of all shards never exist at once.
        """
        lr = float(self.param_groups[0]["lr"])
        self.set_lr(0.0)
        for shard in self._shards.values():
            self._step({shard: torch.zeros_like(shard)})
        self.set_lr(lr)


def _is_matrix(name: str, weight: Tensor) -> bool:
    """Return whether a weight decays by the field's habit; biases of experts are stacked."""
    return weight.dim() > 1 and not name.endswith("bias")


def _make(
    kind: str, groups: list[dict[str, Any]], options: dict[str, Any]
) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(groups, fused=True, **options)
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it names kernels that are not used here
    try:
        from torchao.optim import AdamW8bit, _AdamW
    except ImportError as error:
        raise UserError(
            f"train.optimizer={kind!r} needs torchao: pip install -e '.[torchao]'"
        ) from error
    make = AdamW8bit if KINDS[kind].is_8bit else _AdamW
    rounds = KINDS[kind].weight_dtype == torch.bfloat16
    made: torch.optim.Optimizer = make(groups, bf16_stochastic_round=rounds, **options)
    return made


def part_of(tensor: Tensor) -> Part:
    """Return this rank's rows of a tensor, sharded or not, with the size of the whole."""
    return _local(tensor), tensor.shape if isinstance(tensor, DTensor) else None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
