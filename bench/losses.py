"""The loss kernels against their peers:  python -m bench.losses [--json F] [--peers …] [--tokens …]
[--vocab …] [--heads …]

On logits [T, V]: `logprobs` (log-prob and entropy, no gradient), `policy_loss` (PPO clip, loss and
gradient by the logits). From hidden states [T, D]: `linear_logprobs` and `linear_policy_loss`
(gradients by hidden and weight). On logits GB/s counts the bytes that must move (2 per bf16 element
for `logprobs`, 4 with a gradient), whatever an implementation really moves, and `of copy` divides
by a plain copy timed in the same run; from hidden states `of gemm` divides the time of the bare
products, timed in the same run, by the time. `extra_mb` is the peak beyond the inputs, results
included. `max_err` is against fp64 on sampled
rows: of log-probs in nats, of gradients (by the logits or the hidden states) relative to the
largest entry.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from bench import loss_rivals as rivals
from bench.loss_rivals import PEERS, Batch, HeadBatch, Runs, Tokens, missing
from bench.measure import extra_bytes, new_parser, report, runs_here, seconds_in_turn

QWEN = "896x151936,1536x151936,3584x152064"
"""The heads of Qwen2.5 0.5B, 1.5B and 7B."""
_SAMPLED_ROWS = 16
_OTHER_ROWS = ("gemm", "flowkernels top 20 %")
"""Implementations whose result is another one by design."""
Row = dict[str, Any]


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--peers", default=",".join(PEERS), help="comma-separated")
    add("--dtypes", default="bfloat16" if on_gpu else "float32,bfloat16", help="comma-separated")
    add("--tokens", default="1024,4096,8192,16384" if on_gpu else "1024", help="T on logits")
    add("--vocab", default="151936,152064" if on_gpu else "32768", help="V")
    add("--heads", default=QWEN if on_gpu else "512x32768", help="DxV; empty: no heads")
    many = "1024,4096,8192,16384,65536"
    add("--head-tokens", default=many if on_gpu else "2048", help="T from hidden states")
    add("--repeats", type=int, default=30 if on_gpu else 3, help="timed runs of each")
    add("--threads", type=int, default=0, help="of torch on a CPU; 0: its own choice")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = "cuda" if on_gpu else "cpu"
    peers = _peers(args.peers, device)
    vocabs, tokens, head_tokens = (
        [int(x) for x in text.split(",") if x]
        for text in (args.vocab, args.tokens, args.head_tokens)
    )
    heads = [_head(text) for text in args.heads.split(",") if text]
    dtypes = [getattr(torch, name) for name in args.dtypes.split(",")]

    def rows() -> Iterator[Row]:
        for dtype in dtypes:
            for num_vocab in vocabs:
                for num in tokens:
                    batch = Batch.make(num, num_vocab, dtype, device)
                    yield from measure_logits(batch, peers, args.repeats)
        for dtype in dtypes:
            for size, num_vocab in heads:
                for num in head_tokens:
                    case = HeadBatch.make(num, size, num_vocab, dtype, device)
                    yield from measure_head(case, peers, args.repeats)

    report(args.json, rows())


def measure_logits(batch: Batch, peers: Sequence[str], repeats: int) -> list[Row]:
    """The paths on logits, every implementation in turn within a repeat."""
    logits_TV, tokens = batch.logits_TV, batch.tokens
    target_TV = torch.empty_like(logits_TV)
    paths = {
        "copy": {"torch": lambda: target_TV.copy_(logits_TV)},
        "logprobs": rivals.logprobs_runs(batch, peers),
        "policy_loss": rivals.loss_runs(batch, peers),
    }
    copied = 2 * logits_TV.nbytes
    moved = {"copy": copied, "logprobs": copied / 2, "policy_loss": copied}
    at = _sampled(logits_TV)
    truths = _truths(logits_TV[at], lambda z: z, tokens, at, ("logprobs", "policy_loss"))
    rows = _measure(paths, logits_TV, 0, logits_TV.shape[1], repeats, at, truths)
    bandwidth = copied / next(row["ms"] for row in rows if row["path"] == "copy")
    for row in rows:
        speed = moved[row["path"]] / row["ms"]
        row |= {"gb_s": speed / 1e6, "of copy": speed / bandwidth}
    return rows


def measure_head(batch: HeadBatch, peers: Sequence[str], repeats: int) -> list[Row]:
    """The two paths from hidden states."""
    hidden_TD, weight_VD = batch.hidden_TD, batch.weight_VD
    paths = {
        "linear_logprobs": rivals.head_forward_runs(batch, peers),
        "linear_policy_loss": rivals.head_loss_runs(batch, peers),
    }
    at = _sampled(hidden_TD)
    head = weight_VD.double().t()
    truths = _truths(hidden_TD[at], lambda h: h @ head, batch.tokens, at, list(paths))
    sizes = hidden_TD.shape[1], len(weight_VD)
    rows = _measure(paths, hidden_TD, *sizes, repeats, at, truths)
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
    at: Tensor,
    truths: dict[str, Tensor],
) -> list[Row]:
    runs = {
        (path, impl): run
        for path, impls in paths.items()
        for impl, run in impls.items()
        if impl.startswith("flowkernels") or runs_here(f"{path}: {impl}", run)
    }
    seconds = seconds_in_turn(runs, repeats)
    rows = []
    for (path, impl), run in runs.items():
        row: Row = {
            "path": path,
            "impl": impl,
            "device": example.device.type,
            "dtype": str(example.dtype).removeprefix("torch."),
            "T": len(example),
            "D": size,
            "V": num_vocab,
            "ms": 1e3 * statistics.median(seconds[path, impl]),
            "extra_mb": extra_bytes(run, example.device) / 1e6,
        }
        has_truth = path in truths and impl not in _OTHER_ROWS
        rows.append(row | {"max_err": _error(run()[at], truths[path]) if has_truth else None})
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


def _error(result: Tensor, truth: Tensor) -> float:
    """Absolute error of log-probs; error of gradients relative to the largest entry."""
    error = (result.double() - truth).abs().max()
    return float(error if truth.dim() == 1 else error / truth.abs().max())


def _sampled(example: Tensor) -> Tensor:
    return torch.linspace(0, len(example) - 1, _SAMPLED_ROWS, device=example.device).long()


def _truths(
    source: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    tokens: Tokens,
    at: Tensor,
    paths: Sequence[str],
) -> dict[str, Tensor]:
    """In fp64, on the sampled rows: log-probs, and the gradient of the loss by their source."""
    own = Tokens(*(getattr(tokens, field.name)[at] for field in fields(Tokens)))
    leaf = source.double().requires_grad_()
    logprob = logits_of(leaf).log_softmax(-1).gather(1, own.target_ids_T[:, None])[:, 0]
    found = logprob.detach(), torch.autograd.grad(own.clipped(logprob), leaf)[0]
    return dict(zip(paths, found, strict=True))


if __name__ == "__main__":
    main()
