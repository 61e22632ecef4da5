"""Who may ask the server of a page, under which name, and what it says then."""

from __future__ import annotations

import http.client
import json
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

from flowtrain.metrics import MetricsLog
from flowtrain.view import server as module
from flowtrain.view.__main__ import main
from flowtrain.view.server import Pages, Server


@contextmanager
def served(root: Path) -> Iterator[Server]:
    with Server(Pages(root, 100)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(
    server: Server, path: str, token: str | None = "right", **headers: str
) -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    token = server.token if token == "right" else token
    more = {} if token is None else {"Authorization": f"Bearer {token}"}
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET", path, headers={**more, **names})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, answer.headers


@pytest.fixture
def server(run: Path) -> Iterator[Server]:
    with served(run) as server:
        yield server


def test_data_needs_the_token(server: Server) -> None:
    for path in ("/data", "/data?run=x"):
        for token in (None, "", "wrong", server.token[:-1], f"{server.token}x", "é"):
            status, body, headers = ask(server, path, token)
            assert status == 401 and b"Chad" not in body and headers["WWW-Authenticate"] == "Bearer"
        assert ask(server, path, None, Authorization=f"Basic {server.token}")[0] == 401
        assert ask(server, f"{path}?token={server.token}", None)[0] == 401, "not from the address"
    status, body, _ = ask(server, "/data")
    assert status == 200 and json.loads(body)["step"] == 4 and b"Chad" in body


def test_a_page_without_the_token_holds_nothing_of_the_run(server: Server) -> None:
    status, body, headers = ask(server, "/", None)
    assert status == 200 and b"Chad" not in body and b"num_questions" not in body
    assert headers["Referrer-Policy"] == "no-referrer" and headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', body.decode())
    assert policy.startswith("default-src 'none'; connect-src 'self'; script-src 'sha256-")
    assert "unsafe" not in policy and "http" not in policy
    assert server.token.encode() not in body


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8450", "127.0.0.1.evil.example", "", "[::1", "10.0.0.1"]
)
def test_another_name_is_refused(server: Server, host: str) -> None:
    for path in ("/", "/data"):
        status, body, _ = ask(server, path, Host=host)
        assert status == 403 and b"Chad" not in body


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:9000"])
def test_names_of_this_machine_are_ours(server: Server, host: str) -> None:
    assert ask(server, "/data", Host=host)[0] == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/run/..%2F..%2Fetc", 200),
        ("/data?run=../secret", 404),
        ("/data?run=%2Fetc", 404),
        ("/page.js", 404),
        ("/run/", 404),
        ("/data/", 404),
    ],
)
def test_odd_paths(server: Server, path: str, status: int) -> None:
    """A page that is asked for under any name is an empty shell; data is of known runs alone."""
    found, body, _ = ask(server, path)
    assert found == status and b"Chad" not in body


def test_other_methods_are_refused_and_bodies_are_not_read_as_requests(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    header = {"Authorization": f"Bearer {server.token}"}
    connection.request("POST", "/data", body=b"x", headers=header)
    assert connection.getresponse().status == 501
    connection.close()
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    smuggled = b"GET /data HTTP/1.1\r\nHost: localhost\r\n\r\n"
    connection.request("GET", "/", body=smuggled)
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 200 and connection.sock is None, "closed after one answer"


def test_data_are_made_anew_when_files_have_changed(
    server: Server, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAUSE", 0)
    _, body, headers = ask(server, "/data")
    tag = headers["ETag"]
    assert ask(server, "/data", If_None_Match=tag)[:2] == (304, b"")
    MetricsLog(run, 4, tensorboard=False).log({"step": 5, "version": 5, "reward_mean": 0.9})
    status, after, headers = ask(server, "/data", If_None_Match=tag)
    assert status == 200 and headers["ETag"] != tag
    assert json.loads(body)["step"] == 4 and json.loads(after)["step"] == 5


def test_a_run_that_does_not_exist_is_waited_for(tmp_path: Path, runs: Any) -> None:
    with served(tmp_path / "run") as server:
        assert ask(server, "/data")[:2] == (503, f"there is no folder {tmp_path}/run\n".encode())
        runs.make()
        assert len(json.loads(ask(server, "/data")[1])["rollouts"]) == 38


def test_a_folder_of_runs(tmp_path: Path, runs: Any) -> None:
    runs.make(name="a"), runs.make(name="b/c")
    with served(tmp_path) as server:
        _, body, headers = ask(server, "/data")
        assert {run["name"] for run in json.loads(body)["runs"]} == {"a", "b/c"}
        assert ask(server, "/data", If_None_Match=headers["ETag"])[0] == 304
        assert json.loads(ask(server, "/data?run=b%2Fc")[1])["name"] == "c"


def test_a_run_that_cannot_be_read_is_an_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(server.pages, "data", fail)
    status, body, _ = ask(server, "/data")
    assert (status, body) == (503, b"not yours\n")


def test_many_browsers_at_once(server: Server) -> None:
    bodies = list[bytes]()
    threads = [
        threading.Thread(target=lambda: bodies.append(ask(server, "/data")[1])) for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(bodies) == 12 and len(set(bodies)) == 1


def test_a_mistake_is_one_line_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--serve", "--out", "x.html"]) == 2
    error = capsys.readouterr().err
    assert "--out is for the page as a file" in error and error.count("\n") == 1


def test_the_command_serves_without_extras_and_ends_on_sigterm(run: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('uvicorn', 'starlette', 'torch', 'matplotlib'): sys.modules[name] = None\n"
        "from flowtrain.view.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run), "--serve", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        found = re.match(r"open http://127\.0\.0\.1:(\d+)/#token=([\w-]{32})  ", line)
        assert found, line
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=20)
        connection.request("GET", "/data", headers={"Authorization": f"Bearer {found[2]}"})
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stderr.read() == "" and found[2] not in process.stdout.read()
