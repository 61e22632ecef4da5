"""`bench.gpu` with stages of a few cases: what it runs, keeps, goes on with and judges."""

from __future__ import annotations

import json
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from bench import gpu, gpu_ranks, gpu_report, gpu_runs, gpu_stages

STAGES = '''
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace

# All that cases ask of torch here; importing it takes longer than all of them together.
no_gpu = SimpleNamespace(is_available=lambda: False)
sys.modules["torch"] = SimpleNamespace(cuda=no_gpu, get_num_threads=lambda: 1)
from bench.gpu_cases import AGAIN, Cases, Needs


def note():
    """Each run of a case leaves a line."""
    with open(sys.argv[2] + ".runs", "a") as file:
        file.write("ran\\n")
    return {"ms": 1.0}


def fail():
    raise ValueError("no such size\\nand a long story")


def lack():
    import no_such_package


def lack_gpu():
    raise Needs("a GPU")


def leave():
    """A run leaves its log and its weights."""
    folder = Path(sys.argv[2]).with_suffix("")
    folder.mkdir(exist_ok=True)
    (folder / "log").write_text("fine")
    (folder / "weights").write_bytes(bytes(1 << 23))


def quick(cases):
    cases.run("one", note)
    leave()


def mixed(cases):
    cases.run("before", note)
    cases.run("wrong", fail)
    cases.run("nothing", list)
    cases.run("loses the device", lambda: os._exit(AGAIN))
    cases.run("dies", lambda: os.kill(os.getpid(), signal.SIGSEGV))
    cases.run("hangs", lambda: time.sleep(600), limit_s=1)
    cases.run("lacks", lack)
    cases.run("after", note)


def lacking(cases):
    cases.run("package", lack)
    cases.run("device", lack_gpu)


def unclean(cases):
    sys.exit(3)


globals()[sys.argv[1]](Cases(Path(sys.argv[2]), True))
'''


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls `bench.gpu` with stages of the test's own; gives what became of them."""
    script = tmp_path / "stages.py"
    script.write_text(STAGES)
    monkeypatch.setattr(gpu, "_CHILD", (str(script),))

    def run(limits: dict[str, int], *options: str) -> dict[str, Any]:
        monkeypatch.setattr(gpu, "LIMITS_S", limits)
        monkeypatch.setattr(
            sys, "argv", ["gpu", "--dry-run", "--out", str(tmp_path / "out"), *options]
        )
        gpu.main()
        found: dict[str, Any] = json.loads((tmp_path / "out" / "stages.json").read_text())
        return found

    return run


def rows_of(tmp_path: Path, stage: str) -> dict[str, Any]:
    rows = json.loads((tmp_path / "out" / f"{stage}.json").read_text())["rows"]
    return {row["case"]: row for row in rows}


def test_every_case_fails_alone_and_is_tried_anew(call: Any, tmp_path: Path) -> None:
    outcome = call({"mixed": 60})["mixed"]
    assert (outcome["status"], outcome["reason"]) == (
        "broken", "5 failed: wrong, nothing, loses the device, dies, hangs; needs no_such_package",
    )  # fmt: skip
    rows = rows_of(tmp_path, "mixed")
    failed = ["wrong", "nothing", "loses the device", "dies", "hangs"]
    assert list(rows) == ["before", *failed, "lacks", "after"]
    assert rows["before"]["ms"] == rows["after"]["ms"] == 1.0
    assert rows["wrong"]["error"] == "ValueError: no such size"
    assert "did not end" in rows["dies"]["error"] and "within 1 s" in rows["hangs"]["error"]
    report = (tmp_path / "out" / "report.md").read_text()
    assert "**failed**: wrong: ValueError: no such size" in report
    call({"mixed": 60})
    assert (tmp_path / "out" / "mixed.json.runs").read_text().split() == ["ran", "ran"]
    assert len(rows_of(tmp_path, "mixed")) == 8


def test_a_second_call_goes_on_behind_the_first(
    call: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = {"unclean": 60, "quick": 0, "lacking": 60}
    first = call(limits, "--stages", "unclean,quick")
    assert [x["status"] for x in first.values()] == ["failed", "timed out"]
    assert first["unclean"]["reason"] == "exit status 3, see unclean.log"
    capsys.readouterr()
    second = call({**limits, "quick": 60})
    begun = [line.split()[0] for line in capsys.readouterr().out.splitlines() if " ... " in line]
    assert begun == ["quick", "lacking", "unclean"], "what broke comes behind what has not ended"
    assert second["quick"]["status"] == "done"
    assert (second["lacking"]["status"], second["lacking"]["reason"]) == (
        "skipped",
        "needs a GPU, no_such_package",
    )
    with tarfile.open(tmp_path / "out" / "quick.tar") as archive:
        names = set(archive.getnames())
    assert {"quick.json", "quick.log", "stages.json", "report.md", "quick/log"} <= names
    assert "quick/weights" not in names, "too large to be carried away"
    runs = tmp_path / "out" / "quick.json.runs"
    for options, num_runs in (((), 1), (("--again", "quick"), 2)):
        call({"quick": 30}, *options)
        assert len(runs.read_text().split()) == num_runs, "from nothing when asked"


def test_no_stage_begins_without_time(
    call: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    with pytest.raises(FileNotFoundError, match=r"stages\.json"):
        call({"quick": 30}, "--minutes", "0.1")
    assert "no time is left for quick" in capsys.readouterr().out
    assert not (tmp_path / "out" / "quick.json").exists() and time.monotonic() - started < 25


def test_an_unknown_stage_is_named(call: Any) -> None:
    with pytest.raises(SystemExit, match="'fast' is not a stage: quick"):
        call({"quick": 30}, "--stages", "fast")


def test_without_a_gpu_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="--dry-run takes tiny shapes"):
        gpu.main()


def test_every_stage_is_a_function() -> None:
    places = (gpu_stages, gpu_ranks, gpu_runs)
    for name in gpu.LIMITS_S:
        assert any(callable(getattr(place, name, None)) for place in places)


def rivals(ours_ms: float) -> list[dict[str, Any]]:
    case = {"case": "logits: trl", "T": 8192, "D": 0, "V": 151936, "path": "logprobs"}
    return [{**case, "impl": "flowkernels", "ms": ours_ms}, {**case, "impl": "trl", "ms": 1.1}]


@pytest.mark.parametrize(("ms", "verdict"), [(0.55, "met"), (1.2, "**missed**")])
def test_goals_are_judged_on_a_gpu(tmp_path: Path, ms: float, verdict: str) -> None:
    (tmp_path / "rivals.json").write_text(json.dumps({"rows": rivals(ms)}))
    outcomes = {"rivals": {"status": "done", "seconds": 1.0, "reason": "", "clocks": ""}}
    gpu_report.write_report(tmp_path, outcomes, is_judged=True)
    lines = (tmp_path / "report.md").read_text().splitlines()
    (line,) = (line for line in lines if "times faster than trl" in line)
    assert line.endswith(f"| {1.1 / ms:.4g} | >= 1 | {verdict} |")
    gpu_report.write_report(tmp_path, outcomes, is_judged=False)
    assert "not judged" in (tmp_path / "report.md").read_text()
