"""The loss kernels against their peers:  python -m bench.losses [--json F] [--peers liger,trl,compile,torch] [--tokens …] [--vocab …]

Three paths on logits [T, V]: `logprobs` (log-prob and entropy, no gradient), `policy_loss` (PPO clip, loss and gradient by the logits) and
`branching` (score of every token, the scan included). Bytes that must move: 2 per bf16 element for `logprobs`, 4 with a gradient; GB/s
counts these, whatever an implementation really moves, and `of copy` divides by a plain copy timed in the same run. `extra_mb` is the peak
beyond the inputs. `max_err` is against fp64 on sampled rows: of log-probs in nats, of gradients relative to the largest entry.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flowkernels import LossSpec, branching_score, logprobs, policy_loss
from torch import Tensor
from tqdm import tqdm

from bench.measure import print_table, write_json

PEERS = ("torch", "compile", "trl", "liger")
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
_SAMPLED_ROWS = 16


@dataclass(frozen=True)
class Batch:
    """One case; ratios on both sides of the clip."""

    logits_TV: Tensor
    target_ids_T: Tensor
    advantage_T: Tensor
    old_logprob_T: Tensor
    weight_T: Tensor
    cu_seqlens_S1: Tensor

    @classmethod
    def make(cls, num_tokens: int, num_vocab: int, dtype: torch.dtype, device: str) -> Batch:
        rng = torch.Generator(device).manual_seed(0)
        logits_TV = torch.empty(num_tokens, num_vocab, dtype=dtype, device=device)
        for rows in logits_TV.split(512):  # no fp32 copy of all of it
            rows.copy_(3 * torch.randn(rows.shape, generator=rng, device=device))
        target_ids_T = torch.randint(num_vocab, (num_tokens,), generator=rng, device=device)
        noise_2T = torch.randn(2, num_tokens, generator=rng, device=device)
        old_T = logprobs(logits_TV, target_ids_T).logprob_T + 0.2 * noise_2T[0]
        weight_T = torch.full((num_tokens,), 1 / num_tokens, device=device)
        length = 512
        bounds = [*range(0, num_tokens, length), num_tokens]
        return cls(logits_TV, target_ids_T, noise_2T[1], old_T, weight_T, torch.tensor(bounds, device=device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"comma-separated (default: {','.join(PEERS)})")
    parser.add_argument("--tokens", default="1024,4096,8192,16384" if on_gpu else "1024", help="comma-separated T (default: %(default)s)")
    parser.add_argument("--vocab", default="151936,152064" if on_gpu else "32768", help="comma-separated V (default: %(default)s)")
    parser.add_argument("--dtypes", default="bfloat16" if on_gpu else "float32,bfloat16", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=30 if on_gpu else 7, help="timed runs of each (default: %(default)s)")
    args = parser.parse_args()
    device = "cuda" if on_gpu else "cpu"
    missing = [peer for peer in args.peers.split(",") if (reason := _missing(peer, device)) and not print(f"left out: {peer}: {reason}")]
    peers = [peer for peer in args.peers.split(",") if peer not in missing]
    cases = [
        (int(num_tokens), int(num_vocab), getattr(torch, dtype))
        for dtype in args.dtypes.split(",")
        for num_vocab in args.vocab.split(",")
        for num_tokens in args.tokens.split(",")
    ]
    rows: list[dict[str, Any]] = []
    for num_tokens, num_vocab, dtype in tqdm(cases, desc="cases", disable=None):
        rows += measure(Batch.make(num_tokens, num_vocab, dtype, device), peers, args.repeats)
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def measure(batch: Batch, peers: list[str], repeats: int) -> list[dict[str, Any]]:
    """All paths of one case, every implementation in turn within a repeat."""
    runs = dict(_runs(batch, peers))
    seconds = _seconds(runs, repeats)
    copied = 2 * _num_bytes(batch.logits_TV)
    bandwidth = copied / statistics.median(seconds["copy", "torch"])
    rows = []
    for (path, impl), run in runs.items():
        typical = statistics.median(seconds[path, impl])
        moved = {"copy": copied, "logprobs": copied // 2, "policy_loss": copied, "branching": 0}[path]
        rows.append(
            {
                "path": path,
                "impl": impl,
                "device": batch.logits_TV.device.type,
                "dtype": str(batch.logits_TV.dtype).removeprefix("torch."),
                "T": batch.logits_TV.shape[0],
                "D": 0,
                "V": batch.logits_TV.shape[1],
                "ms": 1e3 * typical,
                "gb_s": moved / typical / 1e9,
                "of_copy": moved / typical / bandwidth,
                "extra_mb": _extra_bytes(run, batch.logits_TV.device) / 1e6,
                "max_err": _error(path, run(), batch),
            }
        )
    return rows


def _runs(batch: Batch, peers: list[str]) -> Iterator[tuple[tuple[str, str], Callable[[], Any]]]:
    """(path, implementation) and what runs it; results are log-probs, or the gradient by the logits."""
    target = torch.empty_like(batch.logits_TV)
    yield ("copy", "torch"), lambda: target.copy_(batch.logits_TV)
    yield ("logprobs", "flowkernels"), lambda: logprobs(batch.logits_TV, batch.target_ids_T).logprob_T
    yield ("policy_loss", "flowkernels"), lambda: _flowkernels_gradient(batch)
    scores = logprobs(batch.logits_TV, batch.target_ids_T)
    arguments = (scores.logprob_T, batch.old_logprob_T, scores.entropy_T, batch.cu_seqlens_S1)
    yield ("branching", "flowkernels"), lambda: branching_score(*arguments).score_T
    if "torch" in peers:
        yield ("logprobs", "torch"), lambda: _naive_scores(batch.logits_TV, batch.target_ids_T)[0]
        yield ("policy_loss", "torch"), lambda: _autograd_gradient(_naive_loss, batch)
    if "compile" in peers:
        compiled_scores, compiled_loss = torch.compile(_naive_scores, dynamic=True), torch.compile(_naive_loss, dynamic=True)
        yield ("logprobs", "compile"), lambda: compiled_scores(batch.logits_TV, batch.target_ids_T)[0]
        yield ("policy_loss", "compile"), lambda: _autograd_gradient(compiled_loss, batch)
    if "trl" in peers:
        yield ("logprobs", "trl"), lambda: _trl_scores(batch.logits_TV, batch.target_ids_T)
        yield ("policy_loss", "trl"), lambda: _autograd_gradient(_trl_loss, batch)
    if "liger" in peers:
        yield ("policy_loss", "liger"), lambda: _liger_gradient(batch)


def _flowkernels_gradient(batch: Batch) -> Tensor:
    logits_TV = batch.logits_TV.detach().requires_grad_()
    out = policy_loss(
        logits_TV,
        batch.target_ids_T,
        spec=LossSpec(clip_low=CLIP_LOW, clip_high=CLIP_HIGH),
        advantage_T=batch.advantage_T,
        weight_T=batch.weight_T,
        old_logprob_T=batch.old_logprob_T,
    )
    return torch.autograd.grad(out.loss, logits_TV)[0]


def _naive_scores(logits_TV: Tensor, target_ids_T: Tensor) -> tuple[Tensor, Tensor]:
    """What a trainer without kernels does."""
    logp_TV = logits_TV.float().log_softmax(-1)
    with torch.no_grad():
        entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
    return logp_TV.gather(1, target_ids_T[:, None])[:, 0], entropy_T


def _naive_loss(logits_TV: Tensor, target_ids_T: Tensor, advantage_T: Tensor, weight_T: Tensor, old_logprob_T: Tensor) -> Tensor:
    """The loss alone: without the entropy that ours returns beside it."""
    logprob_T = logits_TV.float().log_softmax(-1).gather(1, target_ids_T[:, None])[:, 0]
    return _clipped(logprob_T, advantage_T, weight_T, old_logprob_T)


def _clipped(logprob_T: Tensor, advantage_T: Tensor, weight_T: Tensor, old_logprob_T: Tensor) -> Tensor:
    ratio_T = (logprob_T - old_logprob_T).exp()
    surrogate_T = torch.minimum(ratio_T * advantage_T, ratio_T.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage_T)
    return -(weight_T * surrogate_T).sum()


def _autograd_gradient(loss: Callable[..., Tensor], batch: Batch) -> Tensor:
    logits_TV = batch.logits_TV.detach().requires_grad_()
    value = loss(logits_TV, batch.target_ids_T, batch.advantage_T, batch.weight_T, batch.old_logprob_T)
    return torch.autograd.grad(value, logits_TV)[0]


def _trl_scores(logits_TV: Tensor, target_ids_T: Tensor) -> Tensor:
    """TRL's released log-probs with entropy: its Triton kernel on a GPU, chunks of torch on a CPU."""
    from trl.trainer.utils import selective_log_softmax_and_entropy

    logprob_T, _ = selective_log_softmax_and_entropy(logits_TV, target_ids_T, entropy_requires_grad=False)
    return logprob_T


def _trl_loss(logits_TV: Tensor, target_ids_T: Tensor, advantage_T: Tensor, weight_T: Tensor, old_logprob_T: Tensor) -> Tensor:
    return _clipped(_trl_scores(logits_TV, target_ids_T), advantage_T, weight_T, old_logprob_T)


def _liger_gradient(batch: Batch) -> Tensor:
    """Liger takes one advantage per sequence, so each token is a sequence of its own; the gradient is not written in place, as ours."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    logits_TV = batch.logits_TV.detach().requires_grad_()
    # It drops the last position of [B, L + 1, V]: a view whose rows overlap gives it one without a copy.
    size, vocab = logits_TV.shape
    view = logits_TV.as_strided((1, size, vocab), (size * vocab, vocab, 1))
    per_token, _, _ = triton_grpo_loss(
        view,
        batch.old_logprob_T[None, :-1],
        None,
        batch.target_ids_T[None, :-1],
        batch.advantage_T[:1],
        temperature=1.0,
        beta=0.0,
        eps_low=CLIP_LOW,
        eps_high=CLIP_HIGH,
        inplace=False,
        loss_type="grpo",
    )
    return torch.autograd.grad((per_token * batch.weight_T[None, :-1]).sum(), logits_TV)[0]


def _missing(peer: str, device: str) -> str | None:
    if peer not in PEERS:
        raise SystemExit(f"--peers: {peer!r} must be one of {', '.join(PEERS)}")
    if peer == "liger":
        if device == "cpu":
            return "its kernel needs a GPU"
        return None if _installed("liger_kernel") else "liger-kernel is not installed"
    return "trl is not installed" if peer == "trl" and not _installed("trl") else None


def _installed(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


def _seconds(runs: dict[tuple[str, str], Callable[[], Any]], repeats: int) -> dict[tuple[str, str], list[float]]:
    """Seconds of each run, in turn and in an order that rotates, so that a machine whose speed drifts treats all alike."""
    names = list(runs)
    seconds: dict[tuple[str, str], list[float]] = {name: [] for name in names}
    for repeat in range(-2, repeats):
        for index in range(len(names)):
            name = names[(index + repeat) % len(names)]
            taken = _time_once(runs[name])
            if repeat >= 0:
                seconds[name].append(taken)
    return seconds


def _time_once(run: Callable[[], Any]) -> float:
    if not torch.cuda.is_available():
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _extra_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Peak memory beyond what was there before, the result included."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is resident now
    before = _status_bytes("VmRSS")
    run()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def _error(path: str, result: Tensor, batch: Batch) -> float:
    """Largest error against fp64, on rows spread over the batch."""
    if path in ("copy", "branching"):
        return 0.0 if path == "copy" else _branching_error(result, batch)
    rows = torch.linspace(0, len(batch.target_ids_T) - 2, _SAMPLED_ROWS, device=result.device).long()
    logits = batch.logits_TV[rows].double().requires_grad_()
    targets = batch.target_ids_T[rows]
    logprob = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    if path == "logprobs":
        return float((result[rows].double() - logprob.detach()).abs().max())
    loss = _clipped(logprob, batch.advantage_T[rows].double(), batch.weight_T[rows].double(), batch.old_logprob_T[rows].double())
    (truth,) = torch.autograd.grad(loss, logits)
    return float((result[rows].double() - truth).abs().max() / truth.abs().max())


def _branching_error(result: Tensor, batch: Batch) -> float:
    """Against the fp64 definition on the first sequence."""
    end = int(batch.cu_seqlens_S1[1])
    logp = batch.logits_TV[:end].double().log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    log_ratio = logp.gather(1, batch.target_ids_T[:end, None])[:, 0] - batch.old_logprob_T[:end].double()
    omega = log_ratio.flip(0).cumsum(0).flip(0).clamp(-20, 20).exp().clamp(0.8, 1.2)
    z_entropy, z_omega = ((x - x.mean()) / (x.std(correction=0) + 1e-6) for x in (entropy, omega))
    return float((result[:end].double() - z_entropy * z_omega).abs().max())


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


if __name__ == "__main__":
    main()
