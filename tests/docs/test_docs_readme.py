"""The commands of README.md, in its order and with its files, on a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cli_runs import Server
from doc_pages import ROOT, blocks, joined
from page_shell import Shell, write_file

from flowtrain.rollouts.__main__ import _parser as dataflow_parser
from flowtrain.weights.__main__ import _parser as weights_parser

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
    assert "to look at it: python -m flowtrain.logging.page runs/mine" in shell.run_or_fork(
        train, server
    )
    _, *steps = map(json.loads, (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines())
    assert [step["turns_mean"] for step in steps] == [2.0, 2.0]
    assert all("reward/right" in step for step in steps)


def test_the_commands_for_several_machines_are_those_that_make_a_run() -> None:
    """Those of docs/more-than-one-machine.md, which test_docs_machines.py runs, with a file as the
    database and ports that are the defaults.
    """
    [block] = in_section("More than one machine", "sh")
    install, export, *lines = (bare(line) for line in joined(block.text))
    assert install == "pip install -e '.[serve]'" and export == "export FLOWTRAIN_TOKEN=..."
    assert dataflow_parser().parse_args(["serve", "--database", "x"]).port == 8400
    assert weights_parser().parse_args(["serve", "x"]).port == 8321
    text = (ROOT / "docs" / "more-than-one-machine.md").read_text(encoding="utf-8")
    for there, ours in {
        "postgresql://flow:PASSWORD@db.local/flow": "flow.sqlite",
        " --port 8400": "",
        " --port 8321": "",
        "runs/planner": "runs/mine",
        "CUDA_VISIBLE_DEVICES=0 python -m": "python -m",
    }.items():
        assert there in text
        text = text.replace(there, ours)
    page = [" ".join(line.split()) for line in joined(text)]
    places = [page.index(line) for line in lines[:-1]]
    places += [page.index(f"{lines[-1]} --rollout.engine vllm")]
    assert places == sorted(places) and len(places) == 4
