"""The commands of docs/more-than-one-machine.md: in the order of the page, on a fresh folder, they
make a run; addresses, database and sizes are those of this machine.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_runs import Process, Server
from launch.plans import CONFIG

from flowtrain.config.options import parse
from flowtrain.dataflow.__main__ import _parser as dataflow_parser
from flowtrain.launch.__main__ import main as launch
from flowtrain.node.__main__ import _parser as node_parser
from flowtrain.weights.__main__ import _parser as weights_parser

pytest_plugins = ("cli_runs",)
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "more-than-one-machine.md").read_text()
_PROGRAM = re.compile(r"(export |python |torchrun |sudo |ssh |[A-Z_]+=\S* python )")


def commands(text: str) -> list[str]:
    """The commands in the indented blocks of a page, without comments."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = text.replace("\\\n", " ")
    found = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    return [re.sub(r"\s+# .*", "", line) for line in found if _PROGRAM.match(line)]


def here(command: str, ports: tuple[int, int]) -> str:
    """The command for this machine."""
    for old, new in {
        "postgresql://flow:PASSWORD@db.local/flow": "runs/flow.sqlite",
        "10.0.0.5": "127.0.0.1",
        "10.0.0.6": "127.0.0.1",
        "8400": str(ports[0]),
        "8321": str(ports[1]),
        "--nproc_per_node 8": "--nproc_per_node 1",
        "--rollout.engine vllm": "--rollout.engine torch",
    }.items():
        command = command.replace(old, new)
    return command


class Shell:
    """Runs commands of the page in one folder, as somebody with several terminals would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.forked: list[Process] = []
        self.env = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
            "PYTHONUNBUFFERED": "1",
        }

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", command],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def export(self, command: str) -> None:
        name = command.removeprefix("export ").partition("=")[0]
        self.env[name] = self.run(f'{command}; printf %s "${name}"')

    def start(self, name: str, command: str) -> None:
        with self._log(name).open("w") as out:
            self.running[name] = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self.env,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def fork(self, server: Server, command: str) -> None:
        """Start a program that imports much, without the launcher of its ranks."""
        before, _, program = command.partition("-m flowtrain.")
        env = dict(word.split("=") for word in shlex.split(before) if "=" in word)
        env["FLOWTRAIN_TOKEN"] = self.env["FLOWTRAIN_TOKEN"]
        self.forked.append(server.start(*shlex.split(program), cwd=self.folder, env=env))

    def wait_for(self, name: str, text: str) -> None:
        deadline = time.monotonic() + 100.0
        while text not in (said := self._log(name).read_text()):
            assert self.running[name].poll() is None and time.monotonic() < deadline, said
            time.sleep(0.02)

    def ended(self) -> None:
        while self.forked:
            process = self.forked.pop()
            assert process.wait(100.0) == 0, process.err.read_text()[-2000:]

    def close(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            process.wait(30)
        self.running.clear()
        for fork in self.forked:
            os.kill(fork.pid, signal.SIGKILL)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def test_the_page_makes_a_run_in_its_order(tmp_path: Path, server: Server) -> None:
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], two.getsockname()[1]
    (tmp_path / "run.toml").write_text(CONFIG)
    [section] = re.findall(r"## Commands\n(.*?)\n## ", PAGE, re.DOTALL)
    found = [here(command, ports) for command in commands(section)]
    shell = Shell(tmp_path)
    kinds = []
    try:
        for command in found:
            if command.startswith(("sudo ", "ssh ")) or "https://" in command:
                continue  # another machine
            if command.startswith("export "):
                shell.export(command)
                kinds.append("token")
            elif "flowtrain.dataflow serve" in command or "flowtrain.weights serve" in command:
                kinds.append(name := command.split()[2])
                shell.start(name, command)
                shell.wait_for(name, "serving ")
            elif "flowtrain.train" in command or "flowtrain.node" in command:
                kinds.append("process")
                shell.fork(server, command)
        [status] = [
            here(each, ports) for each in re.findall(r"`(python [^`]* status [^`]*)`", section)
        ]
        assert "groups/s produced" in shell.run(status)
        shell.ended()
        [audit] = re.findall(r"`(python [^`]* audit [^`]*)`", section)
        said = shell.run(audit.replace("...", "runs/flow.sqlite"))
        assert "4 planner.assigned" in said and "it all adds up" in said
    finally:
        shell.close()
    assert kinds[:3] == ["token", "flowtrain.dataflow", "flowtrain.weights"] and len(kinds) == 6
    assert (tmp_path / "runs" / "planner" / "weights" / "HEAD").read_text().strip() == "2"


def test_tokens_of_their_own_are_issued_and_used_in_its_order(tmp_path: Path) -> None:
    [section] = re.findall(r"## A token for each\n(.*?)\n## ", PAGE, re.DOTALL)
    (tmp_path / "run.toml").write_text(CONFIG)
    shell = Shell(tmp_path)
    options = {
        "flowtrain.dataflow": "--config run.toml --database runs/flow.sqlite --port 0",
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


@pytest.mark.parametrize(
    "command", [command for command in commands(PAGE) if "-m flowtrain" in command]
)
def test_every_flag_of_the_page_is_known(command: str) -> None:
    inner = re.sub(r"^export \w+=\$\((.*)\)$", r"\1", command).replace(" ...", "").rstrip("&> ")
    module, *words = shlex.split(inner.partition("-m flowtrain.")[2].partition(" > ")[0])
    assert module in ("dataflow", "weights", "node", "train", "launch")
    if module == "train":
        config_free = [word for word in words if word not in ("--config", "run.toml")]
        assert parse(config_free) is not None
    elif module == "node":
        _, rest = node_parser().parse_known_args(words)
        assert parse(rest) is not None
    elif " ... " in command:
        assert "--tokens" in words
    elif module == "dataflow":
        _, rest = dataflow_parser().parse_known_args(words)
        assert [word for word in rest if word != "run.toml"] in ([], ["--config"])
    elif module == "weights":
        weights_parser().parse_args(words)


def test_the_plan_of_the_page_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [plan] = re.findall(r"^```toml\n(# plan\.toml\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "plan.toml").write_text(plan)
    (tmp_path / "run.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    printed = [command for command in commands(PAGE) if "--print" in command]
    assert len(printed) == 3
    for command in printed:
        words = shlex.split(command.partition(" > ")[0])[3:]
        assert launch(words) == 0
        said = capsys.readouterr().out
        assert said.count("flowtrain.node") in (1, 4), "a Job, or each node"
