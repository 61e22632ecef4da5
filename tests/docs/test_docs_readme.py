"""The commands of README.md, in its order and with its files, on a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cli_runs import Server
from doc_pages import ROOT, blocks, joined
from page_shell import Shell, write_file

pytest_plugins = ("cli_runs",)
PAGE = ROOT / "README.md"


def in_section(heading: str, *languages: str) -> list[str]:
    """The blocks under a heading, in these languages."""
    text = PAGE.read_text(encoding="utf-8")
    [section] = re.findall(rf"^## {heading}\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    return [block for block in blocks(PAGE, *languages) if block.text in section]


def test_the_agent_and_reward_of_the_page_train(tmp_path: Path, server: Server) -> None:
    shell = Shell(tmp_path)
    files = in_section("An agent and a reward of your own", "python", "toml")
    for block in files:
        write_file(block, tmp_path)
    [said] = in_section("An agent and a reward of your own", "")
    make, dry_run = joined(said.text)
    shell.run(make)
    assert len((tmp_path / "sums.jsonl").read_text().splitlines()) == 267
    assert "nothing was written" in shell.run_or_fork(dry_run, server)
    assert not (tmp_path / "runs").exists()
    train = dry_run.removesuffix(" --run.dry_run true")
    assert train != dry_run, "without the last option it trains"
    assert "to look at it: python -m flowtrain.logging.page runs/mine" in shell.run_or_fork(
        train, server
    )
    _, *steps = map(json.loads, (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines())
    assert [step["turns_mean"] for step in steps] == [2.0, 2.0]
    assert all("reward/right" in step for step in steps)
