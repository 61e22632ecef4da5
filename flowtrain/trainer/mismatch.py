"""The mismatch between the trainer's and the sampler's log-probs of a batch's tokens.

The comparison covers the tokens of the batch's first optimizer step, whose forward pass uses the
initial weights of the step. The same weights sampled them, so both should agree up to rounding.

T: target tokens of a row, S: its samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowtrain.trainer.packing import PackedRow

BUCKETS = {"below_1e-5": 0.0} | {
    name: float(name) for name in ("1e-5", "1e-4", "1e-3", "1e-2", "1e-1", "1", "10")
}
"""Buckets of |d| in nats, from the least in one to the least in the next."""
UNLIKELY = -0.7
"""Log-prob, about ln 0.5, below which a token is unlikely."""
AGREES = 0.1
"""Mean |d| of a sample up to which rounding explains it; that of bf16 is 0.01 to 0.07."""
_SUMS = (
    *("trained", "trained_abs", "left_out", "num", "d", "k3", "s", "ss", "ds"),
    *("unlikely_d", "unlikely_abs", "samples", "agreeing"),
)
NUM_SUMS = len(_SUMS) + len(BUCKETS)


def mismatch_sums(logprob_T: Tensor, row: PackedRow, version: int | None) -> Tensor:
    """Sums over the trained tokens of a row, [NUM_SUMS] in fp64, with s the sampler's log-prob and
    d the trainer's less it.

    `version`: tokens that other weights sampled are left out and counted; None: none are. A row
    that does not know its versions is not compared.
    """
    is_trained_T = (row.loss_weight_T != 0) & logprob_T.isfinite()
    if row.version_T is None:
        is_ours_T = torch.zeros_like(is_trained_T)
    else:
        is_ours_T = is_trained_T if version is None else is_trained_T & (row.version_T == version)
    s_T = row.sampler_logprob_T.double()
    all_d_T = torch.where(is_trained_T, logprob_T.double() - s_T, 0.0)
    d_T, s_T = (torch.where(is_ours_T, x_T, 0.0) for x_T in (all_d_T, s_T))
    size_T, is_unlikely_T = d_T.abs(), s_T < UNLIKELY
    num_S, size_S = _by_sample(row, is_ours_T.double()), _by_sample(row, size_T)
    is_compared_S = num_S > 0
    of_tokens = {
        "trained": is_trained_T,
        "trained_abs": all_d_T.abs(),
        "left_out": is_trained_T & ~is_ours_T if row.version_T is not None else is_ours_T,
        "num": is_ours_T,
        "d": d_T,
        "k3": d_T.expm1() - d_T,
        "s": s_T,
        "ss": s_T * s_T,
        "ds": d_T * s_T,
        "unlikely_d": d_T * is_unlikely_T,
        "unlikely_abs": size_T * is_unlikely_T,
        "samples": is_compared_S,
        "agreeing": is_compared_S & (size_S < AGREES * num_S),
    }
    # Bounds are plain numbers, because the host would wait for a GPU to copy a tensor of them.
    reaches = [(size_T >= least) & is_ours_T for least in BUCKETS.values()]
    return torch.stack([x.sum().double() for x in (*(of_tokens[n] for n in _SUMS), *reaches)])


def _by_sample(row: PackedRow, x_T: Tensor) -> Tensor:
    """Sum over the targets of each sample, [S]."""
    place_T = torch.arange(len(x_T), device=x_T.device)
    sample_T = torch.searchsorted(row.cu_targets_S1[1:], place_T, right=True)
    return x_T.new_zeros(len(row.cu_targets_S1) - 1).index_add_(0, sample_T, x_T)


def mismatch_metrics(sums: Sequence[float]) -> dict[str, float]:
    """Make metrics of the sums of all rows; the KL and what explains it only where something was
    compared.
    """
    total = dict(zip(_SUMS, sums, strict=False))
    found = {"logprob_mismatch": total["trained_abs"] / max(total["trained"], 1)}
    if not total["num"] and not total["left_out"]:
        return found
    found["mismatch_left_out"] = total["left_out"]
    if total["num"]:
        d, k3, s, ss, ds = (total[name] / total["num"] for name in ("d", "k3", "s", "ss", "ds"))
        variance = ss - s * s
        found |= {
            # By the k3 estimator: the mean of exp(d) - 1 - d.
            "mismatch_kl": k3,
            # Of d over s: 1/r - 1 where the trainer's temperature is r times the sampler's.
            "mismatch_slope": (ds - d * s) / variance if variance > 1e-9 else 0.0,
            # 1 where the trainer does not know that some tokens were kept from the sampler.
            "mismatch_one_sided": abs(total["unlikely_d"]) / (total["unlikely_abs"] or 1.0),
            "mismatch_agreeing": total["agreeing"] / total["samples"],
        }
    reaches = [*sums[len(_SUMS) :], 0.0]
    pairs = zip(BUCKETS, reaches, reaches[1:], strict=False)
    return found | {f"mismatch_tokens/{name}": least - next_ for name, least, next_ in pairs}
