"""`bench.gpu` with stages that take no time: what it runs, keeps, goes on with and judges."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import gpu, gpu_report
from bench.gpu import Stage


def command(code: str) -> str:
    """Python's -c without a blank, since a stage's command is split at blanks."""
    assert " " not in code
    return f"-c {code} {{json}}"


QUICK = command(
    "__import__('json').dump(dict(rows=[]),open(__import__('sys').argv[1],'a'))"  # appends
)
STAGES = (
    Stage("quick", QUICK, 30, ""),
    Stage("broken", command("__import__('sys').exit(3)"), 30, ""),
    Stage("slow", command("__import__('time').sleep(600)"), 1, ""),
    Stage("lacking", QUICK, 30, "", packages=("no_such_package",)),
    Stage("gpu_alone", QUICK, 30, None),
)


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> dict[str, Any]:
    monkeypatch.setattr(gpu, "STAGES", STAGES)
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(folder), *options])
    gpu.main()
    found: dict[str, Any] = json.loads((folder / "stages.json").read_text())
    return found


def test_every_stage_says_what_became_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    outcomes = run(monkeypatch, tmp_path)
    assert {name: outcome["status"] for name, outcome in outcomes.items()} == {
        "quick": "done",
        "broken": "failed",
        "slow": "timed out",
        "lacking": "skipped",
        "gpu_alone": "skipped",
    }
    assert outcomes["broken"]["reason"] == "exit status 3, see broken.log"
    assert outcomes["lacking"]["reason"] == "needs no_such_package"
    assert outcomes["gpu_alone"]["reason"] == "needs a GPU"
    report = (tmp_path / "report.md").read_text()
    assert "**No GPU**" in report and "| slow | timed out | 1 | after 1 s |" in report


def test_a_second_call_goes_on_and_again_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, tmp_path, "--stages", "quick")
    first = (tmp_path / "quick.json").stat().st_mtime_ns
    run(monkeypatch, tmp_path, "--stages", "quick")
    assert (tmp_path / "quick.json").stat().st_mtime_ns == first
    run(monkeypatch, tmp_path, "--stages", "quick", "--again", "quick")
    assert (tmp_path / "quick.json").stat().st_mtime_ns > first
    assert json.loads((tmp_path / "quick.json").read_text()) == {"rows": []}, "the old one is gone"


def test_no_stage_begins_without_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "STAGES", STAGES)
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path), "--minutes", "0.1"])
    started = time.monotonic()
    gpu.main()
    assert "no time is left for quick" in capsys.readouterr().out
    assert not (tmp_path / "stages.json").exists() and time.monotonic() - started < 5


def test_an_unknown_stage_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="'fast' is not a stage: quick, broken"):
        run(monkeypatch, tmp_path, "--stages", "fast")


def losses(share: float, ours_ms: float) -> list[dict[str, Any]]:
    case = {"T": 8192, "D": 0, "V": 151936, "dtype": "bfloat16", "device": "cuda"}
    return [
        {**case, "path": "copy", "impl": "torch", "gb_s": 4290.0, "ms": 1.16},
        {**case, "path": "logprobs", "impl": "flowkernels", "of copy": share, "ms": ours_ms},
        {**case, "path": "logprobs", "impl": "trl", "of copy": 0.5, "ms": 1.1},
        {**case, "path": "logprobs", "impl": "compile", "of copy": 0.2, "ms": 3.2},
    ]


@pytest.mark.parametrize(("share", "verdict"), [(1.02, "met"), (0.87, "**missed**")])
def test_goals_are_judged_on_a_gpu(tmp_path: Path, share: float, verdict: str) -> None:
    (tmp_path / "logits.json").write_text(json.dumps({"rows": losses(share, 0.55)}))
    gpu_report.write_report(tmp_path, {}, on_gpu=True)
    lines = (tmp_path / "report.md").read_text().splitlines()
    (line,) = (line for line in lines if "`logprobs`, share" in line)
    assert line.endswith(f"| {share:.4g} | >= 0.88 | {verdict} |")
    (line,) = (line for line in lines if "best peer" in line)
    assert "best peer (trl)" in line and line.endswith("| 2 | >= 1 | met |")


def test_failed_tests_are_counted(tmp_path: Path) -> None:
    (tmp_path / "gpu_tests.xml").write_text(
        '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="2"/></testsuites>'
    )
    (finding,) = gpu_report.findings(tmp_path)
    assert finding.text == "gpu_tests: failures in 7 tests" and finding.figure == 2
    assert finding.verdict(True) == "**missed**" and finding.verdict(False) == "not judged"


def test_the_commands_of_the_stages_are_those_of_benchmarks() -> None:
    """Each module exists, and its rows go where the report looks for them."""
    for stage in gpu.STAGES:
        for text in filter(None, (stage.command, stage.small)):
            module = text.split()[1]
            assert module == "pytest" or Path(f"{module.replace('.', '/')}.py").exists()
            assert ("{xml}" if module == "pytest" else "{json}") in text
