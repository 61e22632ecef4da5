"""The commands of docs/tutorial.md, in its order and with its files, on a tiny model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from cli_runs import Server
from doc_pages import ROOT, blocks, joined

pytest_plugins = ("cli_runs",)
PAGE = ROOT / "docs" / "tutorial.md"
TINY = """
[tiny]
hidden_size = 32
num_layers = 1
num_heads = 2
[run]
device = "cpu"
threads = 1
"""


def for_tiny(config: str) -> str:
    """The config for a model that learns nothing, in seconds."""
    for old, new in {
        '"models/SmolLM2-135M-Instruct"': '"tiny"',
        "num_steps = 20": "num_steps = 2",
        "num_questions = 8": "num_questions = 2",
        "group_size = 8": "group_size = 2",
        "num_tasks = 100": "num_tasks = 4",
    }.items():
        assert old in config
        config = config.replace(old, new)
    return config + TINY


def run(command: str, folder: Path, server: Server) -> str:
    """Run a command of the page; return what it says."""
    words = [sys.executable, *shlex.split(command)[1:]]
    if words[1:3] == ["-m", "flowtrain.train"]:
        code, lines, out = server.run("train", *words[3:], cwd=folder, with_picture=True)
        assert code == 0, (command, lines)
        return out + "\n".join(lines)
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout + done.stderr


def test_the_tutorial_runs_in_its_order(tmp_path: Path, server: Server) -> None:
    said = []
    for block in blocks(PAGE, "python", "toml", ""):
        if block.language:
            [name, more] = re.findall(r"^# ([\w.]+)(, more)?$", block.text, re.MULTILINE)[0]
            text = for_tiny(block.text) if name == "mine.toml" and not more else block.text
            with (tmp_path / name).open("a") as file:
                file.write(text)
        else:
            said += [run(command, tmp_path, server) for command in joined(block.text)]
    assert "35" in said[1] and "nothing was written" in said[1]
    assert "mine.py:score" not in said[1] and "scored by mine.py:score" in said[2]
    for made in ("sums/curves.png", "sums/view.html", "sums/checkpoints/step_00000002"):
        assert (tmp_path / "runs" / made).exists()
    assert any("reward/right" in each for each in said)
    turns = (tmp_path / "runs/two-turns/metrics.jsonl").read_text()
    assert '"turns_mean": 2.0' in turns
