"""The weight store: immutable versions, a HEAD that names a whole version, garbage and leases."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from weight_samples import chain, same_bits, weights

from flowtrain.records import UserError
from flowtrain.weights import Publisher, SnapshotPolicy, StoreError, WeightStore, pull
from flowtrain.weights.format.manifest import Manifest
from flowtrain.weights.stores import folder as store_module


def publish(store: WeightStore, *versions: int) -> None:
    """Each with the weights of its number, as a full snapshot."""
    for version in versions:
        Publisher(store).publish(weights(version), version)


def names(store: WeightStore) -> list[str]:
    return sorted(path.name for path in store.root.iterdir())


def test_every_version_keeps_its_own_weights(store: WeightStore) -> None:
    assert store.head() is None and store.versions() == []
    for version in (0, 1, 12, 100_000_000):
        publish(store, version)
        assert store.head() == version
    assert store.versions() == [0, 1, 12, 100_000_000]
    for version in store.versions():
        assert same_bits(pull(store, version), weights(version))
        assert not same_bits(pull(store, version), weights(version + 1))
    assert (store.root / "HEAD").read_text() == "100000000\n"
    assert WeightStore(store.root).head() == 100_000_000, "another process sees the same"


@pytest.mark.parametrize("version", [0, 1, 2])
def test_a_version_never_changes(store: WeightStore, version: int) -> None:
    publish(store, 1, 2)
    with pytest.raises(
        StoreError,
        match=rf"version {version} cannot be published in .*: it is at 2, and versions never "
        rf"change",
    ):
        publish(store, version)
    assert store.head() == 2
    assert same_bits(pull(store, 1), weights(1))
    assert names(store) == ["HEAD", "v00000001", "v00000002"]


def test_pulled_weights_are_a_copy(store: WeightStore) -> None:
    publish(store, 1)
    pull(store, 1)["fp32"].zero_()
    assert same_bits(pull(store, 1), weights(1))


def test_a_missing_version_is_named(store: WeightStore) -> None:
    with pytest.raises(UserError, match=r"version 4 is not in .*weights; it holds nothing"):
        pull(store, 4)
    publish(store, 1, 2)
    with pytest.raises(UserError, match=r"version 4 is not in .*weights; it holds \[1, 2\]"):
        pull(store, 4)


@pytest.mark.parametrize("text", ["", "twelve", "-1", "1.5"])
def test_a_head_that_is_no_version_is_named(store: WeightStore, text: str) -> None:
    publish(store, 1)
    (store.root / "HEAD").write_text(text)
    with pytest.raises(StoreError, match=r"HEAD holds .*, not a version; is this a weight store"):
        store.head()


@pytest.mark.parametrize("name", ["HEAD", "v00000001/manifest.json"])
def test_a_file_without_an_end_is_refused(store: WeightStore, name: str) -> None:
    publish(store, 1)
    path = store.root / name
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(StoreError, match=rf"{name} is not a regular file"):
        pull(store, 1)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(StoreError, match=rf"{name} is longer than \d+ bytes"):
        pull(store, 1)


def test_a_head_that_points_nowhere_is_named(store: WeightStore) -> None:
    publish(store, 1)
    (store.root / "HEAD").write_text("7\n")
    with pytest.raises(StoreError, match=r"version 7 is not in .*; it holds \[1\]"):
        pull(store, store.head() or 0)


@pytest.mark.parametrize("call", ["write_snapshot", "commit", "rename", "HEAD"])
def test_an_unfinished_version_is_invisible(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Readers see the version before, and the next publish goes through."""
    publish(store, 1)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    targets = {
        "write_snapshot": "flowtrain.weights.publish.publisher.write_snapshot",
        "commit": "flowtrain.weights.format.manifest.Manifest.to_json",
        "rename": "pathlib.Path.rename",
        "HEAD": "flowtrain.weights.stores.folder.WeightStore._set_head",
    }
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(targets[call], killed)
        publish(store, 2)
    assert store.head() == 1 and store.versions() == [1] and same_bits(pull(store, 1), weights(1))
    with pytest.raises(StoreError):
        pull(store, 2)
    if call != "HEAD":
        (store.root / "v00000002.writing" / "no_such_file").write_bytes(b"")
    publish(store, 2)
    assert same_bits(pull(store, 2), weights(2)) and names(store) == [
        "HEAD",
        "v00000001",
        "v00000002",
    ]
    assert not (store.root / "v00000002" / "no_such_file").exists()


def test_rollback_deletes_later_versions(store: WeightStore) -> None:
    publish(store, 1, 2, 5, 6)
    store.rollback(2)
    assert store.versions() == [1, 2] and store.head() == 2
    with pytest.raises(StoreError):
        pull(store, 5)
    Publisher(store).publish(weights(50), 5)  # trained anew
    assert same_bits(pull(store, 5), weights(50)) and store.head() == 5


def test_rollback_before_the_first_version_empties_the_store(store: WeightStore) -> None:
    store.rollback(3)
    publish(store, 4, 5)
    store.rollback(3)
    assert store.versions() == [] and store.head() is None
    publish(store, 4)
    assert store.head() == 4


@pytest.mark.parametrize("version", [2, 3, 7])
def test_rollback_goes_to_the_newest_that_is_left(store: WeightStore, version: int) -> None:
    """Also where the very version was never published or is garbage by now."""
    publish(store, 1, 2, 8)
    store.rollback(version)
    assert store.versions() == [1, 2] and store.head() == 2
    assert same_bits(pull(store, 2), weights(2))


def test_rollback_moves_head_before_it_deletes(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, 1, 2)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store_module, "remove", killed)
    with pytest.raises(KeyboardInterrupt):
        store.rollback(1)
    assert store.head() == 1 and store.versions() == [1], "a folder beyond HEAD is not a version"


def test_what_lies_beyond_head_goes_before_a_version_is_written(store: WeightStore) -> None:
    """A rollback that was cut short leaves parts of versions, which HEAD would pass later."""
    publish(store, 1, 2, 3)
    (store.root / "HEAD").write_text("1\n")
    (store.root / "v00000002" / "manifest.json").unlink()
    (store.root / "v00000007.writing").mkdir()
    publish(store, 4)
    assert store.versions() == [1, 4] and names(store) == ["HEAD", "v00000001", "v00000004"]


# ---- garbage and leases


def test_garbage_is_what_the_newest_versions_do_not_need(store: WeightStore) -> None:
    publish(store, 1, 2, 9, 10)
    assert store.collect_garbage(keep=2) == [1, 2]
    assert store.versions() == [9, 10] and store.head() == 10
    assert store.collect_garbage(keep=5) == [] and store.versions() == [9, 10]
    assert same_bits(pull(store, 10), weights(10))


def test_garbage_leaves_the_snapshot_and_the_deltas_that_lead_to_kept_versions(
    store: WeightStore,
) -> None:
    publisher = Publisher(store, policy=SnapshotPolicy(max_deltas=5))
    for version in range(1, 13):
        publisher.publish(chain(version), version)
    snapshots = [v for v in store.versions() if store.manifest(v).snapshot_files]
    assert snapshots == [1, 6, 11]
    assert store.collect_garbage(keep=3) == [1, 2, 3, 4, 5]  # 10 is kept, and its snapshot is 6
    for version in range(6, 13):
        assert same_bits(pull(store, version), chain(version))
    assert store.collect_garbage(keep=1) == [6, 7, 8, 9, 10]
    assert same_bits(pull(store, 12), chain(12))


def test_a_replaced_snapshot_stays_for_those_who_load_it(store: WeightStore) -> None:
    """Only the last one that was replaced: it is as large as the model."""
    publisher = Publisher(store, policy=SnapshotPolicy(max_deltas=2))
    for version in range(1, 8):
        publisher.publish(chain(version), version)
    snapshots = [v for v in store.versions() if store.manifest(v).snapshot_files]
    assert snapshots == [1, 3, 5, 7]
    assert store.collect_garbage(1, keep_s=600.0) == [1, 2, 3, 4]
    assert same_bits(pull(store, 5), chain(5))
    path = store.folder(7) / "manifest.json"
    os.utime(path, (0, path.stat().st_mtime - 599.0))
    assert store.collect_garbage(1, keep_s=600.0) == []
    os.utime(path, (0, path.stat().st_mtime - 2.0))
    assert store.collect_garbage(1, keep_s=600.0) == [5, 6]


# ---- manifests


def test_manifest_json_roundtrip(store: WeightStore) -> None:
    publisher = Publisher(store)
    for version in range(1, 6):
        publisher.publish(chain(version), version)
    manifest = store.manifest(5)
    assert Manifest.from_json(manifest.to_json(), "here") == manifest
    assert sorted(manifest.delta_files) == [1, 4]
    assert manifest.snapshot == 1
    assert manifest.num_changed <= 200
