"""`bench.gpu` with stages of a few cases: what it runs, keeps, goes on with and judges."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import measure
from bench.gpu import __main__ as gpu
from bench.gpu import kernels, pack, page, plans, report, runner, runs, training
from bench.gpu.cases import Cases

ROOT = Path(__file__).resolve().parents[1]
STAGES = '''
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace

# All that cases ask of torch here; importing it takes longer than all of them together.
no_gpu = SimpleNamespace(is_available=lambda: False)
sys.modules["torch"] = SimpleNamespace(cuda=no_gpu, get_num_threads=lambda: 1)
from bench.gpu.cases import AGAIN, Cases, Needs


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


def mended(cases):
    """Fails until something is there."""
    def measure():
        found = Path(sys.argv[2]).with_name("mended.now").exists()
        return [note(), {"ms": 2.0} if found else {"error": "it is not there"}]
    cases.run("one", measure)


def unclean(cases):
    sys.exit(3)


def slow(cases):
    """The first case ends, the second does not."""
    cases.run("ends", note)
    cases.run("stays", lambda: time.sleep(600), limit_s=500)


def meets(cases, own, other):
    """Ends once the other stage is there, too."""
    folder = Path(sys.argv[2]).parent
    (folder / f"{own}.here").touch()
    def wait():
        while not (folder / f"{other}.here").exists():
            time.sleep(0.01)
        return {"ms": 1.0}
    cases.run("meeting", wait, limit_s=60)


def left(cases):
    meets(cases, "left", "right")


def right(cases):
    meets(cases, "right", "left")


seconds = float(sys.argv[sys.argv.index("--seconds") + 1])
globals()[sys.argv[1]](Cases(Path(sys.argv[2]), True, seconds))
'''


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls `bench.gpu` with a plan of the test's own; gives what became of its stages."""
    script = tmp_path / "stages.py"
    script.write_text(STAGES)
    monkeypatch.setattr(runner, "CHILD", (str(script),))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def run(groups: dict[str, int], *options: str, seconds: int = 100) -> dict[str, Any]:
        """`groups`: stages, with commas between those that run at once, and their limits."""
        stages = {x: ("", limit) for names, limit in groups.items() for x in names.split(",")}
        plan = plans.Plan(seconds, tuple(tuple(names.split(",")) for names in groups))
        for place in (plans, runner, gpu):
            monkeypatch.setattr(place, "STAGES", stages)
            monkeypatch.setattr(place, "PLANS", {"first": plan})
        words = ["gpu", "--dry-run", "--out", str(tmp_path / "out"), *options]
        monkeypatch.setattr(sys, "argv", words)
        monkeypatch.setattr(runner, "PATIENCE", 1)
        gpu.main()
        return outcomes_of(tmp_path)

    return run


def outcomes_of(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "out" / "stages.json").read_text())
    return found["stages"]


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
    text = (tmp_path / "out" / "report.md").read_text()
    assert "**failed**: wrong: ValueError: no such size" in text
    call({"mixed": 60})
    assert (tmp_path / "out" / "mixed.json.runs").read_text().split() == ["ran", "ran"]
    assert len(rows_of(tmp_path, "mixed")) == 8
    assert call({"mended": 60})["mended"]["status"] == "broken"
    (tmp_path / "out" / "mended.now").touch()
    assert call({"mended": 60})["mended"]["status"] == "done"
    rows = json.loads((tmp_path / "out" / "mended.json").read_text())["rows"]
    assert [row["ms"] for row in rows] == [1.0, 2.0], "also what was right of a case that failed"


def test_a_second_call_goes_on_behind_the_first(
    call: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = {"unclean": 60, "quick": 0, "lacking": 60}
    first = call(limits, "--stages", "unclean,quick")
    assert [x["status"] for x in first.values()] == ["failed", "timed out"]
    assert first["unclean"]["reason"] == "exit status 3, see unclean.log"
    capsys.readouterr()
    second = call({**limits, "quick": 60})
    begun = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if " in " in line]
    assert begun == ["quick", "lacking", "unclean"], "what broke comes behind what has not ended"
    assert second["quick"]["status"] == "done"
    assert (second["lacking"]["status"], second["lacking"]["reason"]) == (
        "skipped",
        "needs a GPU, no_such_package",
    )
    notes = tmp_path / "out" / "quick.json.runs"
    for options, num_runs in (((), 1), (("--again", "quick"), 2)):
        call({"quick": 30}, *options)
        assert len(notes.read_text().split()) == num_runs, "from nothing when asked"


def test_what_comes_back_is_one_small_archive(call: Any, tmp_path: Path) -> None:
    call({"quick": 60}, "--copy-to", str(tmp_path / "back"))
    assert {path.name for path in (tmp_path / "back").iterdir()} == {"results.tar", "report.md"}
    with tarfile.open(tmp_path / "back" / "results.tar") as archive:
        names = set(archive.getnames())
    assert {"quick.json", "quick.log", "stages.json", "report.md", "quick/log"} <= names
    assert "quick/weights" not in names, "too large to be carried away"


def test_stages_of_a_group_run_at_once(call: Any, tmp_path: Path) -> None:
    found = call({"left,right": 60, "quick": 60})
    assert [outcome["status"] for outcome in found.values()] == ["done"] * 3
    assert rows_of(tmp_path, "left")["meeting"]["ms"] == 1.0


def test_what_a_stage_has_measured_when_its_time_is_up_counts(call: Any, tmp_path: Path) -> None:
    found = call({"slow": 5, "quick": 60})
    assert found["slow"]["status"] == "broken" and found["quick"]["status"] == "done"
    rows = rows_of(tmp_path, "slow")
    assert rows["ends"]["ms"] == 1.0 and "did not end within 1 s" in rows["stays"]["error"]
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| slow | broken |" in text and "| ends | 1 |" in text


def archived(folder: Path, name: str) -> str:
    """What a file in the archive says by now; empty where it is not there yet."""
    if not (folder / "results.tar").exists():
        return ""
    with tarfile.open(folder / "results.tar") as archive:
        found = archive.extractfile(name) if name in archive.getnames() else None
        return "" if found is None else found.read().decode()


PLAN = """
from pathlib import Path

from bench.gpu import __main__ as gpu, plans, runner

runner._SAVE_S = 0.1
runner.CHILD = (str(Path(__file__).with_name("stages.py")),)
stages = {"quick": ("", 60), "slow": ("", 500)}
for place in (plans, runner, gpu):
    place.STAGES, place.PLANS = stages, {"first": plans.Plan(900, (("quick",), ("slow",)))}
gpu.main()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_plan_that_is_ended_leaves_a_table_of_what_ran(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As far as it came: stages that have ended, and the one that has begun."""
    (tmp_path / "stages.py").write_text(STAGES)
    (tmp_path / "plan.py").write_text(PLAN)
    words = [str(tmp_path / "plan.py"), "--dry-run", "--out", str(tmp_path / "out")]
    words += ["--copy-to", str(tmp_path / "back")]
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    # The second case has begun: what the first has found is kept.
    while '"stays"' not in archived(tmp_path / "back", "slow.json"):
        assert process.poll() is None
        time.sleep(0.01)
    children = [x.read_text().split() for x in Path(f"/proc/{process.pid}/task").glob("*/children")]
    (stage,) = (int(child) for child in chain(*children))
    process.send_signal(number)
    process.wait()
    if number == signal.SIGKILL:
        os.killpg(stage, signal.SIGKILL)
    else:
        with pytest.raises(ProcessLookupError):
            os.killpg(stage, 0)
    found = outcomes_of(tmp_path)
    assert [outcome["status"] for outcome in found.values()] == ["done", "begun"]
    assert "| slow | begun |" in (tmp_path / "out" / "report.md").read_text()
    assert rows_of(tmp_path, "slow")["ends"]["ms"] == 1.0


def test_no_stage_begins_without_time(
    call: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FileNotFoundError, match=r"stages\.json"):
        call({"quick": 30}, "--minutes", "0.05")
    assert "no time is left for quick" in capsys.readouterr().out
    assert not (tmp_path / "out" / "quick.json").exists()


def test_an_unknown_stage_is_named(call: Any) -> None:
    with pytest.raises(SystemExit, match="'fast' is not a stage: quick"):
        call({"quick": 30}, "--stages", "fast")


def test_without_a_gpu_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="--dry-run takes tiny shapes"):
        gpu.main()


def test_every_stage_is_a_function_and_in_a_plan() -> None:
    planned = {stage for plan in plans.PLANS.values() for group in plan.groups for stage in group}
    assert planned == plans.STAGES.keys()
    for name, (module, limit_s) in plans.STAGES.items():
        assert callable(getattr(importlib.import_module(f"bench.gpu.{module}"), name))
        assert 0 < limit_s <= max(plan.seconds for plan in plans.PLANS.values())


RUN = """
import json, sys, time
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--run.dir") + 1])
folder.mkdir(parents=True)
line = {"step": 1, "reward_mean": 0.5, "weights_loaded_bytes": int(sys.argv[1]), "other": 1}
(folder / "metrics.jsonl").write_text(json.dumps(line) + chr(10) + '{"st')
time.sleep(float(sys.argv[2]))
sys.exit(int(sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("words", "last"),
    [
        (("7", "0", "0"), {"step": 1, "reward_mean": 0.5, "weights_loaded_bytes": 7}),
        (("7", "600", "0"), {"is_cut": True, "seconds": 8}),
        (("7", "0", "2"), {"error": "flowtrain.train ended with status 2, see the log"}),
        (("0", "0", "0"), {"error": "no engine has loaded new weights"}),
    ],
)
def test_a_run_counts_with_the_steps_that_it_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], last: dict[str, Any]
) -> None:
    script = tmp_path / "run.py"
    script.write_text(RUN)
    monkeypatch.setattr(runs, "PROGRAM", (str(script), *words))
    cases = Cases(tmp_path / "stage.json", True)
    cases.run("one", lambda: runs.train(cases, "run"), limit_s=8)
    rows = json.loads((tmp_path / "stage.json").read_text())["rows"]
    assert rows[0]["step"] == 1 and "other" not in rows[0], "the line that is not whole is left out"
    assert rows[-1] == {"case": "one", **last}


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=12))
def test_busy_is_the_time_in_which_a_kernel_runs(spans: list[tuple[int, int]]) -> None:
    kernels = [training.Kernel("gemm", begin, begin + size) for begin, size in spans]
    busy = {t for begin, size in spans for t in range(begin, begin + size)}
    assert training.busy_us(kernels) == len(busy)
    rows = {row["class"]: row for row in training.by_class(kernels)}
    assert rows["products"]["ms"] == pytest.approx(sum(size for _, size in spans) / 1e3)
    assert rows["idle"]["ms"] == pytest.approx((max(busy) + 1 - min(busy) - len(busy)) / 1e3)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_tem_fused_flex_attention_0", "attention, forward"),
        ("triton_tem_fused_flex_attention_backward_2", "attention, backward"),
        ("nvjet_tst_192x192_64x4_1x2_h_bz_coopA_NTT", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention, forward"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention, backward"),
        ("void at::native::elementwise_kernel<128, 4>", "reductions, elementwise"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdam>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("loss_kernel", "flowkernels, policy_loss"),
        ("gated_kernel", "flowkernels, layers"),
        ("what_nobody_knows", "other"),
    ],
)
def test_kernels_have_classes(name: str, kind: str) -> None:
    assert training.class_of(name) == kind


def test_the_page_is_made_of_the_results() -> None:
    assert page.PAGE.read_text() == page.text(), "make it anew: python -m bench.gpu --page"


def test_results_are_kept_with_what_they_were_measured_under(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    rows = [{"case": "a: default", "ms": 1.5, "useful_mfu": 0.4}, {"case": "b", "needs": "trl"}]
    rows.append({"case": "c", "error": "no memory"})
    facts = {"device": "NVIDIA H200", "commit": "abc", "date": "2026-11-28", "torch": "2.11.0"}
    outcome = {"status": "broken", "seconds": 9.0, "reason": "", "clocks": "345 to 1980 MHz"}
    measure.write_rows(tmp_path / "out" / "steps.json", facts, rows)
    plan = {"plan": "first", "is_small": False, "stages": {"steps": outcome, "load": outcome}}
    stages = tmp_path / "out" / "stages.json"
    stages.write_text(json.dumps(plan | {"is_small": True}))
    with pytest.raises(SystemExit, match="dry run"):
        page.keep(tmp_path / "out")
    stages.write_text(json.dumps(plan))
    with tarfile.open(tmp_path / "results.tar", "w") as archive:
        for path in (stages, tmp_path / "out" / "steps.json"):
            archive.add(path, path.name)
    (kept,) = page.keep(tmp_path)
    assert kept == tmp_path / "results" / "h200" / "plans" / "steps.json"
    found = json.loads(kept.read_text())
    assert [row["case"] for row in found["rows"]] == ["a: default", "c"]
    assert found["facts"]["command"] == "python -m bench.gpu --plan first"
    text = page.text()
    assert "No plan has run on a GPU yet" not in text
    assert "2026-11-28, commit abc, `python -m bench.gpu --plan first`: device NVIDIA H200" in text
    assert "345 to 1980 MHz" in text and "| a: default | 1.5 | 0.4 |" in text
    assert "| 0.4 | >= 0.35 | met |" in text and "- failed: c: no memory" in text
    with pytest.raises(SystemExit, match=r"no stages\.json"):
        page.keep(tmp_path / "nowhere")


def wheel(path: Path, name: str, files: dict[str, str]) -> None:
    """Write a wheel with these files."""
    info = f"{name}-1.0.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for file, text in (files | {f"{info}/RECORD": record}).items():
            archive.writestr(file, text)


@pytest.mark.parametrize("most", [1 << 20, 1000])
def test_a_folder_installs_whole_or_in_parts(tmp_path: Path, most: int) -> None:
    folder = tmp_path / "gpu"
    (folder / "wheels").mkdir(parents=True)
    wheel(folder / "wheels", "flowtrain", {"flowtrain/_delta.cpython-312.so": "codec"})
    wheel(folder / "wheels", "lacking", {"lacking.py": "VALUE = 7\n"})
    (folder / "commit").write_text("abc\n")
    number = pack.split(folder / "wheels", folder / "parts", most)
    assert (number > 1) == (most == 1000)
    assert all(path.stat().st_size <= most for path in (folder / "parts").glob("*"))
    (tmp_path / "flowtrain").mkdir()
    script = (
        f". {ROOT}/bench/gpu/setup.sh gpu && echo $FLOWTRAIN_COMMIT"
        " && python3 -c 'import lacking; print(lacking.VALUE)'"
    )
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["abc", "7"], done.stderr
    assert (tmp_path / "flowtrain" / "_delta.cpython-312.so").read_text() == "codec"
    (folder / ("parts/part-000" if number else "wheels/flowtrain-1.0-py3-none-any.whl")).write_text(
        ""
    )
    failed = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert failed.returncode and not failed.stdout, "minutes on a GPU are not begun without it"


def test_a_codec_that_needs_a_new_glibc_is_found_out() -> None:
    assert pack.newest_glibc(b"\0GLIBC_2.2.5\0free\0GLIBC_2.14\0GLIBCXX_3.4.30\0") == 14
    assert pack.newest_glibc(b"\0GLIBC_2.34\0pthread_once\0GLIBC_2.2.5\0") == 34


def test_names_are_those_of_the_image() -> None:
    assert pack.name_of("typing_extensions>=4") == "typing-extensions"
    assert pack.name_of("psycopg[binary]>=3.2") == "psycopg"
    assert {"torch", "transformers", "numpy"} <= pack.image_packages()


def rivals(ours_ms: float) -> list[dict[str, Any]]:
    case = {"case": "logits: trl", "T": 8192, "D": 0, "V": 151936, "path": "logprobs"}
    return [{**case, "impl": "flowkernels", "ms": ours_ms}, {**case, "impl": "trl", "ms": 1.1}]


@pytest.mark.parametrize(("ms", "verdict"), [(0.55, "met"), (1.2, "**missed**")])
def test_goals_are_judged_on_a_gpu(tmp_path: Path, ms: float, verdict: str) -> None:
    (tmp_path / "rivals.json").write_text(json.dumps({"rows": rivals(ms)}))
    outcomes = {"rivals": {"status": "done", "seconds": 1.0, "reason": "", "clocks": ""}}
    report.write_report(tmp_path, outcomes, is_judged=True)
    lines = (tmp_path / "report.md").read_text().splitlines()
    (line,) = (line for line in lines if "times faster than trl" in line)
    assert line.endswith(f"| {1.1 / ms:.4g} | >= 1 | {verdict} |")
    report.write_report(tmp_path, outcomes, is_judged=False)
    assert "not judged" in (tmp_path / "report.md").read_text()


def test_the_kernel_tests_of_a_plan_are_there() -> None:
    folder = Path(__file__).with_name("kernels")
    wanted = {*kernels._KERNEL_TESTS, *kernels._FIRST_TESTS}
    assert not [name for name in wanted if not (folder / f"test_{name}.py").is_file()]
