"""Peak FLOP/s of devices, peak memory of a run, and how a CPU's memory is handed out."""

from __future__ import annotations

import ctypes
import re
import resource
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
"""Dense bf16 with fp32 sums, from the vendor's data sheets, by a part of the name that the device
goes by."""


def peak_tflops(device_name: str) -> float | None:
    """None for a device that is not in the table."""
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


class MemoryPeak:
    """The most memory of a device that this process had since this was made: what tensors took of a
    GPU, or its resident set's growth.
    """

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
