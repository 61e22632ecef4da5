"""The profile of some training steps: a flame graph, a Chrome trace, and a table of operators.

torch's profiler sees the Python calls and the operators of all threads, in one tree; pyinstrument
and py-spy see Python alone, so that a backward pass is one frame to them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch._C._profiler import _EventType, _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from flowtrain.report.flame import Frame, flame_html
from flowtrain.report.run_dir import atomic_write_text
from flowtrain.utils.files import writing
from flowtrain.utils.step_timer import SPAN, STAGES

_KINDS = {
    "matrix products": re.compile(r"aten::(b?add)?b?mm_?$|gemm|nvjet|cutlass_\d+_tensorop"),
    "attention": re.compile(r"attention|flash|fmha|flex"),
    "optimizer": re.compile(r"adam|norm(_cuda)?$|multi_tensor"),
    "copies": re.compile(r"aten::(cat|copy_|clone|fill_|index|gather|scatter)|[Mm]em(cpy|set)"),
}
"""Kinds of operators and kernels by their names; the first that fits."""
_REST = ("other operators", "elsewhere")
_NUM_TOP = 25
_ONE_OF_MANY = re.compile(r" object at 0x\w+|(?<=Module: )(\w+)_\d+$")
"""What tells objects of a class apart, and the layers of a model; it would part their times."""
_Spans = dict[str, list[tuple[int, int]]]
"""Begin and end of a stage's parts in ns, by stage."""


class _Op(NamedTuple):
    """An operator's own time on the CPU, or a kernel's on a GPU."""

    name: str
    start_ns: int
    seconds: float

    @property
    def kind(self) -> str:
        return next((kind for kind, names in _KINDS.items() if names.search(self.name)), _REST[0])


@contextmanager
def profiled(folder: Path, device: torch.device) -> Iterator[None]:
    """Profile what runs within, on all threads, and write the files into `folder`."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    all_threads = _ExperimentalConfig(profile_all_threads=True)
    with profile(
        activities=activities, with_stack=True, experimental_config=all_threads
    ) as profiler:
        yield
    with writing(folder):
        folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(folder / "trace.json.gz"))
    results = profiler.profiler.kineto_results
    tree = results.experimental_event_tree()
    root, ops = Frame(), list[_Op]()
    spans: _Spans = defaultdict(list)
    for event in tree:
        _walk(event, root, spans, ops)
    if device.type == "cuda":
        ops = [
            _Op(event.name(), event.start_ns(), event.duration_ns() / 1e9)
            for event in results.events()
            if event.device_type() == DeviceType.CUDA and not event.name().startswith(SPAN)
        ]
    atomic_write_text(folder / "flame.html", flame_html("Wall time of each thread", root))
    atomic_write_text(folder / "operators.txt", _table(spans, ops))


def _walk(event: Any, frame: Frame, spans: _Spans, ops: list[_Op]) -> None:
    """Add an event and what it called to the flame graph, the spans of stages and the operators."""
    children = event.children
    if event.typed[0] == _EventType.TorchOp:
        if event.name.startswith(SPAN):
            spans[event.name.removeprefix(SPAN)].append((event.start_time_ns, event.end_time_ns))
        else:
            own_ns = event.duration_time_ns - sum(child.duration_time_ns for child in children)
            ops.append(_Op(event.name, event.start_time_ns, max(own_ns, 0) / 1e9))
    callee = frame.add(_ONE_OF_MANY.sub(r"\1", event.name), event.duration_time_ns / 1e9)
    for child in children:
        _walk(child, callee, spans, ops)


def _table(spans: _Spans, ops: Sequence[_Op]) -> str:
    """Say how each stage spent its time, and which operators took most."""
    kinds = [*_KINDS, *_REST]
    lines = ["".join(f"{head:>17}" for head in ("stage", "seconds", *kinds))]
    for stage in STAGES:
        seconds = sum(end - start for start, end in spans[stage]) / 1e9
        if not seconds:
            continue
        by_kind = dict.fromkeys(kinds, 0.0)
        for op in ops:
            if any(start <= op.start_ns < end for start, end in spans[stage]):
                by_kind[op.kind] += op.seconds
        by_kind[_REST[1]] = max(0.0, seconds - sum(by_kind.values()))
        shares = "".join(f"{spent / seconds:>17.1%}" for spent in by_kind.values())
        lines.append(f"{stage:>17}{seconds:>17.3f}{shares}")
    totals: dict[str, list[float]] = defaultdict(list)
    for op in ops:
        totals[op.name].append(op.seconds)
    slowest = sorted(totals.items(), key=lambda item: -sum(item[1]))[:_NUM_TOP]
    lines += ["", f"{'seconds':>10}{'calls':>10}  operator, own time"]
    lines += [f"{sum(spent):>10.3f}{len(spent):>10}  {name[:120]}" for name, spent in slowest]
    return "\n".join(lines) + "\n"
