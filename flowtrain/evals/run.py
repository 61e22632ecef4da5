"""An evaluation from command line to table: load, open or resume the folder, ask, sum up."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowtrain import report
from flowtrain.config import Config
from flowtrain.config.options import to_toml
from flowtrain.evals.ask import Question, ask, questions
from flowtrain.evals.paper import PAPER
from flowtrain.evals.pins import config_pins
from flowtrain.evals.records import RecordLog
from flowtrain.evals.summary import as_json, summarise, table
from flowtrain.evals.system import System, open_system
from flowtrain.report.pins import check_same
from flowtrain.report.run_dir import is_used
from flowtrain.tasks.benchmarks import BENCHMARKS, benchmark_file, load_benchmark
from flowtrain.types import Task, UserError


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of the command line beside the config."""

    benchmarks: tuple[str, ...]
    data: Path
    rows: str
    """First rows of each benchmark; "all", or "" for as many as AgentFlow runs."""
    trials: int
    temperature: float
    """Sampling temperature of the planner; 0 is greedy."""
    planner: str
    """"policy", or an engine's name."""
    out: Path
    resume: bool
    beside: Path | None
    """Another evaluation to compare with."""
    paper: bool
    """Compare with AgentFlow's paper."""


def evaluate_benchmarks(config: Config, request: Request) -> int:
    """Run an evaluation from start to end and return the exit code. An interrupt passes through;
    all rollouts that have ended are on disk.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("an evaluation is one process: start it without torchrun")
    tasks, files = _load(request)
    references = dict(PAPER) if request.paper else {}
    if request.beside is not None:
        references = {str(request.beside): _accuracies(request.beside), **references}
    pins = _pins(config, request, files)
    with report.RunDir.lock(request.out, "--out"):
        begun = _begun(config, request, pins)
        scratch = request.out.with_name(f".{request.out.name}.weights")
        with open_system(
            config, request.benchmarks, request.planner, request.temperature, scratch
        ) as system:
            if begun is None:
                _begin(config, request.out, {**pins, **system.pins})
            else:
                check_same(request.out, begun, {**pins, **system.pins})
            if system.tokenizer_json:
                report.atomic_write_text(request.out / "tokenizer.json", system.tokenizer_json)
            log = RecordLog(request.out)
            _ask_what_is_left(config, questions(tasks, request.trials), system, log)
        _report(request, log, config.agent.tools, references)
    return 0


def _load(request: Request) -> tuple[dict[str, Sequence[Task]], dict[str, Any]]:
    """Load the questions of each benchmark, and what pins them.

    Raises UserError for a benchmark that is unknown or not on disk.
    """
    tasks: dict[str, Sequence[Task]] = {}
    pins = {}
    for name in request.benchmarks:
        every = load_benchmark(name, request.data)
        named = {"": BENCHMARKS[name].num_rows, "all": None}
        num_rows = named[request.rows] if request.rows in named else int(request.rows)
        tasks[name] = every[:num_rows]
        digest = hashlib.sha256(benchmark_file(name, request.data).read_bytes()).hexdigest()
        pins[name] = {"sha256": digest, "rows_in_file": len(every), "rows": len(tasks[name])}
    return tasks, pins


def _pins(config: Config, request: Request, files: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the pins that are known before anything is loaded."""
    return {
        "seed": config.run.seed,
        **{key: getattr(request, key) for key in ("trials", "temperature", "planner")},
        "benchmarks": files,
        "config": config_pins(config),
    }


def _ask_what_is_left(
    config: Config, every: Sequence[Question], system: System, log: RecordLog
) -> None:
    todo = [question for question in every if question.key not in log.done]
    progress = report.ProgressLine(len(every), len(every) - len(todo), enabled=True, unit="rollout")
    try:
        ask(system, todo, log, config.run.seed, config.rollout.max_in_flight, progress)
    finally:
        progress.close()


def _begin(config: Config, out: Path, pins: Mapping[str, Any]) -> None:
    """Make the folder; from its config and the command in its manifest the evaluation can be
    repeated.
    """
    report.RunDir.create(
        out,
        to_toml(config),
        {**report.manifest(config.run.seed, sys.argv, world_size=1), "evaluation": pins},
    )


def _begun(config: Config, request: Request, pins: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read the pins that the evaluation in the folder began with; None where there is none. Raises
    UserError when it may not be resumed.
    """
    path = request.out / "manifest.json"
    if not path.exists():
        if is_used(request.out, to_toml(config)):
            raise UserError(
                f"--out {request.out} is not empty and holds no evaluation; choose another folder"
            )
        return None
    if not request.resume:
        raise UserError(
            f"--out {request.out} holds an evaluation: go on with it by --resume, or choose "
            "another folder"
        )
    begun: dict[str, Any] = json.loads(path.read_text()).get("evaluation") or {}
    if not begun:
        raise UserError(
            f"--out {request.out} is the folder of another run, not of an evaluation; choose "
            "another"
        )
    check_same(
        request.out, {key: begun[key] for key in pins}, pins
    )  # before a model is loaded in vain
    return begun


def _accuracies(folder: Path) -> dict[str, float]:
    """Read the accuracies of another evaluation, by benchmark."""
    path = folder / "summary.json"
    if not path.exists():
        raise UserError(f"--beside {folder}: no evaluation is there")
    scores = json.loads(path.read_text())["benchmarks"]
    found = {name: score["accuracy"] for name, score in scores.items()}
    return {name: accuracy for name, accuracy in found.items() if accuracy is not None}


def _report(
    request: Request,
    log: RecordLog,
    tool_names: Sequence[str],
    references: Mapping[str, Mapping[str, float]],
) -> None:
    """Print the table, and write summary.json."""
    order = request.benchmarks.index
    scores = sorted(
        summarise(log.entries.values(), tool_names), key=lambda score: order(score.benchmark)
    )
    report.write_summary(request.out / "summary.json", as_json(scores))
    print(table(scores, references))
    if failed := sum(score.num_failed for score in scores):
        errors = next(entry.error for entry in log.entries.values() if entry.error)
        print(
            f"{failed} rollouts failed and have no part in the accuracy ({errors}); --resume asks "
            "them again",
            file=sys.stderr,
        )
    print(
        f"{request.out}/trajectories.jsonl, summary.json, manifest.json; to look at it: "
        f"python -m flowtrain.report.viewer {request.out}"
    )
