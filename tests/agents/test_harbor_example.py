"""The example that runs rollouts as trials of Harbor, with a script in place of `harbor`."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from gateway_runs import TASK, calls_of, logging_engine, make_agent, roll_out

from examples.harbor import reward
from flowtrain.config import Config
from flowtrain.records import Trajectory

EXAMPLE = Path(__file__).parents[2] / "examples" / "harbor"
TRIAL = str(EXAMPLE / "trial.py")
HARBOR = """#!{python}
import json, os, pathlib, sys
from openai import OpenAI

options = {{name: value for name, value in zip(sys.argv, sys.argv[1:]) if name[0] == "-"}}
kwargs = dict(word.split("=", 1) for word in sys.argv if word.startswith(("api_base", "max_turns")))
client = OpenAI(base_url=kwargs["api_base"], max_retries=0)
asked = [{{"role": "user", "content": options["--path"]}}]
said = client.chat.completions.create(model="policy", messages=asked).choices[0].message.content
result = {{"reward_valid": True, "verifier_result": {{"rewards": {{"reward": 0.5, "files": 2}}}}}}
if said == "Fail.":
    failure = {{"exception_message": "no container"}}
    result = {{"reward_valid": False, "exception_info": failure, "verifier_result": None}}
trial = pathlib.Path(options["-o"], "job", "trial")
trial.mkdir(parents=True)
(trial / "result.json").write_text(json.dumps(result))
"""
"""Asks the policy once, and writes what Harbor 0.26 writes of a trial."""


def played(reply: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trajectory:
    program = tmp_path / "harbor"
    program.write_text(HARBOR.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    engine = logging_engine(reply)
    task = replace(TASK, columns=json.dumps({"path": "my/task"}))
    command = ["python", TRIAL, "--env", "podman"]
    with closing(make_agent(engine, command=command, columns=["path"])) as agent:
        trajectory = roll_out(agent, task=task)
    assert calls_of(trajectory) == engine.log and len(engine.log) == 1
    assert "my/task" in engine.tokenizer.decode(engine.log[0][0])
    return trajectory


def test_a_trial_is_rewarded_by_its_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trajectory = played("Done.", tmp_path, monkeypatch)
    assert (trajectory.error, trajectory.reported) == ("", {"reward": 0.5})
    assert reward.of_tests(trajectory.task, "", trajectory) == 0.5


def test_a_trial_without_a_reward_fails_its_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trajectory = played("Fail.", tmp_path, monkeypatch)
    assert "no reward: no container" in trajectory.error and not trajectory.reported
    with pytest.raises(KeyError):
        reward.of_tests(trajectory.task, "", trajectory)


def test_folders_become_rows_and_the_config_reads_them() -> None:
    folders = sorted(map(str, (EXAMPLE / "tasks").iterdir()))
    words = [sys.executable, TRIAL, *folders]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [json.loads(line) for line in listed]
    assert [row["path"] for row in rows] == folders
    assert rows[1]["question"].startswith("Write the word harbor")
    config = Config.model_validate(tomllib.loads((EXAMPLE / "train.toml").read_text()))
    assert set(config.gateway.columns) < set(rows[0])
