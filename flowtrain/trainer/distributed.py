"""The ranks of a run, started by torchrun or alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flowtrain.records import Unmet, UserError
from flowtrain.trainer.heartbeat import Heartbeat
from flowtrain.utils.errors import foreign

_MEETING = ("MASTER_ADDR", "MASTER_PORT")
PATIENCE = timedelta(days=7)
"""How long ranks wait for one another between passes: for stragglers, compiling engines,
evaluations. Closed connections reveal a dead rank at once, the `Heartbeat` a lost host."""


@dataclass(frozen=True, slots=True)
class World:
    """This process among the ranks of a run. With one rank the reductions are the identity.

    The two groups have separate timeouts. A collective of training, which all ranks enter at about
    the same time, ends the run if it hangs. The methods below communicate over gloo and wait for as
    long as another rank is busy.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    """Group for collectives of training: NCCL on a GPU. None: all ranks of torchrun."""
    control: dist.ProcessGroup | None = None
    """Messages between the ranks, on gloo; None where there is one rank."""
    clock: timedelta = timedelta(seconds=600)
    """Timeout of a collective of training."""
    heartbeat: Heartbeat | None = None
    """Of this process; None where it is alone."""

    @classmethod
    def join(cls, device: str, timeout_s: float = 600.0) -> World:
        """Return the world of the ranks that torchrun started (RANK, WORLD_SIZE, LOCAL_RANK), or of
        one.

        `device` is "cpu", "cuda" or "auto". A collective of training that takes longer than
        `timeout_s` ends the run instead of hanging it.
        """
        size, rank = _variable("WORLD_SIZE", 1), _variable("RANK", 0)
        local_rank, _ = _variable("LOCAL_RANK", 0), _variable("LOCAL_WORLD_SIZE", 1)
        if rank >= size:
            raise Unmet(f"RANK={rank} must be below WORLD_SIZE={size}; torchrun sets both")
        if size > 1 and (missing := [name for name in _MEETING if not os.environ.get(name)]):
            raise Unmet(f"WORLD_SIZE={size} needs {missing[0]}; torchrun sets both")
        kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        place = torch.device(kind)
        if kind == "cuda":
            if not torch.cuda.is_available():
                raise UserError(
                    "run.device='cuda' but torch finds no CUDA device; use 'auto' or 'cpu'"
                )
            torch.cuda.set_device(local_rank)
            place = torch.device(kind, torch.cuda.current_device())
        # A lone rank gets a group too: FSDP2 wants one, and so the code below it has one path.
        store = dist.HashStore() if size == 1 else None  # type: ignore[attr-defined]
        # What is offloaded is reduced on the CPU.
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        clock = timedelta(seconds=timeout_s)
        where = ", ".join(f"{name}={os.environ.get(name)!r}" for name in _MEETING)
        with foreign(f"the ranks cannot meet: WORLD_SIZE={size}, {where}", raises=Unmet):
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=clock)
        control, heartbeat = _control(range(size)), _heartbeat(rank, size) if size > 1 else None
        return cls(rank, size, place, dist.group.WORLD, control, clock, heartbeat)

    def subworld(self, ranks: Sequence[int]) -> World:
        """Return a world of the given ranks; collective. On other ranks its rank is -1 and
        reductions are not allowed.
        """
        rank = ranks.index(self.rank) if self.rank in ranks else -1
        group = dist.new_group(list(ranks), timeout=self.clock)
        return World(rank, len(ranks), self.device, group, _control(ranks), self.clock)

    @property
    def is_member(self) -> bool:
        """Whether this process belongs to the world."""
        return self.rank >= 0

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh that FSDP shards over, on the run's device also where there is another."""
        group = self.group or dist.group.WORLD
        assert group is not None, "torch.distributed is not initialised"
        return DeviceMesh.from_group(group, self.device.type)

    def control_mesh(self, device_type: str) -> DeviceMesh | None:
        """Return the mesh of the ranks for tensors that only tell whose rows they hold."""
        return None if self.control is None else DeviceMesh.from_group(self.control, device_type)

    def with_own_control_group(self) -> World:
        """Return these ranks with a control group of their own, for further threads; collective."""
        if self.control is None:
            return self
        return replace(self, control=_control(dist.get_process_group_ranks(self.control)))

    def leave(self) -> None:
        """Stop the heartbeat of several ranks, which keep their group, or end a lone rank's
        group.
        """
        if self.heartbeat is not None:
            self.heartbeat.close()
        elif self.size == 1:
            dist.destroy_process_group()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over ranks, in fp64."""
        return self.reduce(values, [])[0]

    def max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over ranks."""
        return self.reduce([], values)[1]

    def reduce(
        self, sums: Sequence[float], maxima: Sequence[float]
    ) -> tuple[list[float], list[float]]:
        """Return sums and maxima from one collective, in which each rank adds its candidates for a
        maximum in its own slot.
        """
        if self.size == 1:
            return [float(value) for value in sums], [float(value) for value in maxima]
        slots = torch.zeros(self.size, len(maxima), dtype=torch.float64)
        slots[self.rank] = torch.tensor(maxima, dtype=torch.float64)
        reduced = torch.cat([torch.tensor(sums, dtype=torch.float64), slots.flatten()])
        dist.all_reduce(reduced, group=self.control)
        return reduced[: len(sums)].tolist(), reduced[len(sums) :].view(slots.shape).amax(
            0
        ).tolist()

    def gather_text(self, text: str) -> list[str]:
        """Return the texts of all ranks, on every rank."""
        return [data.decode() for data in self.gather_bytes(text.encode())]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, on every rank."""
        if self.size == 1:
            return [data]
        longest = int(self.max([len(data)])[0])
        padded = bytearray(len(data).to_bytes(8, "little") + data + bytes(longest - len(data)))
        own = torch.frombuffer(padded, dtype=torch.uint8)
        gathered = torch.empty(self.size, len(own), dtype=torch.uint8)
        dist.all_gather(list(gathered), own, group=self.control)
        rows = [row.numpy().tobytes() for row in gathered]
        return [row[8 : 8 + int.from_bytes(row[:8], "little")] for row in rows]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.sum([0.0])


def _variable(name: str, default: int) -> int:
    """Return a number that torchrun sets in the environment."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or (name.endswith("SIZE") and not int(text)):
        raise Unmet(f"{name}={text!r} in the environment is not a number; torchrun sets it")
    return int(text)


def _heartbeat(rank: int, size: int) -> Heartbeat:
    """Start the heartbeat of this rank, over its own connection to the store."""
    host, port = (os.environ[name] for name in _MEETING)
    store = dist.TCPStore(host, int(port))  # type: ignore[attr-defined]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    signs = dist.PrefixStore(f"heartbeat {attempt}", store)  # type: ignore[attr-defined]
    heartbeat = Heartbeat(signs, rank, size)
    heartbeat.start()
    return heartbeat


def _control(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    if len(ranks) == 1 and dist.get_world_size() == 1:
        return None
    # The ranks of a part may make one more without the others.
    return dist.new_group(
        list(ranks), timeout=PATIENCE, backend="gloo", use_local_synchronization=True
    )
