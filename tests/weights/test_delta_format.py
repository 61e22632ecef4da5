"""docs/delta-format.md is complete: a reader written from it alone agrees with the codec."""

from __future__ import annotations

import numpy as np
import pytest
from delta_reader import read
from test_delta import CODECS, changed, decoded, delta_of, weights

from flowtrain import _delta


@pytest.mark.parametrize(
    ("num_words", "density", "kind", "level", "codec"),
    [
        (0, 0, "unit", 1, None),
        (70_000, 0, "unit", 2, "empty"),
        (1, 1, "any", 1, "dense"),
        (70_000, 0.0003, "any", 1, "pairs"),
        (131_073, 0.01, "unit", 1, "rice"),
        (70_000, 0.03, "special", 1, "rice"),
        (131_072, 0.01, "tiny", 2, "class_rice"),
        (70_001, 0.03, "tiny", 2, "class_rice"),
        (65_536, 0.6, "unit", 1, "bitmap"),
        (131_001, 0.6, "unit", 1, "bitmap"),
        (65_537, 1, "any", 2, "dense"),
    ],
)
def test_a_reader_written_from_the_page_agrees_with_the_codec(
    num_words: int, density: float, kind: str, level: int, codec: str | None
) -> None:
    old = changed(weights(num_words), 0.02, "special", seed=4)
    new = changed(old, density, kind)
    if kind == "tiny":  # some exceptions too, -32768 among them
        new = changed(new, 0.002, "any", seed=6)
        new[100] = old[100] ^ 0x8000
    delta = delta_of(old, new, level, first=12345)
    if codec:
        assert _delta.info(delta)["num_blocks"][CODECS.index(codec)] > 0
    positions, diffs = decoded(delta, old)
    found = read(delta.tobytes(), old.tolist())
    assert found == list(zip(positions.tolist(), diffs.tolist(), strict=True))
    assert np.array_equal(old[positions] + diffs, new[positions])


@pytest.mark.parametrize("at", [9, 30, 70, 75, 80, -1])
def test_the_plain_python_reader_detects_damage(at: int) -> None:
    old = weights(70_000)
    data = bytearray(delta_of(old, changed(old, 0.001)).tobytes())
    data[at] ^= 1
    with pytest.raises(AssertionError):
        read(bytes(data), old.tolist())
