"""A publisher writes snapshots, deltas and skips; one that fails leaves all as it was."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from many_ranks import Meeting, ThreadRank, rows_of
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from weight_samples import Weights, chain, empty_like, same_bits, weights

from flowtrain import _delta
from flowtrain.weights import (
    Published,
    Publisher,
    PublishOptions,
    SnapshotPolicy,
    StoreError,
    WeightReader,
    WeightStore,
    pull,
)
from flowtrain.weights.format.files import read_delta
from flowtrain.weights.publish import publisher as module
from flowtrain.weights.publish.baseline import Baseline
from flowtrain.weights.stores import folder


def test_a_snapshot_is_a_safetensors_file_of_the_tensors(store: WeightStore) -> None:
    published = Publisher(store).publish(weights(3), 3)
    (file,) = store.manifest(3).snapshot_files
    assert same_bits(load_file(store.fetch(3, file)), weights(3))
    assert published.reason == "the publisher has just started" and published.delta_bytes == 0
    assert published.snapshot_bytes == file.num_bytes > 108 * 4 + 508 * 2
    assert published.num_changed == published.num_words == 2 * 108 + 508 + 2 * 35 + 2
    assert "weights_bytes_per_change" not in published.metrics()


def test_a_delta_is_a_safetensors_file_of_what_changed(store: WeightStore) -> None:
    publisher = Publisher(store)
    publisher.publish(chain(1), 1)
    published = publisher.publish(chain(2), 2)
    (file,) = store.manifest(2).delta_files[1]
    with safe_open(store.fetch(2, file), "pt") as opened:
        assert sorted(opened.keys()) == ["matrix", "vector"], "what did not change is left out"
        head = json.loads(opened.metadata()["flowtrain_delta"])
        assert (head["base"], head["version"], head["format"]) == (1, 2, 1)
        assert all(opened.get_tensor(name).dtype == torch.uint8 for name in opened.keys())  # noqa: SIM118
    ours, theirs = (
        torch.cat([t.view(torch.int16).view(-1) for t in chain(v).values()]) for v in (1, 2)
    )
    assert published.num_changed == (ours != theirs).sum()
    assert published.snapshot_bytes == 0
    assert published.reason == ""
    assert published.delta_bytes == file.num_bytes
    metrics = published.metrics()
    assert metrics["weights_density"] == published.num_changed / 72_000
    assert metrics["weights_bytes_per_change"] == file.num_bytes / published.num_changed


@pytest.mark.parametrize("level", [1, 2])
def test_every_version_of_a_chain_is_what_was_published(store: WeightStore, level: int) -> None:
    publisher = Publisher(store, PublishOptions(level=level))
    for version in range(1, 22):
        publisher.publish(chain(version), version)
    for version in range(1, 22):
        assert same_bits(pull(store, version), chain(version))


def test_skips_come_every_fourth_sixteenth_and_64th_version(store: WeightStore) -> None:
    publisher = Publisher(store, policy=SnapshotPolicy(max_deltas=1000))
    small = {"w": torch.zeros(5000, dtype=torch.bfloat16)}
    for version in range(66):
        small["w"].view(torch.int16)[version] += 1
        publisher.publish(small, version)
    for version in range(1, 66):
        longest = max(step for step in (1, 4, 16, 64) if version % step == 0)
        bases = [version - step for step in (1, 4, 16, 64) if step <= longest]
        assert sorted(store.manifest(version).delta_files) == sorted(bases)
    (file,) = store.manifest(64).delta_files[0]
    (blob,) = read_delta(store.fetch(64, file), store.manifest(64).layout, 0, 64).values()
    assert _delta.decode_pairs(blob)[1].tolist() == list(range(1, 65))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_delta_share": 0.001}, "of the full size"),
        ({"max_deltas": 2}, "the last full snapshot is 2 versions old"),
    ],
)
def test_when_a_snapshot_is_due(store: WeightStore, options: dict[str, Any], message: str) -> None:
    publisher = Publisher(store, policy=SnapshotPolicy(**options))
    reasons = [publisher.publish(chain(version), version).reason for version in (1, 2, 3)]
    with_snapshot = [bool(store.manifest(version).snapshot_files) for version in (1, 2, 3)]
    assert with_snapshot == [bool(reason) for reason in reasons] and message in reasons[2]
    has_delta = [bool(store.manifest(version).delta_files) for version in (1, 2, 3)]
    expected = [False, False, False] if "max_delta_share" in options else [False, True, True]
    assert has_delta == expected
    assert same_bits(pull(store, 3), chain(3))


def test_deltas_that_add_up_to_half_the_size_cause_a_snapshot(store: WeightStore) -> None:
    publisher = Publisher(store)
    found = {"w": torch.randn(20_000, generator=torch.Generator().manual_seed(0)).bfloat16()}
    reasons = []
    for version in range(12):
        rng = torch.Generator().manual_seed(version)
        found["w"].view(torch.int16)[torch.randperm(20_000, generator=rng)[:4000]] += 1
        reasons.append(publisher.publish(found, version).reason)
        assert same_bits(pull(store, version), found)
    due = [version for version, reason in enumerate(reasons) if "add up to" in reason]
    assert due
    assert all(store.manifest(v).snapshot == v and store.manifest(v).delta_files for v in due)


def test_a_changed_layout_causes_a_snapshot(store: WeightStore) -> None:
    publisher = Publisher(store)
    publisher.publish(chain(1), 1)
    other = {**chain(2), "new": torch.ones(3, dtype=torch.bfloat16)}
    assert publisher.publish(other, 2).reason == "the layout of the model changed"
    assert same_bits(pull(store, 2), other)
    assert (
        publisher.publish({**chain(3), "new": torch.ones(3, dtype=torch.bfloat16)}, 3).reason == ""
    )


def test_nothing_changed_is_a_version_too(store: WeightStore) -> None:
    publisher = Publisher(store)
    publisher.publish(chain(1), 1)
    published = publisher.publish(chain(1), 2)
    assert (published.num_changed, published.delta_bytes, published.reason) == (0, 0, "")
    assert store.manifest(2).delta_files == {1: ()} and same_bits(pull(store, 2), chain(1))
    assert store.manifest(2).root == store.manifest(1).root


def test_weights_are_cast_to_the_dtype_of_the_store(store: WeightStore) -> None:
    masters = {name: t.float() + 1e-4 for name, t in chain(1).items()}
    Publisher(store, PublishOptions(torch.bfloat16)).publish(masters, 1)
    assert same_bits(pull(store, 1), {name: t.bfloat16() for name, t in masters.items()})


def test_a_tensor_of_an_odd_number_of_bytes_is_named(store: WeightStore) -> None:
    told = r"tensor 'odd' has an odd number of bytes \(\(3,\) torch.uint8\)"
    with pytest.raises(ValueError, match=told):
        Publisher(store).publish({"odd": torch.zeros(3, dtype=torch.uint8)}, 1)
    assert store.head() is None
    even = {"even": torch.arange(4, dtype=torch.uint8)}
    Publisher(store).publish(even, 1)
    assert same_bits(pull(store, 1), even)


@pytest.mark.parametrize(
    "tensors, version, told",
    [
        ({}, 0, "no tensors to publish"),
        ({"__metadata__": torch.ones(2)}, 0, "no tensor can be called '__metadata__'"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, 0, "'a': no file can hold complex128"),
        ({"a": torch.ones(2)}, -1, "version -1 is not a whole number from 0"),
        ({"a": torch.ones(2)}, True, "version True is not a whole number from 0"),
        ({"a": torch.ones(2)}, 10**18, "is not a whole number from 0 to 999999999999999999"),
        ({"a" * 1000: torch.ones(2)}, 0, "bytes, and may have 1000: shorten the names"),
    ],
)
def test_what_no_reader_could_load_is_not_published(
    store: WeightStore, tensors: Weights, version: int, told: str
) -> None:
    publisher = Publisher(store)
    with pytest.raises(ValueError, match=told), mock.patch.object(folder, "MAX_MANIFEST", 1000):
        publisher.publish(tensors, version)
    assert store.head() is None and not list(store.root.glob("v*"))
    publisher.publish(chain(1), 10**18 - 1)
    assert same_bits(pull(store, 10**18 - 1), chain(1))


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "place", ["write_delta", "write_snapshot", "WeightStore.commit", "WeightStore.begin"]
)
@pytest.mark.parametrize(
    "error", [FULL, SafetensorError("I/O error: no space left")], ids=["OSError", "SafetensorError"]
)
def test_a_failed_publish_leaves_store_and_publisher_as_they_were(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception
) -> None:
    """And the next one starts from the version before: what was not published is not lost."""
    publisher = Publisher(store, policy=SnapshotPolicy(max_deltas=1))
    publisher.publish(chain(1), 1)
    reader = WeightReader(store, empty_like(chain(1)))
    reader.load(1)

    def full(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as broken, pytest.raises(type(error)):
        owner, _, name = place.rpartition(".")
        broken.setattr(getattr(module, owner) if owner else module, name, full)
        publisher.publish(chain(2), 2)
    assert sorted(path.name for path in store.root.glob("[Hv]*")) == ["HEAD", "v00000001"]
    assert store.head() == 1 and same_bits(pull(store, 1), chain(1))
    for version in (3, 4, 5, 6, 7):
        publisher.publish(chain(version), version)
    assert sorted(store.manifest(3).delta_files) == [1]
    assert sorted(store.manifest(6).delta_files) == [1, 5]
    for version in (3, 6, 7):
        assert reader.load(version).mode == "delta"
        assert reader.damaged() == []
        assert same_bits(pull(store, version), chain(version))


def test_an_older_version_is_refused_and_nothing_moves(store: WeightStore) -> None:
    publisher = Publisher(store)
    publisher.publish(chain(5), 5)
    with pytest.raises(StoreError, match="version 5 cannot be published"):
        publisher.publish(chain(6), 5)
    assert publisher.publish(chain(6), 6).reason == "" and same_bits(pull(store, 6), chain(6))


# ---- dense deltas


def layers() -> Weights:
    """Sixteen fp32 tensors of the same size."""
    rng = torch.Generator().manual_seed(0)
    return {f"layers.{i}": torch.randn(40, 64, generator=rng) for i in range(16)}


def moved(found: Weights, version: int, names: Iterable[str], rows: int = 40) -> Weights:
    """Move the first rows of the named tensors a little, as an optimizer moves fp32 weights."""
    rng = torch.Generator().manual_seed(version)
    result = {name: tensor.clone() for name, tensor in found.items()}
    for name in sorted(names):
        result[name][:rows] += torch.randn(rows, 64, generator=rng) * 1e-5
    return result


def num_changed(old: Weights, new: Weights) -> int:
    return sum(int((old[n].view(torch.int16) != new[n].view(torch.int16)).sum()) for n in old)


on_device = partial(Baseline, on_device=True)


@pytest.fixture(params=[False, True], ids=["host", "device"])
def encoded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards that are encoded, on the host or by the kernels of a device."""
    names: list[str] = []
    encode_all = module.encode_all

    def record(pairs: Any) -> Any:
        assert all(baseline.on_device == request.param for baseline, _ in pairs)
        names.extend(shard.name for _, shard in pairs)
        return encode_all(pairs)

    monkeypatch.setattr(module, "encode_all", record)
    monkeypatch.setattr(module, "make_baseline", partial(Baseline, on_device=request.param))
    return names


def test_of_a_dense_delta_only_a_sample_is_encoded(store: WeightStore, encoded: list[str]) -> None:
    publisher = Publisher(store)
    publisher.publish(v1 := layers(), 1)
    v2 = moved(v1, 2, v1.keys() - {"layers.3"})
    published = publisher.publish(v2, 2)
    sample = set(encoded)
    assert len(sample) == len(encoded) == 2, "an eighth"
    assert "of the full size" in published.reason and published.num_changed == num_changed(v1, v2)
    assert not store.manifest(2).delta_files and same_bits(pull(store, 2), v2)
    assert Publisher(store).resume(v2, 2), "the digests are those of all words"

    # The sample does not change here, so all is encoded, and the whole delta decides.
    encoded.clear()
    v3 = moved(v2, 3, v2.keys() - sample)
    published = publisher.publish(v3, 3)
    assert sorted(encoded) == sorted(v3) and published.num_changed == num_changed(v2, v3)
    assert "of the full size" in published.reason and same_bits(pull(store, 3), v3)

    v4 = moved(v3, 4, v3, rows=1)
    published = publisher.publish(v4, 4)
    assert (published.reason, published.num_changed) == ("", num_changed(v3, v4))
    assert sorted(store.manifest(4).delta_files) == [3] and same_bits(pull(store, 4), v4)


@pytest.mark.parametrize("place", ["write_snapshot", "WeightStore.commit"])
def test_a_failed_dense_publish_changes_nothing(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, encoded: list[str], place: str
) -> None:
    publisher = Publisher(store)
    publisher.publish(v1 := layers(), 1)
    with monkeypatch.context() as broken, pytest.raises(OSError, match="No space left"):
        owner, _, name = place.rpartition(".")
        broken.setattr(
            getattr(module, owner) if owner else module, name, mock.Mock(side_effect=FULL)
        )
        publisher.publish(moved(v1, 2, v1), 2)
    assert len(encoded) == 2, "it was dense"
    assert sorted(path.name for path in store.root.glob("[Hv]*")) == ["HEAD", "v00000001"]
    v3 = moved(v1, 3, v1, rows=1)
    published = publisher.publish(v3, 3)
    assert (published.reason, published.num_changed) == ("", num_changed(v1, v3))
    assert sorted(store.manifest(3).delta_files) == [1] and same_bits(pull(store, 3), v3)


@pytest.mark.parametrize(("rows", "is_dense"), [(20, False), (40, True)])
def test_the_ranks_together_decide_what_is_dense(
    store: WeightStore, encoded: list[str], rows: int, is_dense: bool
) -> None:
    """Rank 0 has the first 20 rows of each tensor: its own delta is dense in both cases."""
    meeting = Meeting(2)
    versions = [v1 := layers(), v2 := moved(v1, 2, v1, rows), v3 := moved(v2, 3, v2, rows=1)]

    def run(rank: int) -> list[Published]:
        publisher = Publisher(store, ranks=ThreadRank(rank, meeting))
        return [publisher.publish(found, i) for i, found in enumerate(versions, start=1)]

    with mock.patch.object(module, "local_shards", rows_of), ThreadPoolExecutor(2) as pool:
        published, same = pool.map(run, range(2))
    assert published == same
    assert bool(published[1].reason) == is_dense and not published[2].reason
    assert len(encoded) == 2 * (2 if is_dense else 16) + 2 * 16
    assert [p.num_changed for p in published[1:]] == [num_changed(v1, v2), num_changed(v2, v3)]
    assert all(same_bits(pull(store, i), found) for i, found in enumerate(versions, start=1))


# ---- a restarted trainer


def test_a_restarted_publisher_goes_on_with_the_chain(store: WeightStore) -> None:
    publisher = Publisher(store)
    for version in (1, 2, 3):
        publisher.publish(chain(version), version)
    fresh = Publisher(store)
    assert fresh.resume(chain(3), 3)
    assert fresh.publish(chain(4), 4).reason == "" and sorted(store.manifest(4).delta_files) == [3]
    assert same_bits(pull(store, 4), chain(4))
    sizes = [sum(f.num_bytes for f in store.manifest(v).delta_files[v - 1]) for v in (2, 3, 4)]
    again = Publisher(store)
    assert again.resume(chain(4), 4)
    assert again._base is not None
    assert again._base.chain.num_bytes == sum(sizes)


@pytest.mark.parametrize("case", ["other weights", "other layout", "not HEAD", "empty store"])
def test_a_restart_with_anything_else_starts_with_a_snapshot(store: WeightStore, case: str) -> None:
    if case != "empty store":
        publisher = Publisher(store)
        publisher.publish(chain(1), 1)
        publisher.publish(chain(2), 2)
    found = {"other weights": chain(3), "other layout": {"matrix": chain(2)["matrix"]}}.get(
        case, chain(2)
    )
    fresh = Publisher(store)
    assert not fresh.resume(found, 1 if case == "not HEAD" else 2)
    assert fresh.publish(found, 3).reason == "the publisher has just started"
    assert same_bits(pull(store, 3), found)


# ---- the kernels of a device, here on the CPU


def test_changes_found_on_a_device_make_the_same_files(
    store: WeightStore, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = WeightStore(tmp_path / "device")
    files = []
    for each in (store, other):
        if each is other:
            monkeypatch.setattr(module, "make_baseline", on_device)
        publisher = Publisher(each)
        for version in range(1, 6):
            publisher.publish(chain(version), version)
        files.append(
            [
                f
                for v in range(2, 6)
                for listed in each.manifest(v).delta_files.values()
                for f in listed
            ]
        )
        assert same_bits(pull(each, 5), chain(5))
    assert files[0] == files[1] and len(files[0]) == 5, "names, sizes and checksums"


def test_level_2_is_refused_on_a_device(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "make_baseline", on_device)
    publisher = Publisher(store, PublishOptions(level=2))
    with pytest.raises(ValueError, match="level=2 needs the weights on the CPU"):
        publisher.publish(chain(1), 1)


def test_words_kept_on_the_host_are_encoded_there_wherever_the_weights_are(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Level 2 shows it: weights on a device refuse that."""
    monkeypatch.setattr(module, "make_baseline", on_device)
    publisher = Publisher(store, PublishOptions(level=2, on_host=True))
    for version in (1, 2):
        publisher.publish(chain(version), version)
    assert same_bits(pull(store, 2), chain(2))
