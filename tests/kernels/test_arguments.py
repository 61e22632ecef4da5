"""An argument that does not fit is refused by name (`refusals.toml`), and none is changed."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flowkernels
import pytest
import torch
from flowkernels import (
    BranchingScore,
    FutureRatio,
    LossSpec,
    SamplingMask,
    arguments,
    branch_points,
    branching_score,
    layers_triton,
    logprobs,
    policy_loss,
    rows_triton,
)
from flowkernels.implementations import resolve_impl, warps
from kernel_truth import IMPLS, Batch, on_device
from torch import Tensor

NUM, VOCAB = 4, 6


def full_batch() -> Batch:
    """Every argument of `policy_loss` there is, all of them right."""
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(5, NUM, generator=rng)
    return {
        "logits_TV": torch.randn(NUM, VOCAB, generator=rng),
        "target_ids_T": torch.tensor([0, 5, -1, 2]),
        "advantage_T": noise[0],
        "weight_T": noise[1].abs(),
        "old_logprob_T": noise[2] - 2,
        "ref_logprob_T": noise[3] - 2,
        "sampler_logprob_T": noise[4] - 2,
        "cu_seqlens_S1": torch.tensor([0, 1, NUM]),
        "temperature": torch.tensor([0.5, 1.0, 1.5, 2.0]),
        "softcap": 20.0,
        "sampling_mask": kept(),
    }


SPEC = LossSpec("gspo", dual_clip=3.0, kl_coef=0.1, entropy_coef=0.01, tis=2.0, mis=(0.1, 10.0))
FUSED = LossSpec(dual_clip=3.0, kl_coef=0.1, entropy_coef=0.01, tis=2.0, mis=(0.1, 10.0))


def kept(
    ids: Any = (0, 1, 2, 3, 2), offsets: Any = (0, 2, 4, 4, 5), **options: Any
) -> SamplingMask:
    options = {"dtype": torch.int64, **options}
    return SamplingMask(torch.tensor(ids, **options), torch.tensor(offsets, **options))


def head(dtype: torch.dtype = torch.float32) -> Batch:
    shapes = {"hidden_TD": (NUM, 3), "weight_VD": (VOCAB, 3), "bias_V": (VOCAB,)}
    return {name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()}


def right_arguments() -> dict[str, Batch]:
    """Of every function of refusals.toml."""
    ones, words = torch.ones(NUM), torch.zeros(100).bfloat16()
    loss = full_batch()
    of_rows = ("target_ids_T", "temperature", "softcap", "sampling_mask")
    rows = {name: loss[name] for name in of_rows}
    logits = loss.pop("logits_TV")
    bounds = {"cu_seqlens_S1": loss["cu_seqlens_S1"]}
    short = torch.tensor([3, 7], dtype=torch.int16)
    old = {"old_logprob_T": ones, "sampler_logprob_T": ones}
    scores = BranchingScore(ones, ones, ones.bool())
    states, norm = torch.zeros(2, NUM), torch.zeros(1, 1, 2, NUM)
    return {
        "policy_loss": {**loss, "logits_TV": logits, "spec": SPEC, "inplace": True},
        "linear_policy_loss": {**loss, **head(), "spec": SPEC},
        "logprobs": {**rows, "logits_TV": logits},
        "linear_logprobs": {**rows, **head()},
        "discounted_reverse_scan": {**bounds, "x_T": ones, "gamma": 0.5},
        "branching_score": {**bounds, "logprob_T": ones, "old_logprob_T": ones, "entropy_T": ones},
        "branch_points": {**bounds, "scores": scores, "num_points": 2},
        "token_weights": {**bounds, "num_tokens": NUM, "averaging": "token"},
        "correct_for_sampler": {**old, "spec": LossSpec(), "advantage_T": ones, "weight_T": ones},
        "FutureRatio": {},
        "future_aware": {"spec": LossSpec(), "future": FutureRatio()},
        "rms_norm": {"hidden": states, "weight_D": states[0], "eps": 1e-5},
        "rotary": {
            "query_BHND": norm,
            "key_BHND": norm,
            "cos_BNR": states[None],
            "sin_BNR": states[None],
        },
        "swiglu": {"gate": states, "up": states},
        "diff_words": {"old": words, "new": words},
        "diff_pieces": {"olds": [words], "new_of": lambda _: words, "firsts": [0]},
        "digest_words": {"words": words},
        "digest_at": {"words": words.view(torch.int16), "index": torch.arange(100)},
        "scatter_words_": {
            "words": words,
            "counts": torch.tensor([2], dtype=torch.int32),
            "positions": short,
            "diffs": short,
        },
    }


RIGHT = right_arguments()
NAMES = {**vars(torch), **vars(flowkernels), **vars(math), "kept": kept, "head": head}
TABLE = tomllib.loads((Path(__file__).parent / "refusals.toml").read_text())
REFUSED = [
    (function, change, message)
    for functions, rows in TABLE.items()
    for function in functions.split()
    for change, message in rows.items()
]


def function_of(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(flowkernels, name)
    return function


def refused(function: Callable[..., Any], given: Batch, *parts: str) -> None:
    """The parts of a message stand in it in this order."""
    with pytest.raises(ValueError) as error:
        function(**given)
    message = begin = str(error.value)
    for part in parts:
        _, found, begin = begin.partition(part)
        assert found, f"no {part!r} at its place in {message!r}"


@pytest.mark.parametrize("name", RIGHT)
def test_what_fits_is_taken(name: str) -> None:
    """Or the table below would show nothing."""
    assert any(function == name for function, _, _ in REFUSED)
    function_of(name)(**{x: copied(value) for x, value in RIGHT[name].items()})


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    name: str, change: str, message: str
) -> None:
    given = {x: copied(value) for x, value in RIGHT[name].items()}
    if name == "policy_loss":
        given["logits_TV"].requires_grad_()
    refused(function_of(name), given | eval(f"dict({change})", NAMES), *message.split(" … "))
    for x, value in RIGHT[name].items():
        assert not isinstance(value, Tensor) or torch.equal(given[x], value)


def test_triton_on_the_cpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    batch = full_batch()
    parts = ("impl='triton'", "on a GPU", "got cpu", "TRITON_INTERPRET=1")
    for name in ("policy_loss", "logprobs", "discounted_reverse_scan", "branching_score"):
        refused(function_of(name), {**RIGHT[name], "impl": "triton"}, *parts)
    policy_loss(**batch, spec=SPEC, impl="torch")


def test_auto_is_triton_on_a_gpu_and_torch_on_the_cpu() -> None:
    assert resolve_impl("auto", torch.device("cuda", 0)) == "triton"
    assert resolve_impl("auto", torch.device("cuda", 0), torch.float64) == "torch"
    assert resolve_impl("auto", torch.device("cpu")) == "torch"


@pytest.mark.parametrize(("hip", "width"), [(None, 32), ("6.4", 64)])
def test_programs_have_as_many_threads_wherever_they_run(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, width: int
) -> None:
    """A warp is twice as wide on AMD; more than 1024 threads start nowhere."""
    monkeypatch.setattr(torch.version, "hip", hip)
    assert [width * warps(num) for num in (128, 512, 1024)] == [128, 512, 1024] and warps(32) == 1
    for num_warps in (4, 8, 16, 32):
        options = rows_triton.Launch(num_warps).options(2)
        assert options["num_warps"] * width == options["LANES"] == 32 * num_warps
        assert ("maxnreg" in options) == (hip is None)
    assert layers_triton.norm_launch(2**16)["num_warps"] * width == 1024
    assert layers_triton.rotary_launch(64, 8, 128)["num_warps"] * width == 256


def test_values_are_checked_on_the_cpu_and_on_a_gpu_that_is_debugged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading a value of a GPU waits for it."""
    monkeypatch.delenv("FLOWKERNELS_DEBUG", raising=False)
    assert arguments.checks_values(torch.device("cpu"))
    assert not arguments.checks_values(torch.device("cuda"))
    monkeypatch.setenv("FLOWKERNELS_DEBUG", "1")
    assert arguments.checks_values(torch.device("cuda"))


@pytest.mark.parametrize("spec", [SPEC, FUSED], ids=["gspo", "clip"])
@pytest.mark.parametrize("impl", IMPLS)
def test_inputs_are_left_as_they_are(impl: str, spec: LossSpec) -> None:
    batch = on_device(full_batch(), impl)
    batch["logits_TV"].requires_grad_()
    tensors = [x for x in batch.values() if isinstance(x, Tensor)] + [
        batch["sampling_mask"].token_ids_K,
        batch["sampling_mask"].offsets_T1,
    ]
    before = [x.detach().clone() for x in tensors]
    out = policy_loss(**batch, spec=spec, impl=impl)
    (out.loss * 2).backward()
    rows = {
        name: batch[name]
        for name in ("logits_TV", "target_ids_T", "temperature", "softcap", "sampling_mask")
    }
    logprobs(**rows, differentiable=True, impl=impl).logprob_T.sum().backward()
    mask_T = batch["target_ids_T"] >= 0
    score = branching_score(
        out.logprob_T,
        batch["old_logprob_T"],
        out.entropy_T,
        batch["cu_seqlens_S1"],
        mask_T=mask_T,
        impl=impl,
    )
    kept_score = [x.clone() for x in (score.score_T, score.omega_T, score.is_candidate_T)]
    branch_points(score, batch["cu_seqlens_S1"], num_points=2, mask_T=mask_T, allowed_T=mask_T)
    assert all(torch.equal(x.detach(), was) for x, was in zip(tensors, before, strict=True))
    assert all(
        torch.equal(x, y)
        for x, y in zip(
            (score.score_T, score.omega_T, score.is_candidate_T), kept_score, strict=True
        )
    )


def guarded(batch: Batch) -> Tensor:
    """Puts the logits amid a larger tensor of 7s, so that a write beyond them is seen."""
    around = torch.full((NUM + 2, VOCAB + 10), 7.0, device=batch["logits_TV"].device)
    around[1:-1, :VOCAB] = batch["logits_TV"]
    batch["logits_TV"] = around[1:-1, :VOCAB].requires_grad_()
    return around


def assert_guard_holds(around: Tensor) -> None:
    values = around.detach().clone()
    values[1:-1, :VOCAB] = 7.0
    assert (values == 7).all(), "written outside of the logits"


@pytest.mark.parametrize("target", [VOCAB, 2**32 + 1, 2**62])
@pytest.mark.parametrize("spec", [SPEC, FUSED], ids=["gspo", "clip"])
@pytest.mark.parametrize("impl", IMPLS)
def test_unchecked_target_outside_the_vocabulary_gives_nan_and_writes_nowhere_else(
    impl: str, spec: LossSpec, target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "checks_values", lambda device: False)
    for mask_of in (None, full_batch()["sampling_mask"]):
        batch = {
            **full_batch(),
            "sampling_mask": mask_of,
            "target_ids_T": torch.tensor([0, target, -1, 2]),
        }
        batch = on_device(batch, impl)
        around = guarded(batch)
        scored = logprobs(
            batch["logits_TV"],
            batch["target_ids_T"],
            sampling_mask=batch["sampling_mask"],
            impl=impl,
        )
        assert scored.logprob_T.isnan().tolist() == [False, True, False, False]
        out = policy_loss(**batch, spec=spec, inplace=True, impl=impl)
        out.loss.backward()
        assert out.loss.isnan() and out.logprob_T.isnan().tolist() == [False, True, False, False]
        gradient = around.detach()[1:-1, :VOCAB]
        assert (gradient[2] == 0).all()
        assert spec.loss_type == "gspo" or gradient[[0, 3]].isfinite().all()
        assert_guard_holds(around)


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**40])
@pytest.mark.parametrize("spec", [SPEC, FUSED], ids=["gspo", "clip"])
def test_unchecked_mask_id_outside_the_vocabulary_gives_nan_and_writes_nowhere_else(
    spec: LossSpec, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the kernels; torch raises an error of its own."""
    monkeypatch.setattr(arguments, "checks_values", lambda device: False)
    batch = {**full_batch(), "sampling_mask": kept(ids=(0, 1, 2, bad, 2))}
    batch = on_device(batch, "triton")
    around = guarded(batch)
    out = policy_loss(**batch, spec=spec, inplace=True, impl="triton")
    assert out.loss.isnan() and out.logprob_T.isnan().tolist() == [False, True, False, False]
    assert_guard_holds(around)
