"""The weight store: bit-exact, immutable versions, and a HEAD that is always a whole version."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from flowtrain.types import UserError
from flowtrain.weights import WeightStore, store


def weights(seed: int = 0) -> dict[str, Tensor]:
    """fp32 and bf16 with every special value, a transposed (not contiguous) one, an empty one and a scalar."""
    rng = torch.Generator().manual_seed(seed)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, 3.4e38, 1e-40])
    any_bits = torch.randint(-(2**15), 2**15, (500,), generator=rng, dtype=torch.int16).view(torch.bfloat16)
    return {
        "fp32": torch.cat([special, torch.randn(100, generator=rng)]),
        "bf16": torch.cat([special.bfloat16(), any_bits]),
        "transposed": torch.randn(5, 7, generator=rng).T,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(float(seed)),
    }


def same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Type, shape and bits; NaN equals NaN of the same bits only, and 0 is not -0."""

    def bits(tensor: Tensor) -> Tensor:
        return tensor.contiguous().view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)

    same = [(a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bits(a), bits(b)) for a, b in ((ours[k], theirs[k]) for k in ours)]
    return ours.keys() == theirs.keys() and all(same)


@pytest.fixture
def place(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights")


def names(place: WeightStore) -> list[str]:
    return sorted(path.name for path in place.root.iterdir())


def test_what_is_pulled_is_what_was_published(place: WeightStore) -> None:
    published = weights()
    num_bytes = place.publish(published, 3)
    pulled = place.pull(3)
    assert same_bits(pulled, published) and not same_bits(pulled, weights(1))
    assert pulled["bf16"].isnan().any() and pulled["fp32"][1].signbit()
    path = place.root / "v00000003"
    assert num_bytes == (path / "weights.safetensors").stat().st_size > 108 * 4 + 508 * 2
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["version"] == 3 and manifest["num_bytes"] == num_bytes
    assert manifest["tensors"]["bf16"] == {"dtype": "bfloat16", "shape": [508]}
    assert manifest["tensors"]["transposed"] == {"dtype": "float32", "shape": [7, 5]}
    assert manifest["tensors"].keys() == published.keys()


def test_every_version_keeps_its_own_weights(place: WeightStore) -> None:
    assert place.head() is None and place.versions() == []
    for version in (0, 1, 12, 100_000_000):
        place.publish(weights(version), version)
        assert place.head() == version
    assert place.versions() == [0, 1, 12, 100_000_000]
    for version in place.versions():
        assert same_bits(place.pull(version), weights(version))
    assert (place.root / "HEAD").read_text() == "100000000\n"
    assert WeightStore(place.root).head() == 100_000_000, "another process sees the same"


def test_a_version_never_changes(place: WeightStore) -> None:
    place.publish(weights(1), 1)
    place.publish(weights(2), 2)
    with pytest.raises(ValueError, match="version 1 is already in"):
        place.publish(weights(9), 1)
    assert place.head() == 2 and same_bits(place.pull(1), weights(1))


def test_pulled_weights_are_a_copy(place: WeightStore) -> None:
    place.publish(weights(), 1)
    place.pull(1)["fp32"].zero_()
    assert same_bits(place.pull(1), weights())


def test_a_missing_version_is_named(place: WeightStore) -> None:
    with pytest.raises(UserError, match=r"version 4 is not in .*weights; it holds nothing"):
        place.pull(4)
    place.publish(weights(), 1)
    place.publish(weights(), 2)
    with pytest.raises(UserError, match=r"version 4 is not in .*weights; it holds \[1, 2\]"):
        place.pull(4)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("error", [FULL, SafetensorError("I/O error: no space left")], ids=["OSError", "SafetensorError"])
def test_a_failed_write_leaves_head_and_no_half_version(place: WeightStore, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    place.publish(weights(1), 1)

    def half(tensors: Any, path: Path, **_: Any) -> None:
        Path(path).write_bytes(b"half")
        raise error

    with monkeypatch.context() as broken, pytest.raises(type(error)):
        broken.setattr(store, "save_file", half)
        place.publish(weights(2), 2)
    assert names(place) == ["HEAD", "v00000001"]
    assert place.head() == 1 and place.versions() == [1] and same_bits(place.pull(1), weights(1))
    place.publish(weights(2), 2)
    assert place.head() == 2 and same_bits(place.pull(2), weights(2))


def test_nothing_is_seen_before_it_is_whole(place: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a version is written, a reader sees the one before, and then HEAD moves at once."""
    place.publish(weights(1), 1)
    real, seen = store.save_file, []

    def look(*args: Any, **options: Any) -> None:
        real(*args, **options)
        seen.append((place.head(), place.versions()))

    monkeypatch.setattr(store, "save_file", look)
    place.publish(weights(2), 2)
    assert seen == [(1, [1])]

    def killed(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        place.publish(weights(3), 3)
    assert place.head() == 2 and same_bits(place.pull(2), weights(2)), "HEAD is replaced as a whole or not at all"


def test_what_a_killed_process_left_is_ignored_and_replaced(place: WeightStore) -> None:
    place.publish(weights(1), 1)
    left_over = place.root / "v00000002.writing"
    left_over.mkdir()
    (left_over / "weights.safetensors").write_bytes(b"half")
    (left_over / "no_such_file").write_bytes(b"")
    assert place.versions() == [1] and place.head() == 1
    with pytest.raises(UserError):
        place.pull(2)
    place.publish(weights(2), 2)
    assert same_bits(place.pull(2), weights(2)) and names(place) == ["HEAD", "v00000001", "v00000002"]
    assert not (place.root / "v00000002" / "no_such_file").exists()


def test_rollback_forgets_what_came_after(place: WeightStore) -> None:
    for version in (1, 2, 5, 6):
        place.publish(weights(version), version)
    place.rollback(2)
    assert place.versions() == [1, 2] and place.head() == 2
    with pytest.raises(UserError):
        place.pull(5)
    place.publish(weights(50), 5)  # trained anew
    assert same_bits(place.pull(5), weights(50)) and place.head() == 5


def test_rollback_before_the_first_version_empties_the_store(place: WeightStore) -> None:
    place.rollback(3)
    for version in (4, 5):
        place.publish(weights(version), version)
    place.rollback(3)
    assert place.versions() == [] and place.head() is None
    place.publish(weights(4), 4)
    assert place.head() == 4


@pytest.mark.parametrize("version", [2, 3, 7])
def test_rollback_goes_to_the_newest_that_is_left(place: WeightStore, version: int) -> None:
    """Also where the very version was never published or is garbage by now."""
    for each in (1, 2, 8):
        place.publish(weights(each), each)
    place.rollback(version)
    assert place.versions() == [1, 2] and place.head() == 2
    assert same_bits(place.pull(2), weights(2))


def test_rollback_moves_head_before_it_deletes(place: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (1, 2):
        place.publish(weights(version), version)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        place.rollback(1)
    assert place.head() == 1


def test_garbage_is_all_but_the_newest(place: WeightStore) -> None:
    for version in (1, 2, 9, 10):
        place.publish(weights(version), version)
    place.collect_garbage(keep=2)
    assert place.versions() == [9, 10] and place.head() == 10
    place.collect_garbage(keep=5)
    assert place.versions() == [9, 10]
    with pytest.raises(UserError, match=r"it holds \[9, 10\]"):
        place.pull(2)
    assert same_bits(place.pull(10), weights(10))
