"""A dataflow on loopback: a ledger behind its service, and a trainer that trains nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import toy_options
import uvicorn
from torch import Tensor

from flowtrain.agents.agentflow.prompts import CHAT_TEMPLATE
from flowtrain.config import Config, Lora
from flowtrain.inference.factory import ModelSpec
from flowtrain.records import Group
from flowtrain.rollouts.client import Client
from flowtrain.rollouts.codec import unpack_group
from flowtrain.rollouts.contract import BatchRequest, Progress, Register
from flowtrain.rollouts.ledger import Ledger, open_ledger
from flowtrain.rollouts.service import Service
from flowtrain.trainer import toy
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.model.lora import add_adapter
from flowtrain.utils.net import serving
from flowtrain.utils.net.credentials import TokenFile
from flowtrain.weights import Publisher, WeightStore

TOKEN = "of-the-tests"


def make_model(path: Path, num_layers: int = 1) -> str:
    """Make a folder with a model that answers every prompt differently."""
    tokenizer = toy.new_tokenizer(
        ["What is the capital of Chad? Sub-Goal: capital of Chad\nTool Name: Search"] * 9,
        vocab_size=300,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    model = toy.new_model(
        tokenizer, hidden_size=32, num_layers=num_layers, num_heads=2, max_positions=512
    )
    models.export(model, tokenizer, models.full_weights(model), path)
    return str(path)


def make_config(model: str, **sections: dict[str, Any]) -> Config:
    """Make a config for two rollouts of a few tokens per task."""
    small: dict[str, dict[str, Any]] = {
        "model": {"path": model},
        "tasks": {"num_train": 40, "kinds": ("lookup",)},
        "eval": {"num_tasks": 4},
        "agent": {"max_turns": 2, "tools": ("Search", "Base_Generator")},
        "rollout": {"group_size": 2, "num_questions": 2, "max_new_tokens": 6, "max_in_flight": 8},
        "run": {"device": "cpu", "threads": 1},
        "dataflow": {"lease_s": 60.0, "wait_s": 60.0, "max_staleness": 8},
    }
    return toy_options.toy(
        {name: {**small.get(name, {}), **sections.get(name, {})} for name in {**small, **sections}}
    )


class Trainer:
    """Publishes changed weights and reports them; trains nothing."""

    def __init__(
        self,
        ledger: Ledger,
        folder: str,
        root: Path,
        policy: str = "planner",
        lora: Lora | None = None,
    ) -> None:
        """`lora`: versions hold an adapter of the model in the folder."""
        self.store, self.policy, self._ledger = WeightStore(root), policy, ledger
        self.model = models.load_model(folder, torch.float32)
        if lora is not None:
            add_adapter(self.model, lora, folder)
        self._sync = "merged" if lora is None else "adapter"
        self._publisher = Publisher(self.store)
        self.layout = ModelSpec.load("model.path", folder).layout(torch.float32, lora or Lora())
        self._rng = torch.Generator().manual_seed(len(policy))

    def register(self, num_groups: int = 2, max_staleness: int = 8) -> Register:
        self.publish(0)
        request = Register(
            self.policy,
            self.layout,
            str(self.store.root),
            num_groups,
            max_staleness,
            vocab_size=self.model.config.vocab_size,
            max_positions=self.model.config.max_position_embeddings,
        )
        self._ledger.register(request)
        return request

    def publish(self, version: int) -> None:
        """Publish weights of which some have changed."""
        weights = {
            name: self._moved(weight) if version else weight
            for name, weight in models.published_weights(self.model, self._sync).items()
        }
        self._publisher.publish(weights, version)

    def report(self, version: int, is_done: bool = False) -> None:
        self._ledger.progress(Progress(self.policy, version, 0, is_done=is_done))

    def take(self, step: int, timeout_s: float = 60.0) -> list[Group]:
        """Return the groups of a step's batch."""
        deadline = time.monotonic() + timeout_s
        while (batch := self._ledger.batch(BatchRequest(self.policy, step))).num_missing:
            assert time.monotonic() < deadline, f"{batch.num_missing} groups are missing"
            time.sleep(0.05)
        return [unpack_group(served.payload) for served in batch.groups]

    def step(self, version: int) -> list[Group]:
        groups = self.take(version)
        self.publish(version)
        self.report(version)
        return groups

    def _moved(self, weight: Tensor) -> Tensor:
        change = 0.05 * torch.randn(weight.shape, generator=self._rng)
        weight += change * (torch.rand(weight.shape, generator=self._rng) < 0.05)
        return weight


class DataflowServer:
    """A ledger and its service, which can stop and start again at the same port."""

    def __init__(
        self, config: Config, ledger: Ledger, answers: Any, tokens: TokenFile | None = None
    ) -> None:
        """`answers`: the ledger, or a wrapper around it."""
        self.config, self.ledger, self.answers = config, ledger, answers
        self._tokens = tokens
        self._server: uvicorn.Server | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, wait_s: float = 20.0) -> Client:
        return Client(self.url, TOKEN, wait_s)

    def start(self) -> None:
        self._server, listener = serving.make_server(
            Service(self.answers, self.ledger.run, TOKEN, self._tokens), port=self.port
        )
        self.port = listener.getsockname()[1]
        self._thread = threading.Thread(
            target=lambda: self._server.run(sockets=[listener]), daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
            self._thread.join(20)
            assert not self._thread.is_alive()
            self._server = None


@contextmanager
def serve_dataflow(
    config: Config,
    folder: Path,
    ledger: Ledger | None = None,
    answers: Any = None,
    tokens: TokenFile | None = None,
) -> Iterator[DataflowServer]:
    ledger = ledger or open_ledger(config, folder / "ledger.sqlite")
    made = DataflowServer(config, ledger, answers or ledger, tokens)
    try:
        yield made
    finally:
        made.stop()
        ledger.close()


def keep_exit_code(process: Any) -> Any:
    """Return the process with a `poll` that keeps the exit code and can be called again."""
    code: list[int] = []

    def poll() -> int | None:
        if not code and (found := process.poll()) is not None:
            code.append(found)
        return code[0] if code else None

    return replace(process, poll=poll)


def begin_node(server: Any, dataflow: DataflowServer, name: str, *words: object) -> Any:
    command = ("node", "--dataflow", dataflow.url, "--name", name, *words)
    return keep_exit_code(server.start(*command, env={"FLOWTRAIN_TOKEN": TOKEN}))


@contextmanager
def killed_at_the_end() -> Iterator[list[Any]]:
    """Processes are added to the list; those that are left are killed."""
    started: list[Any] = []
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
