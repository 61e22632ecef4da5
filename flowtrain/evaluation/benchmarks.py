"""An evaluation from command line to table: load, open or resume the folder, ask, sum up."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowtrain.config import OWN, Config
from flowtrain.config.options import to_toml
from flowtrain.evaluation.rollout_log import Question, RolloutLog, ask
from flowtrain.evaluation.summary import (
    PAPER,
    Key,
    PlannerBudget,
    as_json,
    short_metrics,
    summarise,
    table,
)
from flowtrain.inference.chat_engines import POLICY
from flowtrain.logging import (
    ProgressLine,
    RunDir,
    aligned,
    atomic_write_text,
    manifest,
    markdown,
    trajectory_record,
    write_summary,
)
from flowtrain.logging.fingerprints import check_same, pinned
from flowtrain.logging.rollouts import count_rollouts
from flowtrain.logging.run_dir import is_used
from flowtrain.records import Task, Trajectory, UserError
from flowtrain.rewards.scorers import check
from flowtrain.tasks.benchmarks import AGENTFLOW, parse_benchmarks
from flowtrain.utils.seeds import derive_seed
from flowtrain.utils.waiting import waiting

if TYPE_CHECKING:
    from flowtrain.evaluation.system import System

_DECIDING = (
    *("model", "tiny", "tasks", "agent", "roles", "engines", "policies", "plugins", "rollout"),
    *("vllm", "judge", "corpus"),
)
_NOT_DECIDING = (
    *("rollout.max_in_flight", "rollout.num_questions", "rollout.group_size"),
    *("agent.max_turns", "agent.eval_max_turns", "tasks.num_train", "tasks.benchmarks"),
    "judge.cache",
)


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of the command line beside the config."""

    planners: tuple[str, ...]
    """"policy", or names of engines; each is asked with each of `max_turns`."""
    max_turns: tuple[int, ...]
    """Budgets of turns."""
    out: Path
    resume: bool
    paper: bool
    """Compare with AgentFlow's paper."""

    @property
    def systems(self) -> list[PlannerBudget]:
        """The planners with their budgets of turns, in order."""
        return [PlannerBudget(name, limit) for name in self.planners for limit in self.max_turns]


def load_benchmarks(config: Config) -> dict[str, tuple[Task, ...]]:
    """Load the questions of `eval.benchmarks`, by name.

    Raises UserError for what is unknown or missing, and for a scorer that does not exist or cannot
    use a task's answers.
    """
    tasks_by_name = {}
    for benchmark in parse_benchmarks(config.eval.benchmarks):
        tasks = benchmark.load(config.tasks.benchmarks)
        tasks_by_name[benchmark.name] = tuple(tasks[: config.eval.rows or benchmark.num_rows])
        for task in tasks_by_name[benchmark.name]:
            check(task)
    return tasks_by_name


class EvaluationLog(RolloutLog[Key]):
    """trajectories.jsonl of an evaluation, where a trial stands for a step.

    Example: {"step": 1, "planner": "policy", "max_turns": 10, "benchmark": "nq", "pid": "3",
    "trial": 1, "task_id": ..., "question": ..., "turns": [...], "reward": 1.0, "metrics": {"em":
    1.0, "f1": 1.0}}
    """

    def __init__(self, folder: Path, tool_names: Sequence[str]) -> None:
        super().__init__(folder)
        self._tool_names = tool_names

    def key(self, record: Mapping[str, Any]) -> Key:
        if "counts" not in record:
            raise UserError(
                f"{self.path} has lines without counts, so it cannot be continued: "
                "choose another --out"
            )
        return Key(*(record[name] for name in Key._fields))

    def fields(self, question: Question[Key], trajectory: Trajectory) -> dict[str, Any]:
        record = trajectory_record(trajectory, question.index)
        for turn, turn_record in zip(trajectory.turns, record["turns"], strict=True):
            if text := turn.call.prompt_text:  # of a frozen planner, which has no ids
                turn_record["prompt_text"] = text
        head = {"step": question.key.trial, "version": 0, **question.key._asdict()}
        metrics = {} if trajectory.error else short_metrics(trajectory)
        counts = count_rollouts([trajectory], self._tool_names)
        return {**head, **record, "metrics": metrics, "counts": counts}


def questions(
    planner: str, system: System, benchmarks: Mapping[str, Sequence[Task]], trials: int, seed: int
) -> list[Question[Key]]:
    """List all questions of the first trial, with each budget of turns, then of the second, so
    that an interrupted run has whole trials.
    """
    all_tasks = [(name, task) for name, tasks in benchmarks.items() for task in tasks]
    keys = [
        (index, task, Key(planner, limit, name, task.id.removeprefix(f"{name}-"), trial))
        for trial in range(1, trials + 1)
        for limit in system.agents
        for index, (name, task) in enumerate(all_tasks)
    ]
    # From names alone: a rollout is the same whatever else is asked, before or beside it. All
    # planners and budgets of turns share a question's seed, so that chance tells them apart less.
    return [
        Question(
            key,
            index,
            system.agents[key.max_turns],
            task,
            derive_seed(seed, "evals", key.benchmark, key.pid, key.trial),
        )
        for index, task, key in keys
    ]


def evaluate_benchmarks(config: Config, request: Request) -> int:
    """Run an evaluation from start to end and return the exit code. An interrupt passes through;
    all rollouts that have ended are on disk.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("an evaluation runs in one process: start it without torchrun")
    tasks_by_name, trials = load_benchmarks(config), config.eval.trials
    if request.paper and not set(tasks_by_name) & set(AGENTFLOW):
        raise UserError(
            f"--paper: AgentFlow's paper has none of {', '.join(tasks_by_name)}; it has "
            f"{', '.join(AGENTFLOW)}"
        )
    for planner in request.planners:  # none is asked before all are known to be there
        _check_planner(config, planner)
    pins = _pins(config, request, tasks_by_name)
    total = sum(map(len, tasks_by_name.values())) * trials * len(request.systems)
    with RunDir.lock(request.out, "--out"):
        _check_folder(config, request, pins)
        with waiting("loading torch and the models"):
            from flowtrain.evaluation.system import open_system
        scratch = request.out.with_name(f".{request.out.name}.weights")
        for planner in request.planners:
            with open_system(config, request.max_turns, planner, scratch) as system:
                _begin(config, request.out, pins, system)
                log = EvaluationLog(request.out, config.agent.tools)
                all_questions = questions(planner, system, tasks_by_name, trials, config.run.seed)
                ask(
                    [question for question in all_questions if not log.is_done(question.key)],
                    log,
                    max_in_flight=config.rollout.max_in_flight,
                    progress=ProgressLine(total, log.num_done, enabled=True, unit="rollout"),
                    scoring=(system.judge, None, None),
                )
        _report(request, list(tasks_by_name), log, config.agent.tools)
    return 0


def _check_planner(config: Config, planner: str) -> None:
    """Raise UserError unless the config allows that planner."""
    if planner == POLICY:
        return
    if planner not in config.engines:
        raise UserError(
            f"--planner {planner!r} may be {POLICY!r} or a name in [engines], which holds "
            f"{', '.join(config.engines) or 'nothing'}"
        )
    if config.agent.name != "agentflow":
        raise UserError(
            f"--planner {planner!r} requires agent.name='agentflow', which is {config.agent.name!r}"
        )
    for role, name in config.roles:
        if name in (POLICY, OWN):
            raise UserError(
                f"--planner {planner!r}: roles.{role}={name!r} would load the policy too; choose "
                "another engine for this role"
            )


def _pins(config: Config, request: Request, tasks: Mapping[str, Sequence[Task]]) -> dict[str, Any]:
    """Collect the pins that are known before anything is loaded."""
    pins = {}
    for benchmark in parse_benchmarks(config.eval.benchmarks):
        with benchmark.file(config.tasks.benchmarks).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        scorer = {"scorer": benchmark.scorer} if benchmark.scorer else {}
        pins[benchmark.name] = {"sha256": digest, "rows": len(tasks[benchmark.name]), **scorer}
    return {
        "seed": config.run.seed,
        "trials": config.eval.trials,
        "temperature": config.eval.temperature,
        "planners": list(request.planners),
        "max_turns": list(request.max_turns),
        "benchmarks": pins,
        "config": pinned(config, _DECIDING, _NOT_DECIDING),
    }


def _check_folder(config: Config, request: Request, pins: Mapping[str, Any]) -> None:
    """Raise UserError when the folder holds something else, or an evaluation that cannot be
    resumed; before a model is loaded in vain.
    """
    manifest_path = request.out / "manifest.json"
    if not manifest_path.exists():
        if is_used(request.out, to_toml(config)):
            raise UserError(
                f"--out {request.out} is not empty and holds no evaluation; choose another folder"
            )
        return
    if not request.resume:
        raise UserError(
            f"--out {request.out} holds an evaluation: continue it with --resume, or choose "
            "another folder"
        )
    recorded_pins: dict[str, Any] = json.loads(manifest_path.read_text()).get("evaluation") or {}
    if not recorded_pins:
        raise UserError(
            f"--out {request.out} is the folder of another run, not of an evaluation; choose "
            "another"
        )
    check_same(request.out, {key: recorded_pins[key] for key in pins if key in recorded_pins}, pins)


def _begin(config: Config, out: Path, pins: Mapping[str, Any], system: System) -> None:
    """Make the folder, from whose files the evaluation can be repeated, and write the policy's
    weights down, or check that they are what they were.
    """
    manifest_path = out / "manifest.json"
    if not manifest_path.exists():
        facts = manifest(config.run.seed, sys.argv, world_size=1)
        RunDir.create(out, to_toml(config), {**facts, "evaluation": dict(pins)})
    if system.weights:
        recorded = json.loads(manifest_path.read_text())
        recorded_weights = recorded["evaluation"].setdefault("weights", system.weights)
        check_same(out, {"weights": recorded_weights}, {"weights": system.weights})
        write_summary(manifest_path, recorded)
        atomic_write_text(out / "tokenizer.json", system.tokenizer_json)


def _report(
    request: Request, names: Sequence[str], log: EvaluationLog, tool_names: Sequence[str]
) -> None:
    """Print the table, and write it and all numbers."""
    rows = summarise(log.entries, request.systems, names, tool_names)
    lines = table(rows, PAPER if request.paper else {})
    write_summary(request.out / "summary.json", as_json(rows))
    atomic_write_text(request.out / "summary.md", markdown(lines))
    print(aligned(lines))
    if failed := log.failures:
        print(
            f"{len(failed)} rollouts failed and are excluded from the accuracy ({failed[0]}); "
            "--resume repeats them",
            file=sys.stderr,
        )
    files = "trajectories.jsonl, summary.json, summary.md, manifest.json"
    print(f"{request.out}/{files}; to look at it: python -m flowtrain.logging.page {request.out}")
