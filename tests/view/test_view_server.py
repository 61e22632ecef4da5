"""Who may ask the server of a page, under which name, and what it says then."""

from __future__ import annotations

import http.client
import json
import os
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

from flowtrain.types import UserError
from flowtrain.view.__main__ import main
from flowtrain.view.server import TOKEN_VARIABLE, Server, View, make_token

TOKEN = "a-token/of+its=own"


@contextmanager
def served(root: Path, **options: Any) -> Iterator[Server]:
    view = View(root, 100, **options)
    with Server(view, TOKEN) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            view.close()


def ask(
    server: Server, path: str, token: str | None = TOKEN, **headers: str
) -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    more = {} if token is None else {"Authorization": f"Bearer {token}"}
    connection.request("GET", path, headers={**more, **headers})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, answer.headers


@pytest.fixture
def server(run: Path) -> Iterator[Server]:
    with served(run) as server:
        yield server


def test_data_needs_the_token(server: Server) -> None:
    for path in ("/api/run", "/api/table", "/api/dataflow", "/api/none"):
        for token in (None, "", "wrong", TOKEN[:-1], f"{TOKEN}x", "é"):
            status, body, headers = ask(server, path, token)
            assert status == 401 and b"Chad" not in body and headers["WWW-Authenticate"] == "Bearer"
        assert ask(server, path, None, Authorization=f"Basic {TOKEN}")[0] == 401
        assert ask(server, f"{path}?token={TOKEN}", None)[0] == 401, "not from the address"
    status, body, _ = ask(server, "/api/run")
    assert status == 200 and json.loads(body)["head"]["step"] == 4 and b"Chad" in body


def test_a_page_without_the_token_holds_nothing_of_the_run(server: Server, run: Path) -> None:
    status, body, headers = ask(server, "/", None)
    assert status == 200 and b"Chad" not in body and b"num_questions" not in body
    assert headers["Referrer-Policy"] == "no-referrer" and headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', body.decode())
    assert policy.startswith("default-src 'none'; connect-src 'self'; script-src 'sha256-")
    assert "unsafe" not in policy and "http" not in policy
    assert TOKEN.encode() not in body


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8450", "127.0.0.1.evil.example", "", "[::1", "10.0.0.1"]
)
def test_another_name_is_refused(server: Server, host: str) -> None:
    for path in ("/", "/api/run"):
        status, body, _ = ask(server, path, Host=host)
        assert status == 403 and b"Chad" not in body


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:9000", "[::1]:8450"])
def test_names_of_this_machine_are_ours(server: Server, host: str) -> None:
    assert ask(server, "/api/run", Host=host)[0] == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/run/..%2F..%2Fetc", 200),
        ("/api/run?run=../secret", 404),
        ("/api/run?run=%2Fetc", 404),
        ("/api/run?epoch=x", 400),
        (f"/api/run?epoch={'9' * 5000}", 400),
        ("/page.js", 404),
        ("/run/", 404),
        ("/api/", 404),
    ],
)
def test_odd_paths(server: Server, path: str, status: int) -> None:
    """A page that is asked for under any name is an empty shell; data is of known runs alone."""
    found, body, _ = ask(server, path)
    assert found == status and b"Chad" not in body


def test_other_methods_are_refused_and_bodies_are_not_read_as_requests(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("POST", "/api/run", body=b"x", headers={"Authorization": f"Bearer {TOKEN}"})
    assert connection.getresponse().status == 501
    connection.close()
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    smuggled = b"GET /api/run HTTP/1.1\r\nHost: localhost\r\n\r\n"
    connection.request("GET", "/", body=smuggled)
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 200 and connection.sock is None, "closed after one answer"


def test_a_run_that_does_not_exist_is_waited_for(tmp_path: Path, runs: Any) -> None:
    with served(tmp_path / "run") as server:
        answer = json.loads(ask(server, "/api/run")[1])
        assert answer["state"]["name"] == "waiting"
        assert answer["state"]["text"].startswith(f"No run has begun in {tmp_path / 'run'} yet")
        runs.make()
        server.view._runs.clear()  # looked at twice within half a second
        answer = json.loads(ask(server, "/api/run")[1])
        assert answer["state"]["name"] == "ended" and len(answer["rollouts"]) == 38


def test_a_folder_of_runs(tmp_path: Path, runs: Any) -> None:
    runs.make(name="a"), runs.make(name="b/c")
    with served(tmp_path) as server:
        table = json.loads(ask(server, "/api/table")[1])
        assert {run["name"] for run in table["runs"]} == {"a", "b/c"}
        assert json.loads(ask(server, f"/api/table?id={table['id']}")[1]) == {"id": table["id"]}
        assert json.loads(ask(server, "/api/run?run=b%2Fc")[1])["head"]["name"] == "c"
        assert json.loads(ask(server, "/api/run")[1]) == {"kind": "table"}


def test_a_run_that_cannot_be_read_is_an_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(server.view, "answer", fail)
    status, body, _ = ask(server, "/api/run")
    assert (status, body) == (503, b"the run cannot be read: not yours\n")


def test_many_browsers_at_once(server: Server) -> None:
    sizes = list[int]()
    threads = [
        threading.Thread(target=lambda: sizes.append(len(json.loads(ask(server, "/api/run")[1]))))
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sizes) == 12 and len(set(sizes)) == 1


def test_a_token_is_asked_for_where_others_can_reach_the_page() -> None:
    assert len(make_token("", "127.0.0.1")) >= 32 != make_token("", "localhost")
    assert make_token("mine", "0.0.0.0") == "mine"
    with pytest.raises(UserError, match=f"--host 0.0.0.0 .* {TOKEN_VARIABLE}"):
        make_token("", "0.0.0.0")
    with pytest.raises(UserError, match="printable ASCII"):
        make_token("with space", "127.0.0.1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--serve", "--host", "0.0.0.0"], "set FLOWTRAIN_VIEW_TOKEN"),
        (["--serve", "--out", "x.html"], "--out is for the page as a file"),
        (["--serve", "--dataflow", "ftp://x"], "url must be like http://host:port/path"),
        (["--dataflow", "http://x"], "--dataflow is for the page that follows a run"),
    ],
)
def test_a_mistake_is_one_line_too(
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert main([str(run), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


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
        env={**os.environ, TOKEN_VARIABLE: ""},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        found = re.match(r"open http://127\.0\.0\.1:(\d+)/#token=([\w-]{32})  ", line)
        assert found, line
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=20)
        connection.request("GET", "/api/run", headers={"Authorization": f"Bearer {found[2]}"})
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stderr.read() == "" and found[2] not in process.stdout.read()
