"""Find out, by value, what vLLM makes of weights once its loader has written them.

A loader writes words in the order of the checkpoint. Before the first request vLLM may pack,
transpose or replace a parameter for its kernels; words that are written there later, in the
loader's order, would be read as others. Names of classes do not tell where that happens: so each
parameter is digested before and after. What this cannot see is a permutation of equal words, such
as zeros; the random weights of a model that starts without a checkpoint have none.

Experts on a CPU are the exception: their kernel reads a packed copy, which is packed again after
each update. The parameters stay as the loader wrote them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from flowtrain.records import UserError
from flowtrain.weights.format.tensor_shards import digest_of

_rearranged: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()
"""Names of the parameters that vLLM rearranged, of each model that it loaded."""
_num_updates = 0
"""Updates of all models in this process."""


def watch_processing(is_used: Callable[[], bool]) -> None:
    """Note from now on what vLLM rearranges in each model that it loads while `is_used`."""
    from vllm.model_executor.model_loader import base_loader

    process = base_loader.process_weights_after_loading

    def watched(model: nn.Module, *args: Any, **options: Any) -> None:
        before = _contents(model) if is_used() else {}
        process(model, *args, **options)
        if before:
            after = _contents(model)
            _rearranged[model] = [name for name in after if after[name] != before.get(name)]

    base_loader.process_weights_after_loading = watched


def refuse_rearranged(model: nn.Module) -> None:
    """Raise UserError for a model that computes with other words than its loader writes."""
    if model not in _rearranged:
        raise UserError(
            "sparse_delta has not seen how vLLM loaded this model; take load_format 'auto' or "
            "'dummy'"
        )
    for name in _rearranged[model]:
        raise UserError(f"sparse_delta does not support {name!r}: vLLM rearranges it after loading")
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    for name, module in model.named_modules():
        sinks = getattr(getattr(module, "impl", None), "sinks", None)
        if sinks is not None and sinks.untyped_storage().data_ptr() not in storages:
            raise UserError(
                f"sparse_delta does not support {name!r}: its attention computes with a copy of "
                "the sinks; take another attention backend"
            )


def pack_copies_of_experts(is_used: Callable[[], bool]) -> None:
    """Let vLLM on a CPU pack copies of experts, for models that it loads while `is_used`: after
    loading, and again when `note_update` was called.
    """
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:  # an older vLLM, whose experts are refused if it rearranges them
        return
    pack, compute = CPUUnquantizedExperts.process_weights_after_loading, CPUUnquantizedExperts.apply

    def process(experts: Any, layer: nn.Module) -> None:
        if is_used():
            experts.plain = {name: getattr(layer, name) for name in ("w13_weight", "w2_weight")}
            experts.packed_at = -1  # to be packed at the first use
        else:
            pack(experts, layer)

    def apply(experts: Any, **options: Any) -> None:
        if hasattr(experts, "plain"):
            if experts.packed_at != _num_updates:
                experts.packed, experts.packed_at = nn.ParameterDict(experts.plain), _num_updates
                pack(experts, experts.packed)
            options |= {"w1": experts.packed.w13_weight, "w2": experts.packed.w2_weight}
        compute(experts, **options)

    CPUUnquantizedExperts.process_weights_after_loading = process
    CPUUnquantizedExperts.apply = apply


def keep_convolutions_plain() -> bool:
    """Let vLLM's kernels on a CPU read the convolutions of recurrent layers as the loader writes
    them, [C, 1, W]; False for a vLLM that has no such kernels.
    """
    from vllm import _custom_ops as ops

    names = ("causal_conv1d_fwd_cpu", "causal_conv1d_update_cpu")
    if not all(hasattr(ops, name) for name in names):
        return False
    for name in names:
        setattr(ops, name, _reading_plain_weight(getattr(ops, name)))
    return True


def _reading_plain_weight(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*, weight: Tensor, is_weight_packed: bool, **options: Any) -> Tensor:
        is_packed = is_weight_packed and weight.dim() == 2
        return kernel(weight=weight.flatten(1), is_weight_packed=is_packed, **options)

    return run


def note_update() -> None:
    """Tell that weights may have changed."""
    global _num_updates
    _num_updates += 1


def _contents(model: nn.Module) -> dict[str, object]:
    def content(tensor: Tensor) -> object:
        if tensor.is_meta or tensor.dtype.itemsize < 2:
            return tensor.dtype, tensor.shape
        return tensor.dtype, tensor.shape, digest_of(tensor.detach().contiguous().view(-1))

    return {name: content(x) for name, x in model.named_parameters(remove_duplicate=False)}
