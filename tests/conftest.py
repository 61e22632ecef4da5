"""Fixtures of several folders: one CPU thread, and a tiny tokenizer and model in a folder."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# `bench.gpu` runs tests of kernels where torch, Triton and pytest are all there is.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # A busy machine is no failure, and every run tries the same examples.
    settings.register_profile(
        "flowtrain",
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("flowtrain")

if not Path("/dev/nvidia0").exists() and importlib.util.find_spec("numpy"):
    # Triton reads this when it is first imported: its kernels then run, value for value, in numpy.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests run in several processes side by side, and their arrays are small.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_HERE = Path(__file__).parent
if sys.dont_write_bytecode:
    # Tests start many interpreters, for which compiling what they import is half of the work: do it
    # once, and not beside the sources.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(_HERE.parent / "build" / "bytecode"))
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"]
for _path in _HERE.rglob("*.py"):
    if not _path.name.startswith("test_") and _path.name != "conftest.py":
        # Test modules import a helper by its bare name, or from another folder as tests.<folder>.
        _dotted = ".".join(_path.relative_to(_HERE.parent).with_suffix("").parts)
        pytest.register_assert_rewrite(_path.stem, _dotted)

import forks  # noqa: E402 - after what it sets

from tests.attacks.tally import table  # noqa: E402

pytest_plugins = ["tests.durations"]

# Collecting makes millions of objects that stay, and a fifth of it was looking for garbage.
gc.disable()

PROGRAMS = {
    "bwrap": "bubblewrap",
    "chromium": "chromium",
    "nginx": "nginx",
    "prometheus": "prometheus",
    "strace": "strace",
}
"""Programs that some tests need, and the packages of Debian that have them."""


def _what_runs_more() -> str:
    """Say what lets tests run that were skipped here."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    missing = [package for name, package in PROGRAMS.items() if not shutil.which(name, path=path)]
    if not (shutil.which("postgres") or Path("/usr/lib/postgresql").is_dir()):
        missing.append("postgresql")
    install = f"apt-get install -y {' '.join(missing)}; " if missing else ""
    makes = "make test-all test-vllm test-optional test-environments test-loggers test-ray"
    return f"{install}{makes}; FLOWTRAIN_PLANNER=1 for the planner's; a GPU for those of kernels"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for each in terminalreporter.stats.values() for report in each]
    if lines := table(reports):
        terminalreporter.section("attacks")
        terminalreporter.write_line("\n".join(lines))
    if num_skipped := len(terminalreporter.stats.get("skipped", ())):
        terminalreporter.write_line(
            f"{num_skipped} tests were skipped; to run more: {_what_runs_more()}"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("vllm") and not importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is not installed: make test-vllm")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run that broke off names no failed tests: CI would take those that pass alone for all."""
    if exitstatus == pytest.ExitCode.INTERNAL_ERROR and session.config.cache:
        session.config.cache.set("cache/lastfailed", {})


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking over all that was imported, again and again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Threads only slow down models this small."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a folder once for all processes of a run of tests: `once(name, make)`."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    shared.mkdir(exist_ok=True)
    forks.folder = shared

    def once(name: str, make: Callable[[Path], None]) -> Path:
        from filelock import FileLock

        path, done = shared / name, shared / f"{name}.done"
        with FileLock(shared / f"{name}.lock"):
            if not done.exists():
                make(path)
                done.touch()
        return path

    return once


@pytest.fixture
def no_side_effects(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts back the signal handlers that a run in this process sets; no curves, no memory plan."""
    monkeypatch.setattr("flowtrain.logging.page.curves.plot_curves", lambda path: None)
    monkeypatch.setattr("flowtrain.trainer.setup.memory_plan.activations", lambda *_, **__: (0, 0))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of 2 layers whose large weights make its distributions far from uniform."""
    import torch

    from flowtrain.trainer import toy
    from flowtrain.trainer.model import loading as models

    path = tmp_path_factory.mktemp("tiny")
    tokenizer = toy.new_tokenizer(
        ["What is the capital of Chad?", "Sub-Goal: capital of Chad"], vocab_size=280
    )
    torch.manual_seed(0)
    model = toy.new_model(tokenizer, hidden_size=32, num_layers=2, num_heads=4, max_positions=64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.24 / model.config.initializer_range if parameter.dim() == 2 else 1.0)
    models.export(model, tokenizer, models.full_weights(model), Path(path))
    return str(path)
