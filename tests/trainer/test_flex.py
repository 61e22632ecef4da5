"""FlexAttention as packed rows use it, on the CPU: not compiled, and forward only."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from batches import random_samples
from forests import is_valid_tree, random_forest
from gradients import distance
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from flowtrain.records import Sample, UserError
from flowtrain.trainer import sharding
from flowtrain.trainer.attention import flex
from flowtrain.trainer.attention import registration as attention
from flowtrain.trainer.attention.flex import BLOCK, FlexTree, padded
from flowtrain.trainer.attention.forest import Forest
from flowtrain.trainer.attention.registration import forest_attention, name_of, structure_of
from flowtrain.trainer.distributed import World
from flowtrain.trainer.loss import forward_rows
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.packing import pack_row

FORESTS = {
    "one chain": torch.full((4 * BLOCK,), 4 * BLOCK),
    "two chains": torch.tensor([300] * 300 + [512] * 212),
    "lone tokens": torch.arange(1, 2 * BLOCK + 1),
    "long branches": random_forest(4 * BLOCK, 0, 0.005),
    "short branches": random_forest(4 * BLOCK, 1, 0.3),
}


@pytest.mark.parametrize(
    ("name", "num_heads", "num_kv_heads"),
    [("short branches", 2, 2), *((name, 4, 2) for name in FORESTS)],
)
@pytest.mark.parametrize("num_before", [0, 7, 256])
def test_it_is_the_attention_of_the_cpu(
    name: str, num_heads: int, num_kv_heads: int, num_before: int
) -> None:
    """Also below the tokens of other passes."""
    ends, rng = FORESTS[name], torch.Generator().manual_seed(0)
    assert is_valid_tree(ends)
    query = torch.randn(1, num_heads, len(ends), 16, generator=rng)
    own, pair = (
        torch.randn(2, 1, num_kv_heads, number, 16, generator=rng)
        for number in (len(ends), num_before)
    )
    before = [tuple(part) for part in pair.tensor_split([num_before // 3], 3)] if num_before else []
    sinks = torch.randn(num_heads, generator=rng)
    forests = FlexTree.of(ends, num_before), Forest.of(ends)
    for options in ({}, {"window": 9}, {"window": 150, "sink_H": sinks}):
        with torch.no_grad():
            outs = [f.attend(query, *own, scaling=0.3, before=before, **options) for f in forests]
        torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FORESTS)
@pytest.mark.parametrize("num_before", [0, 7, 256])
def test_blocks_are_those_that_the_whole_mask_has(name: str, num_before: int) -> None:
    """Too few would be wrong, too many slow; full ones are known as such."""
    ends, tree = FORESTS[name], FlexTree.of(FORESTS[name], num_before)
    ours, num_keys = tree.mask(), num_before + tree._num_fill + len(ends)
    truth = create_block_mask(
        ours.mask_mod, None, None, len(ends), num_keys, device="cpu", BLOCK_SIZE=BLOCK
    )
    assert torch.equal(ours.to_dense(), truth.to_dense())
    for counts, indices in (
        ("kv_num_blocks", "kv_indices"),
        ("full_kv_num_blocks", "full_kv_indices"),
    ):
        for (row, number), (_, expected) in zip(
            _entries(ours, counts), _entries(truth, counts), strict=True
        ):
            assert number == expected
            mine, other = (
                sorted(getattr(mask, indices)[0, 0, row, :number].tolist())
                for mask in (ours, truth)
            )
            assert mine == other
    if name == "one chain" and not num_before:
        assert int(ours.full_kv_num_blocks.sum()) == 6 and int(ours.kv_num_blocks.sum()) == 4


@pytest.mark.parametrize("window", [1, 9, 128, 129, 200, 300])
@pytest.mark.parametrize("name", FORESTS)
def test_blocks_of_a_window_are_enough_and_not_all(name: str, window: int) -> None:
    """Full ones are known as such; on a path none is taken in vain."""
    tree, ends = FlexTree.of(FORESTS[name]), FORESTS[name]
    ours, wide = tree.mask(window), tree.mask()
    truth = create_block_mask(
        ours.mask_mod, None, None, len(ends), len(ends), device="cpu", BLOCK_SIZE=BLOCK
    )
    assert torch.equal(ours.full_kv_num_blocks, truth.full_kv_num_blocks)
    taken, needed, most = (mask.to_dense()[0, 0].bool() for mask in (ours, truth, wide))
    assert bool((taken | ~needed).all()) and bool((most | ~taken).all())
    if name in ("one chain", "lone tokens"):
        assert torch.equal(taken, needed)


def _entries(mask: object, name: str) -> list[tuple[int, int]]:
    return list(enumerate(getattr(mask, name)[0, 0].tolist()))


def test_a_new_batch_compiles_nothing() -> None:
    """Two graphs: the first length as it is, then any; and two for windows."""
    torch._dynamo.reset()
    counter = CompileCounter()
    attend = torch.compile(flex_attention, backend=counter, dynamic=True)
    for seed, num_blocks in enumerate((2, 3, 5, 8, 4, 7)):
        ends = random_forest(num_blocks * BLOCK, seed, 0.3)
        query = torch.randn(1, 2, len(ends), 16)
        with torch.no_grad():
            for window in (None, 100 + seed):
                attend(query, query, query, block_mask=FlexTree.of(ends).mask(window))
        assert counter.frame_count <= 4, num_blocks
    torch._dynamo.reset()


def test_a_model_may_need_more_graphs_than_torch_makes_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    flex._compiled.cache_clear()
    # A monkeypatch would leave the limit deleted: the module's settings are no entries of its dict.
    with torch._dynamo.config.patch(recompile_limit=8):
        attend = flex._compiled()
        kinds = itertools.product(*[[False, True]] * 4)
        for has_gradients, has_window, has_sinks, is_one_block in itertools.islice(kinds, 10):
            ends = FORESTS["lone tokens"][: BLOCK if is_one_block else 2 * BLOCK].clamp(max=BLOCK)
            query = torch.randn(1, 2, len(ends), 16)  # of which a CPU takes no gradients
            mask = FlexTree.of(ends).mask(50 if has_window else None)
            aux = AuxRequest(lse=True) if has_sinks else None
            with torch.set_grad_enabled(has_gradients):
                attend(query, query, query, block_mask=mask, return_aux=aux)
    flex._compiled.cache_clear()
    torch._dynamo.reset()


@pytest.mark.parametrize("number", [1, 12, 60])
def test_filling_a_row_up_changes_no_logits(tiny_path: str, number: int) -> None:
    """And the model gives with FlexAttention what it gives with the attention of the CPU."""
    model = models.load_model(tiny_path, torch.float32).requires_grad_(False)
    row = pack_row(random_samples(number))
    full = padded(row)
    assert len(full.input_ids_N) % BLOCK == 0 <= len(full.input_ids_N) - len(
        row.input_ids_N
    ) < BLOCK and is_valid_tree(full.subtree_end_N)
    logits = forward_rows(model, row)
    torch.testing.assert_close(forward_rows(model, full), logits, rtol=1e-4, atol=1e-5)
    flexed = model(
        input_ids=full.input_ids_N[None],
        position_ids=full.position_ids_N[None],
        use_cache=False,
        logits_to_keep=full.target_row_T,
        forest=FlexTree.of(full.subtree_end_N),
    ).logits[0]
    torch.testing.assert_close(flexed, logits, rtol=1e-4, atol=1e-5)


def test_a_full_row_stays() -> None:
    row = pack_row(
        [Sample(tuple(range(2, BLOCK + 1)), (5, 6), (-1.0, -1.0), (1.0, 1.0), (1.0, 1.0))]
    )
    assert len(row.input_ids_N) == BLOCK
    assert torch.equal(flex.padded(row).subtree_end_N, row.subtree_end_N)


def test_compiled_layers_compute_the_same_and_share_their_graphs(
    tiny_path: str, alone: World
) -> None:
    """Loss gradients; torch's own backend without code generation, so that the test is quick."""
    torch._dynamo.reset()
    grads, counts = [], []
    for is_compiled in (False, True):
        spec = sharding.ShardSpec(torch.float32, fused=not is_compiled)
        model = sharding.shard(models.load_model(tiny_path, torch.float32), alone, spec)
        if is_compiled:
            sharding.compile_layers(model, backend="aot_eager")
        for seed, number in enumerate((3, 9, 5, 14)):
            forward_rows(
                model, pack_row(random_samples(number, seed=seed))
            ).square().mean().backward()
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert distance(grads[1], grads[0]) < 1e-5
    assert counts[:4] == [counts[0]] * 4
    assert 0 < counts[-1] - counts[0] <= 6
    assert counts[-1] == counts[-2], counts
    torch._dynamo.reset()


def attended(
    kinds: Sequence[Any],
    ends: Tensor,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    window: int | None,
) -> list[tuple[Tensor, ...]]:
    """(output, gradients by query, key, value) of each kind, on the device of the ends; and by the
    sinks, if there is a window.
    """
    num_heads, num_kv_heads, size = heads
    rng = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(1, number, len(ends), size, generator=rng).to(ends.device, dtype)
        for number in (num_heads, num_kv_heads, num_kv_heads)
    ]
    upstream = torch.randn(1, len(ends), num_heads, size, generator=rng).to(ends.device, dtype)
    if window is not None:
        tensors.append(torch.randn(num_heads, generator=rng).to(ends.device, dtype))
    found = []
    for kind in kinds:
        inputs = [x.clone().requires_grad_() for x in tensors]
        options = {"scaling": 0.3, "sliding_window": window, "s_aux": (*inputs, None)[3]}
        out = forest_attention(nn.Module(), *inputs[:3], None, forest=kind(ends), **options)[0]
        found.append((out.detach(), *torch.autograd.grad(out, inputs, upstream)))
    return found


def test_a_kind_for_gpus_is_refused_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    assert name_of("auto", cpu) == attention.NAME and name_of("sdpa", cpu) == "flowtrain_sdpa"
    for kind in ("flex", "flash"):
        with pytest.raises(UserError, match=f"train.attention = '{kind}' needs a GPU"):
            name_of(kind, cpu)
    ends = torch.arange(1, BLOCK + 1)
    inputs = torch.zeros(3, 1, 2, BLOCK, 16)
    with pytest.raises(UserError, match="supports neither windows nor sinks: use 'flex'"):
        FlexTree.of(ends, flash=True).attend(*inputs, window=5)
    with pytest.raises(AssertionError, match="N x N"):
        structure_of("eager", torch.arange(1, BLOCK + 1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [(4, 2, 64), (2, 2, 128)])
@pytest.mark.parametrize(("kind", "window"), [("flex", None), ("flex", 150), ("flash", None)])
def test_every_kind_on_a_gpu_is_the_attention_of_the_cpu(
    kind: str, window: int | None, heads: tuple[int, int, int]
) -> None:
    """Within a few roundings to bf16 of the same in fp32."""
    if kind == "flash" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn-4 is not installed")
    torch._dynamo.reset()
    for ends in FORESTS.values():
        (truth,) = attended((Forest.of,), ends, torch.float32, heads, window)
        on_gpu = ends.cuda()
        (ours,) = attended(
            (lambda x: structure_of(attention.NAMES[kind], x),),
            on_gpu,
            torch.bfloat16,
            heads,
            window,
        )
        (plain,) = attended((Forest.of,), on_gpu, torch.bfloat16, heads, window)
        for mine, other, true in zip(ours, plain, truth, strict=True):
            scale = true.abs().max()
            error = (mine.cpu().float() - true).abs().max() / scale
            rounding = (other.cpu().float() - true).abs().max() / scale
            assert error <= 2 * rounding + 2**-8, (kind, float(error), float(rounding))
