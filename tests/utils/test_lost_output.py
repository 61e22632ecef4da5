"""Output that goes away: what is printed then is lost, and the program goes on to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from flowtrain.config.command import run_command
from flowtrain.utils.terminal import bar, protect_output

def body(config):
    for name in ("stdout", "stderr"):
        for _ in range(3):
            print("a line", file=getattr(sys, name), flush=True)
    bar(total=3, initial=1, disable=False).close()
    print("not flushed")
    with open(sys.argv[1], "w") as file:
        file.write("to the end")
    return 0

sys.exit(run_command("flowtrain.x", body, []))
"""


@pytest.mark.parametrize(
    "to", ["| true", ">&-", "2>&-", ">&- 2>&-", "> /dev/full", "2> /dev/full", "2>&1 | true"]
)
def test_a_program_outlives_its_output(to: str, tmp_path: Path) -> None:
    done = tmp_path / "done"
    line = f'"$0" -c "$1" "$2" {to}; exit ${{PIPESTATUS[0]}}'
    words = ["bash", "-c", line, sys.executable, PROGRAM, str(done)]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert done.read_text() == "to the end"
    assert "Error" not in ran.stderr and "Exception" not in ran.stderr


@pytest.mark.parametrize("argv", [["--help"], ["--config", "quickstart", "--show_config", "true"]])
def test_what_was_asked_for_cannot_be_lost_in_silence(argv: list[str]) -> None:
    words = [sys.executable, "-m", "flowtrain.train", *argv]
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr == "flowtrain.train: stdout cannot be written: No space left on device\n"
    ours, theirs = os.pipe()
    os.close(ours)
    ran = subprocess.run(words, stdout=theirs, stderr=subprocess.PIPE, text=True, check=False)
    os.close(theirs)
    assert (ran.returncode, ran.stderr) == (0, "")
