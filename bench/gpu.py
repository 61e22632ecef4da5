"""All that a first half hour on one GPU must answer:

    python -m bench.gpu --out DIR [--minutes M] [--dry-run]

Stages run in the order of what they tell, each in a process of its own with a time limit, until the
minutes are used up. Every case of a stage fails alone. What each found lies in DIR as it comes:
`STAGE.json` (rows, and the versions they were measured under), `STAGE.log`, `report.md`, and at a
stage's end `STAGE.tar` with all of that. A second call goes on where the first stopped; when no
stage is left it tries the broken ones anew. PyTorch and Triton are enough; a stage that needs more
says what. --dry-run takes tiny shapes, on a CPU as well, to see that every stage runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.gpu_cases import AGAIN, keep_good_rows, read_rows
from bench.gpu_report import write_report

ROOT = Path(__file__).resolve().parents[1]
_CHILD = ("-m", "bench.gpu_stages")
_LEAST_S = 15
"""A stage is not begun with less time than this."""
_MOST_BYTES = 1 << 22
"""Of a file in an archive; a trace of kernels, compressed, is below."""
LIMITS_S = {
    "environment": 60,
    "gpu_tests": 120,
    "profile": 120,
    "steps": 300,
    "attention": 300,
    "head_chunks": 90,
    "layers": 120,
    "experts": 120,
    "losses": 90,
    "delta": 60,
    "memory": 300,
    "collectives": 60,
    "checkpoint": 120,
    "kernel_tests": 300,
    "rivals": 300,
    "runs": 500,
    "vllm": 400,
}
"""The stages, functions of `bench/gpu_{stages,ranks,runs}.py`, in the order of what they
tell."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a stage."""

    status: str
    """done, broken (some cases failed), failed, timed out or skipped."""
    seconds: float
    reason: str = ""
    clocks: str = ""
    """The least and the most MHz of the multiprocessors meanwhile."""


def main() -> None:
    args = _arguments()
    if not torch.cuda.is_available() and not args.dry_run:
        raise SystemExit("torch finds no GPU here; --dry-run takes tiny shapes on the CPU")
    args.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * args.minutes
    outcomes = _read(args.out)
    left = _left(outcomes, _chosen(args.stages), _chosen(args.again))
    for name in left:
        left_s = ends - time.monotonic()
        if left_s < _LEAST_S:
            print(f"no time is left for {name}; the same command goes on with it")
            break
        print(f"{name} ...", end=" ", flush=True)
        if name in _chosen(args.again):
            (args.out / f"{name}.json").unlink(missing_ok=True)
        outcome = run(name, args.out, min(left_s, LIMITS_S[name]), args.dry_run)
        print(f"{outcome.status} in {outcome.seconds:.0f} s {outcome.reason}".rstrip(), flush=True)
        outcomes[name] = outcome
        _keep(args.out, name, outcomes, is_judged=not args.dry_run)
    else:
        print("no stage is left" if not left else "every stage has run")
    print(f"report: {args.out / 'report.md'}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="for the results")
    add("--minutes", type=float, default=9.0, help="for this call (default: %(default)s)")
    add("--stages", default="", metavar="S,S", help=f"only these of: {', '.join(LIMITS_S)}")
    add("--again", default="", metavar="S,S", help="stages to begin from nothing")
    add("--dry-run", action="store_true", help="tiny shapes, and no goal is judged")
    return parser.parse_args()


def _left(outcomes: dict[str, Outcome], only: Sequence[str], again: Sequence[str]) -> list[str]:
    """Stages that have not ended, then those that broke."""
    statuses = {name: outcomes[name].status if name in outcomes else "" for name in LIMITS_S}
    wanted = [name for name in LIMITS_S if name in (*only, *again) or not (only or again)]
    begun = [name for name in wanted if statuses[name] in ("", "timed out") or name in again]
    broken = [name for name in wanted if statuses[name] in ("broken", "failed", "skipped")]
    return [*begun, *(name for name in broken if name not in begun)]


def run(name: str, folder: Path, limit_s: float, is_small: bool) -> Outcome:
    """Run a stage, as often as a case takes its process down."""
    path = folder / f"{name}.json"
    keep_good_rows(path)
    started = time.monotonic()
    with (folder / f"{name}.log").open("w") as log, _clocks(folder / f"{name}.clocks") as clocks:
        while True:
            num_rows = len(read_rows(path))
            left_s = limit_s - (time.monotonic() - started)
            code = _process(name, path, left_s, is_small, log.fileno())
            if not (code == AGAIN or (code or 0) < 0) or len(read_rows(path)) == num_rows:
                break
    seconds = time.monotonic() - started
    return Outcome(*_judge(name, code, path, seconds), clocks=clocks())


def _judge(name: str, code: int | None, path: Path, seconds: float) -> tuple[str, float, str]:
    if code is None:
        return "timed out", seconds, f"after {seconds:.0f} s"
    if code:
        return "failed", seconds, f"exit status {code}, see {name}.log"
    rows = read_rows(path)
    failed = [row["case"] for row in rows if "error" in row]
    lacking = sorted({row["needs"] for row in rows if "needs" in row})
    more = ", ..." if len(failed) > 5 else ""
    reason = f"{len(failed)} failed: {', '.join(failed[:5])}{more}" if failed else ""
    if lacking:
        reason = "; ".join(filter(None, [reason, f"needs {', '.join(lacking)}"]))
    is_empty = lacking and all("needs" in row for row in rows)
    return "broken" if failed else "skipped" if is_empty else "done", seconds, reason


def _process(name: str, path: Path, limit_s: float, is_small: bool, log: int) -> int | None:
    """The exit status of a process of the stage; None: the time was up."""
    command = [sys.executable, *_CHILD, name, str(path)]
    paths = (str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = subprocess.Popen(
        [*command, *(["--small"] if is_small else [])],
        cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(max(limit_s, 0))
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


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


def _keep(folder: Path, name: str, outcomes: dict[str, Outcome], is_judged: bool) -> None:
    """Write outcomes and report, and one archive of all that the stage left."""
    found = {stage: asdict(outcome) for stage, outcome in outcomes.items()}
    (folder / "stages.json").write_text(json.dumps(found, indent=1) + "\n")
    write_report(folder, found, is_judged)
    with tarfile.open(folder / f"{name}.tar", "w") as archive:
        for path in (*sorted(folder.glob(f"{name}.*")), folder / name):
            if path.exists() and path.suffix != ".tar":
                archive.add(path, path.name, filter=_without_models)
        for kept in ("stages.json", "report.md"):
            archive.add(folder / kept, kept)


def _without_models(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out what the runs of a stage have written for themselves: weights and moments."""
    return member if member.size < _MOST_BYTES else None


def _chosen(text: str) -> Sequence[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in LIMITS_S:
            raise SystemExit(f"{name!r} is not a stage: {', '.join(LIMITS_S)}")
    return names


def _read(folder: Path) -> dict[str, Outcome]:
    path = folder / "stages.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    return {name: Outcome(**fields) for name, fields in known.items()}


if __name__ == "__main__":
    main()
