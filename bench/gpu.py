"""All that a first half hour on one GPU must answer:  python -m bench.gpu --out DIR [--minutes M]

Stages run in order of worth, each in a process of its own with a time limit, until the minutes are
used up. What each found lies in DIR as it comes: `STAGE.json` (rows, and the versions they were
measured under), `STAGE.log`, and `report.md` with every goal, its figure and a verdict. A second
call goes on where the first stopped; `--again` runs named stages once more. The first half of the
stages needs torch, Triton and this package alone; a stage that lacks something says what. Without a
GPU the same stages run at a small size, to see that they do, and no goal is judged.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.gpu_report import write_report

_LEAST_S = 20
"""A stage is not begun with less time than this."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A question, and the command that answers it."""

    name: str
    command: str
    """Arguments of python; {json} is where its rows go, {xml} where pytest's report goes."""
    limit_s: int
    small: str | None
    """The command without a GPU; None: it makes no sense there."""
    packages: tuple[str, ...] = ()
    """Needed beside torch and Triton."""
    program: str | None = None
    """Needed on the PATH."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a stage."""

    status: str
    """done, failed, timed out or skipped"""
    seconds: float
    reason: str = ""


_LOGITS = "-m bench.losses --json {json} --heads= --peers torch,compile,trl,liger"
_HEADS = "-m bench.losses --json {json} --tokens= --peers torch,compile,trl,cce,gemm"
_STEP = "-m bench.step --json {json}"
_PYTEST = "-m pytest -q -p no:cacheprovider --junitxml {xml}"
_KERNEL_TESTS = "tests/kernels --ignore tests/kernels/test_aot.py"
_TESTS = ("pytest", "hypothesis", "pytest_timeout", "xdist")
_FLOW = ("transformers", "pydantic", "bm25s", "httpx2", "msgspec", "tomli_w", "trafilatura")

STAGES = (
    Stage("environment", "-m bench.gpu_stages environment {json}", 60, ""),
    Stage(
        "logits",
        f"{_LOGITS} --tokens 1024,8192 --vocab 151936,128256,50257 --repeats 15",
        120,
        f"{_LOGITS} --tokens 64 --vocab 4099 --repeats 2",
    ),
    Stage("gpu_tests", f"{_PYTEST} -m gpu tests", 150, f"{_PYTEST} -m gpu tests/training", _TESTS),
    Stage(
        "heads",
        f"{_HEADS} --heads 896x151936,1536x151936,3584x152064,576x49152 --head-tokens 8192"
        " --repeats 9",
        120,
        f"{_HEADS} --heads 64x4096 --head-tokens 128 --repeats 2",
    ),
    Stage(
        "attention",
        "-m bench.attention --json {json}",
        150,
        "-m bench.attention --json {json} --tokens 512 --repeats 2",
        ("transformers",),
    ),
    Stage("delta", "-m bench.gpu_stages delta {json}", 60, ""),
    Stage(
        "step_05b",
        f"{_STEP} --shape 0.5b --scale 1 --batch-size 2",
        150,
        f"{_STEP} --scale 0.02 --repeats 1",
        _FLOW,
    ),
    Stage(
        "kernel_tests",
        f"{_PYTEST} -n 8 --dist worksteal {_KERNEL_TESTS} --ignore tests/kernels/test_roofline.py",
        200,
        f"{_PYTEST} tests/kernels/test_m2po.py",
        _TESTS,
    ),
    Stage("memory", "-m bench.memory --json {json}", 120, "-m bench.memory --json {json}", _FLOW),
    Stage("step_15b", f"{_STEP} --shape 1.5b --scale 1 --batch-size 1", 200, None, _FLOW),
    Stage("l2", "-m bench.gpu_stages l2 {json}", 60, None, program="ncu"),
    Stage("launches", "-m bench.launches --json {json}", 90, None),
    Stage("quickstart", "-m bench.gpu_stages quickstart {json}", 420, "", _FLOW),
    Stage("vllm_pause", "-m bench.weights --json {json}", 240, None, ("vllm", *_FLOW)),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="for all stages (default: %(default)s)"
    )
    names = ", ".join(stage.name for stage in STAGES)
    parser.add_argument("--stages", default="", metavar="S,S", help=f"only these of: {names}")
    parser.add_argument("--again", default="", metavar="S,S", help="stages to run once more")
    args = parser.parse_args()
    only, again = (_chosen(text) for text in (args.stages, args.again))
    args.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * args.minutes
    on_gpu = torch.cuda.is_available()
    outcomes = _read(args.out)
    for stage in STAGES:
        known = outcomes.get(stage.name)
        is_settled = known is not None and known.status == "done" and stage.name not in again
        if is_settled or (only and stage.name not in only):
            continue
        left = ends - time.monotonic()
        if left < _LEAST_S:
            print(f"no time is left for {stage.name}; the same command goes on with it")
            break
        print(f"{stage.name} ...", end=" ", flush=True)
        outcome = run(stage, args.out, min(left, stage.limit_s), on_gpu)
        print(f"{outcome.status} in {outcome.seconds:.0f} s {outcome.reason}".rstrip())
        outcomes[stage.name] = outcome
        _write(args.out, outcomes)
        write_report(args.out, {name: asdict(x) for name, x in outcomes.items()}, on_gpu)
    print(f"report: {args.out / 'report.md'}")


def run(stage: Stage, folder: Path, limit_s: float, on_gpu: bool) -> Outcome:
    """Run one stage in a process group of its own, which its limit ends."""
    lacks = _lacks(stage, on_gpu)
    if lacks:
        return Outcome("skipped", 0.0, lacks)
    for suffix in ("json", "xml"):  # an older result must not pass for this one's
        (folder / f"{stage.name}.{suffix}").unlink(missing_ok=True)
    command = stage.command if on_gpu or not stage.small else stage.small
    paths = {suffix: str(folder / f"{stage.name}.{suffix}") for suffix in ("json", "xml")}
    arguments = [part.format(**paths) for part in command.split()]
    started = time.monotonic()
    with (folder / f"{stage.name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return Outcome("timed out", limit_s, f"after {limit_s:.0f} s")
        finally:
            _end(process)
    seconds = time.monotonic() - started
    if code:
        return Outcome("failed", seconds, f"exit status {code}, see {stage.name}.log")
    return Outcome("done", seconds)


def _lacks(stage: Stage, on_gpu: bool) -> str:
    """What keeps the stage from running here; empty: nothing."""
    if not on_gpu and stage.small is None:
        return "needs a GPU"
    if stage.program is not None and shutil.which(stage.program) is None:
        return f"needs {stage.program}"
    missing = [name for name in stage.packages if importlib.util.find_spec(name) is None]
    return f"needs {', '.join(missing)}" if missing else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the process group, or it would take the GPU from the next stage."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _chosen(text: str) -> Sequence[str]:
    names = [name for name in text.split(",") if name]
    known = [stage.name for stage in STAGES]
    for name in names:
        if name not in known:
            raise SystemExit(f"{name!r} is not a stage: {', '.join(known)}")
    return names


def _read(folder: Path) -> dict[str, Outcome]:
    path = folder / "stages.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    return {name: Outcome(**fields) for name, fields in known.items()}


def _write(folder: Path, outcomes: dict[str, Outcome]) -> None:
    text = json.dumps({name: asdict(x) for name, x in outcomes.items()}, indent=1)
    (folder / "stages.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
