"""A plan, run: stages in processes of their own, each with a time limit, those of a group at once.

What a stage has found is in its file as soon as it is found, so what a stage that is cut off has
measured counts. `stages.json` and `report.md` say at any moment what has begun and what has ended.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.gpu.cases import AGAIN, LATE, keep_good_rows, read_rows
from bench.gpu.plans import PLANS, STAGES
from bench.gpu.report import write_report

ROOT = Path(__file__).resolve().parents[2]
CHILD = ("-m", "bench.gpu.stage")
_LEAST_S = 5
"""Stages are not begun with less time than this."""
PATIENCE = 4
"""A rehearsal takes so many times as long: it is not about time, and has few cores."""
_SAVE_S = 5
"""Seconds between two archives of what stages have found so far."""
_MOST_BYTES = 1 << 22
"""Of a file in an archive; a trace of kernels, compressed, is below."""
_CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a stage."""

    status: str
    """done, broken (some cases failed), failed, timed out, skipped; begun: nobody saw it end."""
    seconds: float = 0.0
    reason: str = ""
    clocks: str = ""
    """The least and the most MHz of the multiprocessors meanwhile."""

    @property
    def has_ended(self) -> bool:
        return self.status not in ("begun", "timed out")


class Results:
    """The folder of a plan's results."""

    def __init__(
        self, plan: str, folder: Path, is_small: bool, copy_to: Path | None = None
    ) -> None:
        """`copy_to`: where an archive and the report are put after each stage, too."""
        folder.mkdir(parents=True, exist_ok=True)
        self.plan, self.folder, self.is_small, self._copy_to = plan, folder, is_small, copy_to
        self.patience = PATIENCE if is_small else 1
        path = folder / "stages.json"
        known = json.loads(path.read_text())["stages"] if path.exists() else {}
        self.outcomes = {name: Outcome(**fields) for name, fields in known.items()}

    def note(self, name: str, outcome: Outcome) -> None:
        """Write what is known of a stage, and the report."""
        self.outcomes[name] = outcome
        found = {stage: asdict(each) for stage, each in self.outcomes.items()}
        known = {"plan": self.plan, "is_small": self.is_small, "stages": found}
        text = json.dumps(known, indent=1)
        (self.folder / "stages.json").write_text(text + "\n")
        write_report(self.folder, found, is_judged=not self.is_small)

    def archive(self) -> None:
        """Put all small files into `results.tar`, and the report beside it, where that is asked."""
        if (target := self._copy_to) is None:
            return
        target.mkdir(parents=True, exist_ok=True)
        new = target / "results.tar.new"
        with tarfile.open(new, "w") as archive:
            for path in sorted(self.folder.rglob("*")):
                name = path.relative_to(self.folder)
                is_kept = path.is_file() and not path.is_symlink() and name.parts[0] != "caches"
                if is_kept and path.stat().st_size < _MOST_BYTES:
                    archive.add(path, str(name))
        new.replace(target / "results.tar")
        shutil.copy(self.folder / "report.md", target / "report.md")

    def take_caches(self, path: Path) -> None:
        """Begin with what an earlier plan has compiled, if its caches are there."""
        if path.exists() and not (self.folder / "caches").exists():
            with tarfile.open(path) as archive:
                archive.extractall(self.folder, filter="data")

    def keep_caches(self) -> None:
        """Pack what Triton and Inductor have compiled, for the next plan to begin with."""
        caches = self.folder / "caches"
        if caches.exists() and not self.is_small:
            with tarfile.open((self._copy_to or self.folder) / "caches.tar.gz", "w:gz") as archive:
                archive.add(caches, "caches")


def run_plan(
    results: Results, seconds: float, only: Sequence[str] = (), again: Sequence[str] = ()
) -> None:
    """Run the stages of a plan that are left, until its seconds are over."""
    ends = time.monotonic() + seconds
    for stage in again:
        (results.folder / f"{stage}.json").unlink(missing_ok=True)
    for group in _left(results, only, again):
        limit_s = ends - time.monotonic()
        if limit_s < _LEAST_S:
            print(f"no time is left for {', '.join(group)}; the same command goes on with it")
            return
        _run_group(group, results, limit_s)
    print("every stage has run")


def _left(results: Results, only: Sequence[str], again: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Groups of stages that have not ended, then of those that broke."""
    known, wanted = results.outcomes, {*only, *again}
    groups = [
        [x for x in group if x in wanted or not wanted] for group in PLANS[results.plan].groups
    ]
    planned = [x for group in groups for x in group]
    groups += [[x] for x in (*only, *again) if x not in planned]  # of another plan
    new = {x for x in STAGES if x in again or x not in known or not known[x].has_ended}
    broken = {x for x, found in known.items() if found.status in ("broken", "failed", "skipped")}
    for chosen in (new, broken - new):
        for group in groups:
            if names := tuple(x for x in group if x in chosen):
                yield names


def _run_group(group: Sequence[str], results: Results, limit_s: float) -> None:
    """Run the stages of a group at once."""
    stopped = threading.Event()
    for name in group:
        results.note(name, Outcome("begun"))
    with ThreadPoolExecutor(len(group)) as pool:
        limits_s = [min(limit_s, results.patience * STAGES[name][1]) for name in group]
        run = {
            pool.submit(_run, name, results, most_s, stopped): name
            for name, most_s in zip(group, limits_s, strict=True)
        }
        pending = {*run}
        try:
            while pending:
                results.archive()
                ended, pending = wait(pending, _SAVE_S, FIRST_COMPLETED)
                for future in ended:
                    name, outcome = run[future], future.result()
                    spent = f"{outcome.status} in {outcome.seconds:.0f} s"
                    print(f"{name}: {spent} {outcome.reason}".rstrip(), flush=True)
                    results.note(name, outcome)
        finally:  # also where a signal ends the plan
            stopped.set()
    results.archive()


def _run(name: str, results: Results, limit_s: float, stopped: threading.Event) -> Outcome:
    """Run a stage, as often as a case takes its process down."""
    folder, started = results.folder, time.monotonic()
    path = folder / f"{name}.json"
    keep_good_rows(path)
    with (folder / f"{name}.log").open("w") as log, _clocks(folder / f"{name}.clocks") as clocks:
        code: int | None = None
        while (left_s := started + limit_s - time.monotonic()) > 0 and not stopped.is_set():
            num_rows = len(read_rows(path))
            command = [sys.executable, *CHILD, name, str(path), "--seconds", f"{left_s:.0f}"]
            process = subprocess.Popen(
                [*command, *(["--small"] if results.is_small else [])],
                cwd=ROOT, env=_environment(folder), stdout=log, stderr=log, process_group=0,
            )  # fmt: skip
            while (code := process.poll()) is None and time.monotonic() < started + limit_s:
                if stopped.wait(0.05):
                    break
            _end(process)
            is_down = code is not None and (code == AGAIN or code < 0)
            if not is_down or len(read_rows(path)) == num_rows:
                break
    seconds = time.monotonic() - started
    status, reason = _judge(name, code, read_rows(path))
    return Outcome(status, seconds, reason, clocks())


def _judge(name: str, code: int | None, rows: Sequence[dict[str, object]]) -> tuple[str, str]:
    """(status, reason) of a stage by how its last process ended and by its rows."""
    if code is not None and code not in (0, LATE):
        return "failed", f"exit status {code}, see {name}.log"
    failed = list(dict.fromkeys(str(row["case"]) for row in rows if "error" in row))
    lacking = sorted({str(row["needs"]) for row in rows if "needs" in row})
    more = ", ..." if len(failed) > 5 else ""
    reasons = [f"{len(failed)} failed: {', '.join(failed[:5])}{more}"] if failed else []
    reasons += [f"needs {', '.join(lacking)}"] if lacking else []
    if code != 0:
        reasons = [f"{sum('error' not in row for row in rows)} rows are kept", *reasons]
        return "timed out", "; ".join(reasons)
    is_empty = lacking and all("needs" in row for row in rows)
    return "broken" if failed else "skipped" if is_empty else "done", "; ".join(reasons)


def _environment(folder: Path) -> dict[str, str]:
    """Of a stage: what is compiled goes into the folder, where the next plan finds it."""
    paths = (str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", ""))
    caches = {key: str((folder / "caches" / name).resolve()) for key, name in _CACHES.items()}
    return {**os.environ, **caches, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the process group, or it would take the GPU from the next stage."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


@contextmanager
def _clocks(path: Path) -> Iterator[Callable[[], str]]:
    """Have nvidia-smi write clocks, power, and what holds them back, into a file every second;
    gives their summary. Empty where there is none.
    """
    if shutil.which("nvidia-smi") is None:
        yield lambda: ""
        return
    fields = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-i", "0"]
    with path.open("w") as file:
        process = subprocess.Popen([*command, "-l", "1"], stdout=file, stderr=file)

    def summary() -> str:
        heads = [line.partition(",")[0] for line in path.read_text().splitlines()]
        found = [int(head) for head in heads if head.isdigit()]
        return f"{min(found)} to {max(found)} MHz" if found else ""

    try:
        yield summary
    finally:
        process.kill()
        process.wait()
