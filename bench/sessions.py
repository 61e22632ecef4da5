"""What sessions of Python cost: a turn, a snapshot, a restore, and the memory of a state.

python -m bench.sessions --json bench/results/cpu/sessions.json
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.measure import print_table, write_json
from flowtrain.tools.sandbox import seccomp
from flowtrain.tools.sandbox.host import ProcessSandbox
from flowtrain.tools.sandbox.sessions import CodeSession, CodeSnapshot, SessionSandbox

CODE = "print(sum(range(100)))"
STATES = {"no variables": "1", "a list of a million numbers": "rows = list(range(10**6)); print(1)"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", metavar="F", help="write the rows to this file")
    add("--calls", type=int, default=200, help="timed calls of each kind (default: 200)")
    args = parser.parse_args()
    rows = asyncio.run(measure(args.calls))
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


async def measure(num_calls: int) -> list[dict[str, Any]]:
    plain = ProcessSandbox(seccomp.backend(), num_workers=1)
    box = SessionSandbox(seccomp.backend(), num_workers=1)
    rows = [await row("a run without a session", num_calls, lambda: plain.run(CODE))]
    rows.append(await row("the first run of a session", num_calls, lambda: first_run(box)))
    for name, begin in STATES.items():
        session = box.open()
        await session.run(begin)
        rows.append(await row(f"a turn, {name}", num_calls, partial(session.run, CODE)))
        rows.append(await row(f"a snapshot, {name}", num_calls, partial(snapshot, session)))
        kept = session.snapshot()
        both = partial(restore_and_run, kept)
        rows.append(await row(f"restore and a turn, {name}", num_calls, both))
        rows.append(await memory_row(session, name))
        kept.close()
        session.close()
    plain.close()
    box.close()
    return rows


async def first_run(box: SessionSandbox) -> None:
    await restored(box.open())


async def restored(session: CodeSession) -> None:
    await session.run(CODE)
    session.close()


async def restore_and_run(kept: CodeSnapshot) -> None:
    await restored(kept.restore())


async def snapshot(session: CodeSession) -> None:
    session.snapshot().close()


async def row(name: str, num_calls: int, call: Callable[[], Awaitable[object]]) -> dict[str, Any]:
    """Time a call after a few that warm it up."""
    times = []
    for _ in range(num_calls + 5):
        started = time.perf_counter()
        await call()
        times.append(1e3 * (time.perf_counter() - started))
    times = sorted(times[5:])
    return {
        "what": name,
        "median ms": round(statistics.median(times), 3),
        "p95 ms": round(times[int(0.95 * len(times))], 3),
    }


async def memory_row(session: CodeSession, name: str) -> dict[str, Any]:
    """Keep 50 states, a turn apart, and see what they take of their own (Pss, of which copies on
    write divide what they share).
    """
    kept = [session.snapshot()]
    before = _pss_kb(kept)
    for _ in range(49):
        await session.run(CODE)
        kept.append(session.snapshot())
    taken = (_pss_kb(kept) - before) / 49
    counted = kept[-1].num_bytes / 1024
    for each in kept:
        each.close()
    row = {"what": f"memory of a further state, {name}", "KiB": round(taken)}
    return row | {"KiB counted": round(counted)}


def _pss_kb(kept: list[Any]) -> int:
    total = 0
    for each in kept:
        lines = Path(f"/proc/{each.pid}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


if __name__ == "__main__":
    main()
