"""Peak FLOP/s of a device by its name; memory that a CPU's tensors leave for later ones."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowtrain.trainer.devices import (
    PEAK_TFLOPS,
    memory_per_rank,
    peak_tflops,
    threads_per_rank,
    usable_cores,
)


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
def test_the_memory_of_a_freed_tensor_serves_the_next_one() -> None:
    """In threads, too: the embedded engine samples in one. It does not before we ask for it."""
    code = """
import os, resource, threading, torch
from flowtrain.trainer.devices import keep_freed_memory
def new_pages(num_mib):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(num_mib << 18)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)
def in_a_thread(num_mib):
    thread = threading.Thread(target=new_pages, args=(num_mib,))
    thread.start()
    thread.join()
for is_kept in (False, True):
    if not os.fork():
        if is_kept:
            keep_freed_memory()
        new_pages(128), new_pages(40), in_a_thread(40)
        os._exit(0)
    os.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    pages = [*map(int, done.stdout.split())]
    assert min(pages[0], pages[3]) > 30_000, "128 MiB in pages of 4 KiB"
    assert min(pages[1:3]) > 10_000 and max(pages[4:]) < 1000


@pytest.mark.parametrize(
    ("ranks", "omp", "asked", "expected"),
    [
        ("1", "", 0, 8),  # all cores
        ("4", "", 0, 2),
        ("16", "", 0, 1),
        ("1", "3", 0, 3),
        ("1", "3,1", 0, 3),  # outer and nested
        ("4", "1", 0, 2),  # torchrun has set it
        ("1", "3", 5, 5),  # run.threads
        ("4", "1", 5, 5),
    ],
)
def test_threads_are_those_that_were_asked_for(
    ranks: str, omp: str, asked: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowtrain.trainer.devices.usable_cores", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setenv("OMP_NUM_THREADS", omp)
    assert threads_per_rank(asked) == expected


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/a/b", {"cpu.max": "max 100000"}, 8),
        ("0::/a/b", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 2),
        ("0::/not/here", {"cpu.max": "50000 100000"}, 1),
        ("2:cpuacct:/a\n1:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "-1"}, 8),
        (
            "9:memory:/m\n1:cpu,cpuacct:/a\n0::/",
            {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"},
            3,
        ),
        ("", {}, 8),
    ],
)
def test_quotas_of_cgroups_are_kept(
    own: str, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert usable_cores(tmp_path, tmp_path / "own") == expected


def test_a_rank_has_its_part_of_the_machine_or_of_its_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    machine = memory_per_rank(tmp_path)
    assert abs(2 * machine - os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) < 2
    for text, expected in (("max\n", machine), ("4096\n", 2048), (f"{1 << 62}\n", machine)):
        (tmp_path / "memory.max").write_text(text)
        assert memory_per_rank(tmp_path) == expected


def test_a_process_on_one_core_computes_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert threads_per_rank(0) == 1
    finally:
        os.sched_setaffinity(0, before)
