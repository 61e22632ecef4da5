"""The bench's calls of other projects' heads: the same log-probs, loss and gradients as plain
torch, where they run without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench import head_peers, losses
from bench.loss_rivals import CLIP_HIGH, CLIP_LOW, PEERS, HeadBatch, clipped
from bench.measure import runs_here

LENGTH = 512


def gradients(loss: Callable[[Tensor, Tensor], Tensor], batch: HeadBatch) -> tuple[Tensor, ...]:
    hidden, weight = (
        batch.hidden_TD.detach().requires_grad_(),
        batch.weight_VD.detach().requires_grad_(),
    )
    value = loss(hidden, weight)
    return value.detach(), *torch.autograd.grad(value, [hidden, weight])


@pytest.mark.parametrize("peer", ["trl", "liger", "liger_grpo"])
def test_a_peer_computes_the_loss_of_the_bench(peer: str) -> None:
    pytest.importorskip(head_peers.MODULES[peer])
    batch = HeadBatch.make(2 * LENGTH, 16, 40, torch.float32, "cpu")
    targets, tokens = batch.target_ids_T, (batch.advantage_T, batch.weight_T, batch.old_logprob_T)

    def of_peer(hidden: Tensor, weight: Tensor) -> Tensor:
        if peer == "liger_grpo":
            clip = (CLIP_LOW, CLIP_HIGH)
            return head_peers.liger_grpo(
                hidden, weight, targets, tokens[0], tokens[2], LENGTH, clip, compiled=False
            )
        return clipped(head_peers.LOGPROBS[peer](hidden, weight, targets), *tokens)

    expected = gradients(
        lambda h, w: clipped(
            (h @ w.t()).log_softmax(-1).gather(1, targets[:, None])[:, 0], *tokens
        ),
        batch,
    )
    torch.testing.assert_close(gradients(of_peer, batch), expected, rtol=1e-4, atol=1e-6)
    assert expected[1].abs().max() > 1e-4


def test_peers_that_cannot_run_are_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(head_peers.MODULES) < set(PEERS)
    monkeypatch.setitem(head_peers.MODULES, "trl", "no_such_package")
    assert losses._peers("torch,trl,liger", "cpu") == ["torch"]
    assert runs_here("path: torch", lambda: None)
    assert not runs_here("path: trl", lambda: torch.ones(2) @ torch.ones(3))
    out = capsys.readouterr().out
    assert (
        "left out: trl: no_such_package cannot be imported: No module named 'no_such_package'"
        in out
    )
    assert (
        "left out: liger: its kernels need a GPU" in out
        and "left out: path: trl: RuntimeError: " in out
    )


def test_heads_are_pairs() -> None:
    assert [losses._head(text) for text in losses.QWEN.split(",")] == [
        (896, 151936),
        (1536, 151936),
        (3584, 152064),
    ]
    with pytest.raises(SystemExit, match="--heads: '896' must be DxV, as 896x151936"):
        losses._head("896")
