"""A head spread over two ranks gives what the head in one piece gives. Run as a script this file is
a rank; the tests compare what the ranks wrote.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from flowkernels import LossSpec, VocabParallel, arguments, linear_logprobs, linear_policy_loss
from kernel_truth import Batch, counted, on_device
from test_linear_loss import HEAD, head_batch, head_truth, temperatures
from torch import Tensor

pytestmark = pytest.mark.dist

VOCAB, DIM, NUM_TOKENS = 101, 12, 23
PARTS = [slice(0, 60), slice(60, VOCAB)]
"""Ids of each rank."""
HALVES = [slice(0, 50), slice(50, VOCAB)]
"""The parts for several chunks, so that one budget holds as many rows on either rank."""
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    spec: LossSpec
    num_tokens: int = NUM_TOKENS
    dtype: torch.dtype = torch.float32
    impl: str = "torch"
    chunk: int | None = None
    """Rows of the larger half that the budget holds."""
    needs: tuple[str, ...] = HEAD
    scale: float = 1.0
    kind: str = ""
    """Keys of the batch that differ from the default."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def parts(self) -> list[slice]:
        return PARTS if self.chunk is None else HALVES

    def batch(self) -> Batch:
        temperature = self.options.get("temperature", 1.0)
        batch = head_batch(self.num_tokens, DIM, VOCAB, temperature, self.dtype)
        if self.kind == "long":
            bounds = [0, 0, 2, 4, 15, 15, 17, self.num_tokens]
            batch["cu_seqlens_S1"] = torch.tensor(bounds)
        if self.kind == "masked":  # the second rank has no probability at all
            batch["bias_V"][PARTS[1]] = -torch.inf
            batch["target_ids_T"] = torch.where(
                batch["target_ids_T"] < 0, -1, batch["target_ids_T"] % 60
            )
        if self.kind == "beyond":
            batch["target_ids_T"][1], batch["target_ids_T"][6], batch["target_ids_T"][9] = (
                VOCAB,
                VOCAB + 60,
                5 * VOCAB,
            )
            batch["weight_T"][[1, 6, 9]] = 1.0
        return batch


CLIP = LossSpec(clip_low=0.2, clip_high=0.3)
GSPO = LossSpec("gspo", clip_low=0.1, clip_high=0.05)
BONUS = LossSpec(entropy_coef=0.3)
DUAL = LossSpec(dual_clip=1.5, kl="k3", kl_coef=0.4)
GSPO_ALL = LossSpec("gspo", kl_coef=0.2, entropy_coef=0.1, tis=2.0, mis=(0.5, 2.5))
WARM = {"temperature": temperatures(NUM_TOKENS), "softcap": 6.0}
CASES = {
    "clip": Case(CLIP),
    "gspo": Case(GSPO),
    "entropy": Case(BONUS),
    "dual-k3": Case(DUAL),
    "gspo-all": Case(GSPO_ALL, options=WARM),
    "cispo": Case(LossSpec("cispo", clip_high=0.1, entropy_coef=0.1), options={"temperature": 0.6}),
    "nll": Case(LossSpec("nll"), options={"softcap": 4.0}, scale=-0.37),
    "all-rows": Case(BONUS, options={**WARM, "compact": False}),
    "chunks": Case(DUAL, chunk=5, options=WARM),
    "chunks-of-all-rows": Case(BONUS, chunk=5, options={"compact": False}),
    "small-chunks": Case(BONUS, chunk=2),
    "gspo-chunks": Case(GSPO_ALL, chunk=5, kind="long", options=WARM),
    "frozen": Case(BONUS, chunk=5, needs=("hidden_TD",)),
    "given-hidden": Case(DUAL, needs=("weight_VD", "bias_V")),
    "fp64": Case(LossSpec("nll", entropy_coef=0.1), dtype=torch.float64),
    "masked": Case(DUAL, kind="masked"),
    "masked-entropy": Case(GSPO_ALL, kind="masked"),
    "triton": Case(
        DUAL, 11, impl="triton", chunk=4, options={"temperature": temperatures(11), "softcap": 6.0}
    ),
    "triton-gspo": Case(LossSpec("gspo", entropy_coef=0.3), 11, impl="triton"),
    "triton-masked": Case(BONUS, 11, impl="triton", kind="masked"),
}
BF16 = {
    "bf16-clip": Case(CLIP, dtype=torch.bfloat16),
    "bf16-gspo": Case(GSPO_ALL, dtype=torch.bfloat16, options=WARM),
    "bf16-entropy": Case(BONUS, dtype=torch.bfloat16, chunk=5),
    "bf16-fp32-logits": Case(DUAL, dtype=torch.bfloat16, options={"fp32_logits": True}),
    "bf16-triton": Case(BONUS, 11, dtype=torch.bfloat16, impl="triton"),
}
BEYOND = {
    "beyond": Case(CLIP, kind="beyond"),
    "triton-beyond": Case(CLIP, 11, impl="triton", kind="beyond"),
}
EMPTY = {"empty": Case(BONUS, 0)}


def take(case: Case, part: slice, group: Any = None) -> Results:
    """Loss, statistics, scores, gradients and the sizes of collectives; of the whole head without a
    group.
    """
    calls: list[int] = []
    all_reduce = dist.all_reduce

    def counting(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        calls.append(tensor.numel())
        return all_reduce(tensor, *arguments, **options)

    batch = (
        case.batch()
        if case.num_tokens
        else {k: v if k in HEAD[1:] else v[:0] for k, v in head_batch(6, DIM, VOCAB).items()}
    )
    batch |= {"weight_VD": batch["weight_VD"][part], "bias_V": batch["bias_V"][part]}
    moved = on_device({**batch, **case.options}, case.impl)
    leaves = {name: moved[name].clone().requires_grad_(name in case.needs) for name in HEAD}
    budget = None if case.chunk is None else case.chunk * 51 * case.dtype.itemsize + 12
    moved |= {"memory_budget": budget, "impl": case.impl, **leaves}
    if case.num_tokens == 0:
        moved["cu_seqlens_S1"] = None
    if group is not None:
        moved["shard"] = VocabParallel(group, part.start, VOCAB)
    dist.all_reduce = counting
    out = linear_policy_loss(**moved, spec=case.spec)
    num_forward = len(calls)
    (out.loss * case.scale).backward()
    num_all = len(calls)
    names = (
        *HEAD,
        "target_ids_T",
        "temperature",
        "softcap",
        "fp32_logits",
        "memory_budget",
        "impl",
        "shard",
    )
    scores = linear_logprobs(**{name: moved[name] for name in names if name in moved})
    dist.all_reduce = all_reduce
    results = {f"grad.{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    results |= {"loss": out.loss, "logprob": out.logprob_T, "entropy": out.entropy_T}
    results |= {"scores": torch.stack([scores.logprob_T, scores.entropy_T, scores.lse_T])}
    sizes = {
        "forward": calls[:num_forward],
        "backward": calls[num_forward:num_all],
        "scores": calls[num_all:],
    }
    results |= {f"stats.{name}": value for name, value in out.stats.items()}
    return {name: value.detach().cpu() for name, value in results.items()} | {
        f"calls.{k}": torch.tensor(v) for k, v in sizes.items()
    }


def take_with_buffer(part: slice, group: Any) -> Results:
    """The gradient of this rank's part of the weight, added to a buffer of ones."""
    case = CASES["chunks"]
    batch = case.batch()
    head = {name: batch[name] if name == "hidden_TD" else batch[name][part] for name in HEAD}
    leaves = {name: value.clone().requires_grad_() for name, value in head.items()}
    total = torch.ones(len(leaves["bias_V"]), DIM)
    shard = VocabParallel(group, part.start, VOCAB)
    linear_policy_loss(
        **{**batch, **case.options, **leaves}, spec=case.spec, shard=shard, weight_grad_VD=total
    ).loss.backward()
    assert leaves["weight_VD"].grad is None
    return {
        "grad.weight_VD": total,
        **{f"grad.{name}": leaves[name].grad for name in ("hidden_TD", "bias_V")},
    }


def take_equal_budgets(part: slice, group: Any) -> Results:
    """Every rank with a budget of 300 numbers, which are five rows here and seven there."""
    case = CASES["clip"]
    batch = case.batch()
    batch |= {name: batch[name][part] for name in ("weight_VD", "bias_V")}
    leaves = {name: batch[name].clone().requires_grad_() for name in HEAD}
    shard = VocabParallel(group, part.start, VOCAB)
    out = linear_policy_loss(**{**batch, **leaves}, spec=case.spec, shard=shard, memory_budget=1200)
    out.loss.backward()
    return {
        "loss": out.loss.detach(),
        **{f"grad.{name}": leaf.grad for name, leaf in leaves.items()},
    }


def run(rank: int, folder: Path) -> None:
    """Run every case on a rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=15),
    )
    group = dist.group.WORLD
    results: dict[str, Results] = {
        name: take(case, case.parts[rank], group)
        for name, case in {**CASES, **BF16, **EMPTY}.items()
    }
    results["buffer"] = take_with_buffer(PARTS[rank], group)
    checks, arguments.checks_values = arguments.checks_values, lambda device: False
    results |= {name: take(case, case.parts[rank], group) for name, case in BEYOND.items()}
    arguments.checks_values = checks
    torch.save(results, folder / f"{rank}.pt")
    # The last, because gloo ends the process when ranks do not agree on a size.
    results["equal-budgets"] = take_equal_budgets(PARTS[rank], group)
    torch.save(results, folder / f"{rank}.pt")
    os._exit(0)  # gloo's threads at times abort a process that is done


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of every case, by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, __file__, str(rank), str(folder)] for rank in range(2)]
    launched = [
        subprocess.Popen(
            c, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for c in commands
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in launched]
    finally:
        for process in launched:
            process.kill()
    files = [folder / f"{rank}.pt" for rank in range(2)]
    assert all(file.exists() for file in files), "\n".join(output[-3000:] for output in outputs)
    return [
        torch.load(file) | {"output": output} for file, output in zip(files, outputs, strict=True)
    ]


def joined(ranks: list[dict[str, Any]], name: str) -> Results:
    """The gradients of both parts as one; all else, which must be the same on both ranks to the
    bit.
    """
    first, second = (rank[name] for rank in ranks)
    assert set(first) == set(second)
    parts = {key for key in first if key in ("grad.weight_VD", "grad.bias_V")}
    for key in first.keys() - parts:
        assert torch.equal(first[key].nan_to_num(7e30), second[key].nan_to_num(7e30)), key
    return {**first, **{key: torch.cat([first[key], second[key]]) for key in parts}}


@pytest.mark.parametrize("name", CASES)
def test_the_parts_give_what_the_whole_gives(ranks: list[dict[str, Any]], name: str) -> None:
    """Loss, statistics, log-probs, entropies, lse, and the gradients of hidden states, weight and
    bias.
    """
    case, ours = CASES[name], joined(ranks, name)
    whole = take(case, slice(0, VOCAB))
    assert {key for key in ours if key.startswith("grad")} == {f"grad.{key}" for key in case.needs}
    for key, value in whole.items():
        if not key.startswith("calls"):
            assert value.isfinite().all() or "stats" in key
            torch.testing.assert_close(
                ours[key], value, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
            )
    assert ours["loss"].abs() > 0.01 and all(
        ours[f"grad.{key}"].abs().max() > 0.01 for key in case.needs
    )


@pytest.mark.parametrize(
    "name", ["clip", "gspo", "entropy", "dual-k3", "chunks", "gspo-chunks", "triton", "triton-gspo"]
)
def test_the_parts_match_fp64_autograd(ranks: list[dict[str, Any]], name: str) -> None:
    case, ours = CASES[name], joined(ranks, name)
    options = {key: value for key, value in case.options.items() if key != "compact"}
    loss, gradients, _ = head_truth(case.spec, case.batch(), **options)
    assert ours["loss"].item() == pytest.approx(loss.item(), rel=1e-5, abs=1e-5)
    for key, gradient in gradients.items():
        torch.testing.assert_close(ours[f"grad.{key}"].double(), gradient, rtol=1e-4, atol=5e-6)


def test_targets_lie_on_both_ranks() -> None:
    for case in (CASES["clip"], CASES["triton"]):
        targets = case.batch()["target_ids_T"][counted(case.batch())]
        assert all(((part.start <= targets) & (targets < part.stop)).sum() >= 2 for part in PARTS)
        assert (case.batch()["target_ids_T"] < 0).any()


@pytest.mark.parametrize("name", BF16)
def test_bf16_parts_lose_no_more_than_the_whole(ranks: list[dict[str, Any]], name: str) -> None:
    """Root mean squares of what is lost of the gradients. Parts of the hidden states' gradient are
    not rounded before they are added.
    """
    case, ours = BF16[name], joined(ranks, name)
    whole = take(case, slice(0, VOCAB))
    torch.testing.assert_close(ours["scores"], whole["scores"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours["loss"], whole["loss"], rtol=1e-4, atol=1e-5)
    options = {key: value for key, value in case.options.items() if key != "fp32_logits"}
    _, gradients, _ = head_truth(case.spec, case.batch(), **options)
    for key, gradient in gradients.items():
        assert ours[f"grad.{key}"].dtype == torch.bfloat16
        error, whole_error = (
            (x[f"grad.{key}"] - gradient).norm() / gradient.norm() for x in (ours, whole)
        )
        assert error <= 1.05 * whole_error < 0.02, key


@pytest.mark.parametrize("name", BEYOND)
def test_a_target_beyond_the_vocabulary_gives_nan(ranks: list[dict[str, Any]], name: str) -> None:
    """Values are not checked here; the other rows keep their log-probs."""
    ours = joined(ranks, name)
    is_beyond = BEYOND[name].batch()["target_ids_T"] >= VOCAB
    assert is_beyond.sum() == 3 and ours["loss"].isnan()
    for logprob in (ours["logprob"], ours["scores"][0]):
        assert torch.equal(logprob.isnan(), is_beyond)
    assert ours["scores"][1:].isfinite().all()


def test_no_tokens_give_a_zero_loss(ranks: list[dict[str, Any]]) -> None:
    ours = joined(ranks, "empty")
    assert (
        ours["loss"] == 0
        and ours["grad.hidden_TD"].shape == (0, DIM)
        and not ours["grad.weight_VD"].any()
    )


def test_the_gradient_of_a_part_is_added_to_a_buffer(ranks: list[dict[str, Any]]) -> None:
    ours, expected = joined(ranks, "buffer"), joined(ranks, "chunks")
    torch.testing.assert_close(
        ours["grad.weight_VD"] - 1, expected["grad.weight_VD"], rtol=1e-4, atol=1e-5
    )
    for name in ("hidden_TD", "bias_V"):
        torch.testing.assert_close(
            ours[f"grad.{name}"], expected[f"grad.{name}"], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    "name",
    ["clip", "all-rows", "chunks", "chunks-of-all-rows", "small-chunks", "given-hidden", "frozen"],
)
def test_two_collectives_a_chunk_and_one_for_the_hidden_states(
    ranks: list[dict[str, Any]], name: str
) -> None:
    case, ours = CASES[name], joined(ranks, name)
    batch = case.batch()
    num_rows = int(counted(batch).sum()) if case.options.get("compact", True) else NUM_TOKENS
    sizes = ours["calls.forward"].tolist()
    if "hidden_TD" in case.needs:
        assert sizes.pop() == NUM_TOKENS * DIM
    for of_chunks, rows in (
        (sizes, num_rows),
        (ours["calls.scores"].tolist(), int((batch["target_ids_T"] >= 0).sum())),
    ):
        chunks = of_chunks[::2]
        assert of_chunks[1::2] == [3 * size for size in chunks] and sum(chunks) == rows
        assert len(chunks) == 1 if case.chunk is None else max(chunks) <= case.chunk
    assert ours["calls.backward"].tolist() == []


def test_equal_budgets_serve_unequal_parts(ranks: list[dict[str, Any]]) -> None:
    """Ranks must cut the rows alike, however many ids each holds."""
    assert all("equal-budgets" in rank for rank in ranks), "".join(
        rank["output"][-1000:] for rank in ranks
    )
    ours, expected = joined(ranks, "equal-budgets"), joined(ranks, "clip")
    for key, value in ours.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]))
