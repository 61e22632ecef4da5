"""Peak FLOP/s of devices, peak memory of a run, and the threads and the memory of a CPU."""

from __future__ import annotations

import ctypes
import math
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "A40": 149.7,
    "A10": 125.0,
    "L4": 121.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}
"""Dense bf16 with fp32 sums, from vendors' data sheets, by a part of the device's name."""


def peak_tflops(device_name: str) -> float | None:
    """Return the peak in TFLOP/s; None for a device that is not in the table."""
    words = f" {device_name.replace('-', ' ')} "
    return next((peak for name, peak in PEAK_TFLOPS.items() if f" {name} " in words), None)


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
"""Parameters of glibc's mallopt."""


def keep_freed_memory() -> None:
    """Have the C library keep the memory of freed tensors, for all threads together.

    By default glibc gives every large block back at once, and for the next tensor the kernel clears
    as many pages again, which takes longer than most operations on a CPU. Has no effect on another
    C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for parameter, value in (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_MAX, 0),
        (_M_TRIM_THRESHOLD, 2**31 - 1),
        (_M_TOP_PAD, 2**26),
    ):
        mallopt(parameter, value)


def threads_per_rank(asked: int) -> int:
    """Return the CPU threads of this rank: the requested number, else OMP_NUM_THREADS, else the
    usable cores divided by the ranks of this machine.

    With several ranks OMP_NUM_THREADS is ignored, because torchrun defaults it to 1.
    """
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    wished = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if asked or (ranks_here == 1 and wished.isdecimal()):
        return max(1, asked or int(wished))
    return max(1, usable_cores() // ranks_here)


def usable_cores(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Count the cores that this process may use, by its affinity and the quotas of its cgroups.

    Args:
        root: where the cgroups are mounted.
        own: names those of this process.
    """
    allowed = len(os.sched_getaffinity(0))
    return min([allowed, *(max(1, math.ceil(quota)) for quota in _quotas(root, own))])


def _quotas(root: Path, own: Path) -> Iterator[float]:
    """Yield the cores that a process gets on average, of each of its cgroups that bounds them."""
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = root / "cpu" if controllers else root  # the second version has one tree for all
        # Within a container the path may be the host's, which is not there.
        for part in ("", *Path(path).parts[1:]):
            group /= part
            files = ["cpu.cfs_quota_us", "cpu.cfs_period_us"] if controllers else ["cpu.max"]
            texts = [(group / name).read_text() for name in files if (group / name).exists()]
            quota, *period = " ".join(texts).split() or ["max"]
            if period and quota.isdecimal():  # neither "max" nor -1
                yield int(quota) / int(period[0])


def memory_per_rank(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that each rank of this machine has, or of its container; `root` is where the
    cgroups are mounted.
    """
    bounds = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of both versions of cgroups
        text = (root / name).read_text().strip() if (root / name).exists() else ""
        bounds += [int(text)] if text.isdecimal() else []
    return min(bounds) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class MemoryPeak:
    """Peak memory of this process since construction: a GPU's tensors, or resident-set growth."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0 if device.type == "cuda" else _peak_resident()

    def num_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _peak_resident() - self._before


def _peak_resident() -> int:
    """Return the most bytes that this process had; `getrusage` begins with those of its parent."""
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"VmHWM:\s*(\d+) kB", status.read_text())):
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
