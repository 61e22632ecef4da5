"""An argument that does not fit is refused with the argument's name, what it must be and what it
is; and nothing that is passed is changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flowkernels import (
    BranchingScore,
    LossSpec,
    SamplingMask,
    arguments,
    branch_points,
    branching_score,
    discounted_reverse_scan,
    logprobs,
    policy_loss,
    token_weights,
)
from flowkernels.implementations import resolve_impl
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
        "sampling_mask": SamplingMask(torch.tensor([0, 1, 2, 3, 2]), torch.tensor([0, 2, 4, 4, 5])),
    }


SPEC = LossSpec("gspo", dual_clip=3.0, kl_coef=0.1, entropy_coef=0.01, tis=2.0, mis=(0.1, 10.0))
FUSED = LossSpec(dual_clip=3.0, kl_coef=0.1, entropy_coef=0.01, tis=2.0, mis=(0.1, 10.0))
META = torch.device("meta")


def kept(
    ids: Any = (0, 1, 2, 3, 2), offsets: Any = (0, 2, 4, 4, 5), **options: Any
) -> SamplingMask:
    return SamplingMask(
        torch.tensor(ids, **{"dtype": torch.int64, **options}), torch.tensor(offsets, **options)
    )


LOGITS = {
    "logits-1d": (
        {"logits_TV": torch.zeros(NUM)},
        "logits_TV",
        "float32, bfloat16, float16 or float64 [T, V]",
        "(4,)",
    ),
    "logits-float64": (
        {"logits_TV": torch.zeros(NUM, VOCAB, dtype=torch.float64), "impl": "triton"},
        "impl='triton'",
        "logits of float32, bfloat16 or float16",
        "float64",
    ),
    "logits-int": (
        {"logits_TV": torch.zeros(NUM, VOCAB, dtype=torch.int64)},
        "logits_TV",
        "float32, bfloat16, float16 or float64",
        "int64",
    ),
    "no-vocabulary": ({"logits_TV": torch.zeros(NUM, 0)}, "logits_TV", "V > 0", "(4, 0)"),
    "logits-transposed": (
        {"logits_TV": torch.zeros(VOCAB, NUM).T},
        "logits_TV",
        "stride 1",
        "(1, 4)",
    ),
    "logits-elsewhere": (
        {"logits_TV": torch.zeros(NUM, VOCAB, device=META)},
        "target_ids_T",
        "on meta",
        "got cpu",
    ),
    "targets-int16": (
        {"target_ids_T": torch.zeros(NUM, dtype=torch.int16)},
        "target_ids_T",
        "int64 [4] (or int32)",
        "int16",
    ),
    "targets-short": (
        {"target_ids_T": torch.zeros(3, dtype=torch.int64)},
        "target_ids_T",
        "int64 [4]",
        "(3,)",
    ),
    "targets-elsewhere": (
        {"target_ids_T": torch.zeros(NUM, dtype=torch.int64, device=META)},
        "target_ids_T",
        "on cpu",
        "meta",
    ),
    "target-above": (
        {"target_ids_T": torch.tensor([0, 1, VOCAB, 2])},
        "target_ids_T",
        "below V=6",
        "got 6",
    ),
    "temperature-0": ({"temperature": 0.0}, "temperature", "above 0", "=0.0"),
    "temperature-nan": ({"temperature": math.nan}, "temperature", "above 0", "=nan"),
    "temperature-inf": ({"temperature": math.inf}, "temperature", "finite", "=inf"),
    "temperatures-int64": (
        {"temperature": torch.ones(NUM, dtype=torch.int64)},
        "temperature",
        "float32 [4]",
        "int64",
    ),
    "temperatures-short": ({"temperature": torch.ones(3)}, "temperature", "float32 [4]", "(3,)"),
    "temperatures-0": (
        {"temperature": torch.tensor([1.0, 0.0, 1.0, 1.0])},
        "temperature",
        "above 0",
        "got 0.0",
    ),
    "temperatures-nan": (
        {"temperature": torch.tensor([1.0, math.nan, 1.0, 1.0])},
        "temperature",
        "above 0",
        "got nan",
    ),
    "temperatures-elsewhere": (
        {"temperature": torch.ones(NUM, device=META)},
        "temperature",
        "on cpu",
        "got meta",
    ),
    "softcap-0": ({"softcap": 0.0}, "softcap", "above 0", "=0.0"),
    "softcap-inf": ({"softcap": math.inf}, "softcap", "finite", "=inf"),
    "softcap-nan": ({"softcap": math.nan}, "softcap", "above 0", "=nan"),
    "kept-int32": (
        {"sampling_mask": kept(dtype=torch.int32)},
        "sampling_mask.token_ids_K",
        "int64 [n]",
        "int32",
    ),
    "kept-2d": (
        {"sampling_mask": SamplingMask(torch.zeros(5, 1, dtype=torch.int64), kept().offsets_T1)},
        "sampling_mask.token_ids_K",
        "int64 [n]",
        "(5, 1)",
    ),
    "kept-strided": (
        {"sampling_mask": SamplingMask(torch.arange(5), torch.zeros(10, dtype=torch.int64)[::2])},
        "sampling_mask.offsets_T1",
        "contiguous",
        "(5,)",
    ),
    "kept-elsewhere": (
        {"sampling_mask": kept(device=META)},
        "sampling_mask.token_ids_K",
        "on cpu",
        "got meta",
    ),
    "kept-offsets-elsewhere": (
        {"sampling_mask": SamplingMask(kept().token_ids_K, kept().offsets_T1.to(META))},
        "sampling_mask.offsets_T1",
        "on cpu",
        "got meta",
    ),
    "kept-offsets-short": (
        {"sampling_mask": kept(offsets=(0, 2, 4, 5))},
        "sampling_mask.offsets_T1",
        "T + 1 = 5",
        "got 4",
    ),
    "kept-offsets-descend": (
        {"sampling_mask": kept(offsets=(0, 4, 2, 4, 5))},
        "sampling_mask.offsets_T1",
        "ascend from 0 to the 5",
        "[0, 4, 2, 4, 5]",
    ),
    "kept-offsets-from-1": (
        {"sampling_mask": kept(offsets=(1, 2, 4, 4, 5))},
        "sampling_mask.offsets_T1",
        "ascend from 0 to the 5",
        "[1, 2, 4, 4, 5]",
    ),
    "kept-offsets-end": (
        {"sampling_mask": kept(offsets=(0, 2, 4, 4, 6))},
        "sampling_mask.offsets_T1",
        "ascend from 0 to the 5",
        "[0, 2, 4, 4, 6]",
    ),
    "kept-id-above": (
        {"sampling_mask": kept(ids=(0, 1, 2, 6, 2))},
        "sampling_mask.token_ids_K",
        "[0, V=6)",
        "0 to 6",
    ),
    "kept-id-negative": (
        {"sampling_mask": kept(ids=(0, 1, -1, 3, 2))},
        "sampling_mask.token_ids_K",
        "[0, V=6)",
        "-1 to 3",
    ),
    "kept-id-twice": (
        {"sampling_mask": kept(ids=(0, 1, 3, 3, 2))},
        "sampling_mask.token_ids_K",
        "must not",
        "twice",
    ),
    "impl": ({"impl": "cuda"}, "impl", "'auto', 'triton', 'torch'", "='cuda'"),
}
TOKENS = {
    f"{name}-{what}": ({name: value}, name, wanted, given)
    for name in ("advantage_T", "weight_T", "old_logprob_T", "ref_logprob_T", "sampler_logprob_T")
    for what, value, wanted, given in (
        ("complex", torch.zeros(NUM, dtype=torch.complex64), "float32 [4]", "complex64"),
        ("long", torch.zeros(5), "float32 [4]", "(5,)"),
        ("0d", torch.tensor(1.0), "float32 [4]", "()"),
        ("elsewhere", torch.zeros(NUM, device=META), "on cpu", "got meta"),
    )
} | {
    f"{name}-{dtype}": (
        {name: torch.zeros(NUM, dtype=dtype)},
        name,
        "float32 [4] (or ",
        str(dtype).removeprefix("torch."),
    )
    for name, dtype in (
        ("advantage_T", torch.int64),
        ("old_logprob_T", torch.bfloat16),
        ("ref_logprob_T", torch.float16),
        ("sampler_logprob_T", torch.bool),
    )
}


def bad_bounds(num: int) -> dict[str, tuple[dict[str, Tensor], str, str, str]]:
    name = "cu_seqlens_S1"
    return {
        "bounds-2d": ({name: torch.tensor([[0, num]])}, name, "int32 or int64 [S + 1]", "(1, 2)"),
        "bounds-float": (
            {name: torch.tensor([0.0, num])},
            name,
            "int32 or int64 [S + 1]",
            "float32",
        ),
        "bounds-none": ({name: torch.zeros(0, dtype=torch.int64)}, name, "[S + 1]", "(0,)"),
        "bounds-descend": (
            {name: torch.tensor([0, 3, 2, num])},
            name,
            f"ascend from 0 to the {num}",
            f"[0, 3, 2, {num}]",
        ),
        "bounds-end": (
            {name: torch.tensor([0, num + 1])},
            name,
            f"ascend from 0 to the {num}",
            f"[0, {num + 1}]",
        ),
        "bounds-from-1": (
            {name: torch.tensor([1, num])},
            name,
            f"ascend from 0 to the {num}",
            f"[1, {num}]",
        ),
        "bounds-many": (
            {name: torch.zeros(20, dtype=torch.int64)},
            name,
            f"ascend from 0 to the {num}",
            "[0, 0, 0, 0, …, 0]",
        ),
        "bounds-elsewhere": (
            {name: torch.tensor([0, num], device=META)},
            name,
            "on cpu",
            "got meta",
        ),
    }


MISSING = {
    "no-ref": ({"ref_logprob_T": None}, "ref_logprob_T", "needs", "kl_coef=0.1"),
    "no-sampler": (
        {"sampler_logprob_T": None, "spec": LossSpec(tis=2.0)},
        "sampler_logprob_T",
        "need",
        "tis=2.0",
    ),
    "no-sampler-mis": (
        {"sampler_logprob_T": None, "spec": LossSpec(mis=(0.5, 2.0))},
        "sampler_logprob_T",
        "need",
        "mis=(0.5, 2.0)",
    ),
    "no-old-tis": (
        {"old_logprob_T": None, "spec": LossSpec("nll", tis=2.0)},
        "old_logprob_T",
        "need",
        "tis=2.0",
    ),
    "no-bounds": ({"cu_seqlens_S1": None}, "cu_seqlens_S1", "needs", "loss_type='gspo'"),
    "no-bounds-level": (
        {"cu_seqlens_S1": None, "spec": LossSpec(tis=2.0, correction_level="sequence")},
        "cu_seqlens_S1",
        "needs",
        "correction_level='sequence'",
    ),
}
LOSS = {**LOGITS, **TOKENS, **bad_bounds(NUM), **MISSING}


def refused(function: Callable[..., Any], arguments_: Batch, needles: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        function(**arguments_)
    message = str(error.value)
    assert all(needle in message for needle in needles), message


@pytest.mark.parametrize("case", LOSS)
def test_policy_loss_refuses_wrong_arguments_before_it_writes(case: str) -> None:
    change, *needles = LOSS[case]
    batch = full_batch()
    logits = batch["logits_TV"].clone().requires_grad_()
    refused(
        policy_loss,
        {**batch, "logits_TV": logits, "spec": SPEC, "inplace": True, **change},
        tuple(needles),
    )
    assert torch.equal(logits, batch["logits_TV"])


@pytest.mark.parametrize("case", LOGITS)
def test_logprobs_refuse_what_does_not_fit(case: str) -> None:
    change, *needles = LOGITS[case]
    batch = {
        name: full_batch()[name]
        for name in ("logits_TV", "target_ids_T", "temperature", "softcap", "sampling_mask")
    }
    refused(logprobs, {**batch, **change}, tuple(needles))


SCAN = {
    "x-2d": ({"x_T": torch.zeros(4, 1)}, "x_T", "float32 [T]", "(4, 1)"),
    "x-float64": ({"x_T": torch.zeros(4, dtype=torch.float64)}, "x_T", "float32 [T]", "float64"),
    "gamma-negative": ({"gamma": -0.1}, "gamma", "[0, 1]", "=-0.1"),
    "gamma-above-1": ({"gamma": 1.01}, "gamma", "[0, 1]", "=1.01"),
    "gamma-nan": ({"gamma": math.nan}, "gamma", "[0, 1]", "=nan"),
    "mask-float": ({"mask_T": torch.ones(4)}, "mask_T", "bool [4]", "float32"),
    "mask-short": ({"mask_T": torch.ones(3, dtype=torch.bool)}, "mask_T", "bool [4]", "(3,)"),
    "mask-elsewhere": (
        {"mask_T": torch.ones(4, dtype=torch.bool, device=META)},
        "mask_T",
        "on cpu",
        "got meta",
    ),
    "impl": ({"impl": "numpy"}, "impl", "'auto', 'triton', 'torch'", "='numpy'"),
    **bad_bounds(4),
}
SCORE = {
    **{case: value for case, value in SCAN.items() if not case.startswith("x-")},
    "logprob-2d": ({"logprob_T": torch.zeros(4, 1)}, "logprob_T", "float32 [T]", "(4, 1)"),
    "old-short": ({"old_logprob_T": torch.zeros(3)}, "old_logprob_T", "float32 [4]", "(3,)"),
    "old-elsewhere": (
        {"old_logprob_T": torch.zeros(4, device=META)},
        "old_logprob_T",
        "on cpu",
        "got meta",
    ),
    "entropy-float16": (
        {"entropy_T": torch.zeros(4, dtype=torch.float16)},
        "entropy_T",
        "float32 [4]",
        "float16",
    ),
    "clip-0": ({"clip": 0.0}, "clip", "(0, 1)", "=0.0"),
    "clip-1": ({"clip": 1.0}, "clip", "(0, 1)", "=1.0"),
    "clip-nan": ({"clip": math.nan}, "clip", "(0, 1)", "=nan"),
}
POINTS = {
    **bad_bounds(4),
    "num-points": ({"num_points": -1}, "num_points", ">= 0", "=-1"),
    "spacing": ({"spacing": -2}, "spacing", ">= 0", "=-2"),
    "mask": ({"mask_T": torch.ones(5, dtype=torch.bool)}, "mask_T", "bool [4]", "(5,)"),
    "allowed": ({"allowed_T": torch.ones(4, dtype=torch.int64)}, "allowed_T", "bool [4]", "int64"),
}
WEIGHTS = {
    **{case: value for case, value in bad_bounds(4).items() if case != "bounds-elsewhere"},
    "averaging": (
        {"averaging": "mean"},
        "averaging",
        "'token', 'sequence' or 'constant'",
        "='mean'",
    ),
    "length-missing": ({"averaging": "constant"}, "length", ">= 1", "None"),
    "length-0": ({"averaging": "constant", "length": 0}, "length", ">= 1", "=0"),
    "length-unused": ({"averaging": "token", "length": 7}, "length", "None for the others", "=7"),
    "mask": ({"mask_T": torch.ones(4)}, "mask_T", "bool [4]", "float32"),
}
BOUNDS = torch.tensor([0, 1, 4])
OTHERS: dict[str, tuple[Callable[..., Any], Batch, dict[str, Any]]] = {
    "scan": (
        discounted_reverse_scan,
        {"x_T": torch.ones(4), "cu_seqlens_S1": BOUNDS, "gamma": 0.5},
        SCAN,
    ),
    "score": (
        branching_score,
        {
            "logprob_T": torch.ones(4),
            "old_logprob_T": torch.ones(4),
            "entropy_T": torch.ones(4),
            "cu_seqlens_S1": BOUNDS,
        },
        SCORE,
    ),
    "points": (
        branch_points,
        {
            "scores": BranchingScore(torch.ones(4), torch.ones(4), torch.ones(4, dtype=torch.bool)),
            "cu_seqlens_S1": BOUNDS,
            "num_points": 2,
        },
        POINTS,
    ),
    "weights": (
        token_weights,
        {"cu_seqlens_S1": BOUNDS, "num_tokens": 4, "averaging": "token"},
        WEIGHTS,
    ),
}


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, (_, _, cases) in OTHERS.items() for case in cases]
)
def test_the_other_functions_refuse_what_does_not_fit(name: str, case: str) -> None:
    function, right, cases = OTHERS[name]
    function(**right)
    change, *needles = cases[case]
    refused(function, {**right, **change}, tuple(needles))


def test_triton_on_the_cpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    batch = full_batch()
    needles = ("impl='triton'", "on a GPU", "got cpu", "TRITON_INTERPRET=1")
    refused(policy_loss, {**batch, "spec": SPEC, "impl": "triton"}, needles)
    refused(
        logprobs,
        {"logits_TV": batch["logits_TV"], "target_ids_T": batch["target_ids_T"], "impl": "triton"},
        needles,
    )
    for name in ("scan", "score"):
        function, right, _ = OTHERS[name]
        refused(function, {**right, "impl": "triton"}, needles)
    policy_loss(**batch, spec=SPEC, impl="torch")


def test_auto_is_triton_on_a_gpu_and_torch_on_the_cpu() -> None:
    assert resolve_impl("auto", torch.device("cuda", 0)) == "triton"
    assert resolve_impl("auto", torch.device("cuda", 0), torch.float64) == "torch"
    assert resolve_impl("auto", torch.device("cpu")) == "torch"


def test_values_are_checked_on_the_cpu_and_on_a_gpu_that_is_debugged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading a value of a GPU waits for it."""
    monkeypatch.delenv("FLOWKERNELS_DEBUG", raising=False)
    assert arguments.checks_values(torch.device("cpu")) and not arguments.checks_values(
        torch.device("cuda")
    )
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


@pytest.mark.parametrize("impl", IMPLS)
def test_an_empty_batch_works(impl: str) -> None:
    none = torch.zeros(1, dtype=torch.int64)
    empty = {
        **{name: x[:0] if isinstance(x, Tensor) else x for name, x in full_batch().items()},
        "cu_seqlens_S1": none,
        "sampling_mask": SamplingMask(none[:0], none),
    }
    empty = on_device(empty, impl)
    for spec in (SPEC, FUSED):
        assert policy_loss(**empty, spec=spec, impl=impl).loss == 0
    assert logprobs(
        empty["logits_TV"], empty["target_ids_T"], sampling_mask=empty["sampling_mask"], impl=impl
    ).logprob_T.shape == (0,)


def guarded(batch: Batch) -> Tensor:
    """Puts the logits into the middle of a larger tensor, of 7s, so that a write beyond them can be
    seen.
    """
    around = torch.full((NUM + 2, VOCAB + 10), 7.0, device=batch["logits_TV"].device)
    around[1:-1, :VOCAB] = batch["logits_TV"]
    batch["logits_TV"] = around[1:-1, :VOCAB].requires_grad_()
    return around


def assert_guard_holds(around: Tensor) -> None:
    values = around.detach().clone()
    values[1:-1, :VOCAB] = 7.0
    assert (values == 7).all(), "written outside of the logits"


@pytest.mark.parametrize("target", [VOCAB, VOCAB + 3, 2**32 + 1, 2**62])
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


@pytest.mark.parametrize("bad", [-1, VOCAB, VOCAB + 3, 2**40, -(2**40)])
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
