"""The command `flowtrain`: the same as `python -m flowtrain.NAME`."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_program

import flowtrain
from flowtrain.__main__ import COMMANDS, main

PACKAGE = Path(flowtrain.__file__).parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_program([sys.executable, "-m", "flowtrain", *arguments])


def test_every_module_that_is_a_command_for_people_is_in_the_table() -> None:
    runnable = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__main__")
        for path in PACKAGE.rglob("*.py")
        if path != PACKAGE / "__main__.py"
        and re.search(r"^ *if __name__ == \"__main__\"|^ *sys.exit\(main", path.read_text(), re.M)
    }
    internal = {name for name in runnable if re.search("child|worker|process", name)}
    assert runnable - internal == {module for module, _ in COMMANDS.values()}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_modules_of_the_table_are_there(name: str) -> None:
    assert importlib.util.find_spec(COMMANDS[name][0]) is not None


def test_a_command_runs_as_its_module_would() -> None:
    done, module = (
        run_program([sys.executable, "-m", *words, "verify", "--help"])
        for words in (("flowtrain", "weights"), ("flowtrain.weights",))
    )
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == module.stdout and "--version" in done.stdout


def test_the_exit_code_is_that_of_the_command(tmp_path: Path) -> None:
    done = run("weights", "verify", str(tmp_path / "none"))
    found = (done.returncode, done.stderr)
    assert found == (2, f"python -m flowtrain.weights: {tmp_path / 'none'} is not a folder\n")


def test_without_a_command_they_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["flowtrain"])
    assert main() == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    monkeypatch.setattr(sys, "argv", ["flowtrain", "--version"])
    assert main() == 0
    assert capsys.readouterr().out == f"flowtrain {flowtrain.__version__}\n"


def test_an_unknown_command_is_refused_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["flowtrain", "nodes"])
    assert main() == 2
    assert capsys.readouterr().err == "flowtrain: unknown command 'nodes'; did you mean node?\n"


def test_ctrl_c_while_a_command_is_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["flowtrain", "evaluation"])
    monkeypatch.setattr(runpy, "run_module", interrupted)
    assert main() == 130
    assert capsys.readouterr().err == "flowtrain evaluation: interrupted\n"


LIGHT = {
    "train": {
        "--help": "--train.lr FLOAT",
        "--show_config true": "[algorithm]",
        "--train.rl 1": "flowtrain.train: unknown key train.rl: did you mean train.lr?",
        "train.lr=1": "'train.lr=1' is not an option",
        "--train.lr x": "train.lr='x': Input should be a valid number",
        "--config nope": "--config nope: no such file",
    },
    "rft": {"--help": "--train.lr FLOAT", "--rft.rl 1": "flowtrain.rft: unknown key rft.rl"},
    "evaluation": {
        "--help": "--benchmarks X",
        "--train.rl 1": "flowtrain.evaluation: unknown key train.rl",
        "--turns 0": "--benchmarks names no benchmark",
        "--benchmarks own=ROWS:exact --planner x": "--planner 'x' may be 'policy'",
    },
    "replay": {
        "--help": "usage: python -m flowtrain.replay",
        "--form 1 runs/a": "unrecognized arguments: --form",
        "nowhere": "nowhere has no replay/steps.jsonl",
    },
    "rollouts": {
        "--help": "usage: python -m flowtrain.rollouts",
        "serve --database a.sqlite --train.rl 1": "unknown key train.rl",
    },
    "node": {"--help": "usage: python -m flowtrain.rollouts.node", "--form x": "--dataflow"},
    "weights": {
        "--help": "usage: python -m flowtrain.weights",
        "verify nowhere": "nowhere is not a folder",
    },
    "prove": {
        "--help": "usage: python -m flowtrain.inference.prove",
        "http://localhost/v1 --model x --policy y --other z": "'z' must be NAME=FOLDER",
    },
    "view": {
        "--help": "usage: python -m flowtrain.logging.page",
        "nowhere": "there is no folder nowhere",
    },
}
"""By command: words, and what is answered. torchrun is torch's own."""
ASK = """
import runpy, sys

sys.modules["torch"] = sys.modules["transformers"] = None  # so that whoever imports them fails
for words in sys.argv[1:]:
    sys.argv = [sys.argv[0], *words.split()]
    try:
        runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print(f"= {end.code or 0}", flush=True)
"""


@pytest.mark.parametrize("name", LIGHT)
@pytest.mark.parametrize("form", ["module", "short"])
def test_help_and_mistakes_are_answered_before_torch_is_imported(
    form: str, name: str, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1 + 1?", "answer": "2"}\n')
    module, first = (COMMANDS[name][0], []) if form == "module" else ("flowtrain", [name])
    asked = [" ".join([*first, words.replace("ROWS", str(rows))]) for words in LIGHT[name]]
    text = ASK.replace("MODULE", repr(module))
    done = run_program([sys.executable, "-c", text, *asked])
    codes = [int(line[2:]) for line in done.stdout.splitlines() if line.startswith("= ")]
    assert codes == [0 if "--help" in words or "--show" in words else 2 for words in LIGHT[name]]
    said = done.stdout + done.stderr
    assert [line for line in LIGHT[name].values() if line not in said] == []


def test_every_command_but_torch_s_own_is_asked_for_help_without_torch() -> None:
    assert {*LIGHT, "torchrun"} == set(COMMANDS)
