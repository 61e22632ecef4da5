"""Malformed manifests and files are refused with their names, before they are used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flowtrain.weights import Publisher, StoreError, WeightStore, pull
from flowtrain.weights.format.files import read_delta, read_snapshot
from flowtrain.weights.format.manifest import TensorSpec


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    found = WeightStore(tmp_path / "weights")
    publisher = Publisher(found)
    for version in range(3):
        publisher.publish({"w": (torch.arange(4096) == version).bfloat16()}, version)
    return found


def circle(record: dict[str, Any]) -> None:
    record["delta_files"]["2"] = record["delta_files"].pop("1")


def tensor(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda record: record["tensors"]["w"].update(changes)


OUTSIDE = (
    "",
    ".",
    "..",
    "../HEAD",
    "a/b.safetensors",
    "a\\b.safetensors",
    ".a.safetensors",
    "HEAD",
)
"""Names that no file of a version has."""
CONTRADICTIONS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a circle": (circle, "not before it"),
    "a later snapshot": (lambda r: r.update(anchor=3), "not before it"),
    "no dtype": (tensor(dtype="bfloat17"), "is not a dtype of this torch"),
    "no dtype but a name": (tensor(dtype="nn"), "is not a dtype of this torch"),
    "a negative shape": (tensor(shape=[-4]), "not a tensor of 16-bit words"),
    "odd bytes": (tensor(dtype="uint8", shape=[3]), "not a tensor of 16-bit words"),
    "an infinite version": (lambda r: r.update(version=float("inf")), "is damaged"),
    "another root": (lambda r: r.update(root="0" * 32), "its root is not that of its tensors"),
    "a file without a size": (
        lambda r: r["delta_files"]["1"][0].pop("num_bytes"),
        "is damaged: 'num_bytes'",
    ),
    "a newer format": (lambda r: r.update(format=2), "a newer flowtrain is needed"),
    **{
        f"file {name!r}": (
            lambda r, name=name: r["delta_files"]["1"][0].update(name=name),
            "outside its folder or no safetensors file",
        )
        for name in (*OUTSIDE, "a.safetensors\n", "a\0.safetensors")
    },
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_contradictory_manifest_is_refused(store: WeightStore, case: str) -> None:
    path, (change, message) = store.folder(2) / "manifest.json", CONTRADICTIONS[case]
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(StoreError, match=message):
        store.manifest(2)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[]", "null", "", '{"format": "1"}', '{"format": 1}', "\udcff"]
)
def test_text_that_is_no_manifest_is_refused(store: WeightStore, text: str) -> None:
    (store.folder(2) / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(StoreError, match=r"manifest.json is (damaged|not the manifest)"):
        store.manifest(2)


def test_a_moved_folder_is_refused(store: WeightStore) -> None:
    store.folder(1).rename(store.root / "v00000001-old")
    store.folder(0).rename(store.folder(1))
    assert store.versions() == [1, 2], "other names are not looked at"
    with pytest.raises(StoreError, match="describes version 0; it was moved"):
        store.manifest(1)


HEAD = {"format": 1, "layout": "x", "base": 1, "version": 2}
BYTES = torch.zeros(3, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("head", "tensor", "message"),
    [
        (None, BYTES, "is not a delta"),
        ("{", BYTES, "is not a delta"),
        ("[]", BYTES, "is not a delta"),
        ("[" * 100_000, BYTES, "is not a delta"),
        ({"format": 1}, BYTES, "is not a delta"),
        (HEAD | {"base": "1"}, BYTES, "is not a delta"),
        ({"format": 2}, BYTES, "a newer flowtrain is needed"),
        (HEAD, torch.zeros(3), "a delta is a run of bytes"),
        (HEAD, BYTES.view(3, 1), "a delta is a run of bytes"),
    ],
)
def test_a_file_that_is_no_delta_is_refused(
    tmp_path: Path, head: Any, tensor: torch.Tensor, message: str
) -> None:
    metadata = (
        {}
        if head is None
        else {"flowtrain_delta": head if isinstance(head, str) else json.dumps(head)}
    )
    save_file({"w": tensor}, tmp_path / "x.safetensors", metadata=metadata)
    with pytest.raises(StoreError, match=message):
        read_delta(tmp_path / "x.safetensors", {}, 0, 1)


@pytest.mark.parametrize("first", ["{", "[]", "3", '{"w": "x"}', '{"w": null}', '{"v": 0}', None])
def test_a_snapshot_without_row_offsets_is_refused(tmp_path: Path, first: str | None) -> None:
    save_file(
        {"w": torch.zeros(3)},
        tmp_path / "x.safetensors",
        metadata={} if first is None else {"first": first},
    )
    with pytest.raises(StoreError, match="holds 'w'"):
        read_snapshot(tmp_path / "x.safetensors", {"w": TensorSpec("float32", (3,))})


def test_tied_weights_are_written_to_snapshots(tmp_path: Path) -> None:
    """safetensors refuses tensors that share memory."""
    head = torch.arange(12.0).view(3, 4)
    store = WeightStore(tmp_path)
    Publisher(store).publish({"embed": head, "head": head, "part": head[1:]}, 0)
    pulled = pull(store, 0)
    assert torch.equal(pulled["embed"], head)
    assert torch.equal(pulled["head"], head)
    assert torch.equal(pulled["part"], head[1:])


def test_garbage_is_listed_before_it_is_deleted(store: WeightStore) -> None:
    assert store.garbage(1) == [] and store.collect_garbage(1) == []
    with pytest.raises(ValueError, match="keep must be at least 1, not 0"):
        store.garbage(0)


def test_others_may_read_what_is_published(store: WeightStore) -> None:
    """A node or a weight server may run as another user."""
    paths = list(store.root.glob("*/*.safetensors"))
    assert paths
    assert all(path.stat().st_mode & 0o777 == path.parent.stat().st_mode & 0o666 for path in paths)
