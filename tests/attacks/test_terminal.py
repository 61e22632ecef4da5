"""Foreign texts on a terminal or in a log file: none of their control characters arrives."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import random
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.config.command import run_command
from flowtrain.evaluation.__main__ import main as evaluation
from flowtrain.logging.page.__main__ import main as viewer
from flowtrain.logging.progress import ProgressLine
from flowtrain.logging.tables import aligned
from flowtrain.records import UserError
from flowtrain.rollouts.__main__ import main as dataflow
from flowtrain.rollouts.node.__main__ import main as node
from flowtrain.rollouts.node.progress import NodeProgress
from flowtrain.utils.terminal import Printable, protect_output
from flowtrain.utils.text import printable
from flowtrain.weights.__main__ import main as weights
from tests.attacks.tally import Tally

SURFACE = "control characters on a terminal or in a log"
RAW = frozenset(
    chr(code)
    for code in (
        *range(9),
        *range(11, 32),
        *range(127, 160),
        0x2028,
        0x2029,
        *range(0x202A, 0x202F),
    )
) | frozenset(map(chr, range(0x2066, 0x206A)))
TEXTS = (
    *("\x1b[2J\x1b[H", "\x1b]0;title\x07", "\x1b]8;;http://x\x07link\x1b]8;;\x07", "\x1b[31mred"),
    *("\x9b31m", "\x90q\x9c", "over\rwritten", "back\b\b\b\bspace", "\x00", "\x7f", "\x0b\x0c"),
    *("\u202eevil", "\u2066x\u2069", "a\u2028b", "\ud800", "\x1bP+q\x1b\\", "\x1b[6n", "\x85"),
    "".join(map(chr, range(0xA0))),
)


def log(text: str) -> None:
    logger = logging.getLogger("flowtrain.attack")
    logger.propagate = False  # pytest has handlers at the root; a command has none
    logger.handlers = [logging.lastResort] if logging.lastResort else []
    logger.warning("a node said %s", text)
    try:
        raise RuntimeError(text)
    except RuntimeError:
        logger.exception("and failed: %s", text)


def fail(text: str) -> None:
    def body(_config: object) -> int:
        raise UserError(f"the server said {text}")

    assert run_command("m", body, ["--model.path", "tiny"]) == 2


def configure(*arguments: str) -> None:
    assert run_command("m", lambda _config: 0, arguments) == 2


def traceback(text: str) -> None:
    try:
        raise RuntimeError(text)
    except RuntimeError as error:
        sys.excepthook(RuntimeError, error, error.__traceback__)


def progress(text: str) -> None:
    line = ProgressLine(10, 0, enabled=True)
    line.show(1, text)
    line.note(text)
    node_line = NodeProgress()
    node_line.show({text: 1}, 0, text)
    node_line.close()


def refused(main: Callable[[list[str]], int], *arguments: str) -> Callable[[str], None]:
    """A command line that meets the text among its arguments, in its own errors or argparse's."""

    def run(text: str) -> None:
        try:
            main([argument.format(text.replace("\0", "")) for argument in arguments])
        except SystemExit as ended:
            assert ended.code == 2

    return run


def evaluate(arguments: list[str]) -> int:
    before, sys.argv = sys.argv, ["evaluation", *arguments]
    try:
        return evaluation()
    finally:
        sys.argv = before


WAYS: dict[str, Callable[[str], None]] = {
    "print": print,
    "print to stderr": lambda text: print(text, file=sys.stderr),
    "log": log,
    "error of a run": fail,
    "traceback": traceback,
    "progress": progress,
    "table": lambda text: print(aligned([("name", "x"), (text, text)])),
    "option of train": lambda text: (run_command("m", lambda _: 0, [f"--run.{text}", "1"]), None)[
        1
    ],
    "value of train": lambda text: (run_command("m", lambda _: 0, ["--run.seed", text]), None)[1],
    "arguments of dataflow": refused(dataflow, "status", "ftp://x/{}"),
    "command of dataflow": refused(dataflow, "{}"),
    "file of dataflow": refused(dataflow, "audit", "--database", "/nowhere/{}"),
    "arguments of weights": refused(weights, "verify", "/nowhere/{}"),
    "version of weights": refused(weights, "verify", "x", "--version", "{}"),
    "arguments of node": refused(node, "--dataflow", "ftp://x/{}"),
    "arguments of evaluation": refused(evaluate, "--benchmarks", "{}", "--trials", "{}"),
    "arguments of viewer": refused(viewer, "/nowhere/{}"),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_control_character_arrives(
    way: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # as it was, after the test
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    protect_output()
    through = []
    for text in TEXTS:
        WAYS[way](text)
        shown = capsys.readouterr()
        assert shown.out + shown.err, "something was said"
        if set(shown.out + shown.err) & RAW:
            through.append(text)
    tally.add(SURFACE, len(TEXTS), len(through))
    assert through == []


def test_a_log_file_and_a_terminal_get_none_either(tmp_path: Path, tally: Tally) -> None:
    """A process of its own, into a file and into a terminal, where bars draw themselves."""
    program = (
        "import logging, sys, warnings\n"
        "from flowtrain.logging.progress import ProgressLine\n"
        "from flowtrain.utils.terminal import bar, protect_output\n"
        "protect_output(); protect_output()\n"
        "text = '\\x1b[2Jfoe\\x9b31m\\x07\\ud800\\r'\n"
        "line = ProgressLine(3, 0, enabled=True)\n"
        "line.show(1, text); line.note(text)\n"
        "logging.getLogger('x').warning(text)\n"
        "print(text); warnings.warn(text)\n"
        "bar(total=3, initial=1, disable=None).close()\n"
        "raise RuntimeError(text)\n"
    )
    path = tmp_path / "log.txt"
    with path.open("wb") as file:
        subprocess.run([sys.executable, "-c", program], stdout=file, stderr=file, check=False)
    logged = path.read_bytes()
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with subprocess.Popen([sys.executable, "-c", program], stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        drawn = _all_of(ours)
        process.wait()
    through = [b for b in (b"\x1b[2J", b"\xc2\x9b", b"\x07") if b in logged or b in drawn]
    tally.add(SURFACE, 2, len(through))
    assert through == [] and not set(logged) & {*range(9), *range(11, 32), 127}
    assert logged.count(b"\\x1b[2Jfoe\\u009b31m\\x07\\ud800\\x0d") == 6
    assert b"33%" in drawn and drawn.count(b"\\x1b[2Jfoe") >= 6


def _all_of(terminal: int) -> bytes:
    data = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # Linux says so when the other side is closed
            piece = b""
        if not piece:
            os.close(terminal)
            return data
        data += piece


@given(st.text())
def test_what_is_printable_stays_and_the_rest_is_escaped(text: str) -> None:
    shown = printable(text)
    assert not set(shown) & RAW
    shown.encode()
    assert printable(shown) == shown
    if not set(text) & RAW and text.isprintable():
        assert shown == text
    assert not set(printable(text, keep="")) & (RAW | set("\n\t"))


def test_composed_texts(campaign: Iterator[int], tally: Tally) -> None:
    for seed in campaign:
        rng = random.Random(seed)
        out = io.StringIO()
        stream = Printable(out)
        texts = ["".join(rng.choices([*RAW, "[", "m", "\n", "x", "é"], k=20)) for _ in range(500)]
        for text in texts:
            print(text, file=stream)
        through = set(out.getvalue()) & RAW
        tally.add(SURFACE, len(texts), len(through))
        assert not through
