"""A folder of runs as a table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowtrain.metrics import MetricsLog
from flowtrain.utils.lock import Lock
from flowtrain.view.__main__ import main
from flowtrain.view.runs import differences, find_runs, run_state, table_data, table_signature


@pytest.fixture
def folder(runs: Any) -> Path:
    """Two runs, one of them below another folder, and what belongs to a run."""
    first, second = runs.make(name="one"), runs.make(name="sweep/two")
    config = second / "config.toml"
    config.write_text(config.read_text().replace("num_minibatches = 1", "num_minibatches = 2"))
    MetricsLog(second, 4, tensorboard=False).log(
        {"step": 5, "version": 5, "reward_mean": 0.1, "eval_reward": 0.75}
    )
    (first / "checkpoints" / "x").mkdir(parents=True)
    (first / "checkpoints" / "x" / "manifest.json").write_text("{}")
    return Path(runs.root)


def test_runs_are_found_within_folders(folder: Path) -> None:
    assert set(find_runs(folder)) == {"one", "sweep/two"}
    assert find_runs(folder / "absent") == []


def test_a_row_per_run(folder: Path) -> None:
    table = table_data(folder)
    two = {run["name"]: run for run in table["runs"]}["sweep/two"]
    assert two["reward"] == [0.1, 0.1, 0.4] and two["held_out"] == [0.75, 0.75]
    assert (two["step"], two["num_steps"], two["seconds"], two["model"]) == (5, 4, 8.0, "tiny")
    assert two["differs"] == [["train.num_minibatches", "2"]]
    labels = {
        panel["title"]: [each["label"] for each in panel["lines"]] for panel in table["panels"]
    }
    assert set(labels["Reward, training"]) == {"one", "sweep/two"}
    assert labels["Held-out"] == ["sweep/two"]


def test_a_table_is_another_one_when_a_run_has_changed(folder: Path, runs: Any) -> None:
    seen = [table_signature(folder)]
    assert table_signature(folder) == seen[0]
    MetricsLog(folder / "one", 4, tensorboard=False).log({"step": 5, "reward_mean": 0.9})
    seen.append(table_signature(folder))
    with Lock.of_folder(folder / "one", ""):
        seen.append(table_signature(folder))
    runs.make(name="three")
    seen.append(table_signature(folder))
    assert all(seen[n] != seen[n + 1] for n in range(3))


def test_the_states_of_a_run(run: Path) -> None:
    assert run_state(run) == "ended"
    (run / "summary.json").unlink()
    assert run_state(run) == "stopped"
    with Lock.of_folder(run, ""):
        assert run_state(run) == "running"
    code = (
        "import sys; from pathlib import Path; from flowtrain.utils.lock import Lock\n"
        f"lock = Lock.of_folder(Path({str(run)!r}), '')\n"
        "print('taken', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"taken\n"
        assert run_state(run) == "running"
        process.kill()
    assert run_state(run) == "stopped", "a process that was killed holds nothing"


def test_a_run_that_cannot_be_read_is_a_row_too(folder: Path) -> None:
    (folder / "one" / "config.toml").write_text("[")
    rows = {run["name"]: run for run in table_data(folder)["runs"]}
    assert rows["one"]["reward"] == [] and rows["sweep/two"]["reward"] == [0.1, 0.1, 0.4]


def test_only_what_differs_is_told() -> None:
    configs: dict[str, dict[str, Any]] = {
        "a": {"train": {"lr": 1.0, "policy": "p"}, "run": {"dir": "x"}},
        "b": {"train": {"lr": 2.0, "policy": "p"}, "run": {"dir": "y"}, "new": {"option": 1}},
        "broken": {},
    }
    told = differences(configs)
    assert told["a"] == [("train.lr", "1.0")] and told["broken"] == []
    assert told["b"] == [("train.lr", "2.0")]
    long = differences({"a": {"x": {"y": "z" * 99}}, "b": {"x": {"y": ""}}})
    assert long["a"] == [("x.y", f'"{"z" * 79} …')]
    assert differences({"a": configs["a"]}) == {"a": []}


def test_the_command_writes_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder / "one")]) == 0 and main([str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == str(folder / "view.html")
    page = (folder / "view.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    expected = {"one": True, "sweep/two": False}
    assert {run["name"]: run["has_page"] for run in data["runs"]} == expected
