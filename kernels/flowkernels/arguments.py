"""Checks of arguments. A `ValueError` names the argument, the requirement and the actual value.

Checks that read values make a GPU wait, so they run on CPU tensors, and on others when
FLOWKERNELS_DEBUG=1 is set. Without the checks a target above the vocabulary, a NaN logit or +inf
makes its row and the loss NaN, so no mistake goes unnoticed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flowkernels.loss_spec import LossSpec
from flowkernels.plain_tensors import check_plain
from flowkernels.sequences import sequence_ids
from flowkernels.targets import SamplingMask, Targets
from flowkernels.token_loss import TokenInputs, TokenLossFn, check_inputs

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32)
LOGPROB_DTYPES = (torch.float32, torch.float64)
"""A log-prob in 16 bits leaves too few digits for a ratio."""
TOKEN_DTYPES = {
    "advantage_T": DTYPES,
    "weight_T": (*DTYPES, torch.bool, *INTEGERS),
    "temperature": DTYPES,
}
"""The dtypes that other numbers of tokens may have."""


def dtype_of_results(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which inputs of this one are accumulated, and results returned."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_logits(logits_TV: Tensor) -> None:
    if logits_TV.dim() != 2 or logits_TV.dtype not in DTYPES or logits_TV.shape[1] == 0:
        raise ValueError(
            "logits_TV must be float32, bfloat16, float16 or float64 [T, V] or [..., T, V], "
            f"V > 0, got {logits_TV.dtype} {tuple(logits_TV.shape)}"
        )
    if logits_TV.stride(1) != 1 and logits_TV.shape[1] > 1:
        raise ValueError(
            "logits_TV must have the vocabulary contiguous (stride 1), got strides "
            f"{logits_TV.stride()}"
        )


def check_targets(
    rows: Tensor,
    num_vocab: int,
    target_ids: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    sampling_mask: SamplingMask | None,
) -> Targets:
    """Return the flat targets of rows [..., X] of logits, or of states that will become such."""
    shape, device = rows.shape[:-1], rows.device
    ids_T = flat_tokens("target_ids_T", target_ids, shape, INTEGERS, device, torch.int64)
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap} must be above 0 and finite, or None")
    temperature_T = temperatures(temperature, shape, dtype_of_results(rows.dtype), device)
    if sampling_mask is not None:
        _check_mask(sampling_mask, len(ids_T), device)
    targets = Targets(ids_T, temperature_T, softcap, sampling_mask)
    if checks_values(device):
        _check_values(targets, num_vocab)
    return targets


def flat_tokens(
    name: str,
    tensor: Tensor,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Return a tensor with an entry per token, of one of the dtypes, as [T], contiguous and without
    a gradient, in `dtype`.
    """
    check_tokens(name, tensor, shape, dtypes, device)
    return tensor.detach().to(dtype).flatten().contiguous()


def check_tokens(
    name: str,
    tensor: Tensor,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    check_plain(name, tensor)
    if tensor.shape != torch.Size(shape) or tensor.dtype not in dtypes:
        alternatives = f" (or {', '.join(map(str, dtypes[1:]))})" if dtypes[1:] else ""
        raise ValueError(
            f"{name} must be {dtypes[0]} {list(shape)}{alternatives}, got {tensor.dtype} "
            f"{tuple(tensor.shape)}".replace("torch.", "")
        )
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, where the logits are, got {tensor.device}")


def check_sequences(cu_seqlens_S1: Tensor, num_tokens: int, device: torch.device) -> None:
    check_plain("cu_seqlens_S1", cu_seqlens_S1)
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
            "hidden_TD must be float32, bfloat16, float16 or float64 [T, D] or [..., T, D], got "
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
            expected, actual = (hidden_TD.dtype, hidden_TD.device), (tensor.dtype, tensor.device)
            raise ValueError(
                f"{name} must be {expected[0]} on {expected[1]}, as hidden_TD, got {actual[0]} on "
                f"{actual[1]}"
            )
    if bias_V is not None and bias_V.shape != weight_VD.shape[:1]:
        raise ValueError(f"bias_V must be [V={weight_VD.shape[0]}], got {tuple(bias_V.shape)}")


def check_token_inputs(
    spec: LossSpec | TokenLossFn, inputs: TokenInputs, targets: Targets, shape: Sequence[int]
) -> TokenInputs:
    """Return the inputs, which have this shape, flat, contiguous, in the dtype of the results and
    without gradients; an advantage of a sequence at all its tokens.
    """
    num_tokens, device, bounds_S1 = len(targets), targets.ids_T.device, inputs.cu_seqlens_S1
    tensors = {name: x for name, x in inputs.per_token().items() if x is not None}
    if bounds_S1 is not None:
        check_sequences(bounds_S1, num_tokens, device)
    for name, tensor in tensors.items():
        dtypes = TOKEN_DTYPES.get(name, LOGPROB_DTYPES)
        is_of_sequences = name == "advantage_T" and _is_of_sequences(tensor, bounds_S1, shape)
        size = tensor.shape if is_of_sequences else shape
        flat = flat_tokens(name, tensor, size, dtypes, device, targets.temperature_T.dtype)
        if is_of_sequences and bounds_S1 is not None:
            flat = flat[sequence_ids(bounds_S1, num_tokens)]
        tensors[name] = flat
    if isinstance(spec, LossSpec):
        check_inputs(spec, inputs)
        if spec.correction_level == "sequence":  # a negative target is in no sequence
            tensors["weight_T"] = torch.where(targets.ids_T >= 0, tensors["weight_T"], 0.0)
    return replace(inputs, **tensors)


def _is_of_sequences(advantage: Tensor, cu_seqlens_S1: Tensor | None, shape: Sequence[int]) -> bool:
    """Return whether there is one advantage per sequence; [T] is per token, even if S = T."""
    if cu_seqlens_S1 is None or advantage.shape == torch.Size(shape):
        return False
    return advantage.shape == (len(cu_seqlens_S1) - 1,)


def temperatures(
    temperature: float | Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the temperatures [T], of stride 0 when it is one number."""
    if isinstance(temperature, Tensor):
        dtypes = TOKEN_DTYPES["temperature"]
        temperature_T = flat_tokens("temperature", temperature, shape, dtypes, device, dtype)
        if checks_values(device) and not bool((temperature_T > 0).all()):
            raise ValueError(
                f"temperature must be above 0 in every row, got {float(temperature_T.min())}"
            )
        return temperature_T
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be above 0 and finite")
    scalar = torch.full((1,), temperature, dtype=dtype, device=device)
    return scalar.expand(math.prod(shape))


def _check_mask(mask: SamplingMask, num_rows: int, device: torch.device) -> None:
    for name, tensor, wanted in (
        ("token_ids_K", mask.token_ids_K, ("int32", "int64")),
        ("offsets_T1", mask.offsets_T1, ("int64",)),
    ):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.dim() != 1 or dtype not in wanted or not tensor.is_contiguous():
            raise ValueError(
                f"sampling_mask.{name} must be contiguous {' or '.join(wanted)} [n], got {dtype} "
                f"{tuple(tensor.shape)}"
            )
        if tensor.device != device:
            raise ValueError(
                f"sampling_mask.{name} must be on {device}, where the logits are, got "
                f"{tensor.device}"
            )
    if len(mask.offsets_T1) != num_rows + 1:
        raise ValueError(
            f"sampling_mask.offsets_T1 must have T + 1 = {num_rows + 1} entries, got "
            f"{len(mask.offsets_T1)}"
        )


def _check_values(targets: Targets, num_vocab: int) -> None:
    if len(targets) and int(targets.ids_T.max()) >= num_vocab:
        raise ValueError(
            f"target_ids_T must be below V={num_vocab} (negative: ignored), got "
            f"{int(targets.ids_T.max())}"
        )
    if targets.mask is None:
        return
    ids_K = targets.mask.token_ids_K
    offsets = targets.mask.offsets_T1.tolist()
    if offsets[0] != 0 or offsets[-1] != len(ids_K) or offsets != sorted(offsets):
        raise ValueError(
            f"sampling_mask.offsets_T1 must ascend from 0 to the {len(ids_K)} ids, got "
            f"{_short(offsets)}"
        )
    if len(ids_K) and not (int(ids_K.min()) >= 0 and int(ids_K.max()) < num_vocab):
        raise ValueError(
            f"sampling_mask.token_ids_K must be in [0, V={num_vocab}), got {int(ids_K.min())} to "
            f"{int(ids_K.max())}"
        )
    if len(torch.unique(targets.mask.row_of_ids() * num_vocab + ids_K)) != len(ids_K):
        raise ValueError("sampling_mask.token_ids_K must not name an id twice in a row")


def _short(numbers: list[int]) -> str:
    if len(numbers) <= 8:
        return str(numbers)
    return f"[{', '.join(map(str, numbers[:4]))}, …, {numbers[-1]}]"
