"""Commands end on SIGTERM and SIGINT whoever starts them: a script's `&` has SIGINT ignored."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

IGNORED = (
    "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "runpy.run_module(sys.argv[1], run_name='__main__', alter_sys=True)"
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "argv",
    [
        ("flowtrain.weights", "serve", "weights", "--port", "0"),
        ("flowtrain.rollouts", "serve", "--database", "flow.sqlite", "--port", "0"),
    ],
)
def test_a_server_in_the_background_ends(
    argv: tuple[str, ...], number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "weights").mkdir()
    code = [sys.executable, "-c", IGNORED.replace("sys.argv[1]", repr(argv[0])), *argv[1:]]
    environment = {**os.environ, "FLOWTRAIN_TOKEN": "secret", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        code, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        said = b""
        for line in process.stdout:
            said += line
            if b"http://" in line:
                break
        process.send_signal(number)
        try:
            said += process.communicate(timeout=60)[0]
        finally:
            process.kill()
        assert process.returncode == 0, said.decode()
