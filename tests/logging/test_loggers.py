"""Where a run's numbers go; W&B and Trackio are scripted, the last tests take the real ones."""

from __future__ import annotations

import logging
import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flowtrain.config import Config
from flowtrain.logging import MetricsLog
from flowtrain.logging.loggers import Background, open_loggers
from flowtrain.records import UserError

ROOT = Path(__file__).resolve().parents[2]


def config(plugins: dict[str, Any] | None = None, **log: Any) -> Config:
    return Config.model_validate({"log": log, "plugins": plugins or {}})


class ScriptedRun(types.ModuleType):
    """Stands in for the packages wandb and trackio, and their runs: keeps what it was told."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[Any] = []

    def init(self, **options: Any) -> ScriptedRun:
        self.calls.append(options)
        return self

    def define_metric(self, name: str, step_metric: str = "") -> None:
        self.calls.append((name, step_metric))

    def log(self, values: dict[str, Any], **options: Any) -> None:
        self.calls.append({**values, **options})

    def finish(self) -> None:
        self.calls.append("finish")


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> ScriptedRun:
    scripted = ScriptedRun("wandb")
    monkeypatch.setitem(sys.modules, "wandb", scripted)
    return scripted


def test_wandb_gets_its_options_and_goes_on_with_its_run(
    wandb: ScriptedRun, tmp_path: Path
) -> None:
    table = {"project": "flows", "entity": "us", "group": "seeds", "tags": ["a", "b"]}
    options = config({"wandb": table}, loggers=["wandb"])
    for step in (1, 2):
        log = MetricsLog(tmp_path, step - 1, False, open_loggers(options, tmp_path, step - 1))
        log.log({"step": step, "a": 0.5, "b": float("nan")})
        log.close()
    first, *metrics, line, end, second = wandb.calls[:6]
    names = ("project", "entity", "group", "tags", "name", "resume", "dir")
    given = ["flows", "us", "seeds", ["a", "b"], tmp_path.name, "allow", str(tmp_path)]
    assert [first[name] for name in names] == given
    assert first["config"]["plugins"] == {"wandb": table}
    assert second["id"] == first["id"] and len(first["id"]) == 32
    assert metrics == [("step", ""), ("*", "step")]
    assert (line, end) == ({"a": 0.5, "step": 1}, "finish")


def test_wandb_shows_late_numbers_at_their_step(wandb: ScriptedRun, tmp_path: Path) -> None:
    (logger,) = open_loggers(config(loggers=["wandb"]), tmp_path, 0)
    logger.log(7, {"a": 1.0})
    logger.log(4, {"eval_reward": 0.5})
    logger.close()
    assert wandb.calls[-3:-1] == [{"a": 1.0, "step": 7}, {"eval_reward": 0.5, "step": 4}]


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UserError, match=rf"pip install -e '\.\[{name}\]'"):
            open_loggers(config(loggers=[name]), tmp_path, 0)


def test_trackio_gets_options_and_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = ScriptedRun("trackio")
    monkeypatch.setitem(sys.modules, "trackio", scripted)
    options = config({"trackio": {"project": "mine"}}, loggers=["trackio"])
    (logger,) = open_loggers(options, tmp_path, 0)
    logger.log(2, {"a": 1.0})
    logger.close()
    first, numbers, end = scripted.calls
    assert (first["project"], first["resume"]) == ("mine", "allow")
    assert first["name"].startswith(f"{tmp_path.name}-")
    assert numbers == {"a": 1.0, "step": 2} and end == "finish"


# ---- loggers of others


class Kept:
    """A logger that keeps its calls."""

    def __init__(self, context: Any = None) -> None:
        self.context, self.calls = context, []

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.calls.append((step, dict(numbers)))

    def close(self) -> None:
        self.calls.append("close")


OWN = """
import json

class Lines:
    def __init__(self, context):
        self.file = (context.run_dir / context.options["name"]).open("a")

    def log(self, step, numbers):
        self.file.write(json.dumps([step, numbers]) + "\\n")

    def close(self):
        self.file.close()

class Broken:
    def __init__(self, context):
        raise OSError("no such server")
"""


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    options = config({"Lines": {"name": "lines.txt"}}, loggers=[f"{path}:Lines"])
    log = MetricsLog(tmp_path, 0, False, open_loggers(options, tmp_path, 0))
    log.log({"step": 1, "a": 0.5, "b": float("inf")})
    log.close()
    log.close()
    assert (tmp_path / "lines.txt").read_text() == '[1, {"a": 0.5}]\n'


def test_what_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    for name, message in {
        "nothing": "log.loggers='nothing': there is no such logger; there are wandb, trackio, and ",
        f"{path}:Nobody": "has no 'Nobody'",
        f"{path}:Broken": "OSError: no such server",
    }.items():
        with pytest.raises(UserError, match=r"log\.loggers") as caught:
            open_loggers(config(loggers=[name]), tmp_path, 0)
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_when_one_cannot_be_opened_the_others_are_closed(
    wandb: ScriptedRun, tmp_path: Path
) -> None:
    with pytest.raises(UserError):
        open_loggers(config(loggers=["wandb", "nothing"]), tmp_path, 0)
    assert wandb.calls[-1] == "finish"


def test_a_logger_that_fails_is_left_out_and_the_run_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(Kept):
        def log(self, step: int, numbers: Mapping[str, float]) -> None:
            super().log(step, numbers)
            raise OSError("down\x1b[2J")

    failing = Failing()
    with caplog.at_level(logging.WARNING):
        logger = Background("mine", failing)
        for step in range(3):
            logger.log(step, {})
        logger.close()
    assert failing.calls == [(0, {})]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning == "the logger 'mine' failed and is disabled: OSError: down\\x1b[2J"


def test_a_logger_that_is_slow_keeps_no_step_waiting(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()

    class Slow(Kept):
        def log(self, step: int, numbers: Mapping[str, float]) -> None:
            gate.wait(20)
            super().log(step, numbers)

    slow = Slow()
    logger = Background("mine", slow)
    for step in range(1200):
        logger.log(step, {})
    gate.set()
    logger.close()
    assert 1000 <= len([call for call in slow.calls if call != "close"]) <= 1001
    assert slow.calls[-1] == "close"
    assert [r.getMessage() for r in caplog.records if "too slow" in r.getMessage()]


def test_wandb_ends_no_run(
    wandb: ScriptedRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(values: object) -> None:
        raise ConnectionError("the service has died")

    wandb.log = fail
    log = MetricsLog(tmp_path, 0, False, open_loggers(config(loggers=["wandb"]), tmp_path, 0))
    log.log({"step": 1, "a": 0.5})
    log.close()
    assert "the logger 'wandb' failed and is disabled: ConnectionError" in caplog.text
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "a": 0.5}\n'


# ---- the real packages, offline


def test_real_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    table = {"project": "p", "group": "g", "tags": ["t"]}
    options = config({"wandb": table}, loggers=["wandb"])
    for first_step in (1, 2):
        log = MetricsLog(tmp_path, first_step - 1, False, open_loggers(options, tmp_path, 0))
        log.log({"step": first_step, "a": 0.5})
        log.log({"step": 0, "eval_reward": 0.5})
        log.close()
    runs = list((tmp_path / "wandb").glob("offline-run-*"))
    ids = {path.name.rpartition("-")[2] for path in runs}
    assert ids == {(tmp_path / "wandb_id.txt").read_text()}


def test_real_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # which it reads when imported
    trackio = pytest.importorskip("trackio")
    options = config({"trackio": {"project": "p"}}, loggers=["trackio"])
    for step in (1, 2):
        log = MetricsLog(tmp_path, step - 1, False, open_loggers(options, tmp_path, step - 1))
        log.log({"step": step, "a": step / 2})
        log.close()
    (run,) = trackio.Api().runs("p")
    from trackio.sqlite_storage import SQLiteStorage

    lines = [each for each in SQLiteStorage.get_logs("p", run.name) if "a" in each]
    assert [(each["step"], each["a"]) for each in lines] == [(1, 0.5), (2, 1.0)]


def test_the_example_with_real_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlruns"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    options = config(loggers=[f"{ROOT}/examples/mlflow_logger.py:MlflowLogger"])
    for step in (1, 2):
        log = MetricsLog(tmp_path, step - 1, False, open_loggers(options, tmp_path, step - 1))
        log.log({"step": step, "tokens/to/no_signal": step / 2})
        log.close()
    from mlflow.tracking import MlflowClient

    run_id = (tmp_path / "mlflow_id.txt").read_text()
    history = MlflowClient().get_metric_history(run_id, "tokens/to/no_signal")
    assert [(each.step, each.value) for each in history] == [(1, 0.5), (2, 1.0)]
