"""A store mirrored to a bucket or a folder: who reads there finds one of the published versions,
wherever the mirror was killed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from http_stores import LAST, fill, same, weights_at

from flowtrain.net.objects import Folder, Objects, open_objects
from flowtrain.types import UserError
from flowtrain.utils.lock import Lock
from flowtrain.weights import (
    Publisher,
    PublishOptions,
    StoreError,
    WeightReader,
    WeightStore,
    open_source,
    pull,
)
from flowtrain.weights.__main__ import main
from flowtrain.weights.stores.bucket import BucketStore
from flowtrain.weights.stores.mirror import Mirror
from tests.s3_server import ENVIRONMENT, s3_server

NUM_KILLS = 60


class Killed(BaseException):
    """Stands for a kill: nothing that the process meant to do afterwards happens."""


class Killing:
    """Objects whose owner is killed before the n-th change."""

    def __init__(self, objects: Objects, num_left: int) -> None:
        self._objects, self._num_left = objects, num_left
        self.url = objects.url

    def __getattr__(self, name: str) -> Any:
        if name in ("put", "delete"):
            if self._num_left == 0:
                raise Killed
            self._num_left -= 1
        return getattr(self._objects, name)


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return fill(tmp_path / "weights")


@pytest.fixture
def mirrored(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "mirror")


def source(mirrored: Objects, tmp_path: Path) -> BucketStore:
    return BucketStore(mirrored, tmp_path / "cache")


def files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name != "mirror.lock"
    }


def test_the_mirror_is_the_store_byte_for_byte(
    store: WeightStore, mirrored: Folder, tmp_path: Path
) -> None:
    mirror = Mirror(store, mirrored)
    assert mirror.update() == [0, 1, 2, 3, 4, 5] and mirror.update() == []
    assert Mirror(store, mirrored).update() == [], "another process finds all of it there"
    assert files(tmp_path / "mirror") == files(store.root)


def test_a_reader_follows_a_mirror(store: WeightStore, mirrored: Folder, tmp_path: Path) -> None:
    Mirror(store, mirrored).update()
    tensors = {name: torch.empty_like(tensor) for name, tensor in weights_at(0).items()}
    reader = WeightReader(source(mirrored, tmp_path), tensors)
    for version in (0, 1, LAST):
        reader.load(version)
        assert same(tensors, weights_at(version))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def rolled_back(store: WeightStore) -> None:
    """Publish other versions 3 to 5 than before, and 6."""
    store.rollback(2)
    publisher = Publisher(store, PublishOptions())
    for version in range(3, 7):
        publisher.publish(weights_at(version + 10), version)


def collected(store: WeightStore) -> None:
    publisher = Publisher(store, PublishOptions())
    assert publisher.publish(weights_at(LAST + 1), LAST + 1).snapshot_bytes
    assert store.collect_garbage(1)


def back(store: WeightStore) -> None:
    store.rollback(3)


@pytest.mark.parametrize("change", [None, rolled_back, collected, back])
def test_a_kill_anywhere_leaves_one_whole_version(
    tmp_path: Path, change: Callable[[WeightStore], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first pass without a change, or the next one after it."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # no power is cut here
    store, begun = fill(tmp_path / "weights"), tmp_path / "begun"
    begun.mkdir()
    states = [{v: pull(store, v) for v in store.versions()}]
    if change is not None:
        Mirror(store, Folder(begun)).update()
        change(store)
        states.append({v: pull(store, v) for v in store.versions()})
    for num in range(NUM_KILLS):
        folder = tmp_path / str(num)
        shutil.copytree(begun, folder / "mirror")
        objects = Folder(folder / "mirror")
        try:
            Mirror(store, Killing(objects, num)).update()
            was_killed = False
        except Killed:
            was_killed = True
        reader = BucketStore(objects, folder / "cache")
        head = reader.head()
        assert head is not None or change is not back
        if head is not None:
            found = pull(reader, head)
            assert any(head in state and same(found, state[head]) for state in states)
        Mirror(store, objects).update()
        assert files(folder / "mirror") == files(store.root)
        if not was_killed:
            assert num > 2
            return
    raise AssertionError("more changes than kills: raise NUM_KILLS")


def test_an_empty_folder_empties_no_mirror(
    store: WeightStore, mirrored: Folder, tmp_path: Path
) -> None:
    Mirror(store, mirrored).update()
    assert Mirror(WeightStore(tmp_path / "elsewhere"), mirrored).update() == []
    assert source(mirrored, tmp_path).head() == LAST


def test_damage_and_what_is_missing_are_said(
    store: WeightStore, mirrored: Folder, tmp_path: Path
) -> None:
    reader = source(mirrored, tmp_path)
    assert reader.head() is None
    with pytest.raises(StoreError, match=r"version 0 is not at .*mirror; the newest there is none"):
        reader.manifest(0)
    Mirror(store, mirrored).update()
    (file,) = reader.manifest(0).snapshot_files
    path = tmp_path / "mirror" / "v00000000" / file.name
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(StoreError, match="came damaged twice: does not have the checksum"):
        reader.fetch(0, file)
    path.unlink()
    with pytest.raises(StoreError, match="was never mirrored or was collected"):
        reader.fetch(0, file)
    path.write_bytes(data)
    part = tmp_path / "cache" / "v00000000" / f"{file.name}.part"
    part.write_bytes(data[:100])  # of a download that was cut
    assert reader.fetch(0, file).read_bytes() == data
    (tmp_path / "mirror" / "HEAD").write_text("<html>")
    with pytest.raises(StoreError, match="holds '<html>', not a version"):
        reader.head()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_server("weights") as address:
        for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": address}).items():
            monkeypatch.setenv(name, value)
        yield "s3://weights/run"


def test_commands_mirror_verify_and_pull_by_s3s_protocol(
    store: WeightStore, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mirror", str(store.root), bucket, "--once"]) == 0
    assert capsys.readouterr().out == "put 0, 1, 2, 3, 4, 5\n"
    assert main(["verify", bucket, "--all"]) == 0
    assert "fine: " in capsys.readouterr().out
    assert main(["inspect", bucket, "--version", "5"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 5
    rolled_back(store)
    assert main(["mirror", str(store.root), bucket, "--once"]) == 0
    reader = open_source(bucket, tmp_path / "cache")
    assert isinstance(reader, BucketStore) and reader.head() == 6
    assert same(pull(reader, 6), pull(store, 6))
    there = {each.key: each.num_bytes for each in open_objects(bucket).list()}
    assert there == {name: len(data) for name, data in files(store.root).items()}


def test_a_second_mirror_of_a_store_is_refused(store: WeightStore, tmp_path: Path) -> None:
    with Lock(store.root / "mirror.lock", "it", "end it"):
        if (pid := os.fork()) == 0:
            os._exit(main(["mirror", str(store.root), str(tmp_path / "m"), "--once"]))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    assert not (tmp_path / "m").exists()


def test_an_address_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no object store"):
        open_source("s3://", tmp_path)
