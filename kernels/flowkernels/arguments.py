"""Checks of what a caller passes. A `ValueError` names the argument, what it must be and what it
is.

Checks that read values make a GPU wait, so they run on CPU tensors, and on others when
FLOWKERNELS_DEBUG=1 is set. Without them a target above the vocabulary, a NaN logit or +inf gives
NaN for its row and so for the loss: nothing wrong goes unseen.
"""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from flowkernels.rows import Rows, SamplingMask
from flowkernels.token_loss import LossSpec, TokenLossFn, Tokens, check_inputs

IMPLS = ("auto", "triton", "torch")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INVARIANT_STEP = 16
"""Products of fewer rows sum in an order that depends on where a row stands (seen of MKL with 3 and
5 rows)."""


def resolve_impl(impl: str, device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """ "auto": Triton on a GPU, torch elsewhere and for float64."""
    if impl not in IMPLS:
        raise ValueError(f"impl={impl!r} must be one of {', '.join(map(repr, IMPLS))}")
    if impl == "auto":
        return "triton" if device.type == "cuda" and dtype != torch.float64 else "torch"
    if impl == "triton" and dtype == torch.float64:
        raise ValueError("impl='triton' needs logits of float32, bfloat16 or float16, got float64")
    if impl == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "impl='triton' needs tensors on a GPU, got cpu (TRITON_INTERPRET=1 interprets the "
            "kernels on the CPU)"
        )
    return impl


def check_rows(
    logits_TV: Tensor,
    target_ids_T: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    sampling_mask: SamplingMask | None,
) -> Rows:
    """Arguments of the functions on logits."""
    if logits_TV.dim() != 2 or logits_TV.dtype not in DTYPES or logits_TV.shape[1] == 0:
        raise ValueError(
            "logits_TV must be float32, bfloat16, float16 or float64 [T, V], V > 0, got "
            f"{logits_TV.dtype} {tuple(logits_TV.shape)}"
        )
    if logits_TV.stride(1) != 1 and logits_TV.shape[1] > 1:
        raise ValueError(
            "logits_TV must have the vocabulary contiguous (stride 1), got strides "
            f"{logits_TV.stride()}"
        )
    return check_targets(
        logits_TV, logits_TV.shape[1], target_ids_T, temperature, softcap, sampling_mask
    )


def check_targets(
    rows_TX: Tensor,
    num_vocab: int,
    target_ids_T: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    sampling_mask: SamplingMask | None,
) -> Rows:
    """What goes with rows of logits, or with hidden states in their place."""
    check_tokens("target_ids_T", target_ids_T, len(rows_TX), torch.int64, rows_TX.device)
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap} must be above 0 and finite, or None")
    rows = Rows(
        rows_TX,
        target_ids_T.contiguous(),
        _temperature(temperature, rows_TX),
        softcap or 0.0,
        sampling_mask,
    )
    if sampling_mask is not None:
        _check_kept(sampling_mask, len(rows_TX), rows_TX.device)
    if checks_values(rows_TX.device):
        _check_values(rows, num_vocab)
    return rows


def check_tokens(
    name: str, tensor: Tensor, num_rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    if tensor.shape != (num_rows,) or tensor.dtype != dtype:
        raise ValueError(
            f"{name} must be {dtype} [{num_rows}], got {tensor.dtype} {tuple(tensor.shape)}".replace(
                "torch.", ""
            )
        )
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, where the logits are, got {tensor.device}")


def check_sequences(cu_seqlens_S1: Tensor, num_tokens: int, device: torch.device) -> None:
    if (
        cu_seqlens_S1.dim() != 1
        or len(cu_seqlens_S1) < 1
        or cu_seqlens_S1.dtype not in (torch.int32, torch.int64)
    ):
        raise ValueError(
            f"cu_seqlens_S1 must be int32 or int64 [S + 1], got {cu_seqlens_S1.dtype} "
            f"{tuple(cu_seqlens_S1.shape)}".replace("torch.", "")
        )
    if cu_seqlens_S1.device != device:
        raise ValueError(f"cu_seqlens_S1 must be on {device}, got {cu_seqlens_S1.device}")
    if checks_values(device):
        bounds = cu_seqlens_S1.tolist()
        if bounds[0] != 0 or bounds[-1] != num_tokens or bounds != sorted(bounds):
            raise ValueError(
                f"cu_seqlens_S1 must ascend from 0 to the {num_tokens} tokens, got {_short(bounds)}"
            )


def checks_values(device: torch.device) -> bool:
    if torch.compiler.is_compiling():
        return False
    return device.type == "cpu" or os.environ.get("FLOWKERNELS_DEBUG") == "1"


def check_head(hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> None:
    if hidden_TD.dim() != 2 or hidden_TD.dtype not in DTYPES or hidden_TD.shape[1] == 0:
        raise ValueError(
            "hidden_TD must be float32, bfloat16, float16 or float64 [T, D], got "
            f"{hidden_TD.dtype} {tuple(hidden_TD.shape)}"
        )
    if weight_VD.dim() != 2 or weight_VD.shape[1] != hidden_TD.shape[1] or weight_VD.shape[0] == 0:
        raise ValueError(
            f"weight_VD must be [V, D={hidden_TD.shape[1]}] like hidden_TD, got "
            f"{tuple(weight_VD.shape)}"
        )
    for name, tensor in (("weight_VD", weight_VD), ("bias_V", bias_V)):
        if tensor is not None and (
            tensor.dtype != hidden_TD.dtype or tensor.device != hidden_TD.device
        ):
            wanted, given = (hidden_TD.dtype, hidden_TD.device), (tensor.dtype, tensor.device)
            raise ValueError(
                f"{name} must be {wanted[0]} on {wanted[1]}, as hidden_TD, got {given[0]} on "
                f"{given[1]}"
            )
    if bias_V is not None and bias_V.shape != weight_VD.shape[:1]:
        raise ValueError(f"bias_V must be [V={weight_VD.shape[0]}], got {tuple(bias_V.shape)}")


def chunk_rows(
    memory_budget: int | None,
    hidden_TD: Tensor,
    num_vocab: int,
    fp32_logits: bool,
    batch_invariant: bool,
) -> int:
    """Rows of logits that fit the budget; without one, what a GPU or a CPU works well with. Never a
    matter of T.
    """
    if batch_invariant and hidden_TD.dtype == torch.float64:
        raise ValueError(
            "batch_invariant works with float32, bfloat16 and float16, got hidden_TD of float64"
        )
    size = hidden_TD.element_size()
    row_bytes = num_vocab * (size if not fp32_logits or size >= 4 else 4 + size)
    num_rows = 4096 if hidden_TD.is_cuda else max(16, 2**23 // num_vocab)
    if memory_budget is not None:
        num_rows = memory_budget // row_bytes
    if not batch_invariant:
        if num_rows < 1:
            raise ValueError(
                f"memory_budget={memory_budget} bytes must hold at least one row of logits, which "
                f"takes {row_bytes}"
            )
        return num_rows
    if num_rows < INVARIANT_STEP:
        wanted = (
            f"{INVARIANT_STEP} rows of logits for batch_invariant, which take "
            f"{INVARIANT_STEP * row_bytes}"
        )
        raise ValueError(f"memory_budget={memory_budget} bytes must hold at least {wanted}")
    return min(num_rows, 4096 if hidden_TD.is_cuda else 256) // INVARIANT_STEP * INVARIANT_STEP


def check_token_inputs(
    spec: LossSpec | TokenLossFn,
    rows: Rows,
    advantage_T: Tensor,
    weight_T: Tensor,
    old_logprob_T: Tensor | None,
    ref_logprob_T: Tensor | None,
    sampler_logprob_T: Tensor | None,
    cu_seqlens_S1: Tensor | None,
) -> Tokens:
    """Everything but the log-probs, which are not known yet; none of it carries a gradient."""
    num_rows, device = rows.logits_TV.shape[0], rows.logits_TV.device
    needed = {"advantage_T": advantage_T, "weight_T": weight_T}
    optional = {
        "old_logprob_T": old_logprob_T,
        "ref_logprob_T": ref_logprob_T,
        "sampler_logprob_T": sampler_logprob_T,
    }
    for name, tensor in {**needed, **optional}.items():
        if tensor is not None:
            check_tokens(name, tensor, num_rows, torch.float32, device)
    if cu_seqlens_S1 is not None:
        check_sequences(cu_seqlens_S1, num_rows, device)
    advantage_T, weight_T = (x.detach().contiguous() for x in needed.values())
    old_T, ref_T, sampler_T = (
        None if x is None else x.detach().contiguous() for x in optional.values()
    )
    tokens = Tokens(
        weight_T, weight_T, advantage_T, weight_T, old_T, ref_T, sampler_T, cu_seqlens_S1
    )
    if isinstance(spec, LossSpec):
        check_inputs(spec, tokens)
    return tokens


def _temperature(temperature: float | Tensor, logits_TV: Tensor) -> Tensor:
    """fp32 [T], of stride 0 when it is one number."""
    num_rows = logits_TV.shape[0]
    if isinstance(temperature, Tensor):
        check_tokens("temperature", temperature, num_rows, torch.float32, logits_TV.device)
        if checks_values(logits_TV.device) and not bool((temperature > 0).all()):
            raise ValueError(
                f"temperature must be above 0 in every row, got {float(temperature.min())}"
            )
        return temperature.detach()
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be above 0 and finite")
    return torch.full((1,), temperature, dtype=torch.float32, device=logits_TV.device).expand(
        num_rows
    )


def _check_kept(sampling_mask: SamplingMask, num_rows: int, device: torch.device) -> None:
    for name, tensor in (
        ("sampling_mask.token_ids_K", sampling_mask.token_ids_K),
        ("sampling_mask.offsets_T1", sampling_mask.offsets_T1),
    ):
        if tensor.dim() != 1 or tensor.dtype != torch.int64 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous int64 [n], got {tensor.dtype} {tuple(tensor.shape)}".replace(
                    "torch.", ""
                )
            )
        if tensor.device != device:
            raise ValueError(
                f"{name} must be on {device}, where the logits are, got {tensor.device}"
            )
    if len(sampling_mask.offsets_T1) != num_rows + 1:
        raise ValueError(
            f"sampling_mask.offsets_T1 must have T + 1 = {num_rows + 1} entries, got {len(sampling_mask.offsets_T1)}"
        )


def _check_values(rows: Rows, num_vocab: int) -> None:
    if len(rows.target_ids_T) and int(rows.target_ids_T.max()) >= num_vocab:
        raise ValueError(
            f"target_ids_T must be below V={num_vocab} (negative: ignored), got "
            f"{int(rows.target_ids_T.max())}"
        )
    if rows.sampling_mask is None:
        return
    ids_K, offsets = rows.sampling_mask.token_ids_K, rows.sampling_mask.offsets_T1.tolist()
    if offsets[0] != 0 or offsets[-1] != len(ids_K) or offsets != sorted(offsets):
        raise ValueError(
            f"sampling_mask.offsets_T1 must ascend from 0 to the {len(ids_K)} kept ids, got "
            f"{_short(offsets)}"
        )
    if len(ids_K) and not (int(ids_K.min()) >= 0 and int(ids_K.max()) < num_vocab):
        raise ValueError(
            f"sampling_mask.token_ids_K must be in [0, V={num_vocab}), got {int(ids_K.min())} to "
            f"{int(ids_K.max())}"
        )
    row_K = torch.repeat_interleave(
        torch.arange(len(offsets) - 1, device=ids_K.device), rows.sampling_mask.offsets_T1.diff()
    )
    if len(torch.unique(row_K * num_vocab + ids_K)) != len(ids_K):
        raise ValueError("sampling_mask.token_ids_K must not name an id twice in a row")


def _short(numbers: list[int]) -> str:
    return (
        str(numbers)
        if len(numbers) <= 8
        else f"[{', '.join(map(str, numbers[:4]))}, …, {numbers[-1]}]"
    )
