"""The commands of README.md, in its order and with its files, on a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cli_runs import Server
from doc_pages import ROOT, blocks, joined
from launch.plans import CONFIG
from page_shell import Shell, free_ports, here, run_in_order, write_file

pytest_plugins = ("cli_runs",)
PAGE = ROOT / "README.md"


def in_section(heading: str, *languages: str) -> list[str]:
    """The blocks under a heading, in these languages."""
    text = PAGE.read_text(encoding="utf-8")
    [section] = re.findall(rf"^## {heading}\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    return [block for block in blocks(PAGE, *languages) if block.text in section]


def bare(line: str) -> str:
    return re.sub(r"\s+#.*", "", line)


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
    assert "to look at it: python -m flowtrain.view runs/mine" in shell.run_or_fork(train, server)
    _, *steps = map(json.loads, (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines())
    assert [step["turns_mean"] for step in steps] == [2.0, 2.0]
    assert all("reward/right" in step for step in steps)


def test_the_commands_for_several_machines_make_a_run_in_their_order(
    tmp_path: Path, server: Server
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    [block] = in_section("More than one machine", "sh")
    ports = free_ports()
    install, *lines = (here(bare(line), ports) for line in joined(block.text))
    for index, port in enumerate(ports, start=1):
        lines[index] += f" --port {port}"  # the page's own are the defaults
    assert install == "pip install -e '.[serve]'"
    shell = Shell(tmp_path)
    try:
        kinds = run_in_order(lines, shell, server)
        shell.ended()
    finally:
        shell.close()
    assert kinds == [
        "token",
        "flowtrain.dataflow",
        "flowtrain.weights",
        "flowtrain.train",
        "flowtrain.node",
    ]
    assert (tmp_path / "runs/mine/weights/HEAD").read_text().strip() == "2"
