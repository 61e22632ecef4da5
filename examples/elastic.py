"""Rollout nodes that die and join while two trainers learn, on one machine: what `make
demo-elastic` shows.

    python examples/elastic.py --verifier runs/demo/warm-verifier/model --dir runs/demo/elastic

One service, two trainers (solver and verifier of examples/workflows/facts.py, each a model of its
own) and three nodes start. Two nodes are killed (SIGKILL, in the middle of their rollouts) once a
third of the solver's steps are done, two new ones join at half. At the end the ledger is audited,
and both runs are made again from their logs.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from flowtrain.rollouts.client import Client
from flowtrain.rollouts.contract import Unavailable
from flowtrain.utils.net.serving import TOKEN_VARIABLE

_CONFIG = "configs/facts.toml"
_END_S = 30.0


class Process:
    """A command with its output in a file; it ends with the demo."""

    def __init__(self, name: str, logs: Path, words: Sequence[str], token: str) -> None:
        self.name, self.log = name, logs / f"{name}.log"
        environment = {**os.environ, TOKEN_VARIABLE: token, "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    @property
    def code(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        """SIGTERM, and its exit code."""
        self._process.terminate()
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(
                f"{self.name} did not end in {_END_S:.0f} s; see {self.log}"
            ) from None

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.code is None:
            self.kill()


class Demo:
    """Everything that runs; use with `with`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._token = options, secrets.token_urlsafe(24)
        self._dir, self._cleanup = Path(options.dir), ExitStack()
        self._nodes: dict[str, Process] = {}
        short = (
            "--dataflow.lease_s",
            "10",
            "--dataflow.max_staleness",
            "2",
            "--eval.num_tasks",
            "100",
            "--eval.every",
            "0",
            # With several threads on busy cores, sums may come out in another order.
            "--run.threads",
            "1",
            "--log.replay",
            "true",
        )
        self._run_options = (
            "--config",
            _CONFIG,
            "--train.num_steps",
            str(options.steps),
            *short,
            *options.words,
        )
        self.database = self._dir / "flow.sqlite"

    def __enter__(self) -> Demo:
        logs = self._dir / "logs"
        logs.mkdir(parents=True)
        serve = ("flowtrain.rollouts", "serve", "--database", str(self.database), "--port", "0")
        service = self._start("service", (*serve, *self._run_options, *self._models("solver")))
        self.url = _printed(service, "serving ").rpartition(" at ")[2]
        self._client = self._cleanup.enter_context(Client(self.url, self._token, 60.0))
        self._trainers = [self._start_trainer(policy) for policy in ("solver", "verifier")]
        page = self._start("page", ("flowtrain.logging.page", str(self._dir / "solver"), "--serve"))
        print(f"watch the solver: {_printed(page, 'open ').split()[0]}")
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def run(self) -> None:
        """Until both trainers are done."""
        steps, killed, joined = self._options.steps, False, False
        self._join("node-1", "node-2", "node-3")
        with tqdm(total=2 * steps, unit="step", desc="both trainers") as bar:
            while any(trainer.code is None for trainer in self._trainers):
                time.sleep(1.0)
                self._check()
                versions = self._versions()
                bar.update(sum(versions.values()) - bar.n)
                bar.set_postfix(versions)
                if not killed and versions.get("solver", 0) >= steps // 3:
                    killed = True
                    self._kill("node-1", "node-2")
                if not joined and versions.get("solver", 0) >= steps // 2:
                    joined = True
                    self._join("node-4", "node-5")
        self._check()
        for name, node in self._nodes.items():
            if (code := node.end()) != 0:
                raise RuntimeError(f"{name} ended with {code}; see {node.log}")

    def _models(self, trained: str) -> tuple[str, ...]:
        """The model that is trained, and where the other policy begins."""
        other = "verifier" if trained == "solver" else "solver"
        models = {"solver": self._options.solver, "verifier": self._options.verifier}
        return (
            "--train.policy",
            trained,
            "--model.path",
            models[trained],
            f"--policies.{other}.path",
            models[other],
        )

    def _start(self, name: str, words: Sequence[str]) -> Process:
        return self._cleanup.enter_context(Process(name, self._dir / "logs", words, self._token))

    def _start_trainer(self, policy: str) -> Process:
        own = ("--run.dir", str(self._dir / policy), "--dataflow.url", self.url)
        torchrun = (
            "flowtrain.torchrun",
            "--standalone",
            "--nproc_per_node",
            "1",
            "-m",
            "flowtrain.train",
        )
        return self._start(
            f"trainer-{policy}", (*torchrun, *self._run_options, *self._models(policy), *own)
        )

    def _join(self, *names: str) -> None:
        for name in names:
            self._nodes[name] = self._start(
                name,
                (
                    "flowtrain.rollouts.node",
                    "--dataflow",
                    self.url,
                    "--name",
                    name,
                    "--run.threads",
                    "1",
                ),
            )
        tqdm.write(f"{', '.join(names)} join")

    def _kill(self, *names: str) -> None:
        for name in names:
            self._nodes.pop(name).kill()
        tqdm.write(f"{', '.join(names)} are killed")

    def _versions(self) -> dict[str, int]:
        try:
            return {
                name: policy["version"]
                for name, policy in self._client.status()["policies"].items()
            }
        except Unavailable:
            return {}

    def _check(self) -> None:
        """Whoever has ended by itself has failed, but for trainers that are done."""
        for process in (*self._trainers, *self._nodes.values()):
            if process.code not in (None, 0):
                raise RuntimeError(f"{process.name} ended with {process.code}; see {process.log}")


def _printed(process: Process, start: str) -> str:
    """The rest of the line that begins so, which a server prints once it listens."""
    while process.code is None:
        for line in process.log.read_text().splitlines():
            if line.startswith(start):
                return line.removeprefix(start)
        time.sleep(0.1)
    raise RuntimeError(f"{process.name} ended with {process.code}; see {process.log}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--solver", default="quickstart", help="folder of its model")
    parser.add_argument("--verifier", required=True, help="folder of its model")
    parser.add_argument(
        "--dir", required=True, help="for everything that the demo writes; it may not exist"
    )
    parser.add_argument("--steps", type=int, default=60, help="of each trainer (default: 60)")
    options, options.words = parser.parse_known_args()
    if Path(options.dir).exists():
        parser.error(f"--dir {options.dir} exists: name another folder, or delete it")
    with Demo(options) as demo:
        demo.run()
    database = str(demo.database)
    checks = [("flowtrain.rollouts", "audit", "--database", database)]
    for policy in ("solver", "verifier"):
        run = str(Path(options.dir) / policy)
        checks.append(("flowtrain.replay", run))
    codes = [
        subprocess.run((sys.executable, "-m", *each), check=False).returncode for each in checks
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
