"""`python -m flowtrain.weights`: output and exit codes, for good stores and for damaged ones."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import http_stores as hs
import pytest
from http_stores import TOKEN, Run, add_snapshot, flip, rewrite, same, weights_at

from flowtrain.utils.net.credentials import Role, issue
from flowtrain.weights import StoreError, WeightStore, open_source, pull
from flowtrain.weights.stores import http

pytest_plugins = ("http_stores",)
pytestmark = pytest.mark.usefixtures("clean_environment")


def test_a_store_without_versions_or_with_a_wrong_head(
    run: Run, copied: WeightStore, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for command in (("verify",), ("verify", "--all")):
        code, _, err = run(command[0], tmp_path / "empty", *command[1:])
        assert code == 1 and "holds no version" in err
    (copied.root / "HEAD").write_text("9\n")
    code, _, err = run("verify", copied.root, "--all")
    assert code == 1 and "HEAD of" in err and "is 9, which does not exist" in err
    (copied.root / "HEAD").write_bytes(b"\xff\xff")
    code, _, err = run("verify", copied.root)
    assert code == 1 and "not a version" in err


# ---- gc


def test_gc(run: Run, copied: WeightStore) -> None:
    code, out, _ = run("gc", copied.root, "--keep", 1)
    assert code == 0 and out == "deleted nothing (0 B); 6 versions stay\n", (
        "the only full snapshot is that of version 0"
    )
    rewrite(copied, 3, snapshot=3, snapshot_files=(add_snapshot(copied, 3),), reason="a test")
    for version in (4, 5):
        rewrite(copied, version, snapshot=3)
    code, out, _ = run("gc", copied.root, "--keep", 2, "--dry-run")
    assert code == 0
    assert re.fullmatch(r"would delete 0, 1, 2 \(.* KiB\); 6 versions are there\n", out)
    assert copied.versions() == list(range(6))
    code, out, _ = run("gc", copied.root, "--keep", 2)
    assert code == 0 and out.startswith("deleted 0, 1, 2 (") and out.endswith("; 3 versions stay\n")
    assert copied.versions() == [3, 4, 5] and same(pull(copied, 5), weights_at(5))


# ---- usage


@pytest.mark.parametrize("command", ["verify", "serve", "gc"])
def test_help_has_an_example(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0 and f"example: python -m flowtrain.weights {command} " in " ".join(out.split())
    code, out, _ = run("--help")
    assert code == 0 and command in out and "Exit codes: 0" in out


WRONG = f"""

polish
inspect S
verify
verify S --version x
verify S --version -1
verify S --all --version 1
gc S
gc S --keep 0
serve S --port 99999
verify /nowhere
gc /nowhere --keep 1
serve {__file__}
gc http://host --keep 1
serve http://host
verify ftp://host
verify {__file__}
"""
"""Command lines, S being a store."""


@pytest.mark.parametrize("line", WRONG.splitlines()[1:])
def test_usage_errors_exit_with_2(run: Run, filled: WeightStore, line: str) -> None:
    code, out, err = run(*(str(filled.root) if word == "S" else word for word in line.split()))
    assert (code, out) == (2, "") and "python -m flowtrain.weights" in err


def test_serve_refuses_a_port_in_use_and_a_bad_token(
    run: Run, filled: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hs.serving(filled) as url:
        code, _, err = run("serve", filled.root, "--port", url.rpartition(":")[2])
        assert code == 2 and "cannot listen at 127.0.0.1 port" in err
    monkeypatch.setenv("FLOWTRAIN_TOKEN", "two words")
    code, _, err = run("serve", filled.root, "--port", 0)
    assert code == 2 and "FLOWTRAIN_TOKEN" in err and "two words" not in err


# ---- over HTTP


def test_commands_work_on_a_url(
    run: Run, filled: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWTRAIN_TOKEN", TOKEN)
    with hs.serving(filled) as url:
        assert run("verify", url, "--all") == run("verify", filled.root, "--all")
        monkeypatch.setenv("FLOWTRAIN_TOKEN", "another")
        code, _, err = run("verify", url)
        assert code == 1 and "the server refuses the token" in err


def test_a_damaged_url(run: Run, copied: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http.time, "sleep", lambda seconds: None)
    flip(copied.folder(0) / "anchor-r0.safetensors")
    with hs.misbehaving(copied.root) as server:
        code, out, _ = run("verify", server.url, "--all")
        assert code == 1
        assert f"damaged: {server.url}/v00000000/anchor-r0.safetensors arrived damaged twice" in out
        shutil.rmtree(copied.folder(0))
        assert " in 5 versions, " in run("verify", server.url, "--all")[1]
        (copied.root / "HEAD").unlink()
        code, _, err = run("verify", server.url)
        assert code == 1 and f"{server.url} holds no version" in err
    code, _, err = run("verify", server.url)
    assert code == 1 and "no answer" in err


def test_a_folder_is_served_from_its_first_version_on_to_the_owners_of_tokens(
    filled: WeightStore, tmp_path: Path
) -> None:
    """It may start before the trainer. No shared token is made beside a file of tokens."""
    root = tmp_path / "run" / "weights"
    path = tmp_path / "tokens.json"
    token = issue(path, "n1", Role.NODE)
    environment = os.environ | {"FLOWTRAIN_TOKEN": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "flowtrain.weights", "serve", str(root)]
    with subprocess.Popen(
        [*command, "--port", "0", "--tokens", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            url = process.stdout.readline().split()[-1]
            assert process.stderr.readline().startswith(f"{root} does not exist yet; ")
            assert open_source(url, tmp_path / "cache", token).head() is None
            shutil.copytree(filled.root, root)
            assert open_source(url, tmp_path / "cache", token).head() == hs.LAST
            for wrong in ("", "wrong", path.name):
                with pytest.raises(StoreError, match="token"):
                    open_source(url, tmp_path / "cache", wrong).head()
            process.send_signal(signal.SIGINT)
            assert process.stdout.read() == "stopped\n"
        finally:
            process.kill()


@pytest.mark.parametrize("given", ["", "a-token-that-was-chosen"])
def test_serve_until_interrupted(filled: WeightStore, tmp_path: Path, given: str) -> None:
    """The command as people run it: the token is printed once when nobody chose one, and Ctrl-C
    ends it well.
    """
    environment = os.environ | {"FLOWTRAIN_TOKEN": given, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "flowtrain.weights", "serve", str(filled.root), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            url = process.stdout.readline().split()[-1]
            token = given or process.stdout.readline().split()[0].removeprefix("FLOWTRAIN_TOKEN=")
            assert len(token) > 20
            assert same(pull(open_source(url, tmp_path, token), 3), weights_at(3))
            process.send_signal(signal.SIGINT)
            rest, errors = process.stdout.read(), process.stderr.read()
            assert process.wait(20) == 0, errors
            assert rest == "stopped\n" and errors == ""
        finally:
            process.kill()
