"""The commands of docs/more-than-one-machine.md, in the order of the page, make a run here."""

from __future__ import annotations

import re
from pathlib import Path

from cli_runs import Server
from doc_pages import ROOT
from page_shell import Shell, here, run_in_order
from ports import free_port

pytest_plugins = ("cli_runs",)
PAGE = (ROOT / "docs" / "more-than-one-machine.md").read_text()
CONFIG = """
run = {device = "cpu", threads = 1}
tiny = {hidden_size = 32, num_layers = 1, num_heads = 2}
tasks = {num_train = 40}
agent = {prompt = "compact", max_turns = 2, tools = ["Search", "Base_Generator"]}
roles = {executor = "rules", verifier = "rules", generator = "rules", tools = "none"}
rollout = {num_questions = 2, group_size = 2, max_new_tokens = 8}
train = {num_steps = 2}
eval = {num_tasks = 2}
log = {tensorboard = false}
dataflow = {wait_s = 60.0}
"""
_PROGRAM = re.compile(r"(export |python |torchrun |sudo |ssh |[A-Z_]+=\S* python )")


def commands(text: str) -> list[str]:
    """The commands in the indented blocks of a page, without comments."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = text.replace("\\\n", " ")
    found = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    return [re.sub(r"\s+# .*", "", line) for line in found if _PROGRAM.match(line)]


def test_the_page_makes_a_run_in_its_order(tmp_path: Path, server: Server) -> None:
    ports = free_port(), free_port()
    (tmp_path / "run.toml").write_text(CONFIG)
    [section] = re.findall(r"## Commands\n(.*?)\n## ", PAGE, re.DOTALL)
    elsewhere = ("sudo ", "ssh ")
    found = [
        here(command, ports)
        for command in commands(section)
        if not command.startswith(elsewhere) and "https://" not in command
    ]
    shell = Shell(tmp_path)
    try:
        kinds = run_in_order(found, shell, server)
        [status] = [
            here(each, ports) for each in re.findall(r"`(python [^`]* status [^`]*)`", section)
        ]
        assert "groups/s produced" in shell.run(status)
        shell.ended()
        [audit] = re.findall(r"`(python [^`]* audit [^`]*)`", section)
        said = shell.run(audit.replace("...", "runs/flow.sqlite"))
        assert "4 planner.assigned" in said and "all counts are consistent" in said
    finally:
        shell.close()
    assert kinds[:3] == ["token", "flowtrain.rollouts", "flowtrain.weights"] and len(kinds) == 6
    assert (tmp_path / "runs" / "planner" / "weights" / "HEAD").read_text().strip() == "2"


def test_tokens_of_their_own_are_issued_and_used_in_its_order(tmp_path: Path) -> None:
    [section] = re.findall(r"## A token for each\n(.*?)\n## ", PAGE, re.DOTALL)
    (tmp_path / "run.toml").write_text(CONFIG)
    shell = Shell(tmp_path)
    options = {
        "flowtrain.rollouts": "--config run.toml --database runs/flow.sqlite --port 0",
        "flowtrain.weights": "runs/planner/weights --port 0",
    }
    issued = []
    try:
        for command in commands(section):
            if command.startswith("export "):
                shell.export(command)
                issued.append(shell.env.pop("FLOWTRAIN_TOKEN"))
            elif " serve " in command:
                module = command.split()[2]
                shell.start(module, command.replace("...", options[module]))
                shell.wait_for(module, "serving ")
            else:
                said = shell.run(command)
                assert "list" not in command or ("eu-1" in said and "planner" in said)
    finally:
        shell.close()
    assert len(set(issued)) == 2 and all(len(token) > 20 for token in issued)
