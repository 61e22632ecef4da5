"""The bench's calls of other projects' heads agree with plain torch, where they need no GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench import loss_rivals, losses
from bench.loss_rivals import LENGTH, MODULES, PEERS, HeadBatch, naive_head
from bench.measure import extra_bytes, runs_here


def gradients(loss: Callable[..., Tensor], batch: HeadBatch) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (batch.hidden_TD, batch.weight_VD)]
    value = loss(*leaves)
    return value.detach(), *torch.autograd.grad(value, leaves)


@pytest.mark.parametrize("peer", MODULES)
def test_a_peer_computes_the_loss_of_the_bench(peer: str) -> None:
    pytest.importorskip(MODULES[peer])
    batch = HeadBatch.make(2 * LENGTH, 16, 40, torch.float32, "cpu")
    score = {"trl": loss_rivals.trl_head, "liger": loss_rivals.liger_head}[peer]
    expected = gradients(batch.tokens.loss_by(naive_head), batch)
    found = gradients(batch.tokens.loss_by(score), batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert expected[1].abs().max() > 1e-4


def test_rows_have_the_errors_against_fp64_of_what_they_ran() -> None:
    """All implementations are within fp32's rounding, and each row says what it measured."""
    logits = loss_rivals.Batch.make(LENGTH, 40, torch.float32, "cpu")
    head = HeadBatch.make(LENGTH, 16, 40, torch.float32, "cpu")
    rows = losses.measure_logits(logits, ["torch"], 1)
    rows += losses.measure_head(head, ["torch", "gemm"], 1)
    paths = {path: {row["impl"] for row in rows if row["path"] == path} for path in (
        "copy", "logprobs", "policy_loss", "linear_logprobs", "linear_policy_loss"
    )}  # fmt: skip
    both = {"flowkernels", "torch"}
    assert paths == {
        "copy": {"torch"},
        "logprobs": both,
        "policy_loss": both,
        "linear_logprobs": {*both, "gemm"},
        "linear_policy_loss": {*both, "gemm", "flowkernels top 20 %", "flowkernels frozen"},
    }
    errors = [row["max_err"] for row in rows if row["impl"].startswith(("flow", "torch"))]
    assert all(error < 1e-4 for error in errors if error is not None)
    has_none = {(row["path"], row["impl"]) for row in rows if row["max_err"] is None}
    assert has_none == {
        ("copy", "torch"),
        ("linear_logprobs", "gemm"),
        ("linear_policy_loss", "gemm"),
        ("linear_policy_loss", "flowkernels top 20 %"),
    }


def test_a_head_that_is_not_fused_has_all_logits() -> None:
    """Measured as the bench does, on logits of 134 MB."""
    batch = HeadBatch.make(512, 8, 2**16, torch.float32, "cpu")
    runs = loss_rivals.head_loss_runs(batch, ["torch"])
    cpu = torch.device("cpu")
    linear, plain = (extra_bytes(runs[name], cpu) for name in ("flowkernels", "torch"))
    assert linear < 90e6 and plain > 260e6


def test_peers_that_cannot_run_are_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(MODULES) < set(PEERS)
    monkeypatch.setitem(MODULES, "trl", "no_such_package")
    assert losses._peers("torch,trl,liger", "cpu") == ["torch"]
    assert runs_here("path: torch", lambda: None)
    assert not runs_here("path: trl", lambda: torch.ones(2) @ torch.ones(3))
    out = capsys.readouterr().out
    assert (
        "left out: trl: no_such_package cannot be imported: No module named 'no_such_package'"
        in out
    )
    assert "left out: liger: its kernels need a GPU" in out
    assert "left out: path: trl: RuntimeError: " in out


def test_heads_are_pairs() -> None:
    found = [losses._head(text) for text in losses.QWEN.split(",")]
    assert found == [(896, 151936), (1536, 151936), (3584, 152064)]
    with pytest.raises(SystemExit, match="--heads: '896' must be DxV, as 896x151936"):
        losses._head("896")
