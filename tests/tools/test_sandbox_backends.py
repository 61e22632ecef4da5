"""What Bubblewrap and limits add to seccomp; how one is chosen; what holds without a filter."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_sandbox_processes import until

from flowtrain.config import Agent
from flowtrain.records import UserError
from flowtrain.tools.sandbox import (
    bubblewrap,
    confine_checkers,
    limits,
    make_checker_sandbox,
    make_sandbox,
    seccomp,
    server,
)
from flowtrain.tools.sandbox.host import ProcessSandbox
from flowtrain.tools.sandbox.server import Backend
from tests.attacks.sandboxes import WHY_NO_BUBBLEWRAP, needs_bubblewrap, outcome, server_pid

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")
IS_ROOT = os.geteuid() == 0


def backend(kind: str, *packages: str) -> Backend:
    with warnings.catch_warnings(action="ignore"):
        return {"bubblewrap": bubblewrap.backend, "limits": limits.backend}[kind](packages)


@pytest.fixture(
    scope="module", params=[pytest.param("bubblewrap", marks=needs_bubblewrap), "limits"]
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def numpy_box(kind: str) -> Iterator[ProcessSandbox]:
    box = ProcessSandbox(backend(kind, "numpy"), num_workers=1, timeout_s=5.0)
    yield box
    box.close()


# ---- packages and files


def test_a_granted_package_computes(numpy_box: ProcessSandbox) -> None:
    code = (
        "import numpy as np\na = np.arange(9e4).reshape(300, 300) + "
        "np.eye(300)\nprint(np.allclose(a @ np.linalg.inv(a), np.eye(300)))"
    )
    assert outcome(numpy_box, code) == "True\n"
    found = outcome(numpy_box, "import numpy\nnumpy.ones(10 ** 9)")
    assert found == "memory limit of 512 MiB exceeded"
    seen = outcome(
        numpy_box,
        "import numpy.polynomial as p\np.Polynomial([1, 2]).roots()[0]\nprint(p.Polynomial([1, "
        "2])(3))",
    )
    assert seen == "7.0\n"
    assert numpy_box.backend.offers == "the standard library, numpy"


def test_files_live_as_long_as_their_run(numpy_box: ProcessSandbox) -> None:
    write = (
        "import os, "
        "pathlib\nprint(os.listdir())\nos.mkdir('a')\npathlib.Path('a/b').write_text('hi')\nprint(open('a/b').read())"
    )
    for _ in range(3):
        assert outcome(numpy_box, write) == "[]\nhi\n"
    assert outcome(numpy_box, "import os\nprint(os.listdir())") == "[]\n"
    found = outcome(
        numpy_box, "import tempfile\nwith tempfile.TemporaryFile() as f: print(f.write(b'abc'))"
    )
    assert found == "3\n"


def test_run_that_writes_files_replaces_its_server(numpy_box: ProcessSandbox) -> None:
    outcome(numpy_box, "1")
    first = server_pid(numpy_box)
    assert outcome(numpy_box, "2 + 2") == "4\n" and server_pid(numpy_box) == first
    for trace in (
        "open('x', 'w')",
        "import os\nopen('x', 'w')\nos.unlink('x')",
        "import os\nos.mkdir('x')\nos.chmod('x', 0)",
    ):
        outcome(numpy_box, "1")
        first = server_pid(numpy_box)
        outcome(numpy_box, trace)
        outcome(numpy_box, "1")
        assert server_pid(numpy_box) != first, trace


def test_limits_leave_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o755)
    box = ProcessSandbox(backend("limits"), num_workers=1)
    found = outcome(
        box,
        "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').write('x')\nos.symlink('/', "
        "'a/d')\nos.chmod('a', 0)",
    )
    assert found == ""
    box.close()
    assert not list(tmp_path.iterdir())


# ---- which one it is


def chosen(**options: object) -> Backend:
    box = make_sandbox(Agent.model_validate(options))
    assert isinstance(box, ProcessSandbox)
    box.close()
    return box.backend


def test_auto_is_the_strictest_that_can_do_what_is_asked_for() -> None:
    assert chosen().name == chosen(sandbox="seccomp").name == "seccomp"


@needs_bubblewrap
def test_packages_want_bubblewrap() -> None:
    assert (
        chosen(python_packages=["numpy"]).name == chosen(sandbox="bubblewrap").name == "bubblewrap"
    )


def test_without_bubblewrap_auto_refuses_and_names_the_ways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError) as refused:
        chosen(python_packages=["numpy"])
    assert str(refused.value) == (
        "agent.sandbox='auto': bubblewrap (the program bwrap) is not installed. Install it "
        "(apt-get install bubblewrap) and allow namespaces; or, if the machine holds nothing "
        "confidential, set agent.sandbox = 'limits', which protects no files (docs/tools.md)"
    )
    with pytest.raises(UserError, match=r"^agent\.sandbox='bubblewrap': bubblewrap \(the program"):
        chosen(sandbox="bubblewrap")
    assert chosen().name == "seccomp", "pure computation needs none"
    can = "READ ALL FILES THAT ANY USER MAY READ" if IS_ROOT else "READ AND WRITE YOUR FILES"
    warned = rf"^sandbox 'limits': model-written code can {can}; install bubblewrap"
    with pytest.warns(RuntimeWarning, match=warned):
        assert chosen(sandbox="limits", python_packages=["numpy"]).name == "limits"


def test_without_seccomp_auto_refuses_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp, "is_offered", lambda: False)
    monkeypatch.setattr(limits, "is_offered", lambda: False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"agent\.sandbox='auto': bubblewrap"):
        chosen()
    with pytest.warns(RuntimeWarning, match="USE THE NETWORK"):
        assert chosen(sandbox="limits").name == "limits"


def checker(sandbox: str) -> str:
    confine_checkers(Agent.model_validate({"sandbox": sandbox}))
    try:
        box = make_checker_sandbox("numpy", 1.0, 512)
    finally:
        confine_checkers(Agent())
    box.close()
    return box.backend.name


@pytest.mark.filterwarnings("ignore:sandbox 'limits'")
@pytest.mark.parametrize("sandbox", ["auto", "seccomp", "bubblewrap", "limits"])
def test_checkers_of_answers_follow_agent_sandbox(
    sandbox: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not WHY_NO_BUBBLEWRAP:
        assert checker(sandbox) == ("limits" if sandbox == "limits" else "bubblewrap")
    monkeypatch.setenv("PATH", "")
    if sandbox == "bubblewrap":
        with pytest.raises(UserError, match=r"agent\.sandbox="):
            checker(sandbox)
    else:
        assert checker(sandbox) == "limits", "it only parses them"


@needs_bubblewrap
def test_without_seccomp_auto_prefers_bubblewrap_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (seccomp, bubblewrap):
        monkeypatch.setattr(module, "is_offered", lambda: False)
    assert chosen().name == "bubblewrap" and not chosen().must_filter
    monkeypatch.undo()
    assert chosen(sandbox="bubblewrap").must_filter and backend("limits").must_filter


def test_a_bubblewrap_that_does_not_work_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bwrap"
    program.write_text(
        "#!/bin/sh\necho first >&2\necho 'bwrap: No permissions to create new namespace' >&2\nexit "
        "1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    told = r"bubblewrap does not work here: bwrap: No permissions to create new namespace\. "
    with pytest.raises(UserError, match=told):
        chosen(sandbox="bubblewrap")


@pytest.mark.parametrize("name", ["nump", "os.path", "a b", "builtins", "-c"])
def test_a_package_that_is_not_there_is_named(name: str) -> None:
    told = r"^agent\.python_packages: no installed package can be imported as '"
    told += re.escape(name)
    with pytest.raises(UserError, match=told):
        chosen(python_packages=[name])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_unimportable_package_is_refused_at_start(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_package.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    reason = "ModuleNotFoundError: No module named 'no_such_module'"
    told = rf"^agent\.python_packages cannot be imported for agent\.sandbox='{kind}': {reason}$"
    with pytest.raises(UserError, match=told):
        chosen(sandbox=kind, python_packages=["broken_package"])


def test_the_warning_says_what_is_not_stopped() -> None:
    said = [
        limits.warning(is_root, has_seccomp)
        for is_root in (True, False)
        for has_seccomp in (True, False)
    ]
    words = ["READ ALL FILES", "READ AND WRITE YOUR FILES", "NETWORK", "KILL YOUR PROCESSES"]
    assert [[word in text for word in words] for text in said] == [
        [True, False, False, False],
        [True, False, True, False],
        [False, True, False, False],
        [False, True, True, True],
    ]


def test_limits_really_do_not_stop_reading(tmp_path: Path) -> None:
    box = ProcessSandbox(backend("limits"), num_workers=1)
    assert outcome(box, "print(open('/etc/passwd').read())") != ""
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    secret.chmod(0o600)
    expected = "PermissionError" if IS_ROOT else "s3cret"  # root's code runs as somebody else
    assert outcome(box, f"print(open({str(secret)!r}).read())").startswith(expected)
    box.close()


# ---- what stands behind the filter


@pytest.fixture
def unfiltered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., ProcessSandbox]:
    """Sandboxes on a kernel that knows no seccomp filter."""

    def make(kind: str, *edits: tuple[str, str]) -> ProcessSandbox:
        source = server.CHILD.read_text()
        for old, new in (("SECCOMP_MODE_FILTER = 2", "SECCOMP_MODE_FILTER = 99"), *edits):
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        child = tmp_path / "child.py"
        child.write_text(source)
        tmp_path.chmod(0o755)
        monkeypatch.setattr(server, "CHILD", child)
        monkeypatch.setattr(bubblewrap, "CHILD", child)
        return ProcessSandbox(
            replace(backend(kind), must_filter=False), num_workers=1, timeout_s=1.0, memory_mb=256
        )

    return make


@pytest.mark.skipif(not IS_ROOT, reason="as the same user, such code could signal the tests")
def test_limits_still_start_no_process_and_signal_nobody(
    unfiltered: Callable[..., ProcessSandbox],
) -> None:
    box = unfiltered("limits")
    for code in (
        "import os\nos.fork()",
        "import os\nwhile True: os.fork()",
        "import _thread\n_thread.start_new_thread(print, ())",
    ):
        assert re.search("BlockingIOError|can't start new thread", outcome(box, code))
    for code in (
        f"os.kill({os.getpid()}, 0)",
        "os.kill(os.getppid(), 9)",
        "os.setuid(0)",
        "open('/usr/lib/flowtrain', 'w')",
    ):
        assert outcome(box, f"import os\n{code}").startswith("PermissionError")
    assert outcome(box, "6 * 7") == "42\n"
    box.close()


@needs_bubblewrap
def test_bubblewrap_still_has_no_network(unfiltered: Callable[..., ProcessSandbox]) -> None:
    box = unfiltered("bubblewrap")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = "import socket\nsocket.create_connection(({!r}, {}), 1)"
        assert "refused" in outcome(
            box, connect.format("127.0.0.1", port)
        ) or "unreachable" in outcome(box, connect.format("127.0.0.1", port))
    assert "unreachable" in outcome(box, connect.format("192.0.2.1", 80))
    box.close()


@needs_bubblewrap
def test_bubblewrap_ends_what_a_run_has_left_behind(
    unfiltered: Callable[..., ProcessSandbox], tmp_path: Path
) -> None:
    box = unfiltered("bubblewrap", ("NPROC=0, ", ""))
    daemon = """
import os, time
if not os.fork():
  os.setsid()
  if not os.fork():
    os.closerange(0, 9)
    time.sleep(1000)  # a busy one would end at its cap on CPU time
  os._exit(0)
os.wait()"""
    mark = str(tmp_path / "child.py").encode()

    def processes() -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                text = path.read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            # Neither the tests themselves nor bubblewrap, whose command line also holds the path.
            found += (
                [path.parent.name]
                if mark in text and not text.partition(b"\0")[0].endswith(b"bwrap")
                else []
            )
        return found

    assert outcome(box, daemon) == ""
    asyncio.run(until(lambda: len(processes()) == 2))  # the server and the daemon
    box.close()
    asyncio.run(until(lambda: not processes()))


@needs_bubblewrap
def test_bubblewrap_keeps_a_massacre_in_the_house(
    unfiltered: Callable[..., ProcessSandbox],
) -> None:
    box = unfiltered("bubblewrap")
    error = outcome(box, "import os\nos.kill(-1, 9)\nos.kill(os.getpid(), 9)")
    assert re.search("died|killed by SIGKILL", error)
    assert outcome(box, "6 * 7") == "42\n"
    box.close()
