"""AdamW over the shards of a rank: torch's in fp32, and smaller ones by torchao.

Bytes per parameter of a rank's share:

    train.optimizer       weights  gradient  moments
    adamw                 4        4         8       torch's fused AdamW
    adamw_8bit            4        4         2.03    moments are codes of 8 bits, scales by 256
    adamw_bf16_sr         2        2         4       weights in bf16, rounded stochastically
    adamw_8bit_bf16_sr    2        2         2.03    both

torchao (and not bitsandbytes) because it has both ideas, in torch alone: bitsandbytes' kernels take
no DTensor, and it rounds to the nearest only, which loses updates below 2^-9 of a bf16 weight. The
optimizers see each rank's shard as a plain tensor, because torchao's 8-bit state on bf16 DTensors
fails (0.18).

Rounding takes its random bits from (step, rank), so there is no random state to save. Checkpoints
hold the state itself, codes and scales of each rank; another number of ranks dequantises it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from flowtrain.training.world import World
from flowtrain.types import UserError
from flowtrain.utils.seeds import derive_seed

_BLOCK = 256
"""Numbers that share a scale in torchao's 8-bit state."""


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """What a value of `train.optimizer` stands for."""

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
    "adamw_8bit_bf16_sr": OptimizerKind(True, torch.bfloat16),
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
        offload: bool = False,
    ) -> None:
        """`offload`: moments wait in the memory of the CPU, and come to the device of the weights
        one parameter at a time.
        """
        self._world, self._kind, self._offload = world, kind, offload
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._shards = {n: nn.Parameter(_local(p.detach())) for n, p in self._parameters.items()}
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        self._inner = _make(kind, list(self._shards.values()), options)

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

    def step(self) -> None:
        """Step on the gradients that the model's parameters have."""
        gradients: dict[Tensor, Tensor] = {}
        for name, parameter in self._parameters.items():
            shard = self._shards[name]
            shard.data = _local(parameter.detach())  # FSDP may have laid it out anew
            if parameter.grad is not None:
                gradients[shard] = _local(parameter.grad)
        self._step(gradients)

    def _step(self, gradients: Mapping[Tensor, Tensor]) -> None:
        parts = [{s: g} for s, g in gradients.items()] if self._offload else [gradients]
        with self._rounding():
            for part in parts:
                for shard, gradient in part.items():
                    shard.grad = gradient
                with self._on_device(part), self._compiling():
                    self._inner.step()
                for shard in part:
                    shard.grad = None

    @contextmanager
    def _on_device(self, shards: Mapping[Tensor, Tensor]) -> Iterator[None]:
        if not self._offload:
            yield
            return
        hosts = {shard: dict(self._inner.state[shard]) for shard in shards}
        for shard, host in hosts.items():
            self._inner.state[shard].update({k: x.to(shard.device) for k, x in host.items()})
        yield
        for shard, host in hosts.items():
            state = self._inner.state[shard]
            state.update({k: _to_host(x, host.get(k)) for k, x in state.items()})

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

    def moments(self) -> dict[str, Tensor]:
        """The state on the CPU of rank 0, and nothing on others; collective.

        "parameter/exp_avg": a whole tensor. Of an 8-bit optimizer, the piece of each rank:
        "parameter/exp_avg.RANK.codes" and ".scale", or ".plain" where it is too small for codes.
        """
        found: dict[str, Tensor] = {}
        for name, state in self.state.items():
            parameter = self._parameters[name]
            for key, value in state.items():
                if KINDS[self._kind].is_8bit and value.dim():
                    parts = self._pieces(value)
                else:
                    parts = {"": _whole(parameter, value)}
                if self._world.is_main:
                    found |= {f"{name}/{key}{part}": x.contiguous() for part, x in parts.items()}
                del parts
        return found

    def _pieces(self, value: Any) -> dict[str, Tensor]:
        codes = getattr(value, "codes", None)
        own = {"plain": value} if codes is None else {"codes": codes, "scale": value.scale}
        data = save({part: x.detach().cpu().contiguous() for part, x in own.items()})
        every = self._world.gather_bytes(data)
        if not self._world.is_main:
            return {}
        return {f".{r}.{p}": x for r, blob in enumerate(every) for p, x in load(blob).items()}

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Take the state of a checkpoint, of any number of ranks and any kind of optimizer."""
        if not moments:
            return
        self._make_state()
        for name, state in self.state.items():
            parameter = self._parameters[name]
            for key, value in state.items():
                if (whole := moments.get(f"{name}/{key}")) is not None:
                    value.copy_(_slice(parameter, whole) if value.dim() else whole)
                else:
                    pieces = _pieces_of(moments, name, key)
                    if not self._took_own_piece(value, pieces):
                        parts = [_dequantised(piece, key == "exp_avg") for piece in pieces]
                        value.copy_(_slice(parameter, torch.cat(parts).view(parameter.shape)))

    def _make_state(self) -> None:
        """Step on zeros with a learning rate of 0, which changes no weight."""
        lr = float(self.param_groups[0]["lr"])
        self.set_lr(0.0)
        zeros: dict[Tensor, Tensor] = {x: torch.zeros_like(x) for x in self._shards.values()}
        self._step(zeros)
        self.set_lr(lr)

    def _took_own_piece(self, value: Any, pieces: Sequence[Mapping[str, Tensor]]) -> bool:
        """Take this rank's piece bit by bit, where it was made by as many ranks."""
        own = pieces[self._world.rank] if len(pieces) == self._world.size else {}
        parts = ("codes", "scale") if hasattr(value, "codes") else ("plain",)
        if set(own) != set(parts) or own[parts[0]].shape != value.shape:
            return False
        for part in parts:
            (value if part == "plain" else getattr(value, part)).copy_(own[part])
        return True


def _make(kind: str, shards: list[nn.Parameter], options: dict[str, Any]) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(shards, fused=True, **options)
    with _needs_torchao(f"train.optimizer={kind!r}"):
        from torchao.optim import AdamW8bit, _AdamW
    make = AdamW8bit if KINDS[kind].is_8bit else _AdamW
    rounds = KINDS[kind].weight_dtype == torch.bfloat16
    made: torch.optim.Optimizer = make(shards, bf16_stochastic_round=rounds, **options)
    return made


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _to_host(value: Tensor, host: Tensor | None) -> Tensor:
    if value.device.type == "cpu":
        return value
    return value.cpu() if host is None else host.copy_(value)


def _whole(parameter: Tensor, value: Tensor) -> Tensor:
    """A state as large as its parameter, on the CPU; collective."""
    if not (value.dim() and isinstance(parameter, DTensor)):
        return value.detach().cpu()
    mesh = parameter.device_mesh
    return (
        DTensor.from_local(
            value.to(mesh.device_type),
            mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        .full_tensor()
        .cpu()
    )


def _slice(parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a tensor as large as the parameter."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()


def _pieces_of(moments: Mapping[str, Tensor], name: str, key: str) -> list[dict[str, Tensor]]:
    """The pieces of a state, rank by rank."""
    pieces: list[dict[str, Tensor]] = []
    parts = ("codes", "scale", "plain")
    while True:
        first = f"{name}/{key}.{len(pieces)}"
        piece = {p: moments[f"{first}.{p}"] for p in parts if f"{first}.{p}" in moments}
        if not piece:
            break
        pieces.append(piece)
    if not pieces:
        raise UserError(f"the checkpoint has no {key!r} of the optimizer for {name!r}")
    return pieces


def _dequantised(piece: Mapping[str, Tensor], is_signed: bool) -> Tensor:
    """A piece as flat fp32."""
    if "plain" in piece:
        return piece["plain"].float().flatten()
    with _needs_torchao("a checkpoint of 8-bit moments"):
        from torchao.optim.subclass_8bit import OptimState8bit
    codes, scale = piece["codes"], piece["scale"]
    state = OptimState8bit.zeros(codes.shape, is_signed, len(codes.flatten()) // len(scale))
    state.codes.copy_(codes)
    state.scale.copy_(scale)
    values: Tensor = state.dequantize().flatten()
    return values


@contextmanager
def _needs_torchao(what: str) -> Iterator[None]:
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it names kernels that are not used here
    try:
        yield
    except ImportError as error:
        raise UserError(f"{what} needs torchao: pip install 'flowtrain[torchao]'") from error
