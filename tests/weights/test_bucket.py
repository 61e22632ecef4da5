"""A store in a bucket, copied there by any program: who reads there finds whole versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from http_stores import LAST, fill, same, weights_at

from flowtrain.records import UserError
from flowtrain.weights import StoreError, WeightReader, WeightStore, open_source, pull
from flowtrain.weights.__main__ import main
from tests.s3_server import ENVIRONMENT, s3_server


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return fill(tmp_path / "weights")


@pytest.fixture
def bucket(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_server("weights") as address:
        for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": address}).items():
            monkeypatch.setenv(name, value)
        for path in store.root.rglob("*"):
            if path.is_file() and path.name[0] != ".":
                put(path.relative_to(store.root).as_posix(), path.read_bytes())
        yield "s3://weights/run"


def put(key: str, data: bytes) -> None:
    import obstore
    from obstore.store import from_url

    url = "s3://weights/run"
    obstore.put(from_url(url, client_options={"allow_http": True}), key, data)


def test_a_reader_follows_a_bucket(bucket: str, tmp_path: Path) -> None:
    tensors = {name: torch.empty_like(tensor) for name, tensor in weights_at(0).items()}
    reader = WeightReader(open_source(bucket, tmp_path / "cache"), tensors)
    for version in (0, 1, LAST):
        reader.load(version)
        assert same(tensors, weights_at(version))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_commands_verify_and_pull_by_s3s_protocol(
    bucket: str, store: WeightStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", bucket, "--all"]) == 0
    assert "fine: 6 versions" in capsys.readouterr().out
    reader = open_source(bucket, tmp_path / "cache")
    assert reader.head() == LAST and same(pull(reader, LAST), pull(store, LAST))


def test_damage_and_what_is_missing_are_said(
    bucket: str, store: WeightStore, tmp_path: Path
) -> None:
    reader = open_source(bucket, tmp_path / "cache")
    with pytest.raises(StoreError, match=r"version 9 is not at .*; the newest there is 5"):
        reader.manifest(9)
    (file,) = reader.manifest(0).snapshot_files
    key = f"v00000000/{file.name}"
    data = (store.root / key).read_bytes()
    put(key, bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(StoreError, match="arrived damaged twice: does not have the checksum"):
        reader.fetch(0, file)
    put(key, data)
    part = tmp_path / "cache" / "v00000000" / f"{file.name}.part"
    part.write_bytes(data[:100])  # of a download that was cut
    assert reader.fetch(0, file).read_bytes() == data
    put("HEAD", b"<html>")
    with pytest.raises(StoreError, match="holds '<html>', not a version"):
        reader.head()
    elsewhere = open_source(f"{bucket}-of-nobody", tmp_path / "cache")
    assert elsewhere.head() is None
    with pytest.raises(StoreError, match="does not exist"):
        open_source(bucket, tmp_path / "other").fetch(7, file)


def test_an_address_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a bucket URL"):
        open_source("s3://", tmp_path)
