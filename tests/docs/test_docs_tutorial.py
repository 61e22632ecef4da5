"""The commands of docs/tutorial.md, in its order and with its files, on a tiny model."""

from __future__ import annotations

from pathlib import Path

from cli_runs import Server
from doc_pages import ROOT, blocks, joined
from page_shell import Shell, write_file

pytest_plugins = ("cli_runs",)
PAGE = ROOT / "docs" / "tutorial.md"


def test_the_tutorial_runs_in_its_order(tmp_path: Path, server: Server) -> None:
    said, shell = [], Shell(tmp_path)
    for block in blocks(PAGE, "python", "toml", ""):
        if block.language:
            write_file(block, tmp_path)
        else:
            said += [shell.run_or_fork(command, server) for command in joined(block.text)]
    assert "35" in said[1] and "nothing was written" in said[1]
    assert "mine.py:score" not in said[1] and "scored by mine.py:score" in said[2]
    for made in ("sums/curves.png", "sums/view.html", "sums/checkpoints/step_00000002"):
        assert (tmp_path / "runs" / made).exists()
    assert any("reward/right" in each for each in said)
    turns = (tmp_path / "runs/two-turns/metrics.jsonl").read_text()
    assert '"turns_mean": 2.0' in turns
