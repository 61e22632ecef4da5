"""The agent without a chat template of docs/agents/custom.md runs on the quickstart's model."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from cli_runs import Server
from doc_pages import ROOT, blocks
from page_shell import Shell, write_file

from flowtrain.records import Call, FinishReason

pytest_plugins = ("cli_runs",)
PAGE = ROOT / "docs" / "agents" / "custom.md"


def test_the_agent_without_a_template_samples_twice(tmp_path: Path, server: Server) -> None:
    [agent] = [block for block in blocks(PAGE, "python") if block.text.startswith("# plain.py")]
    [command] = [block.text for block in blocks(PAGE, "") if "plain.py" in block.text]
    write_file(agent, tmp_path)
    said = Shell(tmp_path).run_or_fork(command, server)
    first, again = map(
        int, re.search(r"turn 2\npolicy reads (\d+) .* first (\d+) as", said).groups()
    )
    assert again < first and "Thought:" in said and "nothing was written" in said


def test_the_table_has_fields_of_calls() -> None:
    text = PAGE.read_text(encoding="utf-8")
    [table] = re.findall(r"returns a `Call`:\n\n\| field .*?\n\n", text, re.DOTALL)
    named = {
        name
        for row in table.splitlines()[4:]
        for name in re.findall(r"`(\w+)`", row.split(" | ")[0])
    }
    assert named and named <= {field.name for field in dataclasses.fields(Call)}
    assert all(f"`{reason}`" in table for reason in FinishReason)
