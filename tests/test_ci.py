"""The run of CI: every stage, one table, failed tests once more, and what is left out."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from processes import run_program
from test_release import ROOT, loaded


@pytest.fixture
def ci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, in a repository of one file, with nothing kept yet and nothing to install."""
    module = loaded(ROOT / ".ci" / "run.py")
    repository = tmp_path / "repository"
    repository.mkdir()
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    (repository / "file").write_text("1")
    for words in (["init", "-q"], ["add", "file"], [*who, "commit", "-qm", "One"]):
        subprocess.run(["git", *words], cwd=repository, check=True)
    values = {"ROOT": repository, "KEPT": tmp_path / "kept", "PROGRAMS": {}}
    places = {"CLONE": tmp_path / "kept" / "clone", "LAST_FAILED": Path("lastfailed")}
    for name, value in {**values, **places}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "state", lambda files: (repository / "file").read_text())
    monkeypatch.chdir(repository)
    return module


@pytest.fixture
def run(ci: ModuleType, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str]]]:
    """Runs stages; gives the exit code and the lines of the table."""

    def run(*stages: object) -> tuple[int, list[str]]:
        run = ci.Run()
        for stage in stages:
            run.stage(stage)
        code = run.end()
        lines = capsys.readouterr().out.splitlines()
        return code, lines[next(i for i, line in enumerate(lines) if line.startswith("stage ")) :]

    return run


def test_a_red_stage_ends_none(ci: ModuleType, run: Callable, tmp_path: Path) -> None:
    code, table = run(ci.Stage("one", "false"), ci.Stage("two", f"touch {tmp_path}/two"))
    assert code == 1 and (tmp_path / "two").exists()
    assert [line.split()[0::2] for line in table[1:3]] == [["one", "failed"], ["two", "passed"]]


def test_a_failed_test_that_passes_alone_is_named_as_flaky(
    ci: ModuleType, run: Callable, tmp_path: Path
) -> None:
    def stage(name: str, alone: str) -> object:
        return ci.Stage(
            name, f"echo '{{{{\"t.py::{name}\": true}}}}' > {ci.LAST_FAILED}; false", (), alone
        )

    code, table = run(stage("a", f"echo >> {tmp_path}/tried"))
    assert code == 0 and table[-1] == "flaky, 1 of at most 5: t.py::a"
    assert (tmp_path / "tried").read_text() == "t.py::a\n"
    code, table = run(stage("a", "true"), stage("b", "false"))
    assert code == 1 and table[2].split()[2:] == ["failed", "t.py::b"]
    code, _ = run(*(stage(f"s{number}", "true") for number in range(ci.MAX_FLAKY + 1)))
    assert code == 1


def test_many_failed_tests_are_not_tried_again(
    ci: ModuleType, run: Callable, tmp_path: Path
) -> None:
    ci_failed = json.dumps({f"t.py::{number}": True for number in range(ci.MAX_FLAKY + 1)})
    (tmp_path / "failed").write_text(ci_failed)
    command = f"cp {tmp_path}/failed {ci.LAST_FAILED}; false"
    code, table = run(ci.Stage("a", command, (), f"touch {tmp_path}/tried; true"))
    assert code == 1 and "t.py::5" in table[1] and not (tmp_path / "tried").exists()


def test_a_stage_of_unchanged_files_is_left_out_nine_times(ci: ModuleType, run: Callable) -> None:
    stage = ci.Stage("a", "test ! -e broken", ("file",))
    words = [run(stage)[1][1].split()[2] for _ in range(12)]
    assert words == ["passed", *["left"] * 9, "passed", "left"]
    assert run(stage._replace(command="true"))[1][1].split()[2] == "passed", "another command"
    Path("file").write_text("2")
    assert run(stage)[1][1].split()[2] == "passed"
    Path("file").write_text("3")
    Path("broken").touch()
    assert [run(stage)[0] for _ in range(2)] == [1, 1], "what failed is not left out"
    assert run(ci.Stage("always", "true"))[1][1].split()[2] == "passed"


def test_a_stranger_has_a_new_clone_and_an_empty_home(
    ci: ModuleType, run: Callable, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    ci.PROGRAMS["program"] = str(program)
    hidden = "true" if not ci.hide() else f"! test -x {program}"
    Path("file").write_text("what is not committed")
    command = f'test -z "$(ls -A "$HOME")" && {hidden} && grep -q "is not committed" file && pwd'
    command += f" && test $PWD = {ci.CLONE} && touch made"
    assert run(ci.Stage("a", command, is_stranger=True))[0] == 0
    assert not Path("made").exists() and not ci.CLONE.exists()
    assert run(ci.Stage("a", f"test -x {program}"))[0] == 0


def test_a_strangers_environment_is_kept(ci: ModuleType, run: Callable, tmp_path: Path) -> None:
    made = tmp_path / "clone" / ".venv"
    (made / "bin").mkdir(parents=True)
    (made / "bin" / "tool").write_text(f"#!{made}/bin/python\nprint('{made}')\n")
    (made / "bin" / "python").symlink_to("/usr/bin/env")
    ci.adopt(made, tmp_path / "kept")
    assert made.exists(), "it is not whole"
    for stamp in (".run", ".done"):
        (made / stamp).touch()
    ci.adopt(made, tmp_path / "kept")
    text = f"#!{tmp_path}/kept/bin/python\nprint('{made}')\n"
    assert (tmp_path / "kept" / "bin" / "tool").read_text() == text
    assert not made.exists() and not (tmp_path / "kept" / ".done").exists()


def test_make_alone_lists_its_targets_and_makes_nothing() -> None:
    done = run_program(["make", "--no-print-directory"], cwd=ROOT)
    assert done.returncode == 0 and done.stderr == ""
    said = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [*said] == targets and "quickstart" in targets
    assert said["run-setup"] == "What a run needs and no more"


def test_the_stages_run_what_is_there(ci: ModuleType) -> None:
    targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines()}
    for stage in ci.STAGES:
        if stage.command.startswith("make "):
            words = stage.command.split(" && ")[0].split()[1:]
            assert {
                word for word in words if word.isidentifier() or ("-" in word and "=" not in word)
            } <= targets
        assert [path for path in stage.files if not (ROOT / path).exists()] == []
    assert [stage.name for stage in ci.STAGES][:2] == ["quickstart", "test"]
