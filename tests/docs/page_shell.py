"""A shell in which the commands of a page run on this machine, in a folder of their own."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from cli_runs import Process, Server
from doc_pages import ROOT, Block
from processes import run_program

TINY = """
[tiny]
hidden_size = 32
num_layers = 1
num_heads = 2
[run]
device = "cpu"
threads = 1
"""


def write_file(block: Block, folder: Path) -> None:
    """Write the file that a block names in its first line, or add to it where it says "more"; a
    config trains a model that learns nothing, in seconds.
    """
    [(name, more)] = re.findall(r"\A# ([\w.]+)(, more)?$", block.text, re.MULTILINE)
    text = block.text
    if name.endswith(".toml") and not more:
        text = for_tiny(text)
    with (folder / name).open("a") as file:
        file.write(text)


def for_tiny(config: str) -> str:
    """The config for a tiny model, two steps of two questions."""
    assert 'path = "models/SmolLM2-135M-Instruct"' in config
    config = config.replace('"models/SmolLM2-135M-Instruct"', '"tiny"')
    for option, value in {
        "num_steps": 2,
        "num_questions": 2,
        "group_size": 2,
        "num_tasks": 4,
    }.items():
        config = re.sub(rf"^{option} = \d+$", f"{option} = {value}", config, flags=re.MULTILINE)
    return config + TINY


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
        done = run_program(["bash", "-euc", command], cwd=self.folder, env=self.env, timeout=200)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def run_or_fork(self, command: str, server: Server) -> str:
        """Run a command, those of the trainer in a warm process; return what it says."""
        _, is_train, options = command.partition("python -m flowtrain.train ")
        if not is_train:
            return self.run(command)
        words = shlex.split(options)
        code, lines, out = server.run("train", *words, cwd=self.folder, with_picture=True)
        assert code == 0, "\n".join(lines)
        return out + "\n".join(lines)

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


def run_in_order(commands: list[str], shell: Shell, server: Server) -> list[str]:
    """Run the commands of a page that are for this machine; return what each one starts."""
    kinds = []
    for command in commands:
        if command.startswith("export "):
            shell.export(command)
            kinds.append("token")
        elif "flowtrain.rollouts serve" in command or "flowtrain.weights serve" in command:
            kinds.append(name := command.split()[2])
            shell.start(name, command)
            shell.wait_for(name, "serving ")
        elif "flowtrain.train" in command or "flowtrain.rollouts.node" in command:
            kinds.append(re.findall(r"flowtrain\.(?:train|rollouts\.node)", command)[0])
            shell.fork(server, command)
    return kinds
