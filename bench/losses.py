"""The loss kernels against their peers:  python -m bench.losses [--json F] [--peers …] [--tokens …]
[--vocab …] [--heads …]

On logits [T, V]: `logprobs` (log-prob and entropy, no gradient), `policy_loss` (PPO clip, loss and
gradient by the logits), `branching` (score of every token, the scan included). From hidden states
[T, D]: `linear_logprobs` and `linear_policy_loss` (gradients by hidden and weight). On logits GB/s
counts the bytes that must move (2 per bf16 element for `logprobs`, 4 with a gradient), whatever an
implementation really moves, and `of copy` divides by a plain copy timed in the same run; from
hidden states `of gemm` divides the time of the bare products, timed in the same run, by the time.
`extra_mb` is the peak beyond the inputs, results included. `max_err` is against fp64 on sampled
rows: of log-probs in nats, of gradients (by the logits or the hidden states) relative to the
largest entry.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench import loss_rivals as rivals
from bench.head_peers import missing
from bench.loss_rivals import PEERS, Batch, HeadBatch, Runs
from bench.measure import extra_bytes, report, runs_here, seconds_of

QWEN = "896x151936,1536x151936,3584x152064"
"""The heads of Qwen2.5 0.5B, 1.5B and 7B."""
_SAMPLED_ROWS = 16
_OTHER_ROWS = ("linear_cross_entropy", "gemm", "flowkernels top 20 %")
"""Implementations whose result is another one by design."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument(
        "--peers", default=",".join(PEERS), help="comma-separated (default: %(default)s)"
    )
    parser.add_argument(
        "--dtypes",
        default="bfloat16" if on_gpu else "float32,bfloat16",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--tokens",
        default="1024,4096,8192,16384" if on_gpu else "1024",
        help="T on logits (default: %(default)s)",
    )
    parser.add_argument(
        "--vocab", default="151936,152064" if on_gpu else "32768", help="V (default: %(default)s)"
    )
    parser.add_argument(
        "--heads",
        default=QWEN if on_gpu else "512x32768",
        help="DxV; empty: no heads (default: %(default)s)",
    )
    parser.add_argument(
        "--head-tokens",
        default="1024,4096,8192,16384,65536" if on_gpu else "2048",
        help="T from hidden states (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=30 if on_gpu else 7,
        help="timed runs of each (default: %(default)s)",
    )
    parser.add_argument(
        "--threads", type=int, default=0, help="of torch on a CPU; 0: its own choice (default)"
    )
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = "cuda" if on_gpu else "cpu"
    peers = _peers(args.peers, device)
    dtypes, vocabs, tokens, head_tokens = (
        [int(x) if x.isdigit() else x for x in text.split(",") if x]
        for text in (args.dtypes, args.vocab, args.tokens, args.head_tokens)
    )
    heads = [_head(text) for text in args.heads.split(",") if text]
    logits_cases = [(t, 0, v, dtype) for dtype in dtypes for v in vocabs for t in tokens]
    head_cases = [(t, d, v, dtype) for dtype in dtypes for d, v in heads for t in head_tokens]
    rows: list[dict[str, Any]] = []
    for num_tokens, size, num_vocab, dtype in [*logits_cases, *head_cases]:
        case = (num_vocab, getattr(torch, str(dtype)), device)
        if size:
            rows += measure_head(HeadBatch.make(num_tokens, size, *case), peers, args.repeats)
        else:
            rows += measure_logits(Batch.make(num_tokens, *case), peers, args.repeats)
    paths = dict.fromkeys(row["path"] for row in rows)
    report(args.json, *([row for row in rows if row["path"] == path] for path in paths))


def measure_logits(batch: Batch, peers: list[str], repeats: int) -> list[dict[str, Any]]:
    """The three paths on logits, every implementation in turn within a repeat."""
    target_TV = torch.empty_like(batch.logits_TV)
    paths = {
        "copy": {"torch": lambda: target_TV.copy_(batch.logits_TV)},
        "logprobs": rivals.logprobs_runs(batch, peers),
        "policy_loss": rivals.loss_runs(batch, peers),
        "branching": rivals.branching_runs(batch),
    }
    copied = 2 * batch.logits_TV.numel() * batch.logits_TV.element_size()
    moved = {"copy": copied, "logprobs": copied / 2, "policy_loss": copied}
    truths = {"logprobs": _logits_truth(batch, False), "policy_loss": _logits_truth(batch, True)}
    rows = _measure(paths, batch.logits_TV, 0, batch.logits_TV.shape[1], repeats, truths)
    bandwidth = copied / next(row["ms"] for row in rows if row["path"] == "copy")
    for row in rows:
        if row["path"] == "branching":
            row["max_err"] = _branching_error(paths["branching"]["flowkernels"](), batch)
        else:
            speed = moved[row["path"]] / row["ms"]
            row |= {"gb_s": speed / 1e6, "of copy": speed / bandwidth}
    return rows


def measure_head(batch: HeadBatch, peers: list[str], repeats: int) -> list[dict[str, Any]]:
    """The two paths from hidden states."""
    paths = {
        "linear_logprobs": rivals.head_forward_runs(batch, peers),
        "linear_policy_loss": rivals.head_loss_runs(batch, peers),
    }
    truths = {
        "linear_logprobs": _head_truth(batch, False),
        "linear_policy_loss": _head_truth(batch, True),
    }
    rows = _measure(
        paths, batch.hidden_TD, batch.hidden_TD.shape[1], len(batch.weight_VD), repeats, truths
    )
    bare = {row["path"]: row["ms"] for row in rows if row["impl"] == "gemm"}
    return [
        row | ({"of gemm": bare[row["path"]] / row["ms"]} if row["path"] in bare else {})
        for row in rows
    ]


def _measure(
    paths: dict[str, Runs],
    example: Tensor,
    size: int,
    num_vocab: int,
    repeats: int,
    truths: dict[str, tuple[Tensor, Tensor]],
) -> list[dict[str, Any]]:
    runs = {
        (path, impl): run
        for path, impls in paths.items()
        for impl, run in impls.items()
        if impl.startswith("flowkernels") or runs_here(f"{path}: {impl}", run)
    }
    seconds = _seconds(runs, repeats)
    rows = []
    for (path, impl), run in runs.items():
        row: dict[str, Any] = {
            "path": path,
            "impl": impl,
            "device": example.device.type,
            "dtype": str(example.dtype).removeprefix("torch."),
        }
        row |= {
            "T": len(example),
            "D": size,
            "V": num_vocab,
            "ms": 1e3 * statistics.median(seconds[path, impl]),
        }
        row |= {"extra_mb": extra_bytes(run, example.device) / 1e6}
        has_truth = path in truths and impl not in _OTHER_ROWS
        rows.append(row | {"max_err": _error(run(), *truths[path]) if has_truth else None})
    return rows


def _head(text: str) -> tuple[int, int]:
    size, _, num_vocab = text.partition("x")
    if not size.isdigit() or not num_vocab.isdigit():
        raise SystemExit(f"--heads: {text!r} must be DxV, as 896x151936")
    return int(size), int(num_vocab)


def _peers(text: str, device: str) -> list[str]:
    """Those that can be measured; says which cannot, and why."""
    peers = []
    for peer in text.split(","):
        if peer not in PEERS:
            raise SystemExit(f"--peers: {peer!r} must be one of {', '.join(PEERS)}")
        reason = missing(peer, device)
        if reason is None:
            peers.append(peer)
        else:
            print(f"left out: {peer}: {reason}")
    return peers


def _seconds(
    runs: dict[tuple[str, str], Callable[[], Any]], repeats: int
) -> dict[tuple[str, str], list[float]]:
    """Seconds of each run, in turn and in an order that rotates, so that a machine whose speed
    drifts treats all alike.
    """
    names = list(runs)
    seconds: dict[tuple[str, str], list[float]] = {name: [] for name in names}
    for repeat in range(-2, repeats):
        for index in range(len(names)):
            name = names[(index + repeat) % len(names)]
            taken = seconds_of(runs[name])
            if repeat >= 0:
                seconds[name].append(taken)
    return seconds


def _error(result: Tensor, rows: Tensor, truth: Tensor) -> float:
    """Absolute error of log-probs; error of gradients relative to the largest entry."""
    error = (result[rows].double() - truth).abs().max()
    return float(error if truth.dim() == 1 else error / truth.abs().max())


def _sampled(num_tokens: int, device: torch.device) -> Tensor:
    return torch.linspace(0, num_tokens - 1, _SAMPLED_ROWS, device=device).long()


def _logits_truth(batch: Batch, wants_gradient: bool) -> tuple[Tensor, Tensor]:
    """(rows, the fp64 result there): log-probs, or the gradient by the logits."""
    rows = _sampled(len(batch.target_ids_T), batch.logits_TV.device)
    logits = batch.logits_TV[rows].double().requires_grad_()
    return rows, _truth(logits, logits, batch, rows, wants_gradient)


def _head_truth(batch: HeadBatch, wants_gradient: bool) -> tuple[Tensor, Tensor]:
    """(rows, the fp64 result there) from hidden states."""
    rows = _sampled(len(batch.target_ids_T), batch.hidden_TD.device)
    hidden = batch.hidden_TD[rows].double().requires_grad_()
    return rows, _truth(hidden, hidden @ batch.weight_VD.double().t(), batch, rows, wants_gradient)


def _truth(
    source: Tensor, logits: Tensor, batch: Batch | HeadBatch, rows: Tensor, wants_gradient: bool
) -> Tensor:
    logprob = logits.log_softmax(-1).gather(1, batch.target_ids_T[rows, None])[:, 0]
    if not wants_gradient:
        return logprob.detach()
    loss = rivals.clipped(
        logprob,
        *(x[rows].double() for x in (batch.advantage_T, batch.weight_T, batch.old_logprob_T)),
    )
    return torch.autograd.grad(loss, source)[0]


def _branching_error(result: Tensor, batch: Batch) -> float:
    """Against the fp64 definition on the first sequence."""
    end = int(batch.cu_seqlens_S1[1])
    logp = batch.logits_TV[:end].double().log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    log_ratio = (
        logp.gather(1, batch.target_ids_T[:end, None])[:, 0] - batch.old_logprob_T[:end].double()
    )
    omega = log_ratio.flip(0).cumsum(0).flip(0).clamp(-20, 20).exp().clamp(0.8, 1.2)
    z_entropy, z_omega = ((x - x.mean()) / (x.std(correction=0) + 1e-6) for x in (entropy, omega))
    return float((result[:end].double() - z_entropy * z_omega).abs().max())


if __name__ == "__main__":
    main()
