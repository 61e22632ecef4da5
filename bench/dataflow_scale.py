"""Many nodes at the dataflow: latencies, CPU time per group and bytes, by the number of nodes.

    python -m bench.dataflow_scale --nodes 10 100 1000 --postgres postgresql://user@host/name

Real are the services (`python -m flowtrain.dataflow serve`, several on PostgreSQL, one on SQLite),
their database and HTTP on loopback. SIMULATED are rollouts and training: nodes hold their share of
the leased units, renew them, push groups that were packed beforehand and lease eight more when they
fall below the share; a trainer per policy takes batches. With --rate the nodes push so many groups
a minute, or as many as they can; without, as fast as they are answered. Database and services must
run on this machine for their CPU times to be read; those of processes that end meanwhile (of
autovacuum) are not seen.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from bench.dataflow_growth import NUM_GROUPS, POLICIES
from bench.dataflow_nodes import LEASE_S, VOCAB_SIZE, Load, Trainer, group, run_nodes
from bench.dataflow_service import GROUP_SIZE, database_of, service
from bench.measure import print_table, write_json
from bench.payloads import database_bytes
from flowtrain.config import Config
from flowtrain.dataflow.client import Client
from flowtrain.dataflow.codec import pack_group, unpack_group
from flowtrain.dataflow.ledger.group_checks import GroupLimits
from flowtrain.types import Task

NUM_TASKS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--units", type=int, default=10, help="leased, per node (default: 10)")
    parser.add_argument("--group-bytes", type=int, default=256_000)
    parser.add_argument("--rate", type=float, default=0.0, help="groups a minute; 0: closed loop")
    parser.add_argument("--seconds", type=float, default=30.0, help="measured (default: 30)")
    parser.add_argument("--replicas", type=int, default=3, help="on PostgreSQL (default: 3)")
    parser.add_argument("--processes", type=int, default=2, help="of nodes (default: 2)")
    parser.add_argument("--threads", type=int, default=8, help="of each of them (default: 8)")
    parser.add_argument("--folder", action="store_true", help="payloads in a folder, too")
    parser.add_argument("--postgres", default="", help="URL of a server; empty: SQLite")
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    args = parser.parse_args()
    rows = []
    for num_nodes in args.nodes:
        for in_folder in (False, True) if args.folder else (False,):
            load = Load(
                *(num_nodes, num_nodes * args.units, args.group_bytes, args.rate, args.seconds),
                *(args.replicas if args.postgres else 1, args.processes, args.threads, in_folder),
            )
            rows.append(row(load, args.postgres))
            print_table(rows[-1:])
            print(flush=True)
    if args.json:
        write_json(args.json, rows)


def row(load: Load, postgres: str = "") -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as cleanup:
        database = str(Path(folder) / "ledger.db")
        if postgres:
            database = cleanup.enter_context(database_of(postgres))
        store = Path(folder) / "store"
        found = _measured(load, database, _options(Path(folder), store, load))
        found["database_mb"] = database_bytes(database) / 1e6
        stored = (path.stat().st_size for path in store.rglob("*") if path.is_file())
        found["folder_mb"] = sum(stored) / 1e6
    return {
        "database": "PostgreSQL" if postgres else "SQLite",
        "payloads": "folder" if load.in_folder else "database",
        "nodes": load.num_nodes,
        "replicas": load.num_replicas,
        **found,
        **_parts(load),
    }


def _options(folder: Path, store: Path, load: Load) -> list[str]:
    tasks = folder / "tasks.jsonl"
    lines = (json.dumps({"question": f"What is {n}?", "answer": str(n)}) for n in range(NUM_TASKS))
    tasks.write_text("\n".join(lines))
    options = {
        "tasks.name": "file",
        "tasks.path": tasks,
        "rollout.num_questions": NUM_GROUPS,
        "rollout.group_size": GROUP_SIZE,
        "dataflow.max_waiting": 1 << 20,
        "dataflow.lease_s": LEASE_S,
        **{f"roles.{name}": "own" for name in POLICIES[1:]},
        **({"dataflow.payloads": store} if load.in_folder else {}),
    }
    return [word for key, value in options.items() for word in (f"--{key}", str(value))]


def _measured(load: Load, database: str, options: Sequence[str]) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with ExitStack() as cleanup:
        before = _children()
        places = [
            cleanup.enter_context(service(database, options)) for _ in range(load.num_replicas)
        ]
        services = _children() - before
        stop = threading.Event()
        cleanup.callback(stop.set)
        trainers = [Trainer(name, *places[i % len(places)]) for i, name in enumerate(POLICIES)]
        pipes, processes = [], []
        for number in range(load.num_processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_nodes, args=(theirs, load, places, number))
            process.start()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()  # its nodes have joined and hold their share
        threads = [threading.Thread(target=each.run, args=(stop,)) for each in trainers]
        for thread in threads:
            thread.start()
        backends = _backends(database)
        pids: dict[str, set[Any]] = {
            "service": services,
            "database": backends,
            "nodes": {p.pid for p in processes},
        }
        start = {name: _cpu_s(of) for name, of in pids.items()}
        began, own_s = time.monotonic(), time.process_time()
        for pipe in pipes:
            pipe.send(began + load.seconds)
        found = [pipe.recv() for pipe in pipes]
        seconds = time.monotonic() - began
        own_s = time.process_time() - own_s
        pids["database"] |= _backends(database)
        spent = {name: _cpu_s(of) - start[name] for name, of in pids.items()}
        status = _status(*places[0])
        stop.set()
        for thread in threads:
            thread.join()
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join()
    times = _merged([*found, *(each.times for each in trainers)])
    num = len(times["push"])
    latencies = {
        f"{name}_{label}_ms": 1e3 * value
        for name in ("lease", "renew", "push", "batch")
        for label, value in _quantiles(times[name]).items()
    }
    return {
        "leased": status[1]["work_items"]["leased"],
        "groups": num,
        "trained": sum(len(each.times["batch"]) for each in trainers) * NUM_GROUPS,
        "groups_per_min": 60 * num / seconds,
        **latencies,
        "status_ms": 1e3 * status[0],
        **{f"{name}_cpu_ms": 1e3 * used / max(1, num) for name, used in spent.items()},
        "trainers_cpu_ms": 1e3 * own_s / max(1, num),
    }


def _status(url: str, token: str) -> tuple[float, dict[str, Any]]:
    with Client(url, token) as client:
        began = time.perf_counter()
        found = client.status()
        return time.perf_counter() - began, found


def _merged(parts: Iterable[dict[str, list[float]]]) -> dict[str, list[float]]:
    merged: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for name, times in part.items():
            merged[name] += times
    return merged


def _quantiles(times: Sequence[float]) -> dict[str, float]:
    if len(times) < 2:
        return {"p50": float("nan"), "p99": float("nan")}
    return {"p50": statistics.median(times), "p99": statistics.quantiles(times, n=100)[98]}


def _parts(load: Load) -> dict[str, float]:
    """Bytes of a group, and the CPU time that decoding and checking it takes: parts of a push."""
    made = group(Task("task", "?", ("1284",)), load.group_bytes)
    payload = pack_group(made)
    roles = dict.fromkeys(POLICIES[1:], "own")
    config = Config.model_validate({"rollout": {"group_size": GROUP_SIZE}, "roles": roles})
    limits = GroupLimits(config, dict.fromkeys(POLICIES, (VOCAB_SIZE, 1 << 20)))
    parts = {
        "pack": lambda: pack_group(made),
        "inflate": lambda: zlib.decompress(payload),
        "decode": lambda: unpack_group(payload),
        "check": lambda: limits.check(made),
    }
    found = {"group_kb": len(payload) / 1e3}
    for name, run in parts.items():
        times = []
        for _ in range(10):
            began = time.thread_time()
            run()
            times.append(time.thread_time() - began)
        found[f"{name}_cpu_ms"] = 1e3 * statistics.median(times)
    return found


# ---- processes


def _children() -> set[int]:
    """Processes that this one has started."""
    own = f"/proc/self/task/{os.getpid()}/children"
    return set(map(int, Path(own).read_text().split()))


def _backends(database: str) -> set[int]:
    """The processes of a PostgreSQL server on this machine; SQLite is in the service's."""
    if "://" not in database:
        return set()
    import psycopg

    with psycopg.connect(database) as connection:
        rows = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        ).fetchall()
    return {row[0] for row in rows}


def _cpu_s(pids: Iterable[int | None]) -> float:
    """CPU seconds that the processes have used, or 0 for one that has ended."""
    total = 0.0
    for pid in pids:
        with suppress(FileNotFoundError):
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return total


if __name__ == "__main__":
    main()
