"""What the gateway costs:  python -m bench.gateway [--json F]

256 rollouts are in flight at a time, each a conversation of four turns with tools, whose last
prompt has about 2,000 tokens: once by each wire of the gateway. The programs are in a process of
their own (`bench/gateway_clients.py`); the engine is SIMULATED: it answers --engine-s seconds after
it was asked, always, with text and a call that are at hand, and takes no core.

"steady": the rollouts began at times drawn at random, so that calls come as they do to a gateway
whose cores have time to spare. What the gateway adds to a call is the time that its client waits,
less the time in the engine, which is measured there, from the prompt's coming until the answer is
due. If the event loop is late to take the answer (`late_p99_ms`), that counts as the gateway's, as
do HTTP, the sockets, and the client's own part of either. "saturated": the engine takes no time, so
that 256 calls always wait, and the rate is that of one process.

CPU time is that of the gateway's process: all of its threads, the rollouts' own begin and end, and
the simulated engine. `http_cpu_ms` is the part of the thread that serves, `longest_gc_ms` the
longest time for which Python looked for garbage: all threads wait for it. `noise_p99_ms` is how
late the process of the programs, which does little, wakes up: nothing on this machine is faster
than that for 99 of 100 calls. `machine_load` is that of the last minute, of all that runs here.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import random
import selectors
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.gateway_clients import WIRES, Clients, Seen
from bench.measure import print_table, write_json
from bench.simulated_chat import TURNS, SimulatedEngine, make_context
from flowtrain.agents.gateway.agent import GatewayAgent
from flowtrain.types import Task

IN_FLIGHT, ENGINE_S = 256, 4.0


@dataclass(frozen=True, slots=True)
class Window:
    """When it was measured, the CPU seconds of this process and of the thread that serves, and the
    times at which the collector of garbage began and ended.
    """

    began: float
    ended: float
    cpu_s: float
    http_s: float
    collector: Sequence[float]


@dataclass(frozen=True, slots=True)
class Load:
    """The rollouts of a case."""

    name: str
    in_flight: int
    engine_s: float
    window_s: float
    """Seconds that are measured, after the rollouts have begun."""

    @property
    def ramp_s(self) -> float:
        """Seconds in which the rollouts begin, so that all turns are met at once from then on."""
        return max(min(2.0, self.window_s), TURNS * self.engine_s)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", metavar="F", help="write the rows to this file")
    add("--in-flight", type=int, default=IN_FLIGHT, help=f"rollouts (default: {IN_FLIGHT})")
    add("--wires", nargs="+", choices=list(WIRES), default=list(WIRES), help="(default: all)")
    add(
        "--engine-s",
        type=float,
        default=ENGINE_S,
        help=f"seconds of the simulated engine per call (default: {ENGINE_S:g})",
    )
    add("--seconds", type=float, default=32.0, help="measured of each wire (default: 32)")
    add("--saturated-s", type=float, default=16.0, help="of each, saturated (default: 16)")
    args = parser.parse_args(argv)
    loads = [
        Load("steady", args.in_flight, args.engine_s, args.seconds),
        Load("saturated", args.in_flight, 0.0, args.saturated_s),
    ]
    with asyncio.Runner(loop_factory=_precise_loop) as runner:
        rows = runner.run(_measure(loads, args.wires))
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def _precise_loop() -> asyncio.AbstractEventLoop:
    """Return a loop whose timers are no whole milliseconds: an engine that answers wakes a loop at
    once, and one that is simulated should.
    """
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


async def _measure(loads: Sequence[Load], wires: Sequence[str]) -> list[dict[str, Any]]:
    clients = Clients()
    await clients.mark()  # it has begun by then
    await clients.seen()
    rows = []
    for load, wire in itertools.product(loads, wires):
        print(f"{wire}, {load.name}: {load.ramp_s + load.window_s:g} s", flush=True)
        rows.append(await case(clients, wire, load))
    clients.end()
    return rows


async def case(clients: Clients, wire: str, load: Load) -> dict[str, Any]:
    """Measure a wire under a load."""
    context, engine = make_context()
    engine.seconds = load.engine_s
    agent = GatewayAgent(context)
    agent._program = clients  # in place of a command: it plays the programs of all rollouts
    clients.wire, clients.turns = wire, TURNS
    assert agent.gateway.base_url, "it serves from now on"
    (thread,) = (each for each in threading.enumerate() if each.name == "gateway")
    numbers, drawn = itertools.count(), random.Random(0)
    begin = time.monotonic() + load.ramp_s
    end = begin + load.window_s

    async def slot(wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        while time.monotonic() < end:
            number = next(numbers)
            trajectory = await agent.run(Task(str(number), "", ("",)), number)
            if trajectory.error or len(trajectory.turns) != TURNS:
                raise SystemExit(f"a rollout failed: {trajectory.error or trajectory.truncated}")

    async def spent(when: float) -> tuple[float, float]:
        await asyncio.sleep(when - time.monotonic())
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        found = time.process_time(), time.clock_gettime(clock)
        await clients.mark()
        return found

    collector: list[float] = []

    def note(phase: str, info: object) -> None:
        collector.append(time.monotonic())

    gc.callbacks.append(note)
    waits_s = [drawn.uniform(0.0, load.ramp_s * 0.9) for _ in range(load.in_flight)]
    slots = asyncio.gather(*map(slot, waits_s))
    before, after = await asyncio.gather(spent(begin), spent(end))
    await slots
    seen = await clients.seen()
    agent.close()
    gc.callbacks.remove(note)
    window = Window(begin, end, after[0] - before[0], after[1] - before[1], collector)
    return row_of(wire, load, engine, seen, window)


def row_of(
    wire: str, load: Load, engine: SimulatedEngine, seen: Seen, window: Window
) -> dict[str, Any]:
    """Sum up the calls whose requests were sent inside the window."""
    begin, end = window.began, window.ended
    added_ms = [1e3 * (s - load.engine_s) for sent, s in seen.calls if begin <= sent < end]
    late_ms, noise_ms = (
        [1e3 * seconds for due, seconds in late if begin <= due < end]
        for late in (engine.late, seen.late)
    )
    number, seconds = len(added_ms), end - begin
    pauses = zip(window.collector[::2], window.collector[1::2], strict=True)
    return {
        "wire": wire,
        "load": load.name,
        "in_flight": load.in_flight,
        "simulated_engine_s": load.engine_s,
        "longest_prompt": engine.longest,
        "calls": number,
        "calls_per_s": number / seconds,
        "cpu_ms": 1e3 * window.cpu_s / number,
        "http_cpu_ms": 1e3 * window.http_s / number,
        "busy": window.cpu_s / seconds,
        "machine_load": os.getloadavg()[0],
        "clients_busy": (seen.cpu_s[1] - seen.cpu_s[0]) / seconds,
        **{f"added_{name}_ms": value for name, value in _percentiles(added_ms).items()},
        "late_p99_ms": _percentiles(late_ms)["p99"],
        "noise_p99_ms": _percentiles(noise_ms)["p99"],
        "longest_gc_ms": 1e3 * max((b - a for a, b in pauses if begin <= a < end), default=0.0),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ranked = sorted(values)
    return {"p50": statistics.median(ranked), "p99": ranked[int(0.99 * len(ranked))]}


if __name__ == "__main__":
    main()
