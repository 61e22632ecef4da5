"""The operators as PyTorch sees them: schemas, torch.compile, checkpointing, autocast, determinism,
memory.
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
    SamplingMask,
    branch_points,
    branching_score,
    discounted_reverse_scan,
    logprobs,
    policy_loss,
)
from graphs import Graphs
from kernel_truth import IMPLS, device_of, peak_bytes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

OPERATORS = ("branching_score", "discounted_reverse_scan", "gradient", "policy_loss", "scores")
SPECS = {
    "clip": LossSpec(clip_high=0.3),
    "all": LossSpec(
        clip_low=0.1, clip_high=0.4, dual_clip=2.0, kl="k2", kl_coef=0.2, entropy_coef=0.1, tis=2.0
    ),
    "gspo": LossSpec("gspo", clip_low=0.9, clip_high=9.0),
}
VOCAB = 13
Batch = dict[str, Any]


def random_batch(
    num: int, impl: str, dtype: torch.dtype = torch.float32, vocab: int = VOCAB
) -> Batch:
    """Advantages are negative, so that losses are positive."""
    rng = torch.Generator().manual_seed(num)
    logits = torch.randn(num, vocab, generator=rng)
    targets = torch.randint(vocab, (num,), generator=rng)
    logp = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    noise = torch.randn(4, num, generator=rng)
    batch = {
        "logits_TV": logits.to(dtype),
        "target_ids_T": targets,
        "advantage_T": -noise[0].abs() - 0.1,
        "weight_T": noise[1].abs(),
        "old_logprob_T": logp + 0.4 * noise[2],
        "ref_logprob_T": logp + 0.4 * noise[3],
        "sampler_logprob_T": logp + 0.4 * noise[1],
        "cu_seqlens_S1": torch.tensor([0, num // 2, num // 2, num]),
    }
    return {name: value.to(device_of(impl)) for name, value in batch.items()}


def loss_of(
    logits_TV: Tensor, batch: Batch, spec: LossSpec, impl: str, inplace: bool = False
) -> Tensor:
    return policy_loss(
        **{**batch, "logits_TV": logits_TV}, spec=spec, impl=impl, inplace=inplace
    ).loss


def gradient_of(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """(value, gradient) at a fresh leaf."""
    leaf = x.detach().clone().requires_grad_()
    value = function(leaf)
    value.backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


class Recorder(TorchDispatchMode):
    """Keeps each call of an operator of ours: its arguments as they were before it ran, and what it
    gave back.
    """

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
    mask = SamplingMask(
        *(torch.tensor(ids, device=device_of(impl)) for ids in ([1, 2, 3], [0, 2, 2, 3, 3, 3, 3]))
    )
    more = {
        "sampling_mask": mask,
        "softcap": 5.0,
        "temperature": torch.linspace(0.5, 2, 6, device=device_of(impl)),
    }
    cases: list[tuple[torch.dtype, LossSpec, Batch]] = [
        (torch.float32, SPECS["clip"], {}),
        (torch.bfloat16, SPECS["all"], more),
    ]
    with Recorder() as recorder:
        for dtype, spec, extra in (
            cases if impl == "triton" else [*cases, (torch.float64, SPECS["all"], {})]
        ):
            batch = random_batch(6, impl, dtype)
            leaf = batch["logits_TV"].clone().requires_grad_()
            logprobs(
                leaf, batch["target_ids_T"], **extra, differentiable=True, impl=impl
            ).logprob_T.sum().backward()
            for inplace in (False, True):
                leaf = batch["logits_TV"].clone().requires_grad_()
                loss = policy_loss(
                    **{**batch, "logits_TV": leaf}, **extra, spec=spec, inplace=inplace, impl=impl
                ).loss
                assert (
                    loss > 0
                    # opcheck then sends a gradient of 1, which leaves the operator's other outputs
                    # alone
                )
                loss.backward()
        x_T = batch["advantage_T"]
        is_token_T = x_T < -0.5
        for mask_T in (None, is_token_T):
            discounted_reverse_scan(
                x_T, batch["cu_seqlens_S1"], gamma=0.9, mask_T=mask_T, impl=impl
            )
            branching_score(
                x_T, 0.5 * x_T, x_T.abs(), batch["cu_seqlens_S1"], mask_T=mask_T, impl=impl
            )
    return recorder.calls


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("impl", IMPLS)
def test_operator_passes_opcheck(impl: str, name: str) -> None:
    """Schema, autograd registration, shapes of the fake kernel, and AOT dispatch with dynamic
    shapes.
    """
    calls = [args for called, args, _ in recorded(impl) if called == name]
    assert calls
    for args in calls:
        torch.library.opcheck(getattr(torch.ops.flowkernels, name).default, args)


@pytest.mark.parametrize("impl", IMPLS)
def test_operators_without_a_gradient_pass_opcheck(impl: str) -> None:
    batch = random_batch(6, impl)
    with Recorder() as recorder, torch.no_grad():
        policy_loss(**batch, spec=SPECS["all"], impl=impl)
        logprobs(batch["logits_TV"], batch["target_ids_T"], impl=impl)
    assert [name for name, _, _ in recorder.calls] == ["policy_loss", "scores"]
    for name, args, _ in recorder.calls:
        torch.library.opcheck(getattr(torch.ops.flowkernels, name).default, args)


def test_every_operator_is_checked() -> None:
    registered = {
        name.removeprefix("flowkernels::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("flowkernels::")
    }
    elsewhere = {
        "linear_gradient",
        "linear_policy_loss",
        "linear_scores",
    }  # see test_linear_operators.py
    elsewhere |= {"diff_words", "digest_words", "scatter_words_"}  # see test_sparse_delta.py
    assert registered == {*OPERATORS, *elsewhere}


@pytest.mark.parametrize(("name", "inplace"), [("clip", False), ("all", True), ("gspo", False)])
@pytest.mark.parametrize("impl", IMPLS)
def test_compiled_policy_loss_is_one_node_and_equal_to_eager(
    impl: str, name: str, inplace: bool
) -> None:
    """inplace=True is for eager mode; torch.compile plans memory itself. GSPO has its gradient in
    the backward graph.
    """
    batch, graphs = random_batch(8, impl), Graphs()

    def function(x: Tensor) -> Tensor:
        return 3 * loss_of(1.5 * x, batch, SPECS[name], impl, inplace)

    loss, gradient = gradient_of(graphs.compile(function), batch["logits_TV"])
    expected, expected_gradient = gradient_of(function, batch["logits_TV"])
    assert graphs.forward == [["scores" if name == "gspo" else "policy_loss"]]
    assert name != "gspo" or graphs.backward == [["gradient"]]
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert expected_gradient.abs().sum() > 0.1


@pytest.mark.parametrize("impl", IMPLS)
def test_compiled_log_probs_and_branching_are_one_node_each_and_equal_to_eager(impl: str) -> None:
    batch, graphs = random_batch(8, impl), Graphs()

    def differentiable(x: Tensor) -> Tensor:
        out = logprobs(
            1.5 * x, batch["target_ids_T"], temperature=0.7, differentiable=True, impl=impl
        )
        return (out.logprob_T * batch["advantage_T"] + out.entropy_T).sum()

    def branch(logp_T: Tensor) -> tuple[Tensor, ...]:
        out = branching_score(
            logp_T,
            batch["old_logprob_T"],
            batch["weight_T"],
            batch["cu_seqlens_S1"],
            gamma=0.9,
            impl=impl,
        )
        scanned_T = discounted_reverse_scan(logp_T, batch["cu_seqlens_S1"], gamma=0.9, impl=impl)
        points = branch_points(out, batch["cu_seqlens_S1"], num_points=2, spacing=2)
        return out.score_T, out.omega_T, out.is_candidate_T, scanned_T, points

    compiled = gradient_of(graphs.compile(differentiable), batch["logits_TV"])
    torch.testing.assert_close(compiled, gradient_of(differentiable, batch["logits_TV"]))
    assert (graphs.forward, graphs.backward) == ([["scores"]], [["gradient"]])
    graphs = Graphs()
    for ours, expected in zip(
        graphs.compile(branch)(batch["ref_logprob_T"]), branch(batch["ref_logprob_T"]), strict=True
    ):
        torch.testing.assert_close(ours, expected)
    assert graphs.forward == [["branching_score", "discounted_reverse_scan"]]


@pytest.mark.parametrize("name", ["all", "gspo"])
def test_one_compilation_serves_every_number_of_tokens(name: str) -> None:
    graphs = Graphs()
    compiled = graphs.compile(
        lambda batch: loss_of(1.5 * batch["logits_TV"], batch, SPECS[name], "torch")
    )
    for num in (8, 9, 3, 33):
        batch = random_batch(num, "torch")
        leaf = batch["logits_TV"].requires_grad_()
        for key, tensor in batch.items():
            if key != "cu_seqlens_S1":
                torch._dynamo.mark_dynamic(tensor, 0)
        loss = compiled(batch)
        loss.backward()
        expected, gradient = gradient_of(
            lambda x, batch=batch: loss_of(1.5 * x, batch, SPECS[name], "torch"), leaf
        )
        torch.testing.assert_close(loss.detach(), expected)
        torch.testing.assert_close(leaf.grad, gradient)
    assert len(graphs.forward) == 1


def test_compile_works_when_the_spec_changes_or_all_is_dynamic() -> None:
    """Numbers that change from call to call become symbols for torch.compile."""
    batch, graphs = random_batch(8, "torch"), Graphs()

    def function(x: Tensor, spec: LossSpec) -> Tensor:
        return loss_of(1.5 * x, batch, spec, "torch")

    compiled = graphs.compile(function)
    for high in (0.1, 0.2, 0.3):
        spec = LossSpec(clip_low=high / 2, clip_high=high, dual_clip=2 + high)
        ours, expected = (
            gradient_of(lambda x, f=f, spec=spec: f(x, spec), batch["logits_TV"])
            for f in (compiled, function)
        )
        torch.testing.assert_close(ours, expected)
    dynamic = gradient_of(
        lambda x: Graphs().compile(function, dynamic=True)(x, SPECS["all"]), batch["logits_TV"]
    )
    torch.testing.assert_close(
        dynamic, gradient_of(lambda x: function(x, SPECS["all"]), batch["logits_TV"])
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_compiled_loss_of_no_tokens_is_zero(impl: str) -> None:
    batch = random_batch(0, impl)
    loss, gradient = gradient_of(
        Graphs().compile(lambda x: loss_of(1.5 * x, batch, SPECS["all"], impl)), batch["logits_TV"]
    )
    assert loss == 0 and gradient.shape == (0, VOCAB)


@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler"
)
def test_inductor_gives_the_loss_and_gradient_of_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process and without vector instructions, each kind of which inductor would first
    compile a program for.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    monkeypatch.setattr("torch._inductor.config.cpp.vec_isa_ok", False)
    monkeypatch.setattr("torch._inductor.config.cpp_cache_precompile_headers", False)
    torch._dynamo.reset()
    batch = random_batch(8, "torch")

    def function(x: Tensor) -> Tensor:
        return loss_of(1.5 * x, batch, SPECS["all"], "torch")

    compiled = torch.compile(function, fullgraph=True)
    ours, expected = (
        gradient_of(lambda x, f=f: 3 * f(x), batch["logits_TV"]) for f in (compiled, function)
    )
    torch.testing.assert_close(ours, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_are_compiled_once_for_all_numbers_of_tokens() -> None:
    from flowkernels.policy_loss_triton import loss_kernel

    sizes = []
    for num in (5, 6, 7, 33):
        batch = random_batch(num, "triton")
        gradient_of(
            lambda x, batch=batch: loss_of(x, batch, SPECS["clip"], "triton"), batch["logits_TV"]
        )
        sizes.append(len(loss_kernel.device_caches[torch.cuda.current_device()][0]))
    assert sizes[0] >= 1 and len(set(sizes)) == 1


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("impl", IMPLS)
def test_without_grad_mode_there_is_no_gradient_buffer(impl: str, name: str) -> None:
    batch = random_batch(6, impl)
    expected = loss_of(batch["logits_TV"].clone().requires_grad_(), batch, SPECS[name], impl)
    for logits in (batch["logits_TV"], batch["logits_TV"].clone().requires_grad_()):
        with torch.set_grad_enabled(not logits.requires_grad), Recorder() as recorder:
            loss = loss_of(logits, batch, SPECS[name], impl)
            ours = loss_of(logits, batch, SPECS[name], impl, inplace=True)
        assert not loss.requires_grad and loss == ours == expected
        sizes = [out.numel() for _, _, result in recorder.calls for out in result]
        assert len(recorder.calls) == 2 and VOCAB * 6 not in sizes
        assert torch.equal(logits, batch["logits_TV"]), (
            "without a gradient to write, in-place leaves the logits alone"
        )


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("impl", IMPLS)
def test_gradient_is_the_same_under_checkpointing(impl: str, name: str) -> None:
    batch = random_batch(6, impl)

    def function(x: Tensor) -> Tensor:
        return 2 * loss_of(1.5 * x, batch, SPECS[name], impl)

    ours = gradient_of(lambda x: checkpoint(function, x, use_reentrant=False), batch["logits_TV"])
    torch.testing.assert_close(ours, gradient_of(function, batch["logits_TV"]), rtol=0, atol=0)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_leaves_the_arithmetic_in_fp32(impl: str, name: str) -> None:
    """bf16 logits of a linear layer: loss and gradient are those of the same logits without
    autocast.
    """
    batch = random_batch(6, impl, torch.bfloat16)
    weight, x = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device_of(impl))
        for shape in ((VOCAB, 4), (6, 4))
    )

    def autocast(weight: Tensor) -> Tensor:
        with torch.autocast(device_of(impl), torch.bfloat16):
            logits = torch.nn.functional.linear(x, weight)
            assert logits.dtype == torch.bfloat16
            loss = loss_of(logits, batch, SPECS[name], impl)
        assert loss.dtype == torch.float32
        return loss

    def plain(weight: Tensor) -> Tensor:
        return loss_of(
            torch.nn.functional.linear(x.bfloat16(), weight.bfloat16()), batch, SPECS[name], impl
        )

    torch.testing.assert_close(
        gradient_of(autocast, weight), gradient_of(plain, weight), rtol=0, atol=0
    )


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_of_two_losses_add_up_in_one_leaf(impl: str, inplace: bool) -> None:
    batch = random_batch(6, impl)
    x, shift = batch["logits_TV"], torch.linspace(0, 1, VOCAB, device=device_of(impl))
    first = gradient_of(lambda x: loss_of(1 * x, batch, SPECS["clip"], impl), x)[1]
    second = gradient_of(lambda x: loss_of(x + shift, batch, SPECS["all"], impl), x)[1]

    def both(x: Tensor) -> Tensor:
        return loss_of(1 * x, batch, SPECS["clip"], impl, inplace) - 2 * loss_of(
            x + shift, batch, SPECS["all"], impl, inplace
        )

    torch.testing.assert_close(gradient_of(both, x)[1], first - 2 * second)
    leaf = x.clone().requires_grad_()
    loss_of(1 * leaf, batch, SPECS["clip"], impl, inplace).backward()
    loss_of(leaf + shift, batch, SPECS["all"], impl, inplace).backward()
    torch.testing.assert_close(leaf.grad, first + second)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("impl", IMPLS)
def test_results_repeat_bit_for_bit_in_deterministic_mode(impl: str, name: str) -> None:
    """The mode also fills fresh memory with NaN, so that nothing is read before it is written."""
    batch = random_batch(20, impl)
    is_token_T = batch["advantage_T"] < -0.3
    batch["weight_T"] = batch["weight_T"] * is_token_T

    def run() -> list[Tensor]:
        leaf = batch["logits_TV"].clone().requires_grad_()
        out = policy_loss(**{**batch, "logits_TV": leaf}, spec=SPECS[name], impl=impl)
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


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("impl", IMPLS)
def test_in_place_gradient_uses_the_storage_of_the_logits(impl: str, name: str) -> None:
    batch, seen = random_batch(6, impl), []
    logits = batch["logits_TV"].requires_grad_() * 1
    storage = logits.data_ptr()
    logits.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    loss_of(logits, batch, SPECS[name], impl, inplace=True).backward()
    assert seen == [storage]


def peak_of(num: int, spec: LossSpec, inplace: bool) -> int:
    """The most that forward and backward have allocated at one time, on the CPU."""
    batch = random_batch(num, "torch", vocab=8192)
    leaf = batch["logits_TV"].requires_grad_()
    return peak_bytes(lambda: loss_of(leaf, batch, spec, "torch", inplace).backward())


@pytest.mark.parametrize("name", SPECS)
def test_in_place_needs_no_memory_that_grows_with_the_logits(name: str) -> None:
    """128 rows more cost 4 MiB of gradient, or nothing in place but a few numbers per row."""
    added = 128 * 8192 * 4
    assert peak_of(256, SPECS[name], True) - peak_of(128, SPECS[name], True) < 0.05 * added
    assert peak_of(256, SPECS[name], False) - peak_of(128, SPECS[name], False) > 0.95 * added
