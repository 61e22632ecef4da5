"""Sparse deltas against numpy: which words changed, what scattering them does, their digest."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from flowkernels import (
    WordDiff,
    diff_pieces,
    diff_words,
    digest_at,
    digest_words,
    scatter_words_,
    sparse_delta,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_truth import IMPLS, device_of, peak_bytes
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint16]
DENSITIES = (0.0, 1e-5, 0.01, 0.3, 1.0)
FIRSTS = (0, 1, 2**32 - 3, 5 * 2**40 + 16)
LAST = 2**63 - 1
SPECIALS = (
    0x0000,
    0x8000,
    0x0001,
    0x8001,
    0x007F,
    0x7F80,
    0xFF80,
    0x7FC0,
    0xFFC0,
    0x7FC1,
    0x7F81,
    0xFFFF,
    0x7FFF,
    0x3F80,
)
"""bf16: zeros, denormals, infinities, NaNs of several payloads, 1."""


def plain_coefficients(index: int) -> tuple[int, int]:
    x = (index + 1) * 0x9E3779B97F4A7C15 % 2**64
    r = ((x & 0xFFFFFFFF) ^ 0x85EBCA6B) * ((x >> 32) ^ 0xC2B2AE35) % 2**64
    r ^= r >> 32
    return (r & 0xFFFFFFFF) | 1, (r >> 32) | 1


def plain_digest(words: list[int], first: int) -> list[int]:
    """The digest in integers that do not wrap, reduced at the end."""
    pairs = [(w * w, plain_coefficients(first + i)) for i, w in enumerate(words)]
    return [sum(square * c[k] for square, c in pairs) % 2**64 for k in (0, 1)]


def numpy_digest(words: Words, first: int) -> list[int]:
    u64 = np.uint64
    x = (np.arange(len(words), dtype=u64) + u64(first + 1)) * u64(0x9E3779B97F4A7C15)
    r = ((x & u64(0xFFFFFFFF)) ^ u64(0x85EBCA6B)) * ((x >> u64(32)) ^ u64(0xC2B2AE35))
    r ^= r >> u64(32)
    squares = words.astype(u64) ** u64(2)
    return [
        int(np.sum(squares * (c | u64(1)), dtype=u64)) for c in (r & u64(0xFFFFFFFF), r >> u64(32))
    ]


def random_change(num: int, density: float, seed: int = 0) -> tuple[Words, Words]:
    """(old, new); a share of the words differs, some as floats would compare wrongly."""
    rng = np.random.default_rng(seed)
    old, new = (rng.integers(0, 2**16, num, dtype=np.uint16) for _ in range(2))
    for words in (old, new):
        words[rng.random(num) < 0.1] = rng.choice(np.array(SPECIALS, dtype=np.uint16))
    new[new == old] += np.uint16(1)
    changed = np.zeros(num, dtype=bool)
    changed[rng.permutation(num)[: math.ceil(density * num)]] = True
    return old, np.where(changed, new, old)


def tensor(words: Words, impl: str, dtype: torch.dtype = torch.int16) -> Tensor:
    """A copy."""
    return torch.from_numpy(words.view(np.int16).copy()).view(dtype).to(device_of(impl))


def unsigned(x: Tensor) -> NDArray[Any]:
    bits = x.cpu().numpy()
    return bits.view(f"uint{8 * bits.itemsize}")


def digest(x: Tensor) -> list[int]:
    assert x.dtype == torch.int64 and x.shape == (2,)
    return [int(v) % 2**64 for v in x.tolist()]


def minus(a: list[int], b: list[int]) -> list[int]:
    return [(x - y) % 2**64 for x, y in zip(a, b, strict=True)]


def assert_diff_is_right(diff: WordDiff, old: Words, new: Words, first: int) -> None:
    index = np.flatnonzero(old != new)
    found = (diff.counts.dtype, diff.positions.dtype, diff.diffs.dtype)
    assert found == (torch.int32, torch.int16, torch.int16)
    seen = diff.counts.tolist()
    assert seen == [int(np.sum(index // 65536 == block)) for block in range(-(-len(old) // 65536))]
    np.testing.assert_array_equal(unsigned(diff.positions), (index % 65536).astype(np.uint16))
    np.testing.assert_array_equal(unsigned(diff.diffs), new[index] - old[index])
    assert digest(diff.digest_change) == minus(numpy_digest(new, first), numpy_digest(old, first))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(words=st.lists(st.integers(0, 2**16 - 1), max_size=20), first=st.integers(0, LAST - 20))
def test_the_digest_of_numpy_is_that_of_plain_integers(words: list[int], first: int) -> None:
    assert numpy_digest(np.array(words, dtype=np.uint16), first) == plain_digest(words, first)


def test_the_digest_is_the_published_one(impl: str) -> None:
    """Numbers that the codec in another language must give, too."""
    words = np.arange(0, 65536, 7, dtype=np.uint16)
    found = digest(digest_words(tensor(words, impl), impl=impl))
    assert found == [0xF41BA1A4813C939B, 0xC47213EB1AAE23CD]
    found = digest(digest_words(tensor(words, impl), 2**40 + 5, impl=impl))
    assert found == [0x6F8B7F8E0660204F, 0xC938F87707A731E9]


@pytest.mark.parametrize(
    ("num", "first"),
    [
        *((num, 5 * 2**40 + 16) for num in (0, 1, 2047, 16384, 65537, 100_000)),
        *((16385, first) for first in FIRSTS),
    ],
)
def test_the_digest_matches_numpy(impl: str, num: int, first: int) -> None:
    words, _ = random_change(num, 0.0, seed=num)
    assert digest(digest_words(tensor(words, impl), first, impl=impl)) == numpy_digest(words, first)


def test_digests_of_pieces_add_up_and_depend_on_positions(impl: str) -> None:
    words, _ = random_change(70_001, 0.0)
    whole = digest(digest_words(tensor(words, impl), 11, impl=impl))
    parts = [
        digest(digest_words(tensor(words[a:b], impl), 11 + a, impl=impl))
        for a, b in ((0, 5), (5, 65536), (65536, 70_001))
    ]
    assert [sum(values) % 2**64 for values in zip(*parts, strict=True)] == whole
    assert digest(digest_words(tensor(words, impl), 12, impl=impl)) != whole
    swapped = words.copy()
    swapped[[3, 40_000]] = words[[40_000, 3]]
    assert words[3] != words[40_000]
    assert digest(digest_words(tensor(swapped, impl), 11, impl=impl)) != whole


CELLS = [(65537, density) for density in DENSITIES]
CELLS += [(0, 1.0), (1, 0.0), (1, 1.0), (65535, 0.3), (65536, 1.0), (132_000, 0.01), (132_000, 1.0)]
"""(words, share of them that changes)"""
OF_KERNELS = ((1, 1.0), (65536, 1.0), (65537, 0.01), (132_000, 0.3))


@pytest.mark.parametrize(
    ("impl", "num", "density"),
    [("torch", *cell) for cell in CELLS] + [(x, *cell) for x in IMPLS[1:] for cell in OF_KERNELS],
)
def test_diff_matches_numpy_and_scattering_it_gives_the_new_words_and_back(
    impl: str, num: int, density: float
) -> None:
    old, new = random_change(num, density, seed=num)
    first = 3 * 2**33 + num
    words = tensor(old, impl)
    diff = diff_words(words, tensor(new, impl), first, impl=impl)
    assert_diff_is_right(diff, old, new, first)
    np.testing.assert_array_equal(unsigned(words), old)
    made = scatter_words_(words, diff.counts, diff.positions, diff.diffs, first, impl=impl)
    np.testing.assert_array_equal(unsigned(words), new)
    assert digest(made) == digest(diff.digest_change)
    undone = scatter_words_(words, diff.counts, diff.positions, -diff.diffs, first, impl=impl)
    np.testing.assert_array_equal(unsigned(words), old)
    assert digest(undone) == minus([0, 0], digest(made))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_words_at_any_place(data: st.DataObject) -> None:
    """Words at the ends of the range, where differences wrap and a sign would show."""
    pair = st.tuples(*[st.sampled_from(SPECIALS) | st.integers(0, 2**16 - 1)] * 2)
    pairs = data.draw(st.lists(pair, max_size=40))
    first = data.draw(st.integers(0, 2**34) | st.integers(LAST - len(pairs) - 5, LAST - len(pairs)))
    old, new = (np.array([p[k] for p in pairs], dtype=np.uint16) for k in (0, 1))
    expected = minus(plain_digest(new.tolist(), first), plain_digest(old.tolist(), first))
    for impl in IMPLS:
        words = tensor(old, impl)
        diff = diff_words(words, tensor(new, impl), first, impl=impl)
        assert_diff_is_right(diff, old, new, first)
        assert digest(diff.digest_change) == expected
        assert (
            digest(scatter_words_(words, diff.counts, diff.positions, diff.diffs, first, impl=impl))
            == expected
        )
        np.testing.assert_array_equal(unsigned(words), new)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_words_are_bits_and_not_numbers(impl: str, dtype: torch.dtype) -> None:
    """A NaN equals itself and no other payload, and +0 is not -0."""
    old, new = (
        np.array(words, dtype=np.uint16)
        for words in zip(*((a, b) for a in SPECIALS for b in SPECIALS), strict=True)
    )
    diff = diff_words(tensor(old, impl, dtype), tensor(new, impl, dtype), impl=impl)
    assert len(diff.diffs) == len(SPECIALS) * (len(SPECIALS) - 1)
    assert_diff_is_right(diff, old, new, 0)
    words = tensor(old, impl, dtype)
    scatter_words_(words, diff.counts, diff.positions, diff.diffs, impl=impl)
    np.testing.assert_array_equal(unsigned(words.view(torch.int16)), new)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.complex64])
def test_wider_elements_are_several_words_each(impl: str, dtype: torch.dtype) -> None:
    old, new = random_change(3 * 4 * 8, 0.2)
    a, b = (tensor(words, impl, dtype).view(3, -1) for words in (old, new))
    diff = diff_words(a, b, impl=impl)
    assert_diff_is_right(diff, old, new, 0)
    assert digest(digest_words(a, impl=impl)) == numpy_digest(old, 0)
    scatter_words_(a, diff.counts, diff.positions, diff.diffs, impl=impl)
    assert torch.equal(a.view(torch.int16), b.view(torch.int16))


def test_only_the_piece_within_a_larger_tensor_is_read_and_written(impl: str) -> None:
    """The piece starts at an odd word, so that no load of it is aligned."""
    old, new = random_change(66_000, 1.0)
    weights, target = tensor(old, impl), tensor(new, impl)
    piece = slice(257, 65_900)
    diff = diff_words(weights[piece], target[piece], 257, impl=impl)
    assert_diff_is_right(diff, old[piece], new[piece], 257)
    scatter_words_(weights[piece], diff.counts, diff.positions, diff.diffs, 257, impl=impl)
    np.testing.assert_array_equal(
        unsigned(weights), np.concatenate([old[:257], new[piece], old[65_900:]])
    )


def test_pieces_are_diffed_as_each_alone_and_the_host_waits_for_all_at_once(
    impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, firsts = (0, 1, 66_000, 300, 2048), (7, 0, 3 * 2**33, 5, 1)
    changes = [random_change(num, 0.3, seed=num) for num in sizes]
    olds, news = ([tensor(words, impl) for words in each] for each in zip(*changes, strict=True))
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: reads.append(x.shape) or tolist(x))
    monkeypatch.setattr(torch.Tensor, "__int__", lambda x: pytest.fail("one more read"))
    found = diff_pieces(olds, news.__getitem__, firsts, impl=impl)
    assert reads == ([] if impl == "torch" else [(len(sizes),)])
    monkeypatch.undo()
    assert len(found) == len(sizes) and diff_pieces([], news.__getitem__, [], impl=impl) == []
    for diff, (old, new), first in zip(found, changes, firsts, strict=True):
        assert_diff_is_right(diff, old, new, first)


def test_a_parameter_is_patched_and_autograd_learns_of_it(impl: str) -> None:
    weight = torch.nn.Parameter(torch.ones(4, 8, dtype=torch.bfloat16, device=device_of(impl)))
    product = (weight * weight).sum()
    diff = diff_words(weight, torch.full_like(weight, 2.0), impl=impl)
    scatter_words_(weight, diff.counts, diff.positions, diff.diffs, impl=impl)
    assert (weight == 2).all() and weight.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_scattering_on_wrong_words_changes_the_digest_otherwise(impl: str) -> None:
    old, new = random_change(70_000, 0.01)
    diff = diff_words(tensor(old, impl), tensor(new, impl), impl=impl)
    met = old.copy()
    met[np.flatnonzero(old != new)[5]] ^= np.uint16(1)
    words = tensor(met, impl)
    made = scatter_words_(words, diff.counts, diff.positions, diff.diffs, impl=impl)
    np.testing.assert_array_equal(unsigned(words), met + (new - old))
    assert (
        digest(made)
        == minus(numpy_digest(met + (new - old), 0), numpy_digest(met, 0))
        != digest(diff.digest_change)
    )


def test_the_digest_of_scattered_words_is_that_of_the_piece_they_make_up() -> None:
    words, _ = random_change(70_001, 0.0)
    order = torch.from_numpy(np.random.default_rng(3).permutation(70_001))
    flat = torch.from_numpy(words.view(np.int16))
    parts = [
        digest(digest_at(flat[at].view(1, -1), (at + 11).view(1, -1))) for at in order.split(30_000)
    ]
    found = [sum(values) % 2**64 for values in zip(*parts, strict=True)]
    assert found == digest(digest_words(flat, 11))


@pytest.mark.parametrize(
    "counts", [[2, 3], [9, 9], [5, -5], [-9, 9], [-(2**31), 2**31 - 1], [0, 0]]
)
def test_without_checks_the_kernel_still_stays_within_its_tensors(
    counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU no value is read first."""
    monkeypatch.setattr(sparse_delta, "checks_values", lambda device: False)
    device = device_of("triton")
    held = torch.zeros(65536 + 400, dtype=torch.int16, device=device)
    words = held[200 : 200 + 65536 + 10]
    around = torch.arange(1, 16, dtype=torch.int16, device=device)
    positions, diffs = around[5:10], around[5:10].clone()
    positions[3:] = torch.tensor(
        [-2, -1]
    )  # the last words of a block, and so past the end of the second one
    made = scatter_words_(
        words,
        torch.tensor(counts, dtype=torch.int32, device=device),
        positions,
        diffs,
        impl="triton",
    )
    assert not held[:200].any() and not held[200 + 65536 + 10 :].any()
    assert set(words.tolist()) <= {0, *diffs.tolist()}
    assert digest(made) == numpy_digest(unsigned(words), 0)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.data())
def test_words_at_places_of_their_own_take_their_part_of_the_changes(data: st.DataObject) -> None:
    """A cut of rows and every so many columns, transposed: what lies outside changes nothing."""
    rows, columns, step = 12, 5, data.draw(st.integers(1, 3))
    stride = data.draw(st.integers(columns * step, 6000))
    old, new = random_change(rows * stride + 9, 0.3, seed=stride)
    skipped = data.draw(st.integers(0, 40))  # words before the first block
    origin = data.draw(st.integers(0, 9))
    index = origin + np.arange(rows)[:, None] * stride + step * np.arange(columns)
    grid_old, grid_new = old[index], new[index]
    is_met = (grid_old != grid_new) & (index >= skipped)
    wanted = np.where(is_met, grid_new, grid_old)
    for impl in IMPLS:
        diff = diff_words(tensor(old[skipped:], impl), tensor(new[skipped:], impl), impl=impl)
        words = tensor(np.ascontiguousarray(grid_old.T), impl).view(-1)
        dims = torch.tensor([[rows, stride, 1], [columns, step, rows]], device=words.device)
        fields = words, diff.counts, diff.positions
        where: dict[str, Any] = {"first": skipped, "dims": dims, "origin": origin, "impl": impl}
        made = scatter_words_(*fields, diff.diffs, **where)
        np.testing.assert_array_equal(unsigned(words).reshape(columns, rows), wanted.T)
        met = torch.from_numpy(index[is_met])
        ends = [torch.from_numpy(x[is_met].view(np.int16)) for x in (grid_new, grid_old)]
        assert digest(made) == digest(digest_at(ends[0], met) - digest_at(ends[1], met))
        scatter_words_(*fields, -diff.diffs, **where)
        np.testing.assert_array_equal(unsigned(words).reshape(columns, rows), grid_old.T)


# ---- as PyTorch sees it


@pytest.mark.parametrize(("impl", "num"), [("torch", 70_000), *((x, 1) for x in IMPLS[1:])])
def test_operators_pass_opcheck(impl: str, num: int) -> None:
    """Schema, what they mutate, shapes of the fake kernels (the number of changes is known at run
    time only), AOT dispatch.
    """
    old, new = (tensor(words, impl) for words in random_change(num, 0.01))
    diff = diff_words(old, new, impl=impl)
    ops = torch.ops.flowkernels
    torch.library.opcheck(ops.diff_words.default, (old, new, 3, impl))
    torch.library.opcheck(
        ops.scatter_words_.default,
        (old, diff.counts, diff.positions, diff.diffs, 3, None, 0, impl),
    )
    torch.library.opcheck(ops.digest_words.default, (old, 3, impl))


def test_scattering_takes_memory_by_the_change_and_not_by_the_word() -> None:
    """The reference, since the interpreter copies what it is given."""
    old, new = (tensor(words, "torch") for words in random_change(2**22, 1e-4))
    diff = diff_words(old, new)
    peak = peak_bytes(lambda: scatter_words_(old, diff.counts, diff.positions, diff.diffs))
    assert 0 < peak < 200 * len(diff.diffs) < 0.02 * old.nbytes
    assert torch.equal(old, new)
