"""Bounds that the machine code of a kernel sets, read from the disassembly of its hot loops.

A hot loop is an innermost loop that reads or writes global memory. For each, the instructions of an
iteration are counted, and the time that a warp waits for memory is found by running the loop on
paper: a load takes the device's latency, a warp issues in order and stops at the first instruction
that touches a register which is still being loaded. The compiler may sink loads to their first use,
so what the source says about loads in flight proves nothing; this does.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.sass import Instruction


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, by what bounds a kernel there. Clocks and units are NVIDIA's; bandwidth is what a copy
    reaches, and the latencies, under load, are assumptions.
    """

    name: str
    num_sms: int
    clock_ghz: float
    copy_tb_s: float
    dram_ns: float = 700.0
    l2_ns: float = 300.0
    issue_slots: int = 4
    multiply_lanes: int = 64
    """Integer products per clock of a multiprocessor."""
    special_lanes: int = 16
    """Special functions per clock of a multiprocessor; so many threads shuffle in two clocks."""
    registers: int = 65536
    max_threads: int = 2048
    shared: int = 227 * 1024
    """Bytes of shared memory of a multiprocessor."""


DEVICES = {
    "sm_80": Device(
        "A100 80GB", num_sms=108, clock_ghz=1.41, copy_tb_s=1.75, l2_ns=700, shared=163 * 1024
    ),
    "sm_90": Device("H200", num_sms=132, clock_ghz=1.755, copy_tb_s=4.3),
    "sm_100": Device("B200", num_sms=148, clock_ghz=1.85, copy_tb_s=7.0),
}


@dataclass(frozen=True, slots=True)
class Resources:
    """A program's share of a multiprocessor."""

    registers: int
    """Per thread."""
    shared: int
    """Bytes."""
    num_warps: int

    def threads_per_sm(self, device: Device) -> int:
        """Threads at work on a multiprocessor; registers are given out by 8 per thread."""
        threads = 32 * self.num_warps
        programs = min(
            device.registers // (-(-self.registers // 8) * 8 * threads),
            device.max_threads // threads,
            device.shared // max(1, self.shared),
        )
        return threads * max(1, programs)


@dataclass(frozen=True, slots=True)
class Goal:
    """The share of a copy's bandwidth that a kernel shall reach, in bytes that must move."""

    share: float
    num_bytes: float
    """Per byte that is loaded: 1 for a read, 2 for a read and a write."""
    latencies: tuple[str, ...] = ("dram",)
    """Memory that each pass over the data reads from: "dram", or "l2" for what was read before."""
    min_loads: float = 4.0
    """Loads under way per thread. Fewer do where a multiprocessor is full of threads."""
    load_bytes: float = 16.0
    """Of a load, on average."""
    store_bytes: float = 16.0
    max_shuffles: float = 0.0
    """Per element; a program without a loop has those of its end in this number."""
    share_on: Mapping[str, float] = field(default_factory=dict)
    """Another share on some devices, by their names."""


@dataclass(frozen=True, slots=True)
class SmallGoal:
    """For a few numbers per token, tens of kB in all, where bandwidth does not matter: how often
    the kernel may wait for memory, one time after another.
    """

    waits: float
    """Per iteration, over all loops (one that the compiler unrolled stands there more than once);
    without a loop, in the whole program."""
    has_loop: bool = True


SCORE = Goal(0.88, 1)
GRADIENT = Goal(0.88, 2)
LOSS = Goal(1 / 1.3, 2, ("dram", "l2"), share_on={"A100 80GB": 1 / 1.7})
"""108 rows of 304 kB are 33 of the 40 MB of an A100's L2, which are two halves that copy from each
other: count with the second read from DRAM, six bytes an element in place of four."""
SCALE = Goal(0.88, 2, min_loads=2)
COUNT = Goal(0.8, 1, min_loads=2, store_bytes=4, max_shuffles=0.2)
COMPACT = Goal(
    0.8, 1, min_loads=2, load_bytes=12, store_bytes=2, max_shuffles=0.3, share_on={"B200": 0.75}
)
DIGEST = Goal(0.8, 1, share_on={"B200": 0.6})
"""Fourteen instructions for two bytes: a B200 has more memory for each of them than an H200."""
NO_WRITE = Goal(0.8, 6, load_bytes=2)
SCATTER = Goal(0.8, 34 / 3, load_bytes=2, store_bytes=2)
"""A change is three loads of two bytes; its own 4 bytes must move and the 32 of its word's sector,
and these once more to be written."""
NORM = Goal(0.8, 1, min_loads=2, store_bytes=13, max_shuffles=0.6)
"""Weights are loaded once more for each few rows, and the lanes of a row meet at its end."""
NORM_GRADIENT = Goal(0.8, 1.5, load_bytes=10, max_shuffles=0.7)
ROTARY = Goal(0.8, 1.75, min_loads=3, load_bytes=8, store_bytes=8)
"""Heads of 64 in a few key heads are short."""
GATED = Goal(0.8, 1.5, min_loads=2)
GATED_GRADIENT = Goal(0.8, 2, min_loads=2)
STATISTICS = SmallGoal(waits=3)
MERGE = SmallGoal(waits=4, has_loop=False)
SCAN = SmallGoal(waits=1)
BRANCHING = SmallGoal(waits=8)
CAPPED = 0.35
"""Share where logits are capped: three special functions per element bound it then, not memory."""
MARGIN = 1.15
"""A bound must be so much above the goal."""
_BESIDE = ("_mask_statistics", "_logits_at", "_write_at", "backward_row", "write_zeros")
"""Functions whose loops are over a few ids of a row, or over rows that are not read."""


@dataclass(frozen=True)
class Loop:
    """An iteration of a hot loop, as one thread runs it."""

    instructions: tuple[Instruction, ...]

    @cached_property
    def counts(self) -> Counter[str]:
        return Counter(instruction.kind for instruction in self.instructions)

    @cached_property
    def loads(self) -> list[Instruction]:
        return [i for i in self.instructions if i.kind == "LDG"]

    @cached_property
    def stores(self) -> list[Instruction]:
        return [i for i in self.instructions if i.kind == "STG"]

    @property
    def functions(self) -> set[str]:
        """Names of the functions of the source that read and write memory."""
        return {
            name
            for path, line in {i.where for i in (*self.loads, *self.stores) if i.where}
            for first, last, name in _function_lines(path)
            if first <= line <= last
        }

    def num_elements(self, size: int) -> float:
        return (self.bytes_loaded or self.bytes_stored) / size

    def count(self, *kinds: str) -> int:
        """Instructions of these kinds, or all of them."""
        return sum(self.counts[kind] for kind in kinds) if kinds else len(self.instructions)

    @property
    def bytes_loaded(self) -> int:
        return sum(load.num_bytes for load in self.loads)

    @property
    def bytes_stored(self) -> int:
        return sum(store.num_bytes for store in self.stores)

    @cached_property
    def waits(self) -> float:
        """Latencies of memory that a warp waits for in an iteration, in the long run."""
        num_warm, num_timed = 4, 8
        ready: dict[str, float] = {}
        now = started = 0.0
        for iteration in range(num_warm + num_timed):
            if iteration == num_warm:
                started = now
            for instruction in self.instructions:
                touched = instruction.read | instruction.written
                now = max(now, *(ready.pop(register, 0.0) for register in touched), 0.0)
                if instruction.kind == "LDG":
                    ready |= dict.fromkeys(instruction.written, now + 1.0)
        return (now - started) / num_timed

    @property
    def loads_in_flight(self) -> float:
        """Loads that are under way on average while a warp waits."""
        return len(self.loads) / self.waits if self.waits else float("inf")


def hot_loops(instructions: Sequence[Instruction]) -> list[Loop]:
    """Innermost loops that touch global memory, in their order."""
    spans = [
        (i.target, i.address)
        for i in instructions
        if i.target is not None and i.target <= i.address
    ]
    return [
        loop
        for first, last in sorted(spans)
        if not any(
            (first, last) != other and first <= other[0] and other[1] <= last for other in spans
        )
        for loop in [Loop(tuple(_between(instructions, first, last)))]
        if loop.loads or loop.stores
    ]


def _between(instructions: Sequence[Instruction], first: int, last: int) -> Iterator[Instruction]:
    return (i for i in instructions if first <= i.address <= last)


def row(
    program: Sequence[Instruction],
    device: Device,
    resources: Resources,
    *,
    goal: Goal | SmallGoal,
    element_size: int,
) -> dict[str, Any]:
    """Columns of the table: counts per element of the passes over the data, widths of accesses, the
    least number of loads under way, and the bounds in TB/s; `fault` says what keeps a kernel from
    its goal.
    """
    loops = hot_loops(program)
    passes = [loop for loop in loops if not loop.functions & set(_BESIDE)] or [Loop(tuple(program))]
    threads = resources.threads_per_sm(device)

    def per_element(*kinds: str) -> float:
        return sum(loop.count(*kinds) / loop.num_elements(element_size) for loop in passes)

    loads = min((loop.loads_in_flight for loop in passes if loop.loads), default=float("inf"))
    found: dict[str, Any] = {
        "threads_per_sm": threads,
        "instructions": per_element(),
        "special": per_element("MUFU"),
        "shuffles": per_element("SHFL"),
        "load_bytes": _mean_width([i for loop in passes for i in loop.loads]),
        "store_bytes": _mean_width([i for loop in passes for i in loop.stores]),
        "loads_in_flight": loads,
        "waits": sum(loop.waits for loop in passes),
    }
    if isinstance(goal, SmallGoal):
        return found | {"fault": ", ".join(_small_faults(found["waits"], bool(loops), goal))}
    num_bytes = goal.num_bytes * element_size
    lanes = device.num_sms * device.clock_ghz / 1e3  # of one lane per multiprocessor, per ps
    nanoseconds = {"dram": device.dram_ns, "l2": device.l2_ns}
    wait_ns = sum(
        loop.waits * nanoseconds[where] / loop.num_elements(element_size)
        for loop, where in zip(passes, goal.latencies, strict=True)
    )
    bounds = {
        "issue_tb_s": num_bytes * lanes * 32 * device.issue_slots / per_element(),
        "latency_tb_s": num_bytes * device.num_sms * threads / wait_ns / 1e3,
    }
    if products := per_element("IMAD"):
        bounds["multiply_tb_s"] = num_bytes * lanes * device.multiply_lanes / products
    if special := per_element("MUFU") + per_element("SHFL") / 2:
        bounds["special_tb_s"] = num_bytes * lanes * device.special_lanes / special
    goal_tb_s = goal.share_on.get(device.name, goal.share) * device.copy_tb_s
    return {
        **found,
        **bounds,
        "goal_tb_s": goal_tb_s,
        "fault": ", ".join(_faults(found, min(bounds.values()) / goal_tb_s, goal)),
    }


def _mean_width(accesses: Sequence[Instruction]) -> float | None:
    return fmean(i.num_bytes for i in accesses) if accesses else None


def _faults(found: dict[str, Any], ratio: float, goal: Goal) -> Iterator[str]:
    if found["loads_in_flight"] < goal.min_loads:
        yield f"{found['loads_in_flight']:.1f} loads in flight"
    for access, least in (("load", goal.load_bytes), ("store", goal.store_bytes)):
        width = found[f"{access}_bytes"]
        if width is not None and width < least:
            yield f"{access}s of {width:.3g} bytes"
    if found["shuffles"] > goal.max_shuffles:
        yield f"{found['shuffles']:.2g} shuffles per element"
    if ratio < MARGIN:
        yield f"a bound at {ratio:.2f} times the goal"


def _small_faults(waits: float, has_loop: bool, goal: SmallGoal) -> Iterator[str]:
    if waits > goal.waits:
        yield f"waits for memory {waits:.2g} times"
    if has_loop and not goal.has_loop:
        yield "a loop"


@cache
def _function_lines(path: str) -> list[tuple[int, int, str]]:
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    return [
        (node.lineno, node.end_lineno or node.lineno, node.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    ]
