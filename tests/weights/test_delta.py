"""The sparse-delta codec restores every bit, and composed deltas equal direct ones."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain import _delta

CODECS = ("empty", "pairs", "rice", "class_rice", "bitmap", "dense")
SPECIALS = [
    0x0000,
    0x8000,
    0x0001,
    0x8001,
    0x007F,
    0x7F80,
    0xFF80,
    0x7F81,
    0x7FC0,
    0xFFC1,
    0xFFFF,
    0x7F7F,
]
"""+-0, denormals, infinities, NaNs of several payloads, the largest number."""

HEADER_BYTES = 72


def weights(num_words: int, seed: int = 0) -> np.ndarray:
    """bf16 of normal(0, 0.02)."""
    return (
        np.random.default_rng(seed).normal(0, 0.02, num_words).astype(np.float32).view(np.uint32)
        >> 16
    ).astype(np.uint16)


def changed(words: np.ndarray, density: float, kind: str = "unit", seed: int = 1) -> np.ndarray:
    """A copy with about that share of its words changed: by a unit ("tiny"), or to anything."""
    rng = np.random.default_rng(seed)
    where = rng.random(len(words)) < density * (
        20 * (words & 0x7FFF < 0x3B00) if kind == "tiny" else 1
    )
    new = {
        "unit": words + rng.choice(np.array([1, 65535], np.uint16), len(words)),
        "tiny": words + rng.choice(np.array([1, 65535], np.uint16), len(words)),
        "special": rng.choice(np.array(SPECIALS, np.uint16), len(words)),
        "any": rng.integers(0, 65536, len(words), dtype=np.uint16),
    }[kind]
    return np.where(where, new, words).astype(np.uint16)


def delta_of(
    old: np.ndarray, new: np.ndarray, level: int = 1, first: int = 0, num_threads: int = 1
) -> np.ndarray:
    return _delta.encode(
        old,
        new,
        first=first,
        level=level,
        base_digest=_delta.digest(old, first=first),
        num_threads=num_threads,
    )


def applied(delta: np.ndarray, words: np.ndarray, num_threads: int = 1) -> np.ndarray:
    result = words.copy()
    _delta.apply([delta], [result], num_threads=num_threads)
    return result


def minus(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return (a[0] - b[0]) % 2**64, (a[1] - b[1]) % 2**64


def decoded(delta: np.ndarray, base: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Positions in the whole delta, and differences."""
    counts, positions, diffs = _delta.decode_pairs(delta, base)
    return np.repeat(np.arange(len(counts)), counts) * 65536 + positions, diffs


def resealed(delta: np.ndarray) -> np.ndarray:
    """With the checksum of header and directory made right again."""
    data = bytearray(delta.tobytes())
    num_blocks = -(-int.from_bytes(data[8:16], "little") // _delta.BLOCK_WORDS)
    data[64:72] = bytes(8)
    end = HEADER_BYTES + 12 * num_blocks
    sums = [
        xxhash.xxh3_64_intdigest(bytes(part)).to_bytes(8, "little")
        for part in (data[:HEADER_BYTES], data[HEADER_BYTES:end])
    ]
    data[64:72] = xxhash.xxh3_64_intdigest(b"".join(sums)).to_bytes(8, "little")
    return np.frombuffer(bytes(data), np.uint8)


# ---- hashes


def test_xxh3_is_that_of_the_xxhash_package() -> None:
    data = np.random.default_rng(0).integers(0, 256, 200_000, dtype=np.uint8)
    for size in [*range(301), 511, 512, 513, 1023, 1024, 1025, 2048, 4097, 65536, 199_999]:
        part = data[7 : 7 + size] if size < 199_000 else data[:size]
        assert _delta.xxh3(part) == xxhash.xxh3_64_intdigest(part.tobytes()), size


def true_digest(words: np.ndarray, first: int) -> tuple[int, int]:
    a = b = 0
    for index, word in enumerate(words.tolist(), first):
        x = (index + 1) * 0x9E3779B97F4A7C15 % 2**64
        r = (x % 2**32 ^ 0x85EBCA6B) * (x >> 32 ^ 0xC2B2AE35)
        r ^= r >> 32
        a, b = a + word**2 * (r % 2**32 | 1), b + word**2 * (r >> 32 | 1)
    return a % 2**64, b % 2**64


@pytest.mark.parametrize("first", [0, 1, 65536, 2**40 + 3, 2**64 - 100])
def test_digest_is_its_formula(first: int) -> None:
    for num_words in (0, 1, 3, 4, 7, 8, 9, 100):
        words = changed(weights(num_words), 0.5, "any")
        assert _delta.digest(words, first=first) == true_digest(words, first)


@given(st.integers(0, 200_000), st.lists(st.integers(0, 200_000), max_size=4), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_digests_of_shards_add_up(num_words: int, cuts: list[int], num_threads: int) -> None:
    words = weights(num_words)
    whole = _delta.digest(words, first=5, num_threads=num_threads)
    for start, end in pairwise([0, *sorted(min(cut, num_words) for cut in cuts), num_words]):
        whole = minus(whole, _delta.digest(words[start:end], first=5 + start))
    assert whole == (0, 0)


def test_the_digest_sees_one_word_and_its_place() -> None:
    words = weights(1000)
    swapped = words.copy()
    swapped[[3, 4]] = words[[4, 3]]
    assert words[3] != words[4]
    assert _delta.digest(swapped) != _delta.digest(words) != _delta.digest(words, first=1)


# ---- round trips

SIZES = [0, 1, 2, 63, 64, 65, 1000, 65535, 65536, 65537, 140_000]
DENSITIES = [0, 0.00002, 0.001, 0.01, 0.1, 0.3, 0.6, 0.9, 1]
versions = st.tuples(
    st.sampled_from(DENSITIES),
    st.sampled_from(["unit", "tiny", "special", "any"]),
    st.integers(0, 2**32),
)


@given(
    st.sampled_from(SIZES),
    versions,
    versions,
    versions,
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.integers(1, 3),
)
@settings(max_examples=300, deadline=None)
def test_composed_deltas_equal_direct_ones(
    num_words: int,
    zeroth: Any,
    there: Any,
    further: Any,
    level: int,
    other_level: int,
    num_threads: int,
) -> None:
    old = changed(weights(num_words), *zeroth)
    new = changed(old, *there)
    last = changed(new, *further)
    first = zeroth[2] * 3
    delta = delta_of(old, new, level, first, num_threads)
    told = _delta.validate(delta, old, num_threads=num_threads)
    assert told == _delta.info(delta)
    found = (told["num_words"], told["first"], told["level"], told["num_bytes"])
    assert found == (num_words, first, level, delta.size)
    assert told["num_changed"] == (old != new).sum()
    assert sum(told["num_blocks"]) == -(-num_words // 65536)
    found = (told["base_digest"], told["target_digest"])
    assert found == (_delta.digest(old, first=first), _delta.digest(new, first=first))
    assert delta.size <= 72 + 12 * sum(told["num_blocks"]) + 2 * num_words
    positions, diffs = decoded(delta, old)
    assert np.array_equal(positions, np.flatnonzero(old != new))
    assert np.array_equal(diffs, (new - old)[old != new])
    assert np.array_equal(applied(delta, old, num_threads), new)

    more = delta_of(new, last, other_level, first)
    words = old.copy()
    _delta.apply_rounds([([delta], [words]), ([more], [words])], num_threads=num_threads)
    assert np.array_equal(words, last)
    both = _delta.compose([delta, more], old, level=level, num_threads=num_threads)
    assert np.array_equal(both, delta_of(old, last, level, first))
    back = delta_of(new, old, level, first)
    assert np.array_equal(_delta.compose([delta, back], old), delta_of(old, old, 1, first))
    if level == other_level == 1:  # what stands alone is composed alone
        assert np.array_equal(_delta.compose([delta, more]), both)
        assert np.array_equal(decoded(delta)[0], positions) and _delta.validate(delta) == told


def test_all_values_to_all_values() -> None:
    """Each of the 65,536 words becomes its neighbour, its complement, and a random one."""
    old = np.arange(65536, dtype=np.uint16)
    for new in (old + 1, ~old, np.random.default_rng(0).permutation(old), old ^ 0x8000):
        for level in (1, 2):
            assert np.array_equal(applied(delta_of(old, new.astype(np.uint16), level), old), new)


@pytest.mark.parametrize(
    ("codec", "density", "kind", "level"),
    [
        ("pairs", 0.0003, "any", 1),
        ("rice", 0.01, "unit", 1),
        ("rice", 0.03, "any", 1),
        ("class_rice", 0.01, "tiny", 2),
        ("bitmap", 0.6, "unit", 1),
        ("bitmap", 0.6, "unit", 2),
        ("dense", 1, "any", 1),
        ("dense", 1, "any", 2),
    ],
)
def test_every_codec_is_reached(codec: str, density: float, kind: str, level: int) -> None:
    old = weights(3 * 65536 - 11)
    new = changed(old, density, kind)
    delta = delta_of(old, new, level)
    assert _delta.info(delta)["num_blocks"][CODECS.index(codec)] == 3
    assert np.array_equal(applied(delta, old, 2), new)


def test_dense_changes_cost_no_more_than_the_words() -> None:
    old = weights(200_000)
    delta = delta_of(old, changed(old, 1, "any"))
    assert delta.size == 72 + 4 * 12 + 2 * 200_000


@pytest.fixture
def isa() -> Iterator[Callable[[str], None]]:
    def use(name: str) -> None:
        if not _delta.use_isa(name):
            pytest.skip(f"this machine has no {name}")
        assert _delta.isa() == name

    yield use
    assert _delta.use_isa("best")


@pytest.mark.parametrize("name", ["avx2", "avx512"])
def test_instruction_sets_agree(name: str, isa: Callable[[str], None]) -> None:
    def everything() -> Iterator[bytes]:
        for num_words in (1, 63, 65, 1000, 65537, 131_093):
            for density in (0.0001, 0.01, 0.4, 1):
                for level, kind in ((1, "unit"), (2, "unit"), (1, "any"), (2, "special")):
                    old = changed(weights(num_words), 0.1, "special", seed=2)
                    new = changed(old, density, kind)
                    delta = delta_of(old, new, level, first=11)
                    back = delta_of(new, old, 2, first=11)
                    positions, diffs = decoded(delta, old)
                    for result in (
                        delta,
                        back,
                        positions,
                        diffs,
                        applied(delta, old),
                        applied(back, new),
                    ):
                        yield result.tobytes()
                    yield repr(_delta.digest(new, first=3)).encode()

    isa("scalar")
    scalar = list(everything())
    isa(name)
    assert list(everything()) == scalar


def test_an_unknown_instruction_set_is_not_used() -> None:
    before = _delta.isa()
    assert _delta.use_isa("mmx") is False and _delta.isa() == before


# ---- changes found elsewhere


def pairs_of(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    where = np.flatnonzero(old != new)
    counts = np.bincount(where // 65536, minlength=-(-len(old) // 65536)).astype(np.uint32)
    return counts, (where % 65536).astype(np.uint16), (new - old)[where]


@given(st.sampled_from(SIZES), versions, st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_pairs_give_the_bytes_of_encode(num_words: int, version: Any, num_threads: int) -> None:
    old = weights(num_words)
    new = changed(old, *version)
    base = _delta.digest(old, first=9)
    change = minus(_delta.digest(new, first=9), base)
    ours = _delta.encode_pairs(
        *pairs_of(old, new), num_words, change, first=9, base_digest=base, num_threads=num_threads
    )
    assert np.array_equal(ours, delta_of(old, new, first=9))
    for told, found in zip(pairs_of(old, new), _delta.decode_pairs(ours), strict=True):
        assert told.dtype == found.dtype and np.array_equal(told, found)


@given(st.sampled_from(SIZES), versions, st.sampled_from([1, 2]), st.integers(1, 3), st.data())
@settings(max_examples=100, deadline=None)
def test_pairs_of_any_run_are_added_to_it_and_taken_back(
    num_words: int, version: Any, level: int, num_threads: int, data: st.DataObject
) -> None:
    old = weights(num_words)
    new = changed(old, *version)
    end = data.draw(st.integers(0, num_words))
    begin = data.draw(st.integers(0, end) | st.sampled_from(range(0, end + 1, 65536)))
    delta = delta_of(old, new, level, first=9)
    run = {"begin": begin, "end": end, "num_threads": num_threads}
    pairs = _delta.decode_pairs(delta, old, **run)
    for told, found in zip(pairs_of(old[begin:end], new[begin:end]), pairs, strict=True):
        assert np.array_equal(told, found)
    if begin == end:
        return
    counts, positions, diffs = pairs
    words, first = old[begin:end].copy(), 9 + begin
    where: Any = {"first": first, "origin": first, "dims": [(len(words), 1, 1)]}
    made = _delta.scatter(words, counts, positions, diffs, **where, num_threads=num_threads)
    assert np.array_equal(words, new[begin:end])
    both = [_delta.digest(part[begin:end], first=first) for part in (new, old)]
    assert made == minus(*both)
    _delta.scatter(words, counts, positions, -diffs, **where)
    assert np.array_equal(words, old[begin:end])


@given(
    st.integers(1, 30),
    st.integers(1, 40),
    st.integers(0, 9000),
    st.sampled_from(SIZES),
    st.integers(0, 200),
    st.integers(1, 3),
    st.integers(1, 3),
)
@settings(max_examples=100, deadline=None)
def test_pairs_go_to_places_of_their_own(
    rows: int, columns: int, gap: int, num_words: int, origin: int, step: int, num_threads: int
) -> None:
    """A cut of rows and every so many columns, turned; it may reach beyond the delta."""
    first, stride = 100, columns * step + gap
    old = weights(max(first + num_words, origin + rows * stride))
    new = old.copy()
    piece = slice(first, first + num_words)
    new[piece] = changed(old[piece], 0.3, "any")
    cut = origin + np.arange(rows)[:, None] * stride + step * np.arange(columns)
    words = old[cut].T.ravel()
    made = _delta.scatter(
        words,
        *pairs_of(old[piece], new[piece]),
        first=first,
        origin=origin,
        dims=[(rows, stride, 1), (columns, step, rows)],
        num_threads=num_threads,
    )
    assert np.array_equal(words.reshape(columns, rows).T, new[cut])
    both = old.copy()
    both[cut] = new[cut]
    assert made == minus(_delta.digest(both), _delta.digest(old))


@pytest.mark.parametrize(
    ("counts", "positions", "diffs", "says"),
    [
        ([2], [1, 1], [1, 1], "ascend"),
        ([2], [2, 1], [1, 1], "ascend"),
        ([1], [100], [1], "ascend"),
        ([1], [1], [0], "zero"),
        ([1], [1, 2], [1, 1], "add up"),
        ([101], [1], [1], "exceeds"),
        ([1, 0], [1], [1], "one number per block"),
        ([1], [1, 2], [1], "differ in length"),
    ],
)
def test_wrong_pairs_are_refused(
    counts: list[int], positions: list[int], diffs: list[int], says: str
) -> None:
    arrays = np.array(counts, np.uint32), np.array(positions, np.uint16), np.array(diffs, np.uint16)
    with pytest.raises(ValueError, match=says):
        _delta.encode_pairs(*arrays, 100, (0, 0))


# ---- the GIL


def lets_others_run(call: Callable[[], Any]) -> bool:
    """Whether another thread gets on during many calls, which give the GIL up themselves."""
    gate, progress = threading.Lock(), []
    other = threading.Thread(target=lambda: (gate.acquire(), progress.append(True), gate.release()))
    before = sys.getswitchinterval()
    with gate:
        other.start()
        sys.setswitchinterval(1e6)
    try:
        for _ in range(20_000):
            call()
            if progress:
                return True
        return False
    finally:
        sys.setswitchinterval(before)
        other.join()


@pytest.mark.parametrize(
    "name",
    [
        "encode",
        "encode_pairs",
        "apply",
        "validate",
        "decode_pairs",
        "scatter",
        "compose",
        "digest",
        "xxh3",
    ],
)
def test_the_gil_is_released(name: str) -> None:
    old = weights(65536)
    new = changed(old, 0.1)
    delta = delta_of(old, new)
    back = delta_of(new, old)
    words = old.copy()
    pairs = pairs_of(old, new)
    data = old.view(np.uint8)
    calls: dict[str, Callable[[], Any]] = {
        "encode": lambda: _delta.encode(old, new),
        "encode_pairs": lambda: _delta.encode_pairs(*pairs, 65536, (0, 0)),
        "apply": lambda: (_delta.apply([delta], [words]), _delta.apply([back], [words])),
        "validate": lambda: _delta.validate(delta, old),
        "decode_pairs": lambda: _delta.decode_pairs(delta),
        "scatter": lambda: _delta.scatter(
            words, *pairs, first=0, origin=0, dims=[(len(words), 1, 1)]
        ),
        "compose": lambda: _delta.compose([delta, back]),
        "digest": lambda: _delta.digest(old),
        "xxh3": lambda: _delta.xxh3(data),
    }
    assert lets_others_run(calls[name])


def test_a_call_that_keeps_the_gil_would_be_seen() -> None:
    assert not lets_others_run(lambda: sum(range(1000)))


def test_threads_are_started_once(tmp_path: Path) -> None:
    """And anew in a forked child, which has none of its parent's."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys\n"
        "import numpy as np\n"
        "from flowtrain import _delta\n"
        "words = np.arange(8 << 16, dtype=np.uint16)\n"
        "def threads():\n"
        "    _delta.digest(words, num_threads=4)\n"
        "    return set(os.listdir('/proc/self/task'))\n"
        "before = set(os.listdir('/proc/self/task'))\n"
        "first = threads()\n"
        "assert len(first - before) == 3, first - before\n"
        "assert all(threads() == first for _ in range(50))\n"
        "if (child := os.fork()) == 0:\n"
        "    signal.alarm(20)\n"
        "    os._exit(0 if len(threads()) == 4 else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
