"""Tools of MCP servers: real ones over both transports, and hostile ones by hand."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mcp.client import stdio
from ports import free_port

from flowtrain.agents.agentflow.executor import Executor
from flowtrain.agents.agentflow.prompts import tools_text
from flowtrain.config import Config
from flowtrain.config.options import parse
from flowtrain.records import Action, ToolResult, UserError
from flowtrain.tools import Tool, run_tool
from flowtrain.tools.registry import make_tools
from flowtrain.utils.event_loop import run_to_end

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = [sys.executable, str(ROOT / "examples" / "mcp_server.py")]
BY_HAND = str(Path(__file__).parent / "mcp_by_hand.py")


@pytest.fixture(autouse=True)
def short_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that hang are killed sooner."""
    monkeypatch.setattr(stdio, "PROCESS_TERMINATION_TIMEOUT", 0.2)


@contextmanager
def tools_of(*names: str, **servers: Mapping[str, Any]) -> Iterator[dict[str, Tool]]:
    """The tools of a config with these servers."""
    tools = make_tools(Config.model_validate({"agent": {"tools": names}, "mcp": servers}))
    try:
        yield tools
    finally:
        for tool in tools.values():
            tool.close()


def by_hand(tmp_path: Path, word: str, **options: Any) -> dict[str, Any]:
    command = (sys.executable, "-S", BY_HAND, word, str(tmp_path / "starts"))
    return {"command": command, "timeout_s": 20.0, **options}


@contextmanager
def echo(tmp_path: Path, word: str, **options: Any) -> Iterator[Tool]:
    """The tool of the server by hand."""
    with tools_of("hand.echo", hand=by_hand(tmp_path, word, **options)) as tools:
        yield tools["hand.echo"]


def call(tool: Tool, timeout_s: float = 60.0, max_chars: int = 400, **given: object) -> ToolResult:
    return run_to_end(run_tool(tool, given, timeout_s, max_chars))


def call_together(tool: Tool, *queries: str) -> list[ToolResult]:
    async def many() -> list[ToolResult]:
        each = (run_tool(tool, {"query": query}, 60.0, 400) for query in queries)
        return await asyncio.gather(*each)

    return run_to_end(many())


def starts(tmp_path: Path) -> list[int]:
    return [int(line) for line in (tmp_path / "starts").read_text().splitlines()]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# ---- the example, by the SDK


@contextmanager
def served() -> Iterator[dict[str, Any]]:
    """The example over streamable HTTP."""
    port = free_port()
    with subprocess.Popen([*EXAMPLE, str(port)], stderr=subprocess.PIPE, text=True) as process:
        assert any("Uvicorn running" in line for line in process.stderr)
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            yield {"url": f"http://127.0.0.1:{port}/mcp"}
        finally:
            process.kill()


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_the_example_works_over_both_transports(transport: str) -> None:
    reached = nullcontext({"command": EXAMPLE}) if transport == "stdio" else served()
    with reached as server, tools_of("areas.*", areas=server) as tools:
        area, total = tools["areas.area"], tools["areas.total"]
        assert list(tools) == ["areas.area", "areas.total"]
        assert not any(tool.card.is_stateful for tool in tools.values())
        shown = "areas.total: Adds numbers up, several times if asked to."
        assert shown in tools_text(tools.values())
        assert call(area, country="Chad").output == "The area of Chad is 1284."
        assert call(total, numbers=[1, 2.5], times=2).output == "7"
        wrong = "numbers.0\n  Input should be a valid number"
        assert wrong in call(total, numbers=["x"]).error
        assert "area" in call(area, country="Atlantis").error
        executor = Executor(tools, 30.0, 400)
        for sub_goal, name, found in (
            ("Mali", "areas.area", "The area of Mali is 1240."),
            ('{"numbers": [1, 2], "times": 3}', "areas.total", "9"),
        ):
            action = Action("", "", sub_goal, name)
            used, _, _ = run_to_end(executor.execute("q", action, 0, 30.0))
            assert used is not None and (used.result.output, used.result.error) == (found, None)


# ---- by hand


def test_rollouts_share_one_process_which_ends_with_the_last_tool(tmp_path: Path) -> None:
    with echo(tmp_path, "good") as tool:
        numbers = [*map(str, range(50))]
        assert [result.output for result in call_together(tool, *numbers)] == numbers
        (pid,) = starts(tmp_path)
        assert not is_gone(pid)
    assert is_gone(pid)
    assert call(tool, query="x").error == "the server 'hand' is closed"


def test_a_tool_is_stateful_unless_the_server_says_it_only_reads(tmp_path: Path) -> None:
    for word, expected in (("good", True), ("read_only", False)):
        with echo(tmp_path, word) as tool:
            assert tool.card.is_stateful is expected
            assert tool.card.schema["required"] == ["query"]


def test_a_program_gets_only_the_variables_that_it_is_meant_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWTRAIN_TOKEN", "ours")
    monkeypatch.setenv("AREAS_KEY", "theirs")
    with echo(tmp_path, "environment", env=("AREAS_KEY",)) as tool:
        seen = json.loads(call(tool, max_chars=99_999, query="").output)
    assert seen.pop("AREAS_KEY") == "theirs" and "PATH" in seen
    assert set(seen) <= {"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LC_CTYPE"}


@pytest.mark.parametrize(
    ("word", "output", "error"),
    [
        ("mixed", "hi\nhi\n[image (image/png) is left out]", None),
        ("image", "", "hand.echo returned image (image/png), and no text"),
        ("structured", '{"found": ["hi"]}', None),
        ("failed", "", "hi"),
        ("refuses", "", "not today"),
        ("no_json", "hi", None),
    ],
)
def test_results(tmp_path: Path, word: str, output: str, error: str | None) -> None:
    with echo(tmp_path, word) as tool:
        result = call(tool, query="hi")
    assert (result.output, result.error) == (output, error)
    assert len(starts(tmp_path)) == 1


def test_a_long_result_loses_its_middle(tmp_path: Path) -> None:
    with echo(tmp_path, "long") as tool:
        result = call(tool, query="hi")
    assert result.error is None and len(result.output) < 500
    assert f"{(7 << 20) - 400} characters left out" in result.output


def test_cards_hold_no_control_characters(tmp_path: Path) -> None:
    with echo(tmp_path, "control") as tool:
        assert tool.card.description == "Says \\x1b[2J it \\u202eagain."


@pytest.mark.parametrize("word", ["huge_line", "flood", "no_result"])
def test_a_call_that_goes_wrong_is_an_error_of_its_turn(tmp_path: Path, word: str) -> None:
    with echo(tmp_path, word, timeout_s=2.0) as tool:
        result = call(tool, query="hi")
    assert result.error is not None and result.output == ""
    assert all(is_gone(pid) for pid in starts(tmp_path))


@pytest.mark.parametrize(("word", "timeout_s"), [("dies_once", 20.0), ("hangs_once", 1.0)])
def test_a_server_that_dies_or_hangs_is_started_again(
    tmp_path: Path, word: str, timeout_s: float
) -> None:
    with echo(tmp_path, word, timeout_s=timeout_s) as tool:
        errors = [result.error or "" for result in call_together(tool, *["hi"] * 4)]
        assert any(errors)
        assert all("timed out after 1 s" in each for each in errors) == (word == "hangs_once")
        assert call(tool, query="hi").output == "hi"
        pids = starts(tmp_path)
        assert len(pids) == 2 and is_gone(pids[0])


def test_many_failures_at_a_time_start_a_server_once(tmp_path: Path) -> None:
    with echo(tmp_path, "dies") as tool:
        for _ in range(3):
            assert all(result.error for result in call_together(tool, *["x"] * 8))
        # A call that comes late, on a busy machine, may be the next server's first.
        assert 3 <= len(starts(tmp_path)) < 8


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("dies_at_once", r"\(it said: no licence\)"),
        ("silent", "no answer within 1 s"),
        ("bad_name", r"its tool 'echo\\x1b\[2J' has a name"),
        ("none", r"no tool 'hand.\*'; the tools of mcp.hand are none"),
    ],
)
def test_a_server_that_is_of_no_use_ends_the_run_at_its_start(
    tmp_path: Path, word: str, reason: str
) -> None:
    server = by_hand(tmp_path, word, timeout_s=1.0 if word == "silent" else 20.0)
    with pytest.raises(UserError, match=reason) as raised, tools_of("hand.*", hand=server):
        pass
    assert "hand" in str(raised.value) and str(raised.value).isprintable()
    assert all(is_gone(pid) for pid in starts(tmp_path))


def test_what_the_config_gets_wrong(tmp_path: Path) -> None:
    good, remote = by_hand(tmp_path, "good"), {"url": "http://127.0.0.1:9/mcp"}
    for names, servers, reason in (
        (["hand.ecco"], {"hand": good}, "agent.tools: no tool 'hand.ecco'; the .* hand.echo"),
        (["hand.*", "hand.echo"], {"hand": good}, "'hand.echo' is listed twice"),
        (["hand.echo"], {"head": good}, r"no tool 'hand.echo'; there are .*head\.\*"),
        (["hand.echo"], {"hand": {"command": ["/no/such"]}}, "mcp.hand: .*No such file"),
        (["hand.echo"], {"hand": {}}, "set mcp.hand.command or mcp.hand.url"),
        (["hand.echo"], {"hand": {**good, "env": ("NO_SUCH",)}}, "mcp.hand.env: .*'NO_SUCH'"),
        (["hand.echo"], {"hand": {**remote, "token_env": "NO"}}, "mcp.hand.token_env='NO'"),
        (["hand.echo"], {"hand": remote}, "mcp.hand: "),
    ):
        with pytest.raises(UserError, match=reason), tools_of(*names, **servers):
            pass


@pytest.mark.parametrize(
    "argv",
    [
        ("--mcp.a.timeout_s", "0"),
        ("--mcp.a.url", "ftp://x"),
        ("--mcp.a b.url", "http://x"),
        ("--mcp.a.url", "http://x", "--mcp.a.command", '["x"]'),
        ("--mcp.a.url", "http://x", "--mcp.a.env", '["x"]'),
        ("--mcp.a.command", '["x"]', "--mcp.a.token_env", "x"),
    ],
)
def test_tables_that_make_no_sense(argv: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=r"mcp\.a"):
        parse(argv)


# ---- over HTTP


@contextmanager
def answering(body: bytes) -> Iterator[tuple[str, list[str]]]:
    """A server that gives every request one answer; the tokens that it has seen."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(self.headers.get("Authorization", ""))
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/mcp", seen
        server.shutdown()


def test_a_bad_answer_over_http_ends_the_run_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAND_TOKEN", "secret-1")
    with answering(b"no JSON") as (url, seen):
        server = {"url": url, "token_env": "HAND_TOKEN", "timeout_s": 5.0}
        with (
            pytest.raises(UserError, match=r"^mcp\.hand: ") as raised,
            tools_of("hand.*", hand=server),
        ):
            pass
    assert set(seen) == {"Bearer secret-1"} and "secret-1" not in str(raised.value)
