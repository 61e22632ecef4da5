"""The ranks of a run: started by torchrun or alone, gloo on CPU and NCCL on GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flowtrain.types import UserError


@dataclass(frozen=True, slots=True)
class World:
    """This process among its peers. With one rank the reductions below are the identity."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    """None: all that torchrun started."""

    @classmethod
    def join(cls, device: str, timeout_s: float = 600.0) -> World:
        """Join the ranks that torchrun started (RANK, WORLD_SIZE, LOCAL_RANK), or be the only one.

        `device` is "cpu", "cuda" or "auto". A collective that waits longer than `timeout_s` ends
        the run instead of hanging it.
        """
        size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        if kind == "cuda":
            if not torch.cuda.is_available():
                raise UserError(
                    "run.device='cuda' but torch finds no CUDA device; use 'auto' or 'cpu'"
                )
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # A lone rank gets a group too: FSDP2 wants one, and so the code below it has one path.
        store = dist.HashStore() if size == 1 else None  # type: ignore[attr-defined]
        backend = (
            "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        )  # what is offloaded is reduced on the CPU
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
        )
        return cls(
            rank,
            size,
            torch.device(kind, torch.cuda.current_device())
            if kind == "cuda"
            else torch.device(kind),
        )

    def part(self, ranks: Sequence[int]) -> World:
        """These of the ranks as a world of their own; collective. Elsewhere its rank is -1, and
        nothing may be reduced in it.
        """
        rank = ranks.index(self.rank) if self.rank in ranks else -1
        return World(rank, len(ranks), self.device, dist.new_group(list(ranks)))

    @property
    def is_member(self) -> bool:
        """This process is one of them."""
        return self.rank >= 0

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh that FSDP shards over; None: all ranks."""
        return None if self.group is None else DeviceMesh.from_group(self.group, self.device.type)

    def leave(self) -> None:
        """Several ranks keep their group to the end of the process (see `end_process`); a lone one
        may join again.
        """
        if self.size == 1:
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
        """Both at once, in one collective: every rank adds its candidates for a maximum in a slot
        of its own.
        """
        if self.size == 1:
            return [float(value) for value in sums], [float(value) for value in maxima]
        slots = torch.zeros(self.size, len(maxima), dtype=torch.float64)
        slots[self.rank] = torch.tensor(maxima, dtype=torch.float64)
        tensor = torch.cat([torch.tensor(sums, dtype=torch.float64), slots.flatten()]).to(
            self.device
        )
        dist.all_reduce(tensor, group=self.group)
        reduced = tensor.cpu()
        return reduced[: len(sums)].tolist(), reduced[len(sums) :].view(slots.shape).amax(
            0
        ).tolist()

    def gather_text(self, text: str) -> list[str]:
        """The text of each rank, on every rank."""
        return [data.decode() for data in self.gather_bytes(text.encode())]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of each rank, on every rank."""
        if self.size == 1:
            return [data]
        longest = int(self.max([len(data)])[0])
        padded = bytearray(len(data).to_bytes(8, "little") + data + bytes(longest - len(data)))
        own = torch.frombuffer(padded, dtype=torch.uint8).to(self.device)
        gathered = torch.empty(self.size, len(own), dtype=torch.uint8, device=self.device)
        dist.all_gather_into_tensor(gathered.flatten(), own, group=self.group)
        rows = [row.numpy().tobytes() for row in gathered.cpu()]
        return [row[8 : 8 + int.from_bytes(row[:8], "little")] for row in rows]

    def barrier(self) -> None:
        """Every rank gets here before any goes on. An all-reduce, because NCCL's own barrier
        guesses the device.
        """
        self.sum([0.0])


def end_process(code: int) -> NoReturn:
    """Exit; among several ranks without tearing the interpreter down, where a thread of gloo at
    times aborts a process that is done.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
