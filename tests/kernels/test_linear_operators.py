"""The operators of linear losses as PyTorch sees them: schemas, torch.compile, checkpointing,
autocast, accumulation of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flowkernels import LossSpec, PolicyLoss, TokenLoss, Tokens, linear_policy_loss
from graphs import Graphs
from kernel_truth import Batch, mask_of
from rows import HEAD, Gradients, head_batch, squared
from torch import Tensor
from torch.utils.checkpoint import checkpoint

OPERATORS = ("linear_gradient", "linear_policy_loss", "linear_scores")
SPECS = {
    "clip": LossSpec(clip_high=0.3),
    "all": LossSpec(dual_clip=2.0, kl="k2", kl_coef=0.2, entropy_coef=-0.1),
    "gspo": LossSpec("gspo", clip_low=0.5),
}
NUM_TOKENS, DIM, VOCAB = 7, 6, 11
ROW = 4 * VOCAB
SUBSETS = [[1, 2], [], [3], [0, 5, 7], [], [], [4]]


def small_batch(num_tokens: int = NUM_TOKENS, dtype: torch.dtype = torch.float32) -> Batch:
    """Advantages are negative, so that losses are positive."""
    batch = head_batch(num_tokens, DIM, VOCAB, dtype=dtype)
    return batch | {
        "advantage_T": -batch["advantage_T"].abs() - 0.1,
        "weight_T": batch["weight_T"].abs(),
    }


def run(function: Callable[..., Tensor], batch: Batch) -> tuple[Tensor, Gradients]:
    """Value and gradients of a function of the batch at fresh leaves."""
    leaves = {name: batch[name].detach().clone().requires_grad_() for name in HEAD}
    value = function({**batch, **leaves})
    value.backward()
    return value.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def loss_of(batch: Batch, spec: Any, **options: Any) -> Tensor:
    options = {"memory_budget": 3 * ROW, "impl": "torch", **options}
    out: PolicyLoss = linear_policy_loss(**batch, spec=spec, **options)
    return out.loss


def operator_arguments(
    name: str, has_bias: bool, has_mask: bool, needs: list[bool], dtype: torch.dtype
) -> tuple[Any, ...]:
    """Arguments as the public functions pass them."""
    batch = small_batch(dtype=dtype)
    head = [batch[key].requires_grad_(need) for key, need in zip(HEAD, needs, strict=True)]
    head[2] = head[2] if has_bias else None
    mask = mask_of(SUBSETS)
    of_rows = (
        (torch.linspace(0.5, 2, NUM_TOKENS), 5.0, mask.token_ids_K, mask.offsets_T1)
        if has_mask
        else (torch.ones(1).expand(NUM_TOKENS), None, None, None)
    )
    is_invariant = has_mask and dtype != torch.float64
    options = (dtype == torch.bfloat16, 3, 3, is_invariant, "torch")
    targets = batch["target_ids_T"]
    if name == "linear_scores":
        return (*head, targets, *of_rows, *options)
    if name == "linear_gradient":
        return (
            *(x if x is None else x.detach() for x in head),
            targets,
            *of_rows,
            torch.randn(2, NUM_TOKENS),
            needs,
            *options,
        )
    old, ref = batch["old_logprob_T"], batch["ref_logprob_T"] if has_mask else None
    spec = SPECS["gspo" if name.endswith("gspo") else "all" if has_mask else "clip"]
    bounds = batch["cu_seqlens_S1"] if spec.loss_type == "gspo" else None
    return (
        *head,
        targets,
        *of_rows,
        batch["advantage_T"],
        batch["weight_T"],
        old,
        ref,
        bounds,
        spec.encoded,
        needs,
        "chunks" if has_mask else "no",
        *options,
    )


NEEDS = {
    "all": [True, True, True],
    "frozen-head": [True, False, False],
    "weight": [False, True, False],
    "none": [False, False, False],
}


@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize(
    ("has_bias", "has_mask"), [(True, True), (False, False)], ids=["much", "little"]
)
@pytest.mark.parametrize("name", [*OPERATORS, "linear_policy_loss_gspo"])
def test_operator_passes_opcheck(name: str, has_bias: bool, has_mask: bool, needs: str) -> None:
    """Schema, autograd registration, shapes and types of the fake kernel, and AOT dispatch with
    dynamic shapes.
    """
    flags = NEEDS[needs] if has_bias else [*NEEDS[needs][:2], False]
    dtypes = [torch.float32]
    if needs == "all" and has_mask:
        dtypes += [torch.bfloat16, torch.float64]
    operator = getattr(torch.ops.flowkernels, name.removesuffix("_gspo")).default
    for dtype in dtypes:
        arguments = operator_arguments(name, has_bias, has_mask, flags, dtype)
        if "policy_loss" in name:
            assert (
                operator(*arguments)[0] > 0
            )  # opcheck then sends a gradient of 1, which leaves the operator's other outputs alone
        torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize(("name", "has_mask"), [("clip", False), ("all", True), ("gspo", True)])
def test_a_compiled_loss_is_one_node_and_equal_to_eager(name: str, has_mask: bool) -> None:
    """The gradients come with it: in the backward graph they are scaled, and nothing of ours is
    left to do.
    """
    batch, graphs = small_batch(), Graphs()
    options = {"sampling_mask": mask_of(SUBSETS), "temperature": 0.8} if has_mask else {}

    def function(batch: Batch) -> Tensor:
        return 3 * loss_of({**batch, "hidden_TD": 1.5 * batch["hidden_TD"]}, SPECS[name], **options)

    loss, gradients = run(graphs.compile(function), batch)
    expected, expected_gradients = run(function, batch)
    assert graphs.forward == [["linear_policy_loss"]] and graphs.backward == [[]]
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, expected_gradients)
    assert all(gradient.abs().max() > 0.01 for gradient in expected_gradients.values())


def own(tokens: Tokens) -> TokenLoss:
    return squared(tokens)


def test_a_compiled_loss_of_ones_own_is_a_node_each_way() -> None:
    batch, graphs = small_batch(), Graphs()
    ours = run(graphs.compile(lambda batch: 3 * loss_of(batch, own)), batch)
    assert (graphs.forward, graphs.backward) == ([["linear_scores"]], [["linear_gradient"]])
    torch.testing.assert_close(ours, run(lambda batch: 3 * loss_of(batch, own), batch))


@pytest.mark.parametrize("name", ["all", "own"])
def test_one_compilation_serves_every_number_of_tokens(name: str) -> None:
    graphs, spec = Graphs(), SPECS.get(name, own)
    compiled = graphs.compile(lambda batch: loss_of(batch, spec, memory_budget=None))
    for num_tokens in (8, 9, 4, 21):
        batch = small_batch(num_tokens)
        leaves = {key: batch[key].clone().requires_grad_() for key in HEAD}
        moved = {**batch, **leaves}
        for key, tensor in moved.items():
            if key == "hidden_TD" or key.endswith("_T"):
                torch._dynamo.mark_dynamic(tensor, 0)
        loss = compiled(moved)
        loss.backward()
        expected = run(lambda batch: loss_of(batch, spec, memory_budget=None), batch)
        torch.testing.assert_close(
            (loss.detach(), {key: leaf.grad for key, leaf in leaves.items()}), expected
        )
    assert len(graphs.forward) == 1


@pytest.mark.parametrize("name", [*SPECS, "own"])
def test_gradients_are_the_same_under_checkpointing(name: str) -> None:
    """The loss is taken a second time in the backward pass."""
    spec, taken = SPECS.get(name, own), []

    def function(batch: Batch) -> Tensor:
        taken.append(1)
        return 2 * loss_of({**batch, "hidden_TD": batch["hidden_TD"].tanh()}, spec)

    expected = run(function, small_batch())
    ours = run(lambda batch: checkpoint(function, batch, use_reentrant=False), small_batch())
    assert len(taken) == 3
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", [*SPECS, "own"])
def test_gradients_of_two_losses_add_up_in_one_head(name: str) -> None:
    """Both in one graph and over two backward passes."""
    spec, batches = SPECS.get(name, own), [small_batch(), small_batch(9)]
    batches[1]["weight_VD"] = batches[0]["weight_VD"]
    first, second = (
        run(lambda batch: loss_of(batch, spec), batch)[1]["weight_VD"] for batch in batches
    )
    for in_one_graph in (True, False):
        weight = batches[0]["weight_VD"].clone().requires_grad_()
        one, two = (loss_of(batch | {"weight_VD": weight}, spec) for batch in batches)
        for total in [one - 2 * two] if in_one_graph else [one, -2 * two]:
            total.backward()
        torch.testing.assert_close(weight.grad, first - 2 * second)
    assert first.abs().max() > 0.01 and second.abs().max() > 0.01


@pytest.mark.parametrize("fp32_logits", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["all", "own"])
def test_autocast_leaves_the_arithmetic_as_the_operands_have_it(
    name: str, dtype: torch.dtype, fp32_logits: bool
) -> None:
    """Holds for fp32 and bf16 heads; fp32 logits stay fp32: autocast acts outside alone."""
    spec, batch = SPECS.get(name, own), small_batch(dtype=dtype)

    def autocast(batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(batch, spec, fp32_logits=fp32_logits)

    expected = run(lambda batch: loss_of(batch, spec, fp32_logits=fp32_logits), batch)
    torch.testing.assert_close(run(autocast, batch), expected, rtol=1e-6, atol=1e-6)
