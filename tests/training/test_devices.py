"""Peak FLOP/s of a device by its name; memory that a CPU's tensors leave for later ones."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from flowtrain.training.devices import PEAK_TFLOPS, peak_tflops


def test_devices_are_known_by_name() -> None:
    names = {
        "NVIDIA H200": 989.0,
        "NVIDIA H100 80GB HBM3": 989.0,
        "NVIDIA H100 PCIe": 756.0,
        "NVIDIA A100-SXM4-80GB": 312.0,
        "NVIDIA GeForce RTX 4090": 165.2,
        "NVIDIA L4": 121.0,
        "NVIDIA L40S": 362.0,
        "NVIDIA A10": 125.0,
    }
    assert {name: peak_tflops(name) for name in names} == names
    assert peak_tflops("NVIDIA GeForce GTX 1080") is None and peak_tflops("Tesla A1000") is None
    assert all(math.isfinite(peak) and peak > 0 for peak in PEAK_TFLOPS.values())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts pages as Linux does")
@pytest.mark.parametrize(("call", "is_kept"), [("", False), ("keep_freed_memory()", True)])
def test_the_memory_of_a_freed_tensor_serves_the_next_one(call: str, is_kept: bool) -> None:
    """In threads, too: the embedded engine samples in one."""
    code = f"""
import resource, threading, torch
from flowtrain.training.devices import keep_freed_memory
{call}
def new_pages(num_mib):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(num_mib << 18)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
def in_a_thread(num_mib):
    thread = threading.Thread(target=new_pages, args=(num_mib,))
    thread.start()
    thread.join()
new_pages(128), new_pages(40), in_a_thread(40)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    first, *later = map(int, done.stdout.split())
    assert first > 30_000, "128 MiB in pages of 4 KiB"
    assert max(later) < 1000 if is_kept else min(later) > 10_000
