"""Statistics of the optimizer steps of a batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowtrain.trainer.distributed import World
from flowtrain.trainer.mismatch import NUM_SUMS, mismatch_metrics, mismatch_sums
from flowtrain.trainer.model.experts import RouteMetrics
from flowtrain.trainer.packing import PackedRow


class StepMetrics:
    """Statistics of one batch, summed on the device and brought to the host once."""

    def __init__(
        self,
        has_reference: bool = False,
        has_teacher: bool = False,
        routes: RouteMetrics | None = None,
        version: int | None = None,
    ) -> None:
        """
        Args:
            has_teacher: the loss includes the divergence from a teacher.
            has_reference: the KL is relative to a reference policy, else to the old policy.
            version: see `mismatch_sums`.
        """
        self.routes, self._version = routes, version
        self._has_teacher = has_teacher
        self._kl = "kl_ref" if has_reference else "kl_old"
        self.grad_norms: list[float] = []
        self.ratio_bounds: list[float] = []
        self.num_skipped = 0
        self._open: list[dict[str, Tensor]] = []
        self._stats: list[dict[str, Tensor]] = []
        self._mismatch: list[Tensor] = []
        self._skipped: list[Tensor] = []
        self._num_packed = self._num_repeated = self._num_unshared = self._num_rows = 0
        self.num_flops = 0.0

    def add(
        self, stats: dict[str, Tensor], loss: Tensor, logprob_T: Tensor, row: PackedRow | None
    ) -> None:
        """Add a row; None stands for an empty pass in step with other ranks."""
        nothing = torch.zeros_like(loss)
        self._open.append({"divergence_sum": nothing, **stats, "loss_sum": loss})
        if row is not None:
            if not self.grad_norms:
                self._mismatch.append(mismatch_sums(logprob_T.detach(), row, self._version))
            self._num_packed += len(row.input_ids_N)
            self._num_repeated += row.num_repeated_tokens
            self._num_unshared += row.num_unshared_tokens
            self._num_rows += 1

    def close_step(self, grad_norm: float | None) -> None:
        """End an optimizer step; without a norm it was skipped, and its statistics are dropped."""
        if grad_norm is None:
            self.num_skipped += 1
            self._skipped += [stats["num_tokens_sum"] for stats in self._open]
            self._mismatch = self._mismatch if self.grad_norms else []
        else:
            self.grad_norms.append(grad_norm)
            self._stats += self._open
        self._open = []

    def reduce(self, world: World, lr: float) -> dict[str, float]:
        sums, maxima = self._to_host()
        names = sorted(sums)
        num_skipped = float(torch.stack(self._skipped).double().sum()) if self._skipped else 0.0
        mismatch = [0.0] * NUM_SUMS
        if self._mismatch:
            mismatch = torch.stack(self._mismatch).sum(0).tolist()
        counts = [self._num_packed, self._num_repeated, self._num_unshared, self._num_rows]
        (
            (num_packed, num_repeated, num_unshared, num_rows, num_flops, num_skipped, *summed),
            (ratio_max, negative_ratio_min),
        ) = world.reduce(
            [*counts, self.num_flops, num_skipped, *(sums[n] for n in names), *mismatch], maxima
        )
        sums = dict(zip(names, summed, strict=False))
        has_tokens = sums["num_tokens_sum"] > 0
        num_steps, num_tokens = max(len(self.grad_norms), 1), max(sums["num_tokens_sum"], 1)
        return {
            "num_tokens": sums["num_tokens_sum"],
            "num_packed_tokens": num_packed,
            "num_rows": num_rows,
            "train_tflop": num_flops / 1e12,
            "shared_token_share": 1 - num_packed / num_unshared if num_unshared else 0.0,
            "repeated_token_share": num_repeated / num_packed if num_packed else 0.0,
            "num_optim_steps": len(self.grad_norms),
            "num_steps_skipped": self.num_skipped,
            "loss": sums["loss_sum"] / num_steps,
            "grad_norm": sum(self.grad_norms) / num_steps,
            "lr": lr,
            self._kl: sums["kl_sum"] / num_tokens,
            "entropy": sums["entropy_sum"] / num_tokens,
            "clip_fraction": (sums["clipped_low_sum"] + sums["clipped_high_sum"]) / num_tokens,
            "clip_fraction_low": sums["clipped_low_sum"] / num_tokens,
            "clip_fraction_high": sums["clipped_high_sum"] / num_tokens,
            "ratio_mean": sums["ratio_sum"] / num_tokens if has_tokens else 1.0,
            "ratio_max": ratio_max if has_tokens else 1.0,
            "ratio_min": -negative_ratio_min if has_tokens else 1.0,
            **mismatch_metrics(summed[len(names) :]),
            **({"divergence": sums["divergence_sum"] / num_tokens} if self._has_teacher else {}),
            **({"num_tokens_skipped": num_skipped} if num_skipped else {}),
            **(
                {"ratio_bound": sum(self.ratio_bounds) / len(self.ratio_bounds)}
                if self.ratio_bounds
                else {}
            ),
            **(self.routes.reduce(world) if self.routes else {}),
        }

    def _to_host(self) -> tuple[dict[str, float], tuple[float, float]]:
        """Return sums by the same names on all ranks, and (maximum ratio, -minimum ratio)."""
        names = [*_SUMS, "ratio_max", "ratio_min"]
        if not self._stats:
            return dict.fromkeys(_SUMS, 0.0), (-math.inf, -math.inf)
        table = torch.stack(
            [torch.stack([stats[name].double() for name in names]) for stats in self._stats]
        ).cpu()
        sums = dict(zip(_SUMS, table[:, :-2].sum(0).tolist(), strict=True))
        return sums, (float(table[:, -2].max()), float((-table[:, -1]).max()))


_SUMS = (
    "num_tokens_sum",
    "entropy_sum",
    "kl_sum",
    "ratio_sum",
    "clipped_low_sum",
    "clipped_high_sum",
    "loss_sum",
    "divergence_sum",
)
