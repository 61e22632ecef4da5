"""The sparse-delta codec refuses wrong input by name and leaves the weights as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_delta import CODECS, applied, changed, delta_of, resealed, weights

from flowtrain import _delta

OLD = weights(140_000)
NEW = changed(OLD, 0.01)
LEVELS = pytest.mark.parametrize("level", [1, 2])


def refused(
    error: type[Exception],
    delta: np.ndarray,
    words: np.ndarray = OLD,
    match: str | None = None,
    num_threads: int = 1,
) -> None:
    """By every function that reads it, and `words` stay what they are."""
    kept = words.copy()
    with pytest.raises(error, match=match):
        _delta.apply([delta], [kept], num_threads=num_threads)
    assert np.array_equal(kept, words)
    with pytest.raises(error):
        _delta.validate(delta, words, num_threads=num_threads)
    with pytest.raises(error):
        _delta.compose([delta], words)


def test_the_errors_have_one_parent() -> None:
    kinds = (_delta.NotADelta, _delta.NewerFormat, _delta.CorruptDelta, _delta.WrongBase)
    assert all(issubclass(kind, _delta.DeltaError) for kind in (*kinds, _delta.WrongLayout))
    assert issubclass(_delta.DeltaError, ValueError)


# ---- bytes that are not a delta, or no longer


@pytest.mark.parametrize(
    "data", [b"", b"FTDL", b"\0" * 500, b"PK\3\4" + b"\7" * 200, bytes(range(256))]
)
def test_bytes_that_are_no_delta_are_refused(data: bytes) -> None:
    refused(_delta.NotADelta, np.frombuffer(data, np.uint8))


def test_a_newer_format_is_refused() -> None:
    delta = delta_of(OLD, NEW)
    delta[4] = 2
    refused(_delta.NewerFormat, delta, match="a newer flowtrain is needed")


@LEVELS
def test_truncated_and_extended_deltas_are_refused(level: int) -> None:
    delta = delta_of(OLD, NEW, level)
    for size in [0, 1, 71, 72, 73, 100, 107, 108, 109, *range(200, delta.size, 97), delta.size - 1]:
        refused(_delta.NotADelta if size < 72 else _delta.CorruptDelta, delta[:size].copy())
    refused(_delta.CorruptDelta, np.append(delta, np.uint8(0)))


@LEVELS
def test_any_flipped_bit_is_seen(level: int) -> None:
    old = weights(1000)
    new = changed(old, 0.05)
    delta = delta_of(old, new, level)
    for byte in range(delta.size):
        for bit in (0, 3, 7):
            mutated = delta.copy()
            mutated[byte] ^= 1 << bit
            words = old.copy()
            with pytest.raises(_delta.DeltaError) as caught:
                _delta.apply([mutated], [words])
            is_newer = byte == 4 and mutated[4] > 1
            kind = _delta.NewerFormat if is_newer else _delta.CorruptDelta
            kind = _delta.NotADelta if byte < 4 else kind
            assert caught.type is kind and np.array_equal(words, old), byte


@LEVELS
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_flipped_bit_in_the_last_block_leaves_the_first_alone(
    level: int, num_threads: int
) -> None:
    delta = delta_of(OLD, NEW, level)
    delta[-5] ^= 4
    refused(_delta.CorruptDelta, delta, match="block 2", num_threads=num_threads)


@pytest.mark.parametrize(
    ("at", "value", "error"),
    [
        (5, 2, _delta.CorruptDelta),  # level
        (6, 15, _delta.CorruptDelta),  # block_log2
        (24, 7, _delta.CorruptDelta),  # num_changed
        (32, 7, _delta.WrongBase),  # base digest: then the target does not follow
        (48, 7, _delta.WrongBase),  # target digest
    ],
)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_wrong_header_under_right_checksums_is_undone(
    at: int, value: int, error: type[Exception], num_threads: int
) -> None:
    delta = delta_of(OLD, NEW)
    delta[at] ^= value
    words = OLD.copy()
    with pytest.raises(error):
        _delta.apply([resealed(delta)], [words], num_threads=num_threads)
    assert np.array_equal(words, OLD)


def test_a_wrong_number_of_changes_is_refused_by_whoever_reads_them() -> None:
    delta = delta_of(OLD, NEW)
    delta[24] ^= 7
    for function in (_delta.validate, _delta.decode_pairs):
        with pytest.raises(_delta.CorruptDelta, match="another number of changes"):
            function(resealed(delta))


def test_a_codec_of_level_2_in_a_delta_of_level_1_is_refused() -> None:
    """It would be read without the base that it needs."""
    delta = delta_of(OLD, changed(OLD, 0.01, "tiny"), level=2)
    assert _delta.info(delta)["num_blocks"][CODECS.index("class_rice")] > 0
    delta[5] = 1
    forged = resealed(delta)
    refused(_delta.CorruptDelta, forged, match="directory is contradictory at block 0")
    for function in (_delta.info, _delta.decode_pairs):
        with pytest.raises(_delta.CorruptDelta, match="directory is contradictory"):
            function(forged)


def test_resealing_is_that_of_the_codec() -> None:
    delta = delta_of(OLD, NEW)
    assert np.array_equal(resealed(delta), delta)


def test_a_huge_size_is_refused_before_memory_is_allocated() -> None:
    delta = delta_of(OLD, NEW)
    delta[8:16] = 0xFF
    for function in (_delta.info, _delta.validate, _delta.decode_pairs):
        with pytest.raises(_delta.CorruptDelta, match="directory"):
            function(delta)


# ---- other weights


@LEVELS
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_wrong_base_is_refused(level: int, num_threads: int) -> None:
    delta = delta_of(OLD, NEW, level)
    last = np.flatnonzero(OLD != NEW)[-1]
    near = OLD.copy()
    near[last] ^= 1
    refused(_delta.WrongBase, delta, near, match="base", num_threads=num_threads)
    refused(_delta.WrongBase, delta, NEW, num_threads=num_threads)
    refused(_delta.WrongBase, delta, np.zeros_like(OLD), match="base", num_threads=num_threads)


def test_validate_sees_damage_where_nothing_changes() -> None:
    damaged = OLD.copy()
    damaged[np.flatnonzero(OLD == NEW)[0]] ^= 1
    with pytest.raises(_delta.WrongBase):
        _delta.validate(delta_of(OLD, NEW), damaged)


def test_applying_twice_is_refused() -> None:
    delta = delta_of(OLD, NEW)
    words = applied(delta, OLD)
    with pytest.raises(_delta.WrongBase):
        _delta.apply([delta], [words])
    assert np.array_equal(words, NEW)


def test_a_wrong_length_is_refused() -> None:
    delta = delta_of(OLD, NEW)
    refused(_delta.WrongLayout, delta, OLD[:-1].copy(), match="140000 words, .* 139999")


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("bad", ["base", "bits", "length", "kind"])
def test_one_bad_patch_of_several_changes_none(bad: str, num_threads: int) -> None:
    first, second, third = OLD.copy(), OLD[:70_000].copy(), OLD.copy()
    deltas = [delta_of(first, NEW), delta_of(second, NEW[:70_000], 2), delta_of(OLD, NEW, 2)]
    if bad == "base":
        second[np.flatnonzero(second != NEW[:70_000])[-1]] += 1
    elif bad == "bits":
        deltas[1][-1] ^= 1
    elif bad == "length":
        second = second[:-1].copy()
    else:
        deltas[1] = np.zeros(100, np.uint8)
    kept = [first.copy(), second.copy(), third.copy()]
    with pytest.raises(_delta.DeltaError):
        _delta.apply(deltas, [first, second, third], num_threads=num_threads)
    for now, before in zip([first, second, third], kept, strict=True):
        assert np.array_equal(now, before)


def test_several_good_patches_are_applied_together() -> None:
    words = [OLD.copy(), OLD[:5].copy(), OLD[:0].copy()]
    deltas = [
        delta_of(OLD, NEW, 2),
        delta_of(OLD[:5], OLD[:5] + np.uint16(1)),
        delta_of(OLD[:0], OLD[:0]),
    ]
    _delta.apply(deltas, words, num_threads=2)
    assert np.array_equal(words[0], NEW) and np.array_equal(words[1], OLD[:5] + np.uint16(1))
    _delta.apply([], [])


def test_overlapping_patches_are_refused() -> None:
    words = OLD.copy()
    delta = delta_of(OLD[:1000], NEW[:1000])
    for other in (words[:1000], words[999:1999]):
        with pytest.raises(_delta.WrongLayout, match="words in common"):
            _delta.apply([delta, delta], [words[:1000], other])
    assert np.array_equal(words, OLD)
    apart = delta_of(OLD[1000:], NEW[1000:])
    _delta.apply([delta, apart], [words[:1000], words[1000:]])
    assert np.array_equal(words, NEW)


def test_rounds_before_one_that_is_refused_are_undone() -> None:
    words, delta = OLD.copy(), delta_of(OLD, NEW)
    with pytest.raises(_delta.WrongBase):
        _delta.apply_rounds([([delta], [words]), ([delta], [words])])
    assert np.array_equal(words, OLD)


# ---- composition


def test_compose_refuses_deltas_that_do_not_follow() -> None:
    delta = delta_of(OLD, NEW)
    with pytest.raises(_delta.WrongBase, match="delta 2 does not start where"):
        _delta.compose([delta, delta])
    with pytest.raises(_delta.WrongLayout):
        _delta.compose([delta, delta_of(NEW[:9], NEW[:9])])
    with pytest.raises(_delta.WrongLayout):
        _delta.compose([delta, delta_of(NEW, NEW, first=1)])
    with pytest.raises(ValueError, match="nothing"):
        _delta.compose([])


@LEVELS
def test_compose_refuses_a_wrong_base(level: int) -> None:
    """Or it would be sealed as if it were right."""
    last = changed(NEW, 0.01, seed=5)
    deltas = [delta_of(OLD, NEW, level), delta_of(NEW, last, level)]
    wrong = OLD.copy()
    wrong[: len(wrong) // 2] ^= 0x80
    with pytest.raises(_delta.WrongBase):
        _delta.compose(deltas, wrong)
    with pytest.raises(_delta.WrongBase):
        _delta.compose(deltas, wrong, level=2)


def test_level_2_needs_its_base() -> None:
    delta = delta_of(OLD, NEW, 2)
    calls: list[Callable[[Any], Any]] = [
        _delta.decode_pairs,
        _delta.validate,
        lambda delta: _delta.compose([delta]),
    ]
    for call in calls:
        with pytest.raises(_delta.WrongBase, match="base weights"):
            call(delta)
    with pytest.raises(ValueError, match="level 2 needs the base"):
        _delta.compose([delta_of(OLD, NEW)], level=2)
    assert _delta.info(delta)["level"] == 2


# ---- arguments


ODD = np.zeros(2 * 1000 + 1, np.uint8)[1:].view(np.uint16)
READ_ONLY = OLD.copy()
READ_ONLY.flags.writeable = False
OTHERS = (OLD.view(np.int16), OLD.astype(">u2"), np.repeat(OLD, 2)[::2], OLD.tolist())
"""Of another type, byte order and stride, and no array."""
DELTA = delta_of(OLD, NEW)
PAIRS = _delta.decode_pairs(DELTA)


def scattered(*pairs: np.ndarray, words: np.ndarray = OLD, **options: Any) -> None:
    """To a copy; `words` as they are where they cannot be written to."""
    words = words.copy() if words is OLD else words
    run: dict[str, Any] = {"first": 0, "origin": 0, "dims": [(len(words), 1, 1)]}
    _delta.scatter(words, *(pairs or PAIRS), **(run | options))


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    *((lambda words=words: _delta.encode(words, words), TypeError, "") for words in OTHERS),
    *((lambda words=words: _delta.apply([DELTA], [words]), TypeError, "") for words in OTHERS),
    *((lambda words=words: _delta.digest(words), TypeError, "") for words in OTHERS),
    (lambda: _delta.info(DELTA.view(np.int8)), TypeError, ""),
    (lambda: _delta.info(DELTA.tobytes()), TypeError, ""),
    (lambda: _delta.apply([DELTA], [READ_ONLY]), ValueError, "not writeable"),
    (lambda: _delta.digest(ODD), ValueError, "even address"),
    (lambda: _delta.encode(ODD, ODD), ValueError, "even address"),
    (lambda: _delta.apply([delta_of(OLD, OLD)], [ODD]), ValueError, "even address"),
    (lambda: _delta.apply([DELTA], []), ValueError, "differ in length"),
    (lambda: _delta.encode(OLD, NEW[:10]), _delta.WrongLayout, "140000 words, new has 10"),
    *(
        (
            lambda run=run: _delta.decode_pairs(DELTA, begin=run[0], end=run[1]),
            *(ValueError, "begin and end must be in order and within the delta"),
        )
        for run in ((2, 1), (0, len(OLD) + 1), (2**63, 2**64 - 1), (len(OLD) + 1, None))
    ),
    *(
        (lambda dims=dims: scattered(dims=dims), ValueError, "the places reach beyond the words")
        for dims in (
            [(len(OLD) + 1, 1, 1)],
            [(2, 9, 1), (len(OLD), 1, 1)],
            [(2**62, 9, 4), (1, 1, 1)],
            [(3, 9, 2**63), (1, 1, 1)],
        )
    ),
    (lambda: scattered(dims=[(0, 1, 1)]), ValueError, "must not be zero"),
    (lambda: scattered(dims=[(1, 0, 1)]), ValueError, "must not be zero"),
    (lambda: scattered(dims=[], words=OLD[:0].copy()), ValueError, "reach beyond the words"),
    (lambda: scattered(words=READ_ONLY), ValueError, "not writeable"),
    (lambda: scattered(words=OLD.view(np.int16)), TypeError, ""),
    (lambda: scattered(PAIRS[0], PAIRS[1], PAIRS[2][1:]), ValueError, "differ in length"),
    (lambda: scattered(PAIRS[0][1:], *PAIRS[1:]), ValueError, "do not add up"),
    (lambda: scattered(PAIRS[0] + np.uint32(70_000), *PAIRS[1:]), ValueError, "exceeds the block"),
    *(
        (
            lambda level=level: _delta.encode(OLD, NEW, level=level),
            *(ValueError, f"level must be 1 or 2, not {level}"),
        )
        for level in (0, 3, -1)
    ),
    *(
        (
            lambda num=num: _delta.encode(OLD, NEW, num_threads=num),
            *(ValueError, "num_threads must be at least 1"),
        )
        for num in (0, -1)
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_arguments_are_refused_not_copied(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()
    assert np.array_equal(READ_ONLY, OLD)


def test_there_may_be_many_threads() -> None:
    many = 2**31 - 1
    assert np.array_equal(delta_of(OLD, NEW, num_threads=many), DELTA)
    assert np.array_equal(applied(DELTA, OLD, many), NEW)
