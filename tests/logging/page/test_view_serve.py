"""The page as a server on this machine gives it, to those who know its address."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowtrain.logging import MetricsLog
from flowtrain.logging.page.__main__ import main
from flowtrain.logging.page.serve import Server


@contextmanager
def served(run: Path) -> Iterator[Server]:
    with Server(run, 100) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(port: int, path: str, method: str = "GET") -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, answer.headers


def test_only_the_address_that_was_printed_has_the_page(run: Path) -> None:
    with served(run) as server:
        others = (
            "/",
            "/data",
            "/config.toml",
            server.path[:-1],
            f"{server.path}/",
            f"{server.path}x",
        )
        for path in (*others, f"{server.path}/../config.toml", "/%C3%A9"):
            status, body, _ = ask(server.server_port, path)
            assert status == 404 and b"Chad" not in body
        assert ask(server.server_port, server.path, "POST")[0] == 501
        status, body, headers = ask(server.server_port, server.path)
    assert status == 200 and b"Chad" in body and server.path.encode() not in body
    assert headers["Referrer-Policy"] == "no-referrer" and headers["Cache-Control"] == "no-store"
    assert server.server_address[0] == "127.0.0.1" and len(server.path) == 33


def test_each_load_shows_what_is_new(tmp_path: Path, runs: Any, data_of: Any) -> None:
    with served(tmp_path / "run") as server:
        missing = f"there is no folder {tmp_path}/run\n".encode()
        assert ask(server.server_port, server.path)[:2] == (503, missing)
        run = runs.make()
        for step in (4, 5):
            page = ask(server.server_port, server.path)[1].decode()
            assert data_of(page)["step"] == step
            MetricsLog(run, step, tensorboard=False).log({"step": 5, "reward_mean": 0.9})


def test_a_mistake_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--serve", "--out", "x.html"]) == 2
    error = capsys.readouterr().err
    assert "--out writes the page to a file" in error and error.count("\n") == 1


def test_the_command_serves_without_extras_and_ends_on_sigterm(run: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('uvicorn', 'starlette', 'torch', 'matplotlib'): sys.modules[name] = None\n"
        "from flowtrain.logging.page.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run), "--serve", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        line = process.stdout.readline()
        printed = re.match(r"open http://127\.0\.0\.1:(\d+)(/[\w-]{32})  ", line)
        assert printed, line
        assert ask(int(printed[1]), printed[2])[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stderr.read() == "" and printed[2] not in process.stdout.read()
