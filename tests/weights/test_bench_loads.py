"""The bench of loads without vLLM, on weights small enough to compare word by word."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import loads as bench
from bench.weights import SHAPES
from flowtrain._delta import DeltaError
from flowtrain.inference.vllm.sharded_target import ShardedTarget
from flowtrain.weights.load.target import HostTensors

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def _a_small_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", SMALL)


def test_both_paths_take_as_many_changes_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def change(weights: Mapping[str, Tensor], density: float, seed: int) -> int:
        before = {name: tensor.clone() for name, tensor in weights.items()}
        said = real(weights, density, seed)
        words = [
            (weights[name].view(torch.int16), before[name].view(torch.int16)) for name in before
        ]
        counts.append(sum(int((new != old).sum()) for new, old in words))
        assert all(int((new - old).abs().max()) == 1 for new, old in words if new.numel() > 1000)
        return said

    real = bench.change
    monkeypatch.setattr(bench, "change", change)
    views, plain = bench.measure("small", 0.02, repeats=1, device="cpu")
    assert (views["path"], plain["path"]) == ("views on cpu", "tensors on cpu")
    for row in (views, plain):
        assert row["changed"] == counts[1] and 0.018 < row["changed"] / row["words"] < 0.02
        assert row["ns_per_change"] == pytest.approx(1e9 * row["pause_s"] / row["changed"])
        assert 0 < row["delta_bytes"] < row["words"] and row["staged_s"] > 0 < row["publish_s"]
    assert views["connect_s"] > views["prove_s"] > 0 and "prove_s" not in plain


def test_weights_and_biases_are_fused_as_in_vllm() -> None:
    weights = bench.new_weights(bench.config_of("small"), "cpu")
    model = bench.FusedModel(weights)
    model.load_weights(weights.items())
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    for kind in ("weight", "bias"):
        parts = [weights[f"{attention}.{name}_proj.{kind}"] for name in "qkv"]
        fused = model.get_parameter(f"{attention}.qkv_proj.{kind}".replace(".", "_"))
        assert torch.equal(fused, torch.cat(parts))
    parts = [weights[f"{mlp}.{name}_proj.weight"] for name in ("gate", "up")]
    fused = model.get_parameter(f"{mlp}.gate_up_proj.weight".replace(".", "_"))
    assert torch.equal(fused, torch.cat(parts))
    assert sum(map(Tensor.numel, model.parameters())) == sum(map(Tensor.numel, weights.values()))


@pytest.mark.parametrize(
    ("shift", "lost", "error"),
    [
        (0, 1, ValueError("_proj.bias': the ranks together do not hold each of its words once")),
        (1, 0, ValueError("k_proj.bias': its loader also changes '.*q_proj.bias'")),
    ],
)
def test_a_loader_with_a_wrong_slice_is_found_out(
    monkeypatch: pytest.MonkeyPatch, shift: int, lost: int, error: Exception
) -> None:
    """Keys' biases that begin among those of the queries, or end early."""

    def load_weights(self: bench.FusedModel, found: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in found:
            fused, first = self.slices[name]
            if name.endswith("k_proj.bias"):
                first, tensor = first - shift, tensor[lost:]
            self.get_parameter(fused).data.narrow(0, first, len(tensor)).copy_(tensor)

    monkeypatch.setattr(bench.FusedModel, "load_weights", load_weights)
    with pytest.raises(type(error), match=str(error)):
        bench.measure("small", 0.02, repeats=1, device="cpu")


@pytest.mark.parametrize(
    ("kind", "words_of"),
    [
        (ShardedTarget, lambda target: target.plan.views["model.norm.weight"][0].memory),
        (HostTensors, lambda target: target._tensors["model.norm.weight"].view(torch.int16)),
    ],
)
def test_a_word_that_nothing_changed_is_checked_too(
    monkeypatch: pytest.MonkeyPatch, kind: type[Any], words_of: Callable[[Any], Tensor]
) -> None:
    """A word that flips behind the first version's back."""

    def finish(target: Any) -> None:
        real(target)
        words_of(target)[3] ^= 1

    real = kind.finish
    monkeypatch.setattr(kind, "finish", finish)
    with pytest.raises(RuntimeError, match=r"'model.norm.weight' is not that of version 0"):
        bench.measure("small", 0.02, repeats=1, device="cpu")


def test_a_full_snapshot_is_no_load_of_a_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(target: ShardedTarget, batch: Any) -> None:
        if failures:
            raise failures.pop()
        real(target, batch)

    real, failures = ShardedTarget.apply, [DeltaError("damaged")]
    monkeypatch.setattr(ShardedTarget, "apply", apply)
    with pytest.raises(RuntimeError, match="version 1 was loaded by snapshot: damaged"):
        bench.measure("small", 0.02, repeats=1, device="cpu")
