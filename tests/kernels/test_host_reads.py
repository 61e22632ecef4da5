"""How often a linear loss makes the host wait: watched on a CPU, captured as a graph on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flowkernels import (
    LossSpec,
    PolicyLoss,
    linear_logprobs,
    linear_policy_loss,
    lm_head,
    loss_walk,
)
from flowkernels import linear_policy_loss as public
from kernel_truth import IMPLS, Batch, counted, mask_of, on_device
from rows import HEAD, ROW, SPECS, VOCAB, close, head_batch, ours, truth
from test_fused_lm_head import whole_batch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

READS = {"nonzero", "masked_select", "_local_scalar_dense", "is_nonzero", "unique", "_unique2"}
"""Operators whose result the host must have before it goes on."""
KERNELS = ((loss_walk, "run_loss"), (loss_walk, "reduce"))
KERNELS += ((lm_head, "compute_scores"), (lm_head, "write_gradient"))


class Reads(TorchDispatchMode):
    """Notes each operator for which the host would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        by_bool = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        has_no_size = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in READS or by_bool or has_no_size:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """What the walk itself reads: kernels read nothing, arguments are checked on a CPU alone."""
    found, tolist = Reads(), Tensor.tolist

    def unseen(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return kernel(*args, **kwargs)

        return call

    def noted(tensor: Tensor) -> Any:
        found.names.append("tolist")
        return tolist(tensor)

    for module, name in KERNELS:
        monkeypatch.setattr(module, name, unseen(getattr(module, name)))
    monkeypatch.setattr(Tensor, "tolist", noted)
    monkeypatch.setattr("flowkernels.arguments.checks_values", lambda device: False)
    operator = public.__globals__["_linear_loss_op"]
    inside = torch.no_grad()(operator._init_fn)  # of which a mode sees nothing otherwise
    monkeypatch.setitem(public.__globals__, "_linear_loss_op", inside)
    return found


def read_of(reads: Reads, spec: LossSpec, batch: Batch, **options: Any) -> list[str]:
    reads.names.clear()
    leaves = {name: batch[name].clone().requires_grad_() for name in HEAD}
    with reads:
        linear_policy_loss(**{**batch, **leaves}, spec=spec, impl="torch", **options)
    return list(reads.names)


LOSSES = ("k3-entropy", "gspo-all", "cispo", "nll", "mis")
MASK = mask_of([list(range(row % 5)) for row in range(19)])


@pytest.mark.parametrize("has_mask", [False, True], ids=["all-ids", "sampling_mask"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_host_reads_once_per_call_or_not_at_all(
    name: str, has_mask: bool, reads: Reads
) -> None:
    batch = head_batch() | ({"sampling_mask": MASK} if has_mask else {})
    for budget in (None, 5 * ROW):
        found = read_of(reads, SPECS[name], batch, compact="call", memory_budget=budget)
        assert found == ["tolist"]
        bounds = ["tolist"] if name == "gspo-all" and budget else []
        assert read_of(reads, SPECS[name], batch, compact=False, memory_budget=budget) == bounds
    assert len(read_of(reads, SPECS[name], batch, compact="chunks", memory_budget=5 * ROW)) > 1


def test_a_read_is_noticed(reads: Reads) -> None:
    """By every way that there is."""
    x = torch.arange(3)
    with reads:
        x[x > 1], x.sum().item(), bool(x.any()), x.nonzero(), x.repeat_interleave(x), x.tolist()
        torch.nonzero_static(x, size=2), x[x.clone()], x.repeat_interleave(x, output_size=3)
    assert len(reads.names) == 6


def test_true_is_what_costs_nothing_on_the_device() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    resolve = loss_walk.resolve_compact
    assert [resolve(True, cpu), resolve(True, gpu)] == ["chunks", "call"]
    assert [resolve(how, gpu) for how in (False, "call", "chunks")] == ["no", "call", "chunks"]


@pytest.mark.parametrize("num_rows", [3, 19])
@pytest.mark.parametrize(
    ("name", "impl"),
    [
        *((name, "torch") for name in ("all", "gspo-all", "gspo-z-loss", "mis")),
        *(("all", impl) for impl in IMPLS[1:]),
    ],
)
def test_rows_left_out_by_call_change_nothing(name: str, num_rows: int, impl: str) -> None:
    batch = {**head_batch(), "sampling_mask": MASK}
    budget = num_rows * ROW
    expected, true = ours(SPECS[name], batch, "torch", memory_budget=budget, compact=False)
    out, gradients = ours(SPECS[name], batch, impl, memory_budget=budget, compact="call")
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.logprob_T, expected.logprob_T, rtol=1e-5, atol=1e-5)
    close(gradients, true)


def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written holds NaN."""
    empty = torch.empty

    def nan(*args: Any, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(lm_head.torch, "empty", nan)


@pytest.mark.parametrize("compact", [False, "call", "chunks"])
@pytest.mark.parametrize("kind", ["whole", "holes", "no-weight", "no-advantage", "long-sequence"])
def test_every_row_of_a_gradient_is_written(
    kind: str, compact: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and weights without a gradient get theirs, though nothing is zeroed first."""
    batch, spec = head_batch() if kind == "holes" else whole_batch(), SPECS["clip"]
    if kind == "no-weight":
        batch["weight_T"] = torch.zeros(19)
    if kind in ("no-advantage", "long-sequence"):
        is_idle = torch.arange(19) < (19 if kind == "no-advantage" else 10)
        batch["advantage_T"] = torch.where(is_idle, 0.0, batch["advantage_T"])
    if kind == "long-sequence":
        batch["cu_seqlens_S1"], spec = torch.tensor([0, 10, 19]), LossSpec("gspo", clip_low=1.0)
    poisoned(monkeypatch)
    _, gradients = ours(spec, batch, "torch", memory_budget=5 * ROW, compact=compact)
    _, true, _ = truth(spec, batch)
    for name in HEAD:
        torch.testing.assert_close(gradients[name].double(), true[name], rtol=1e-4, atol=5e-6)
        assert bool(true[name].any()) == (kind not in ("no-weight", "no-advantage"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("has_mask", [False, True], ids=["all-ids", "sampling_mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["clip", "k3-entropy", "gspo-all", "cispo", "nll"])
def test_a_cuda_graph_captures_loss_and_gradients(
    name: str, dtype: torch.dtype, has_mask: bool
) -> None:
    """Replayed on other numbers than those it was captured with."""
    mask = {"sampling_mask": MASK} if has_mask else {}
    batch = on_device(head_batch(dtype=dtype) | mask, "triton")
    leaves = {key: batch[key].clone().requires_grad_() for key in HEAD}
    budget = None if name == "gspo-all" else 5 * VOCAB * dtype.itemsize
    options: dict[str, Any] = {"compact": False, "memory_budget": budget}

    def step() -> tuple[PolicyLoss, tuple[Tensor, ...]]:
        out = linear_policy_loss(**{**batch, **leaves}, spec=SPECS[name], **options)
        return out, torch.autograd.grad(out.loss, list(leaves.values()))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles the kernels
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, gradients = step()
    with torch.no_grad():
        for leaf in leaves.values():
            leaf.mul_(0.7)
        batch["advantage_T"].mul_(-1.3)
        batch["weight_T"][4:7] = 0
    graph.replay()
    expected, expected_gradients = step()
    torch.testing.assert_close(captured.loss, expected.loss)
    torch.testing.assert_close(captured.logprob_T, expected.logprob_T)
    torch.testing.assert_close(captured.stats, expected.stats)
    torch.testing.assert_close(gradients, expected_gradients)
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compact", [False, "call"])
def test_torch_sees_no_more_reads_on_a_gpu(compact: Any) -> None:
    """With `set_sync_debug_mode("error")` a read raises; the one of a call is waived by hand."""
    batch = on_device(head_batch(dtype=torch.bfloat16), "triton")
    leaves = {key: batch[key].clone().requires_grad_() for key in HEAD}

    def step() -> PolicyLoss:
        budget = 5 * VOCAB * 2
        out = linear_policy_loss(
            **{**batch, **leaves}, spec=SPECS["clip"], compact=compact, memory_budget=budget
        )
        out.loss.backward()
        return out

    def waived(tensor: Tensor, tolist: Any = Tensor.tolist) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        numbers = tolist(tensor)
        torch.cuda.set_sync_debug_mode("error")
        return numbers

    step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "tolist", waived)
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    few = {name: batch[name] for name in (*HEAD, "target_ids_T")}
    rows = counted(batch)
    logprob_T = linear_logprobs(**few).logprob_T
    torch.testing.assert_close(out.logprob_T[rows], logprob_T[rows])
