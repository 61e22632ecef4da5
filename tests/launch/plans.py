"""Plans for the tests of the launcher."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "of-the-tests"
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
PLAN = """
config = "run.toml"
token_env = "A_TOKEN"
options = ["--train.num_steps", "2"]

[hosts.here]
python = "{python}"
env = {{ OMP_NUM_THREADS = 1, PYTHONPATH = "{path}" }}
[hosts.far]
ssh = "me@127.0.0.1"
folder = "{folder}"
python = "{python}"
env = {{ OMP_NUM_THREADS = 1, PYTHONPATH = "{path}" }}

[service]
host = "here"
database = "flow.sqlite"
port = {ports[0]}

[trainers.planner]
host = "here"
run_dir = "runs/planner"
weights_port = {ports[1]}

[nodes.cpu]
host = "here"
[nodes.eu]
host = "far"
count = 2
options = ["--run.threads", "1"]

[kubernetes]
image = "registry/flowtrain:1"
"""
FAKE_SSH = """#!/bin/sh
# Runs the last argument as a login shell would, in another folder, and writes down what it got.
printf '%s\\n' "$@" >>"{record}"
cd "{home}"
for last; do :; done
exec env -u A_TOKEN sh -c "$last"
"""


def write_plan(folder: Path, ports: tuple[int, int] = (8400, 8321), plan: str = PLAN) -> Path:
    """Write run.toml and plan.toml into a folder; returns the plan."""
    (folder / "run.toml").write_text(CONFIG)
    path = folder / "plan.toml"
    python_path = f"{ROOT}:{ROOT / 'kernels'}"
    path.write_text(
        plan.format(python=sys.executable, path=python_path, folder=folder, ports=ports)
    )
    return path


def fake_ssh(folder: Path) -> tuple[Path, dict[str, str]]:
    """Make an `ssh` that runs commands here; returns the file of what it got, and the PATH."""
    programs, record, home = folder / "programs", folder / "ssh.txt", folder / "home"
    programs.mkdir()
    home.mkdir()
    program = programs / "ssh"
    program.write_text(FAKE_SSH.format(record=record, home=home))
    program.chmod(0o755)
    return record, {"PATH": f"{programs}:{os.environ['PATH']}"}


FAKE_PYTHON = """#!/bin/sh
echo "started $FLOWTRAIN_TOKEN $*" >>"{folder}/calls"
trap 'echo "ended $2" >>"{folder}/calls"; exit 3' TERM
case "$2" in
  flowtrain.dataflow | flowtrain.weights) echo "serving it at http://x:1";;
esac
while :; do
  if [ "$2" = flowtrain.train ] && [ -e "{folder}/done" ]; then exit 7; fi
  if [ "$2" = flowtrain.dataflow ] && [ -e "{folder}/broken" ]; then exit 5; fi
  sleep 0.05
done
"""


def fake_python(folder: Path) -> str:
    """Make a `python` that writes down how it was started; the trainer ends with 7 once the folder
    has a file `done`.
    """
    program = folder / "python"
    program.write_text(FAKE_PYTHON.format(folder=folder))
    program.chmod(0o755)
    return str(program)


FORKING_PYTHON = """#!{python} -S
import contextlib, json, os, signal, socket, sys

argv = sys.argv[2:]
if argv[0] in ("flowtrain.dataflow", "flowtrain.weights"):
    os.execv({python!r}, [{python!r}, "-m", *argv])
argv[0] = argv[0].removeprefix("flowtrain.")
job = {{"argv": argv, "cwd": os.getcwd(), "env": {{**os.environ}}, "pid": os.getpid()}}
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect({path!r})
    lines = asked.makefile("rw")
    print(json.dumps(job), file=lines, flush=True)
    forked = int(lines.readline())

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(forked, number)

    signal.signal(signal.SIGTERM, pass_on)
    sys.exit(int(lines.readline()))
"""


def forking_python(folder: Path) -> str:
    """Make a `python` that starts the servers, which import little, and asks a socket of the folder
    for forks of all else; their output and their signals go through it.
    """
    program = folder / "python"
    path = str(folder / "forks")
    program.write_text(FORKING_PYTHON.format(python=sys.executable, path=path))
    program.chmod(0o755)
    return str(program)
