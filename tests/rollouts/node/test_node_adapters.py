"""A real node whose policies are adapters of one model, each with a trainer of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

import torch
from cli_runs import Server
from loopback_dataflow import (
    Trainer,
    begin_node,
    killed_at_the_end,
    make_config,
    make_model,
    serve_dataflow,
)
from torch import Tensor

from flowtrain.config import Lora
from flowtrain.records import Call, Group, Sample
from flowtrain.trainer.loss import score_row
from flowtrain.trainer.model.lora import adapter_weights
from flowtrain.trainer.packing import pack_row

pytest_plugins = ("cli_runs",)
LORA = Lora(rank=2, alpha=64.0, sync="adapter")


def calls_of(groups: Iterable[Group], policy: str) -> list[Call]:
    turns = (turn for group in groups for t in group.trajectories for turn in t.turns)
    return [turn.calls[policy] for turn in turns if policy in turn.calls]


@torch.no_grad()
def check_logprobs(trainer: Trainer, held: dict[int, dict[str, Tensor]], call: Call) -> None:
    """The node's log-probs are those of the trainer's model with the adapter of that version."""
    for name, weight in adapter_weights(trainer.model).items():
        weight.copy_(held[call.spans[0].version][name])
    row = pack_row([Sample.of(call)])
    found = score_row(trainer.model, row, 1.0).logprob_T
    torch.testing.assert_close(found, torch.tensor(call.logprobs), rtol=0, atol=1e-4)


def test_two_policies_are_adapters_of_one_model(server: Server, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    own = {"roles": {"verifier": "own"}, "policies": {"verifier": {"path": model}}}
    config = make_config(model, lora=LORA.model_dump(), **own)
    with serve_dataflow(config, tmp_path) as made:
        trainers = {
            name: Trainer(made.ledger, model, tmp_path / name, name, LORA)
            for name in ("planner", "verifier")
        }
        held: dict[str, dict[int, dict[str, Tensor]]] = {name: {} for name in trainers}
        seen: dict[str, list[Call]] = {name: [] for name in trainers}
        for trainer in trainers.values():
            trainer.register()
        with killed_at_the_end() as started:
            started.append(node := begin_node(server, made, "n1"))
            for step in range(1, 30):
                for name, trainer in trainers.items():
                    weights = adapter_weights(trainer.model).items()
                    held[name][step - 1] = {key: weight.clone() for key, weight in weights}
                    seen[name] += calls_of(trainer.step(step), name)
                versions = {name: {c.spans[0].version for c in seen[name]} for name in trainers}
                if all(len(found) > 2 for found in versions.values()):
                    break
            else:
                raise AssertionError(f"tokens of several versions: {versions}")
            os.kill(node.pid, signal.SIGTERM)
            assert node.wait() == 0, node.err.read_text()
        for name, trainer in trainers.items():
            whole = [call for call in seen[name] if len(call.spans) == 1]
            assert len(whole) > 4
            for call in whole:
                check_logprobs(trainer, held[name], call)
        assert not made.ledger.audit().problems
