"""The operators as PyTorch sees them: schemas, torch.compile, checkpointing, autocast, determinism,
memory. Losses get logits, or hidden states and a head.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from flowkernels import (
    LossSpec,
    TokenLoss,
    Tokens,
    branch_points,
    branching_score,
    discounted_reverse_scan,
    logprobs,
)
from flowkernels.arguments import dtype_of_results
from graphs import Graphs
from kernel_truth import IMPLS, Batch, device_of, mask_of, on_device, peak_bytes
from rows import HEAD, Gradients, batch_of, leaves_of, squared
from rows import loss_of as result_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

OPERATORS = ("branching_score", "discounted_reverse_scan", "gradient", "policy_loss", "scores")
OF_HEAD = ("linear_gradient", "linear_policy_loss", "linear_scores")


def own(tokens: Tokens) -> TokenLoss:
    return squared(tokens)


SPECS = {
    "clip": LossSpec(clip_high=0.3),
    "all": LossSpec(
        clip_low=0.1, clip_high=0.4, dual_clip=2.0, kl="k2", kl_coef=0.2, entropy_coef=0.1, tis=2.0
    ),
    "gspo": LossSpec("gspo", clip_low=0.9, clip_high=9.0),
    "own": own,
}
CASES = [
    *(("logits", name, impl) for name in ("clip", "all", "gspo") for impl in IMPLS),
    *(("head", name, "torch") for name in SPECS),
]
of_losses = pytest.mark.parametrize(("form", "name", "impl"), CASES)
VOCAB = 13


def new_batch(
    form: str, num: int, impl: str, dtype: torch.dtype = torch.float32, **options: Any
) -> Batch:
    """Advantages are negative, so that losses are positive."""
    batch = batch_of(form, num, **{"vocab": VOCAB, "dim": 6, "dtype": dtype, **options})
    batch["advantage_T"] = -batch["advantage_T"].abs() - 0.1
    batch["weight_T"] = batch["weight_T"].abs()
    return on_device(batch, impl)


def loss_of(batch: Batch, name: str, impl: str = "torch", **options: Any) -> Tensor:
    """Of a head, in chunks of three rows of fp32."""
    if "hidden_TD" in batch:
        options = {"memory_budget": 3 * 4 * VOCAB, **options}
    return result_of(SPECS[name], batch, impl, **options).loss


def run(function: Callable[[Batch], Tensor], batch: Batch) -> tuple[Tensor, Gradients]:
    """Value and gradients of a function of the batch at fresh leaves."""
    names = leaves_of(batch)
    leaves = {name: batch[name].detach().clone().requires_grad_() for name in names}
    value = function({**batch, **leaves})
    value.backward()
    return value.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def times(batch: Batch, factor: float) -> Batch:
    """With rows that are no leaf."""
    name = leaves_of(batch)[0]
    return {**batch, name: factor * batch[name]}


class Recorder(TorchDispatchMode):
    """Keeps each call of an operator: its arguments before it ran, and what it gave back."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace != "flowkernels":
            return func(*args, **(kwargs or {}))
        name = func.name().split("::")[1]
        copied = (
            args[0].detach().clone(),
            *(arg.detach() if isinstance(arg, Tensor) else arg for arg in args[1:]),
        )
        copied[0].requires_grad_(args[0].requires_grad and name in ("scores", "policy_loss"))
        result = func(*args, **(kwargs or {}))
        self.calls.append((name, copied, result))
        return result


@cache
def recorded(impl: str) -> list[tuple[str, tuple[Any, ...], Any]]:
    """Calls of every operator by the public functions, with few and with all arguments."""
    more = {"masked": True, "softcap": 5.0, "temperature": torch.linspace(0.5, 2, 6)}
    cases: list[tuple[torch.dtype, str, Batch]] = [
        (torch.float32, "clip", {}),
        (torch.bfloat16, "all", more),
    ]
    with Recorder() as recorder:
        for dtype, name, options in (
            cases if impl == "triton" else [*cases, (torch.float64, "all", {})]
        ):
            batch = new_batch("logits", 6, impl, dtype, **options)
            leaf = batch["logits_TV"].clone().requires_grad_()
            given = ("target_ids_T", "temperature", "softcap", "sampling_mask")
            of_rows = {key: batch[key] for key in given if key in batch}
            scores = logprobs(leaf, **of_rows, differentiable=True, impl=impl)
            scores.logprob_T.sum().backward()
            for inplace in (False, True):
                loss, _ = run(lambda b, n=name, i=inplace: loss_of(b, n, impl, inplace=i), batch)
                assert loss > 0  # opcheck then sends a gradient of 1 to the loss, none elsewhere
        x_T, bounds = batch["advantage_T"], batch["cu_seqlens_S1"]
        is_token_T = x_T < -0.5
        for mask_T in (None, is_token_T):
            discounted_reverse_scan(x_T, bounds, gamma=0.9, mask_T=mask_T, impl=impl)
            branching_score(x_T, 0.5 * x_T, x_T.abs(), bounds, mask_T=mask_T, impl=impl)
    return recorder.calls


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("impl", IMPLS)
def test_operator_passes_opcheck(impl: str, name: str) -> None:
    """Schema, autograd, shapes of the fake kernel, AOT dispatch with dynamic shapes."""
    calls = [args for called, args, _ in recorded(impl) if called == name]
    assert calls
    for args in calls:
        torch.library.opcheck(getattr(torch.ops.flowkernels, name).default, args)


def test_operators_without_a_gradient_pass_opcheck() -> None:
    batch = new_batch("logits", 6, "torch")
    with Recorder() as recorder, torch.no_grad():
        loss_of(batch, "all")
        logprobs(batch["logits_TV"], batch["target_ids_T"])
    assert [name for name, _, _ in recorder.calls] == ["policy_loss", "scores"]
    for name, args, _ in recorder.calls:
        torch.library.opcheck(getattr(torch.ops.flowkernels, name).default, args)


def test_every_operator_is_checked() -> None:
    names = torch._C._dispatch_get_all_op_names()
    ours = (name.partition("::") for name in names)
    # See test_sparse_delta.py and test_distillation.py.
    elsewhere = {"diff_words", "digest_words", "scatter_words_", "linear_distillation"}
    found = {name for library, _, name in ours if library == "flowkernels"}
    assert found == {*OPERATORS, *OF_HEAD, *elsewhere}


SUBSETS = [[1, 2], [], [3], [0, 5, 7], [], [], [4]]


def head_arguments(
    name: str, has_much: bool, needs: list[bool], dtype: torch.dtype
) -> tuple[Any, ...]:
    """Arguments as the public functions pass them; `has_much`: bias, mask, softcap, reference."""
    batch = new_batch("head", 7, "torch", dtype)
    head = [batch[key].requires_grad_(need) for key, need in zip(HEAD, needs, strict=True)]
    head[2] = head[2] if has_much else None
    mask, results = mask_of(SUBSETS), dtype_of_results(dtype)
    of_rows = (
        (torch.linspace(0.5, 2, 7, dtype=results), 5.0, mask.token_ids_K, mask.offsets_T1)
        if has_much
        else (torch.ones(1, dtype=results).expand(7), None, None, None)
    )
    options = (dtype == torch.bfloat16, 3, 3, "torch")
    first = (*(x if x is None or name != "linear_gradient" else x.detach() for x in head),)
    first = (*first, batch["target_ids_T"], *of_rows)
    if name == "linear_scores":
        return (*first, *options)
    if name == "linear_gradient":
        return (*first, torch.randn(3, 7, dtype=results)[:2], needs, *options)
    keys = ("advantage", "weight", "old_logprob", "ref_logprob")
    tokens = [batch[f"{key}_T"].to(results) for key in keys]
    spec = SPECS["gspo" if name.endswith("gspo") else "all" if has_much else "clip"]
    tokens[3] = tokens[3] if has_much else None
    bounds = batch["cu_seqlens_S1"] if spec.loss_type == "gspo" else None
    how = "chunks" if has_much else "no"
    return (*first, *tokens, bounds, spec.encoded, needs, how, *options)


@pytest.mark.parametrize(
    ("has_much", "needs", "dtype"),
    [
        (True, [True, True, True], torch.bfloat16),
        (True, [False, True, False], torch.float64),
        (False, [True, False, False], torch.float32),
        (False, [False, False, False], torch.float32),
    ],
)
@pytest.mark.parametrize("name", [*OF_HEAD, "linear_policy_loss_gspo"])
def test_an_operator_of_a_head_passes_opcheck(
    name: str, has_much: bool, needs: list[bool], dtype: torch.dtype
) -> None:
    operator = getattr(torch.ops.flowkernels, name.removesuffix("_gspo")).default
    arguments = head_arguments(name, has_much, needs, dtype)
    assert "policy_loss" not in name or operator(*arguments)[0] > 0  # as above
    torch.library.opcheck(operator, arguments)


# ---- torch.compile


@pytest.mark.parametrize(
    ("form", "name", "impl", "options", "forward", "backward"),
    [
        *(("logits", "clip", impl, {}, "policy_loss", None) for impl in IMPLS[1:]),
        ("logits", "all", "torch", {"inplace": True}, "policy_loss", None),
        ("logits", "gspo", "torch", {}, "scores", ["gradient"]),
        ("head", "all", "torch", {"masked": True}, "linear_policy_loss", []),
        ("head", "own", "torch", {}, "linear_scores", ["linear_gradient"]),
    ],
)
def test_a_compiled_loss_is_one_node_and_equal_to_eager(
    form: str, name: str, impl: str, options: Any, forward: str, backward: list[str] | None
) -> None:
    """inplace=True is for eager mode; torch.compile plans memory itself. Gradients that come with
    the loss are scaled in the backward graph, and nothing of ours is left to do.
    """
    setting = {"masked": True, "temperature": 0.8} if "masked" in options else {}
    batch, graphs = new_batch(form, 8, impl, **setting), Graphs()
    given = {} if setting else options

    def function(batch: Batch) -> Tensor:
        return 3 * loss_of(times(batch, 1.5), name, impl, **given)

    (loss, gradients), (expected, true) = (
        run(f, batch) for f in (graphs.compile(function), function)
    )
    assert (graphs.forward == [[forward]] and backward is None) or graphs.backward == [backward]
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, true)
    assert all(gradient.abs().max() > 0.01 for gradient in true.values())


def test_compiled_log_probs_and_branching_are_one_node_each_and_equal_to_eager() -> None:
    batch, graphs = new_batch("logits", 8, "torch"), Graphs()

    def differentiable(batch: Batch) -> Tensor:
        logits, ids = 1.5 * batch["logits_TV"], batch["target_ids_T"]
        out = logprobs(logits, ids, temperature=0.7, differentiable=True)
        return (out.logprob_T * batch["advantage_T"] + out.entropy_T).sum()

    def branch(batch: Batch) -> tuple[Tensor, ...]:
        logp_T, bounds = batch["ref_logprob_T"], batch["cu_seqlens_S1"]
        given = (logp_T, batch["old_logprob_T"], batch["weight_T"], bounds)
        out = branching_score(*given, gamma=0.9)
        scanned_T = discounted_reverse_scan(logp_T, bounds, gamma=0.9)
        points = branch_points(out, bounds, num_points=2, spacing=2)
        return out.score_T, out.omega_T, out.is_candidate_T, scanned_T, points

    compiled = run(graphs.compile(differentiable), batch)
    torch.testing.assert_close(compiled, run(differentiable, batch))
    assert (graphs.forward, graphs.backward) == ([["scores"]], [["gradient"]])
    graphs = Graphs()
    torch.testing.assert_close(graphs.compile(branch)(batch), branch(batch))
    assert graphs.forward == [["branching_score", "discounted_reverse_scan"]]


@pytest.mark.parametrize(("form", "name"), [("logits", "gspo"), ("head", "all")])
def test_one_compilation_serves_every_number_of_tokens(form: str, name: str) -> None:
    graphs, options = Graphs(), {} if form == "logits" else {"memory_budget": None}
    compiled = graphs.compile(lambda batch: loss_of(times(batch, 1.5), name, **options))
    for num in (8, 9, 4, 33):
        batch = new_batch(form, num, "torch")

        def dynamic(batch: Batch) -> Tensor:
            for key, tensor in batch.items():
                if key.endswith(("_T", "_TV", "_TD")):
                    torch._dynamo.mark_dynamic(tensor, 0)
            return compiled(batch)

        expected = run(lambda batch: loss_of(times(batch, 1.5), name, **options), batch)
        torch.testing.assert_close(run(dynamic, batch), expected)
    assert len(graphs.forward) == 1


def test_compile_works_when_the_spec_changes() -> None:
    """Numbers that change from call to call become symbols for torch.compile."""
    batch, graphs = new_batch("logits", 8, "torch"), Graphs()

    def function(batch: Batch, spec: Any) -> Tensor:
        return result_of(spec, times(batch, 1.5)).loss

    compiled = graphs.compile(function)
    for high in (0.1, 0.2, 0.3):
        spec = LossSpec(clip_low=high / 2, clip_high=high, dual_clip=2 + high)
        ours, expected = (
            run(lambda b, f=f, spec=spec: f(b, spec), batch) for f in (compiled, function)
        )
        torch.testing.assert_close(ours, expected)


def test_compiled_loss_of_no_tokens_is_zero() -> None:
    batch = {
        key: x[:0] if key[-2:] in ("_T", "TV") else x
        for key, x in new_batch("logits", 6, "torch").items()
    }
    batch["cu_seqlens_S1"] = torch.tensor([0, 0])
    loss, gradients = run(Graphs().compile(lambda b: loss_of(times(b, 1.5), "all")), batch)
    assert loss == 0 and gradients["logits_TV"].shape == (0, VOCAB)


@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler"
)
def test_inductor_gives_the_loss_and_gradient_of_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process and without vector instructions."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    monkeypatch.setattr("torch._inductor.config.cpp.vec_isa_ok", False)
    monkeypatch.setattr("torch._inductor.config.cpp_cache_precompile_headers", False)
    torch._dynamo.reset()
    batch = new_batch("logits", 8, "torch")

    def function(batch: Batch) -> Tensor:
        return loss_of(times(batch, 1.5), "all")

    compiled = torch.compile(function, fullgraph=True)
    ours, expected = (run(lambda b, f=f: 3 * f(b), batch) for f in (compiled, function))
    torch.testing.assert_close(ours, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_are_compiled_once_for_all_numbers_of_tokens() -> None:
    from flowkernels.policy_loss_triton import loss_kernel

    sizes = []
    for num in (5, 6, 7, 33):
        run(lambda batch: loss_of(batch, "clip", "triton"), new_batch("logits", num, "triton"))
        sizes.append(len(loss_kernel.device_caches[torch.cuda.current_device()][0]))
    assert sizes[0] >= 1 and len(set(sizes)) == 1


# ---- modes of autograd


@pytest.mark.parametrize(("form", "name", "impl"), [case for case in CASES if case[0] == "logits"])
def test_without_grad_mode_there_is_no_gradient_buffer(form: str, name: str, impl: str) -> None:
    batch = new_batch(form, 6, impl)
    expected, _ = run(lambda batch: loss_of(batch, name, impl), batch)
    logits = batch["logits_TV"].clone()
    for leaf in (logits, logits.clone().requires_grad_()):
        given = {**batch, "logits_TV": leaf}
        with torch.set_grad_enabled(not leaf.requires_grad), Recorder() as recorder:
            loss = loss_of(given, name, impl)
            ours = loss_of(given, name, impl, inplace=True)
        assert not loss.requires_grad and loss == ours == expected
        sizes = [out.numel() for _, _, result in recorder.calls for out in result]
        assert len(recorder.calls) == 2 and VOCAB * 6 not in sizes
        assert torch.equal(leaf, logits), "in-place leaves the logits alone"


@of_losses
def test_gradients_are_the_same_under_checkpointing(form: str, name: str, impl: str) -> None:
    """The loss is taken a second time in the backward pass."""
    batch, taken = new_batch(form, 6, impl), []

    def function(batch: Batch) -> Tensor:
        taken.append(1)
        return 2 * loss_of(times(batch, 1.5), name, impl)

    expected = run(function, batch)
    ours = run(lambda batch: checkpoint(function, batch, use_reentrant=False), batch)
    assert len(taken) == 3
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@of_losses
def test_gradients_of_two_losses_add_up_in_one_leaf(form: str, name: str, impl: str) -> None:
    """Both in one graph and over two backward passes."""
    batch = new_batch(form, 6, impl)
    for options in [{"inplace": True}, {}] if form == "logits" else [{}]:

        def one(batch: Batch, options: Any = options) -> Tensor:
            return loss_of(times(batch, 1.0), name, impl, **options)

        def two(batch: Batch, options: Any = options) -> Tensor:
            return -2 * loss_of(times(batch, 0.5), "all", impl, **options)

        def in_turn(batch: Batch, one: Any = one, two: Any = two) -> Tensor:
            one(batch).backward()
            return two(batch)

        parts = [run(function, batch)[1] for function in (one, two)]
        expected = {key: parts[0][key] + parts[1][key] for key in parts[0]}
        torch.testing.assert_close(run(lambda b: one(b) + two(b), batch)[1], expected)
        torch.testing.assert_close(run(in_turn, batch)[1], expected)
        assert all(part.abs().max() > 0.01 for of in parts for part in of.values())


@pytest.mark.parametrize("name", ["clip", "all", "gspo"])
@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_leaves_the_arithmetic_in_fp32(impl: str, name: str) -> None:
    """Loss and gradient of bf16 logits are those without autocast."""
    device, batch = device_of(impl), new_batch("logits", 6, impl, torch.bfloat16)
    rng = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 4, generator=rng).to(device) for n in (VOCAB, 6))

    def loss(linear: Tensor) -> Tensor:
        assert linear.dtype == torch.bfloat16
        return loss_of({**batch, "logits_TV": linear}, name, impl)

    results = []
    for has_autocast in (True, False):
        leaf = weight.clone().requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=has_autocast):
            dtype = torch.float32 if has_autocast else torch.bfloat16
            value = loss(torch.nn.functional.linear(x.to(dtype), leaf.to(dtype)))
        assert value.dtype == torch.float32
        value.backward()
        results.append((value.detach(), leaf.grad))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("fp32_logits", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["all", "own"])
def test_autocast_leaves_the_arithmetic_of_a_head_as_its_operands_have_it(
    name: str, dtype: torch.dtype, fp32_logits: bool
) -> None:
    """fp32 logits stay fp32: autocast acts outside alone."""
    batch = new_batch("head", 7, "torch", dtype)
    results = []
    for has_autocast in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
            results.append(run(lambda b: loss_of(b, name, fp32_logits=fp32_logits), batch))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["clip", "all", "gspo"])
@pytest.mark.parametrize("impl", IMPLS)
def test_results_repeat_bit_for_bit_in_deterministic_mode(impl: str, name: str) -> None:
    """The mode also fills fresh memory with NaN, so that nothing is read before it is written."""
    batch = new_batch("logits", 20, impl)
    is_token_T = batch["advantage_T"] < -0.3
    batch["weight_T"] = batch["weight_T"] * is_token_T

    def run() -> list[Tensor]:
        leaf = batch["logits_TV"].clone().requires_grad_()
        out = result_of(SPECS[name], {**batch, "logits_TV": leaf}, impl)
        out.loss.backward()
        score = branching_score(
            out.logprob_T,
            batch["old_logprob_T"],
            out.entropy_T,
            batch["cu_seqlens_S1"],
            mask_T=is_token_T,
            impl=impl,
        )
        points = branch_points(score, batch["cu_seqlens_S1"], num_points=2, spacing=2)
        return [
            out.loss.detach(),
            leaf.grad,
            *out.stats.values(),
            score.score_T,
            score.omega_T,
            score.is_candidate_T,
            points,
        ]

    torch.use_deterministic_algorithms(True)
    try:
        first, second = run(), run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not any(tensor.isnan().any() for tensor in first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["clip", "all", "gspo"])
@pytest.mark.parametrize("impl", IMPLS)
def test_in_place_gradient_uses_the_storage_of_the_logits(impl: str, name: str) -> None:
    batch, seen = new_batch("logits", 6, impl), []
    logits = batch["logits_TV"].requires_grad_() * 1
    storage = logits.data_ptr()
    logits.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    loss_of({**batch, "logits_TV": logits}, name, impl, inplace=True).backward()
    assert seen == [storage]


def peak_of(num: int, name: str, inplace: bool) -> int:
    """The most that forward and backward have allocated at one time, on the CPU."""
    batch = new_batch("logits", num, "torch", vocab=8192)
    batch["logits_TV"].requires_grad_()
    return peak_bytes(lambda: loss_of(batch, name, inplace=inplace).backward())


@pytest.mark.parametrize("name", ["clip", "all", "gspo"])
def test_in_place_needs_no_memory_that_grows_with_the_logits(name: str) -> None:
    """128 rows more cost 4 MiB of gradient, or nothing in place but a few numbers per row."""
    added = 128 * 8192 * 4
    assert peak_of(256, name, True) - peak_of(128, name, True) < 0.05 * added
    assert peak_of(256, name, False) - peak_of(128, name, False) > 0.95 * added
