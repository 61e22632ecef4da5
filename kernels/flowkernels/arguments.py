"""Checks of what a caller passes. A `ValueError` names the argument, what it must be and what it is.

Checks that read values make a GPU wait, so they run on CPU tensors, and on others when FLOWKERNELS_DEBUG=1 is set. Without them a
target above the vocabulary, a NaN logit or +inf gives NaN for its row and so for the loss: nothing wrong goes unseen.
"""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from flowkernels.rows import KeptSet, Rows

IMPLS = ("auto", "triton", "torch")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def resolve_impl(impl: str, device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """ "auto": Triton on a GPU, torch elsewhere and for float64."""
    if impl not in IMPLS:
        raise ValueError(f"impl={impl!r} must be one of {', '.join(map(repr, IMPLS))}")
    if impl == "auto":
        return "triton" if device.type == "cuda" and dtype != torch.float64 else "torch"
    if impl == "triton" and dtype == torch.float64:
        raise ValueError("impl='triton' needs logits of float32, bfloat16 or float16, got float64")
    if impl == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("impl='triton' needs tensors on a GPU, got cpu (TRITON_INTERPRET=1 interprets the kernels on the CPU)")
    return impl


def check_rows(logits_TV: Tensor, target_ids_T: Tensor, temperature: float | Tensor, softcap: float | None, kept: KeptSet | None) -> Rows:
    if logits_TV.dim() != 2 or logits_TV.dtype not in DTYPES or logits_TV.shape[1] == 0:
        raise ValueError(
            f"logits_TV must be float32, bfloat16, float16 or float64 [T, V], V > 0, got {logits_TV.dtype} {tuple(logits_TV.shape)}"
        )
    if logits_TV.stride(1) != 1 and logits_TV.shape[1] > 1:
        raise ValueError(f"logits_TV must have the vocabulary contiguous (stride 1), got strides {logits_TV.stride()}")
    num_rows, num_vocab = logits_TV.shape
    check_tokens("target_ids_T", target_ids_T, num_rows, torch.int64, logits_TV.device)
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap} must be above 0 and finite, or None")
    rows = Rows(logits_TV, target_ids_T.contiguous(), _temperature(temperature, logits_TV), softcap or 0.0, kept)
    if kept is not None:
        _check_kept(kept, num_rows, logits_TV.device)
    if checks_values(logits_TV.device):
        _check_values(rows, num_vocab)
    return rows


def check_tokens(name: str, tensor: Tensor, num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
    if tensor.shape != (num_rows,) or tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} [{num_rows}], got {tensor.dtype} {tuple(tensor.shape)}".replace("torch.", ""))
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, where the logits are, got {tensor.device}")


def check_sequences(cu_seqlens_S1: Tensor, num_tokens: int, device: torch.device) -> None:
    if cu_seqlens_S1.dim() != 1 or len(cu_seqlens_S1) < 1 or cu_seqlens_S1.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens_S1 must be int32 or int64 [S + 1], got {cu_seqlens_S1.dtype} {tuple(cu_seqlens_S1.shape)}".replace("torch.", "")
        )
    if cu_seqlens_S1.device != device:
        raise ValueError(f"cu_seqlens_S1 must be on {device}, got {cu_seqlens_S1.device}")
    if checks_values(device):
        bounds = cu_seqlens_S1.tolist()
        if bounds[0] != 0 or bounds[-1] != num_tokens or bounds != sorted(bounds):
            raise ValueError(f"cu_seqlens_S1 must ascend from 0 to the {num_tokens} tokens, got {_short(bounds)}")


def checks_values(device: torch.device) -> bool:
    if torch.compiler.is_compiling():
        return False
    return device.type == "cpu" or os.environ.get("FLOWKERNELS_DEBUG") == "1"


def _temperature(temperature: float | Tensor, logits_TV: Tensor) -> Tensor:
    """fp32 [T], of stride 0 when it is one number."""
    num_rows = logits_TV.shape[0]
    if isinstance(temperature, Tensor):
        check_tokens("temperature", temperature, num_rows, torch.float32, logits_TV.device)
        if checks_values(logits_TV.device) and not bool((temperature > 0).all()):
            raise ValueError(f"temperature must be above 0 in every row, got {float(temperature.min())}")
        return temperature.detach()
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be above 0 and finite")
    return torch.full((1,), temperature, dtype=torch.float32, device=logits_TV.device).expand(num_rows)


def _check_kept(kept: KeptSet, num_rows: int, device: torch.device) -> None:
    for name, tensor in (("kept.token_ids_K", kept.token_ids_K), ("kept.offsets_T1", kept.offsets_T1)):
        if tensor.dim() != 1 or tensor.dtype != torch.int64 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous int64 [n], got {tensor.dtype} {tuple(tensor.shape)}".replace("torch.", ""))
        if tensor.device != device:
            raise ValueError(f"{name} must be on {device}, where the logits are, got {tensor.device}")
    if len(kept.offsets_T1) != num_rows + 1:
        raise ValueError(f"kept.offsets_T1 must have T + 1 = {num_rows + 1} entries, got {len(kept.offsets_T1)}")


def _check_values(rows: Rows, num_vocab: int) -> None:
    if len(rows.target_ids_T) and int(rows.target_ids_T.max()) >= num_vocab:
        raise ValueError(f"target_ids_T must be below V={num_vocab} (negative: ignored), got {int(rows.target_ids_T.max())}")
    if rows.kept is None:
        return
    ids_K, offsets = rows.kept.token_ids_K, rows.kept.offsets_T1.tolist()
    if offsets[0] != 0 or offsets[-1] != len(ids_K) or offsets != sorted(offsets):
        raise ValueError(f"kept.offsets_T1 must ascend from 0 to the {len(ids_K)} kept ids, got {_short(offsets)}")
    if len(ids_K) and not (int(ids_K.min()) >= 0 and int(ids_K.max()) < num_vocab):
        raise ValueError(f"kept.token_ids_K must be in [0, V={num_vocab}), got {int(ids_K.min())} to {int(ids_K.max())}")
    row_K = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=ids_K.device), rows.kept.offsets_T1.diff())
    if len(torch.unique(row_K * num_vocab + ids_K)) != len(ids_K):
        raise ValueError("kept.token_ids_K must not name an id twice in a row")


def _short(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"[{', '.join(map(str, numbers[:4]))}, …, {numbers[-1]}]"
