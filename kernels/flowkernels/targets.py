"""Records of targets: the target of each row of logits, and how its sampler saw the row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TARGETS = (
    "Tensor targets, Tensor temperature, float? softcap, Tensor? mask_ids, Tensor? mask_offsets"
)
"""`Targets.flat` in the schema of an operator."""
UNSPECIALISED = ["num_rows", "temperature_stride"]
"""Launch arguments that Triton must not specialise on when they are 1 or a multiple of 16. Each
specialised kernel would take seconds to compile, in the middle of a run."""


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """The token ids that top-k / top-p sampling kept for each row, concatenated, as in vLLM's
    `SamplingMask` (arXiv 2512.02556, 3.1).

    A row without ids was not truncated. The target always counts as kept; the ids of a row must be
    distinct.

    Example: SamplingMask(token_ids_K=tensor([5, 9, 2]), offsets_T1=tensor([0, 2, 2, 3])): rows 0
    and 2 were truncated, row 1 was not.
    """

    token_ids_K: Tensor
    """int32 or int64, on the device of the logits."""
    offsets_T1: Tensor
    """int64 [T + 1], ascending from 0 to K."""

    def __getitem__(self, rows: slice) -> SamplingMask:
        """Return the mask of consecutive rows. The result still holds all ids and offsets into
        them, because selecting its own ids (`trimmed`) makes the host wait for the device.
        """
        return SamplingMask(self.token_ids_K, self.offsets_T1[rows.start : rows.stop + 1])

    def trimmed(self) -> SamplingMask:
        """Return the mask with only the ids of its own rows, and offsets that start at 0."""
        begin, end = int(self.offsets_T1[0]), int(self.offsets_T1[-1])
        if end - begin == len(self.token_ids_K):
            return self
        return SamplingMask(self.token_ids_K[begin:end], self.offsets_T1 - begin)

    def at(self, index_A: Tensor, num_ids: int | None = None) -> SamplingMask:
        """Return the mask of the given rows, in this order; `num_ids`: their number of ids, if
        known, which spares the host a wait.
        """
        counts_A = self.offsets_T1.diff()[index_A]
        offsets_A1 = torch.cat([counts_A.new_zeros(1), counts_A.cumsum(0)])
        shift_A = self.offsets_T1[index_A] - offsets_A1[:-1]
        shift_K = torch.repeat_interleave(shift_A, counts_A, output_size=num_ids)
        place_K = shift_K + torch.arange(len(shift_K), device=shift_K.device)
        return SamplingMask(self.token_ids_K[place_K], offsets_A1)

    def is_truncated(self) -> Tensor:
        """Return bool [T], true for rows with ids."""
        return self.offsets_T1.diff() > 0

    def row_of_ids(self) -> Tensor:
        """Return the row of each id, int64 [K]. The mask must be `trimmed`."""
        counts_T = self.offsets_T1.diff()
        return torch.repeat_interleave(
            torch.arange(len(counts_T), device=counts_T.device), counts_T
        )


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of T rows of logits, or of hidden states that will become such."""

    ids_T: Tensor
    """int64; a negative id marks a row that is not read and whose results are 0."""
    temperature_T: Tensor
    """fp32 (fp64 for fp64 logits); its stride may be 0."""
    softcap: float | None = None
    mask: SamplingMask | None = None

    def __len__(self) -> int:
        return len(self.ids_T)

    def __getitem__(self, rows: slice) -> Targets:
        """Return the targets of consecutive rows."""
        mask = None if self.mask is None else self.mask[rows]
        return Targets(self.ids_T[rows], self.temperature_T[rows], self.softcap, mask)

    def at(self, index_A: Tensor, num_mask_ids: int | None = None) -> Targets:
        """Return the targets of the given rows, in this order; see `SamplingMask.at`."""
        mask = None if self.mask is None else self.mask.at(index_A, num_mask_ids)
        return Targets(self.ids_T[index_A], self.temperature_T[index_A], self.softcap, mask)

    def flat(self) -> tuple[Any, ...]:
        """Return the fields as an operator takes them; `unflatten` puts them together again."""
        ids_K, offsets_T1 = (
            (None, None) if self.mask is None else (self.mask.token_ids_K, self.mask.offsets_T1)
        )
        return self.ids_T, self.temperature_T, self.softcap, ids_K, offsets_T1


@dataclass(frozen=True, slots=True)
class Slopes:
    """Upstream gradients of the scores of each row, [T]; None for one that is 0 everywhere."""

    logprob_T: Tensor
    entropy_T: Tensor | None = None
    lse_T: Tensor | None = None

    def __getitem__(self, rows: slice | Tensor) -> Slopes:
        optional = (None if x is None else x[rows] for x in (self.entropy_T, self.lse_T))
        return Slopes(self.logprob_T[rows], *optional)


def unflatten(
    ids_T: Tensor,
    temperature_T: Tensor,
    softcap: float | None,
    mask_ids_K: Tensor | None,
    mask_offsets_T1: Tensor | None,
) -> Targets:
    """Return `Targets` from the arguments of an operator."""
    mask = None
    if mask_ids_K is not None and mask_offsets_T1 is not None:
        mask = SamplingMask(mask_ids_K, mask_offsets_T1)
    return Targets(ids_T, temperature_T, softcap, mask)
