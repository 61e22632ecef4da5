"""A reader updates in place, all or nothing, and says why where it takes a snapshot instead."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from many_ranks import publish_together
from torch import Tensor
from weight_samples import Weights, chain, empty_like, same_bits, weights

from flowtrain import _delta
from flowtrain.weights import (
    Publisher,
    PublishOptions,
    SnapshotPolicy,
    StoreError,
    WeightReader,
    WeightStore,
    pull,
)
from flowtrain.weights.format.files import seal, write_delta
from flowtrain.weights.format.manifest import File, TensorSpec
from flowtrain.weights.format.tensor_shards import u16_view
from flowtrain.weights.load.reader import find_chain
from flowtrain.weights.load.target import HostTensors

NUM_VERSIONS = 40


@pytest.fixture(scope="module", params=[1, 2], ids=["level 1", "level 2"])
def full(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    """Versions 1 to 40; not to be changed."""
    store = WeightStore(tmp_path_factory.mktemp("full") / "weights")
    publisher = Publisher(store, PublishOptions(level=request.param))
    for version in range(1, NUM_VERSIONS + 1):
        publisher.publish(chain(version), version)
    return store


@pytest.fixture
def copy(full: WeightStore, tmp_path: Path) -> WeightStore:
    """The same, to be damaged."""
    shutil.copytree(full.root, tmp_path / "copy")
    return WeightStore(tmp_path / "copy")


def reader_at(store: WeightStore, version: int) -> tuple[WeightReader, Weights]:
    own = empty_like(chain(1))
    reader = WeightReader(store, own)
    reader.load(version)
    return reader, own


def file_of(store: WeightStore, version: int, base: int) -> Path:
    (file,) = store.manifest(version).delta_files[base]
    return store.folder(version) / file.name


def test_a_reader_follows_in_place(full: WeightStore) -> None:
    reader, own = reader_at(full, 1)
    pointers = {name: t.data_ptr() for name, t in own.items()}
    for version in range(2, NUM_VERSIONS + 1):
        loaded = reader.load(version)
        assert (loaded.mode, loaded.num_deltas, loaded.version) == (
            "delta",
            1,
            version,
        ) and loaded.num_bytes < 2000
        assert (
            same_bits(own, chain(version)) and reader.version == version and reader.damaged() == []
        )
    assert {name: t.data_ptr() for name, t in own.items()} == pointers


@pytest.mark.parametrize(
    ("start", "end", "num_deltas"),
    [(1, 17, 1), (1, 33, 2), (2, 40, 11), (5, 9, 1), (17, 40, 5), (3, 4, 1)],
)
def test_a_late_reader_applies_all_deltas_or_none(
    full: WeightStore, start: int, end: int, num_deltas: int
) -> None:
    reader, own = reader_at(full, start)
    path = reader.stage(end).result()
    assert path.start is not None and len(path.prepared.batches) == num_deltas
    last = path.prepared.batches[-1]
    key, blob = next(iter(last.items()))
    zeros = np.zeros(_delta.info(blob)["num_words"], np.uint16)
    last[key] = _delta.encode(zeros, zeros + 3)
    with pytest.raises(_delta.WrongBase):
        HostTensors(own).apply(path.prepared)
    assert same_bits(own, chain(start)), "those before it are taken back"
    last[key] = blob
    loaded = reader.load(end)
    assert (loaded.mode, loaded.num_deltas) == ("delta", num_deltas)
    assert same_bits(own, chain(end)) and reader.damaged() == []


def test_the_chain_is_logarithmic(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    publisher = Publisher(store, policy=SnapshotPolicy(max_deltas=1000))
    words = {"w": torch.zeros(70_000, dtype=torch.bfloat16)}
    for version in range(200):
        words["w"].view(torch.int16)[version] += 1
        publisher.publish(words, version)
    longest = max(
        len(find_chain(store, start, store.manifest(end)))
        for start in range(0, 200, 7)
        for end in range(start + 1, 200, 11)
    )
    assert longest <= 3 * 2 * 3 + 3, (
        "three skips on each of three tiers, up and down, and three of 64"
    )
    found = [base for base, _ in find_chain(store, 0, store.manifest(199))]
    assert found == [0, 64, 128, 192, 196, 197, 198]


def test_a_first_load_and_a_return_to_an_older_version_use_snapshots(full: WeightStore) -> None:
    reader, own = reader_at(full, 9)
    loaded = reader.load(4)
    assert loaded.mode == "snapshot" and "no deltas lead from version 9 to 4" in loaded.reason
    assert same_bits(own, chain(4)) and reader.version == 4


def test_deltas_longer_than_the_weights_are_replaced_by_a_snapshot(store: WeightStore) -> None:
    publisher = Publisher(store)
    found = {"w": torch.randn(20_000, generator=torch.Generator().manual_seed(0)).bfloat16()}
    for version in range(1, 12):
        rng = torch.Generator().manual_seed(version)
        at = torch.randperm(20_000, generator=rng)[:2600]
        found["w"].view(torch.int16)[at] = torch.randint(
            -(2**15), 2**15, (2600,), generator=rng, dtype=torch.int16
        )
        publisher.publish(found, version)
        if version == 3:
            own = empty_like(found)
            reader = WeightReader(store, own)
            reader.load(3)
    loaded = reader.load(11)
    assert loaded.mode == "snapshot"
    assert "are longer than the weights" in loaded.reason
    assert same_bits(own, found)


def test_the_same_version_costs_nothing(full: WeightStore) -> None:
    reader, own = reader_at(full, 9)
    assert reader.load(9).mode == "none" and same_bits(own, chain(9))


def test_tensors_that_cannot_be_written_to_directly_are_copied_to(store: WeightStore) -> None:
    Publisher(store).publish(weights(1), 1)
    own = {
        name: torch.zeros(t.T.shape, dtype=t.dtype).T if t.dim() == 2 else torch.zeros_like(t)
        for name, t in weights(1).items()
    }
    assert not own["transposed"].is_contiguous() or own["transposed"].numel() == 0
    WeightReader(store, own).load(1)
    assert same_bits(own, weights(1))


# ---- tensors that share memory


def numbers(*starts: int) -> Weights:
    tensors = {name: torch.ones(64, 4).bfloat16() for name in "abc"[: len(starts)]}
    for tensor, start in zip(tensors.values(), starts, strict=True):
        tensor[0] = start
    return tensors


def tied(kind: str) -> Weights:
    """An engine whose tensors are one."""
    one = torch.zeros(64, 4).bfloat16()
    if kind == "strided":
        one = torch.zeros(4, 64).bfloat16().t()
    return {"a": one, "b": one if kind == "same" else one[:]}


@pytest.mark.parametrize("kind", ["same", "view", "strided"])
def test_tied_tensors_take_equal_values_alone(store: WeightStore, kind: str) -> None:
    publisher, own = Publisher(store), tied(kind)
    reader = WeightReader(store, own)
    for version, starts in enumerate([(1, 1), (1, 2), (3, 3)]):
        publisher.publish(numbers(*starts), version)
    with pytest.raises(StoreError, match="version 1 has 'b' and 'a' apart; here they are one"):
        reader.load(1)
    assert not own["a"].any() and reader.version is None
    assert reader.load(0).mode == "snapshot" and same_bits(own, numbers(1, 1))
    with pytest.raises(StoreError, match="apart"):
        reader.load(1)
    assert same_bits(own, numbers(1, 1)) and reader.version == 0
    assert reader.load(2).mode == "delta" and same_bits(own, numbers(3, 3))
    assert reader.damaged() == []


def test_parts_of_one_memory_are_tensors_apart(store: WeightStore) -> None:
    """A layer that is fused, by rows and by columns."""
    Publisher(store).publish(numbers(1, 2, 3), 0)
    for own in (
        dict(zip("abc", torch.zeros(192, 4).bfloat16().split(64), strict=True)),
        dict(zip("abc", torch.zeros(64, 12).bfloat16().split(4, 1), strict=True)),
    ):
        WeightReader(store, own).load(0)
        assert same_bits(own, numbers(1, 2, 3))


MEMORY = torch.zeros(12).bfloat16()
SQUARE = torch.zeros(4, 4).bfloat16()


@pytest.mark.parametrize(
    "own",
    [
        {"a": MEMORY[:8], "b": MEMORY[4:]},
        {"a": MEMORY[4:], "b": MEMORY[:8]},
        {"a": MEMORY, "b": torch.zeros(4).bfloat16(), "c": MEMORY[11:]},
        {"a": SQUARE, "b": SQUARE.t()},
        {"a": SQUARE[:, :3], "b": SQUARE[:, 2:]},
        {"a": MEMORY[:1].expand(8)},
    ],
)
def test_tensors_that_share_a_part_of_their_memory_are_refused(own: Weights) -> None:
    with pytest.raises(ValueError, match=r"share a part of their memory|elements in one place"):
        HostTensors(own)


# ---- damage


def damages() -> Iterator[tuple[str, str]]:
    yield "missing", "is missing, though the manifest names it"
    yield "truncated", r"bytes, its manifest says"
    yield "bit flip", "does not have the checksum of its manifest"
    yield "sealed garbage", "is not a safetensors file"
    yield "of another version", "leads from version"
    yield "not a delta", "is not a delta of this store"
    yield "of another model", "belongs to a model of another layout"
    yield "newer", "has format 9; this code reads up to 1"
    yield "wrong base", "do not lead there"


def damage(store: WeightStore, kind: str) -> None:
    """The delta from 5 to 6; from "sealed garbage" on the manifest is made to agree."""
    path, manifest = file_of(store, 6, 5), store.manifest(6)
    data = bytearray(path.read_bytes())
    if kind == "missing":
        path.unlink()
        return
    if kind == "truncated":
        data = data[:-1]
    elif kind == "bit flip":
        data[len(data) // 2] ^= 4
    elif kind == "sealed garbage":
        data = bytearray(b"garbage")
    elif kind == "of another version":
        data = bytearray(file_of(store, 7, 6).read_bytes())
    elif kind == "not a delta":
        data = bytearray((store.folder(1) / store.manifest(1).snapshot_files[0].name).read_bytes())
    elif kind == "of another model":
        write_delta(path, {"matrix": _delta.encode(*[u16_view(chain(5)["still"])] * 2)}, {}, 5, 6)
        data = bytearray(path.read_bytes())
    elif kind == "newer":
        data = bytearray(bytes(data).replace(b'\\"format\\": 1', b'\\"format\\": 9'))
    elif kind == "wrong base":
        blobs = {
            n: _delta.encode(
                *(chain(v)[n].view(torch.int16).numpy().view("uint16").ravel() for v in (4, 6))
            )
            for n in ("matrix", "vector")
        }
        write_delta(path, blobs, manifest.layout, 5, 6)
        data = bytearray(path.read_bytes())
    path.write_bytes(data)
    if kind not in ("truncated", "bit flip"):
        sealed: File = seal(path)
        manifest.delta_files[5] = (sealed,)
        (store.folder(6) / "manifest.json").write_text(manifest.to_json())


@pytest.mark.parametrize(("kind", "message"), list(damages()))
def test_a_delta_that_is_not_right_is_replaced_by_a_snapshot_with_the_reason(
    copy: WeightStore, caplog: pytest.LogCaptureFixture, kind: str, message: str
) -> None:
    """Version 6 is lost, later ones are not."""
    damage(copy, kind)
    reader, own = reader_at(copy, 5)
    with pytest.raises(StoreError, match=message):
        reader.load(6)
    assert same_bits(own, chain(5)) and reader.version == 5, "nothing was touched"
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        loaded = reader.load(9)  # a skip leads from 5 to 9
    assert loaded.mode == "delta" and same_bits(own, chain(9)) and not caplog.records
    copy.rollback(9)
    Publisher(copy).publish(chain(10), 10)
    reader, own = reader_at(copy, 9)
    damage_free = reader.load(10)
    assert damage_free.mode == "snapshot" and same_bits(own, chain(10))


def test_a_missing_delta_is_logged_and_replaced_by_a_snapshot(
    store: WeightStore, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Publisher(store, policy=SnapshotPolicy(max_deltas=2))
    for version in (1, 2, 3):
        publisher.publish(chain(version), version)
    reader, own = reader_at(store, 2)
    file_of(store, 3, 2).unlink()
    with caplog.at_level(logging.WARNING):
        loaded = reader.load(3)
    assert loaded.mode == "snapshot" and "is missing" in loaded.reason and same_bits(own, chain(3))


def test_weights_that_something_else_changed_are_replaced_by_a_snapshot(full: WeightStore) -> None:
    """At once where a delta touches them; elsewhere when all words are compared."""
    at = int(
        (chain(5)["matrix"].view(torch.int16) != chain(6)["matrix"].view(torch.int16))
        .flatten()
        .nonzero()[0]
    )
    reader, own = reader_at(full, 5)
    own["matrix"].view(-1)[at] += 1
    loaded = reader.load(6)
    assert loaded.mode == "snapshot"
    assert "not its base, or were damaged" in loaded.reason
    assert loaded.num_damaged == 1
    assert same_bits(own, chain(6))


def test_verify_every_finds_and_repairs_damage_that_deltas_do_not_touch(
    full: WeightStore, caplog: pytest.LogCaptureFixture
) -> None:
    own = empty_like(chain(1))
    reader = WeightReader(full, own, verify_every=2)
    assert reader.load(5).num_damaged is None
    own["still"][3] = -1.0
    assert reader.damaged() == ["still"]
    loaded = reader.load(6)
    assert loaded.num_damaged == 1
    assert loaded.mode == "snapshot"
    assert same_bits(own, chain(6))
    assert reader.damaged() == []
    assert "1 tensors were not those of version 6 and are loaded again: still" in caplog.text
    assert loaded.metrics()["weights_damaged"] == 1


def test_a_version_that_was_published_again_is_recognised(store: WeightStore) -> None:
    """A reader of the old 3 must not take the new delta to 4."""
    publisher = Publisher(store)
    for version in (1, 2, 3):
        publisher.publish(chain(version), version)
    reader, own = reader_at(store, 3)
    store.rollback(2)
    again = Publisher(store)
    assert again.resume(chain(2), 2)
    again.publish(chain(13), 3)
    again.publish(chain(14), 4)
    loaded = reader.load(4)
    assert loaded.mode == "snapshot" and "do not lead there" in loaded.reason
    assert same_bits(own, chain(14))


@pytest.mark.parametrize("kind", ["name", "dtype", "shape"])
def test_another_model_is_refused_and_changes_nothing(full: WeightStore, kind: str) -> None:
    own: dict[str, Tensor] = empty_like(chain(1))
    own |= {
        "name": {"extra": torch.zeros(1)},
        "dtype": {"vector": torch.zeros(1000, dtype=torch.float16)},
        "shape": {"vector": torch.zeros(999, dtype=torch.bfloat16)},
    }[kind]
    reader = WeightReader(full, own)
    told = "version 3 holds another model than the one here: 1 tensors differ"
    with pytest.raises(StoreError, match=told):
        reader.load(3)
    assert reader.version is None and not any(t.any() for t in own.values())


@pytest.mark.parametrize("kind", ["missing", "bit flip", "half"])
def test_a_damaged_snapshot_is_refused_and_changes_nothing(copy: WeightStore, kind: str) -> None:
    path = copy.folder(1) / copy.manifest(1).snapshot_files[0].name
    if kind == "missing":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data[: len(data) // 2] if kind == "half" else data)
    own = empty_like(chain(1))
    with pytest.raises(StoreError, match=r"missing|checksum|bytes, its manifest says"):
        WeightReader(copy, own).load(7)
    assert not any(t.any() for t in own.values())


def test_a_snapshot_with_another_digest_than_its_manifest_is_refused(copy: WeightStore) -> None:
    path = copy.folder(1) / copy.manifest(1).snapshot_files[0].name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    manifest = copy.manifest(1)
    text = manifest.to_json().replace(manifest.snapshot_files[0].xxh3, seal(path).xxh3)
    (copy.folder(1) / "manifest.json").write_text(text)
    with pytest.raises(StoreError, match="the full snapshot of version 1 is damaged at"):
        pull(copy, 1)


def test_shapes_beyond_any_memory_are_refused(store: WeightStore) -> None:
    Publisher(store).publish(chain(1), 1)
    manifest = store.manifest(1)
    manifest.layout["vector"] = TensorSpec("bfloat16", (2**40, 2**20))
    (store.folder(1) / "manifest.json").write_text(manifest.to_json())
    with pytest.raises(StoreError, match=r"version 1 .* has tensors that do not fit into memory"):
        pull(store, 1)


# ---- other numbers of ranks


def test_a_chain_across_a_change_of_the_number_of_ranks(store: WeightStore) -> None:
    """The shards are then cut otherwise, so deltas are applied one after another."""
    publish_together(store, 1, range(1, 4))
    publish_together(store, 3, range(4, 7), resume=True)
    publish_together(store, 2, range(7, 9), resume=True)
    reader, own = reader_at(store, 2)
    loaded = reader.load(8)
    assert loaded.mode == "delta" and same_bits(own, chain(8)) and reader.damaged() == []
    assert len(store.manifest(5).delta_files[4]) == 3
    assert same_bits(pull(store, 8), chain(8))
