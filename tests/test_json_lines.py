"""Whatever a process prints in JSON is a JSON object a line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from processes import run_program

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = r"""
import logging, sys, warnings
from flowtrain.utils.json_lines import print_json, say
from flowtrain.utils.terminal import bar, protect_output

protect_output()
print("before")
print_json("flowtrain.test")
print_json("flowtrain.test")
print("two\nlines")
print("\n  a forged {\"level\": \"error\"}\x1b[2J", file=sys.stderr)
sys.stderr.write("half")
sys.stderr.write(" a line\n")
logging.getLogger("flowtrain.x").warning("of %s", "logging\nin two lines")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("flowtrain.x").exception("failed")
warnings.warn("look")
say("step 3", fields={"step": 3, "loss": 0.5})
say("bad", "error")
with bar(total=2) as shown:
    shown.update()
raise KeyError("the end")
"""


def run(**env: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    done = run_program(
        [sys.executable, "-c", PROGRAM], env={**os.environ, "PYTHONPATH": str(ROOT), **env}
    )
    assert done.returncode == 1
    first, *out = done.stdout.splitlines()
    assert first == "before"
    err = [line for line in done.stderr.splitlines() if "0/2" not in line and "1/2" not in line]
    return [json.loads(line) for line in out], [json.loads(line) for line in err]


def test_every_line_is_an_object() -> None:
    out, err = run()
    assert [line["message"] for line in out] == ["two", "lines"]
    forged, half, logged, failed, warned, step, bad, end = err
    for line in (*out, *err):
        assert line["process"] == "flowtrain.test" and line["time"].endswith("Z")
        assert "rank" not in line
    assert forged["level"] == "info" and forged["message"].startswith("a forged {")
    assert half["message"] == "half a line"
    assert (logged["level"], logged["logger"]) == ("warning", "flowtrain.x")
    assert logged["message"] == "of logging\nin two lines"
    assert failed["level"] == "error" and "ZeroDivisionError" in failed["exception"]
    assert "look" in warned["message"] and warned["logger"] == "py.warnings"
    assert (step["message"], step["fields"]) == ("step 3", {"step": 3, "loss": 0.5})
    assert (bad["message"], bad["level"]) == ("bad", "error")
    assert end["level"] == "critical" and end["message"] == "KeyError: 'the end'"
    assert "Traceback" in end["exception"]


def test_ranks_say_who_they_are() -> None:
    out, err = run(RANK="3")
    assert {line["rank"] for line in (*out, *err)} == {"3"}
