"""What the parts of `bench.links` share: shapes of links, options of the run, and processes in
namespaces.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.emulated_network import Namespace, Shape

PARTITIONED = "all three, partition"
_FAR = {"delay_s": 0.15}
SHAPES = {
    "lan": Shape(),
    "300 ms": Shape(**_FAR),
    "300 ms, 1 % loss": Shape(**_FAR, loss=0.01),
    "100 Mbit/s": Shape(bytes_per_s=12.5e6),
    "all three": Shape(**_FAR, loss=0.01, bytes_per_s=12.5e6),
    "300 ms, 3 % loss": Shape(**_FAR, loss=0.03),
    PARTITIONED: Shape(**_FAR, loss=0.01, bytes_per_s=12.5e6),
}
LEASE_S = 20.0
"""Shorter than a partition, so that leases run out in one."""
START_S, END_S, PATIENCE_S = 300.0, 60.0, 400.0
CONFIG = (
    *("--config", "configs/quickstart.toml", "--model.dtype", "bfloat16", "--run.threads", "1"),
    *("--eval.every", "0", "--eval.at_ends", "false", "--checkpoint.every", "20"),
    *("--log.tensorboard", "false", "--train.num_steps", "100000"),
    *("--train.lr", "2e-5"),  # so that few words of bfloat16 change, as in large models
    *("--dataflow.lease_s", f"{LEASE_S:g}"),
)
FLOW_PORT, WEIGHTS_PORT = 8400, 8321


class Crew:
    """Processes that share a token, each with a log; they end with the context."""

    def __init__(self, folder: Path) -> None:
        self.token = secrets.token_hex(8)
        self._folder = folder
        self._environment = {**os.environ, "FLOWTRAIN_TOKEN": self.token, "OMP_NUM_THREADS": "1"}
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, namespace: Namespace, module: str, *words: object) -> None:
        with namespace.entered(), (self._folder / f"{name}.log").open("w") as log:
            self._started[name] = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, words)],
                env=self._environment,
                stdout=log,
                stderr=log,
            )

    def until(self, is_so: Callable[[], bool], limit_s: float) -> None:
        """Wait, with everybody at work."""
        end = time.monotonic() + limit_s
        while not is_so():
            for name, process in self._started.items():
                if process.poll() is not None or time.monotonic() > end:
                    said = (self._folder / f"{name}.log").read_text()[-2000:]
                    raise SystemExit(f"{name} is at exit code {process.returncode}: {said}")
            time.sleep(0.02)

    def end(self, *names: str) -> None:
        """With SIGTERM."""
        processes = [self._started.pop(name) for name in names]
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(END_S)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started.values():
            process.kill()
            process.wait(END_S)


def urls(hub: Namespace) -> tuple[str, str]:
    return f"http://{hub.address}:{FLOW_PORT}", f"http://{hub.address}:{WEIGHTS_PORT}"
