"""The profile of some training steps: torch's trace of all threads, and its table of operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from flowtrain.logging.run_dir import atomic_write_text
from flowtrain.utils.files import writing


@contextmanager
def profiled(folder: Path, device: torch.device) -> Iterator[None]:
    """Profile what runs within, on all threads, and write the files into `folder`."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    all_threads = _ExperimentalConfig(profile_all_threads=True)
    # Without the stacks of Python, whose frames torch may name when they are gone, which it cannot
    # read then.
    with profile(activities=activities, experimental_config=all_threads) as profiler:
        yield
    with writing(folder):
        folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(folder / "trace.json.gz"))
    sort_key = f"self_{device.type}_time_total"
    table = profiler.key_averages().table(sort_by=sort_key, row_limit=50, max_name_column_width=80)
    atomic_write_text(folder / "operators.txt", f"{table}\n")
