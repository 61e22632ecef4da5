"""The program that Harbor's Python runs: it lists tasks, checks them, and plays a rollout's trial.

    python trial_process.py list    # options as JSON on stdin; prints a line of JSON per task
    python trial_process.py check   # options as JSON on stdin; prints a line of JSON per trial
    python trial_process.py play    # as a command behind the gateway

Harbor wants Python 3.12 and packages that those of vLLM exclude, so it lives in an environment of
its own, where flowtrain is not: nothing here imports it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from harbor.models.job.config import DatasetConfig
from harbor.models.task.task import Task
from harbor.models.trial.config import (
    AgentConfig,
    EnvironmentConfig,
    TrialConfig,
    VerifierConfig,
)
from harbor.tasks.client import TaskClient
from harbor.trial.trial import Trial

KINDS = {"agent": AgentConfig, "environment": EnvironmentConfig, "verifier": VerifierConfig}
SHELL = {"import_path": "shell:Shell"}
"""The agent where the options name none; Harbor's own default is the oracle."""
_ENDPOINT = ("_BASE_URL", "_API_KEY")


class TrialFailed(Exception):
    """The trial has no reward that says something of the policy."""


async def tasks_of(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return id, question and folder of each task, downloading what a registry has."""
    for key, kind in KINDS.items():
        kind.model_validate(options.get(key) or {})
    found = await DatasetConfig.model_validate(options.get("dataset")).get_task_configs()
    if not found:
        return []
    loaded = await TaskClient().download_tasks([config.get_task_id() for config in found])
    return [_described(Task(at.path)) for at in loaded.results]


def _described(task: Any) -> dict[str, Any]:
    steps = task.config.steps or []
    asked = [task.step_instruction(step.name) for step in steps] or [task.instruction]
    return {
        "id": task.name,
        "question": "\n\n".join(asked).strip(),
        "path": str(task.task_dir),
    }


async def run_trial(
    path: str, options: Mapping[str, Any], agent: Mapping[str, Any], folder: str
) -> dict[str, float]:
    """Run one trial and return the rewards that its tests gave. Raises TrialFailed where it gave
    none, and where it failed for a reason that Harbor does not hold against the agent.
    """
    # Commands of a sandbox may run as another user, who has to reach what lies in the folder.
    Path(folder).chmod(0o711)
    parts = {key: options[key] for key in ("environment", "verifier") if options.get(key)}
    config = {"task": {"path": path}, "agent": agent, "trials_dir": folder, **parts}
    trial = await Trial.create(TrialConfig.model_validate(config))
    result = await trial.run()
    failure, verdict = result.exception_info, result.verifier_result
    if failure is not None and (verdict is None or not failure.policy.has_valid_reward):
        raise TrialFailed(f"{failure.exception_type}: {failure.exception_message}")
    if verdict is None or not verdict.rewards:
        raise TrialFailed("its tests gave no reward")
    rewards = {name: float(value) for name, value in verdict.rewards.items()}
    # Beside "reward" stand figures that explain it.
    return {"reward": rewards["reward"]} if "reward" in rewards else rewards


async def check(options: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield what the oracle and an agent that does nothing get for each task."""
    places = asyncio.Semaphore(os.cpu_count() or 1)

    async def one(task: Mapping[str, Any], agent: str) -> dict[str, Any]:
        async with places:
            with tempfile.TemporaryDirectory(prefix="flowtrain-harbor-") as folder:
                try:
                    rewards = await run_trial(task["path"], options, {"name": agent}, folder)
                    got: object = sum(rewards.values())
                except Exception as error:  # noqa: BLE001  # of a stranger's task: others go on
                    got = f"{type(error).__name__}: {error}"
        return {"id": task["id"], "agent": agent, "got": got}

    tasks = await tasks_of(options)
    for done in asyncio.as_completed([one(t, a) for t in tasks for a in ("oracle", "nop")]):
        yield await done


async def play() -> None:
    """Run the trial of FLOWTRAIN_TASK and write its reward into FLOWTRAIN_OUTCOME."""
    given = json.loads(Path(os.environ["FLOWTRAIN_TASK"]).read_text(encoding="utf-8"))["harbor"]
    options = given["options"]
    agent = dict(options.get("agent") or SHELL)
    if agent.get("name"):
        # One of Harbor's own, which it installs in the environment. Others read their endpoint from
        # this process, and what commands see has no key in it.
        endpoint = {name: value for name, value in os.environ.items() if name.endswith(_ENDPOINT)}
        agent = {
            "model_name": "openai/policy",  # Harbor wants a provider before the model
            "base_url": os.environ["OPENAI_BASE_URL"],
            **agent,
            "env": {**agent.get("env", {}), **endpoint},
        }
    rewards = await run_trial(given["path"], options, agent, str(Path.cwd()))
    outcome = json.dumps({"answer": "", "reward": rewards})
    Path(os.environ["FLOWTRAIN_OUTCOME"]).write_text(outcome, encoding="utf-8")


async def main(what: str) -> None:
    """Do what the first argument says."""
    if what == "play":
        return await play()
    options, lines = json.load(sys.stdin), sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # whatever others print is no line of ours
        if what == "list":
            for task in await tasks_of(options):
                print(json.dumps(task), file=lines, flush=True)
        else:
            async for line in check(options):
                print(json.dumps(line), file=lines, flush=True)
    return None


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1]))
    except Exception as error:  # noqa: BLE001  # whatever it is, the caller shows one line of it
        sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))
