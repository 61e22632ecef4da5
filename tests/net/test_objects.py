"""Objects in a folder and in a bucket: one contract, hostile keys, what a kill leaves behind."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.net import objects as room
from flowtrain.net.objects import MissingObject, Objects, StoreSilent, open_objects, read_object
from flowtrain.types import UserError
from tests.s3_server import ENVIRONMENT, s3_server


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server("bucket") as address, pytest.MonkeyPatch.context() as patch:
        for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": address}).items():
            patch.setenv(name, value)
        yield "s3://bucket"


@pytest.fixture(params=["folder", "bucket"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "folder":
        return open_objects(str(tmp_path / "store"))
    url = request.getfixturevalue("bucket")
    return open_objects(f"{url}/{tmp_path.name}", patience_s=5)


def test_an_object_is_read_as_it_was_put(objects: Objects) -> None:
    objects.put("a/b.txt", b"first")
    objects.put("a/b.txt", b"second")
    assert read_object(objects, "a/b.txt", 100) == b"second"
    assert b"".join(objects.chunks("a/b.txt", 2, 3)) == b"con"
    assert b"".join(objects.chunks("a/b.txt", 6, 3)) == b""
    record = objects.record("a/b.txt")
    assert record is not None and (record.key, record.num_bytes) == ("a/b.txt", 6)
    assert record.modified_s > 1.7e9


def test_a_long_file_is_put_and_read_in_parts(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_CHUNK", 5 << 20)
    data = bytes(range(256)) * (12 << 12)  # 12 MiB
    (tmp_path / "long").write_bytes(data)
    objects.put("long", tmp_path / "long")
    assert read_object(objects, "long", len(data)) == data
    assert [len(chunk) for chunk in objects.chunks("long", 1 << 20, 7 << 20)] == [5 << 20, 2 << 20]
    with pytest.raises(UserError, match="long has more than 12582911 bytes"):
        read_object(objects, "long", len(data) - 1)


def test_what_is_missing_is_said_to_be(objects: Objects) -> None:
    assert objects.record("no") is None and not list(objects.list())
    with pytest.raises(MissingObject, match=r"/no is not there"):
        read_object(objects, "no", 1)
    objects.put("a/yes", b"")
    assert read_object(objects, "a/yes", 0) == b""
    objects.delete(["no", "a/yes", "b/no"])
    assert objects.record("a/yes") is None


def test_objects_are_listed_below_whole_parts(objects: Objects) -> None:
    for key in ("a/1", "a/b/2", "ab/3", "4"):
        objects.put(key, key.encode())
    assert sorted(each.key for each in objects.list()) == ["4", "a/1", "a/b/2", "ab/3"]
    assert sorted((each.key, each.num_bytes) for each in objects.list("a")) == [
        ("a/1", 3),
        ("a/b/2", 5),
    ]
    assert not list(objects.list("c"))


HOSTILE = ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", ".", "a/.", "ä", "a\\b", "a\nb"]
HOSTILE += ["%2e%2e/x", "~", "x" * 901, "a?b", "a#b", "a\x00", "a b"]


@pytest.mark.parametrize("key", HOSTILE)
def test_a_hostile_key_is_refused(objects: Objects, key: str) -> None:
    for ask in (
        lambda: objects.put(key, b"x"),
        lambda: objects.record(key),
        lambda: objects.delete(["fine", key]),
        lambda: list(objects.chunks(key, 0, 1)),
    ):
        with pytest.raises(UserError, match="is no key"):
            ask()


@given(key=st.text(st.sampled_from("./a\\%\x00=-_:é"), max_size=12))
def test_no_key_leaves_the_folder(tmp_path_factory: pytest.TempPathFactory, key: str) -> None:
    outer = tmp_path_factory.getbasetemp() / "outer"
    root = outer / "inner" / "store"
    root.mkdir(parents=True, exist_ok=True)
    with suppress(UserError, StoreSilent):
        open_objects(str(root)).put(key, b"x")
    assert [path for path in outer.rglob("*") if path.is_file() and root not in path.parents] == []
    assert [path.name for path in outer.iterdir()] == ["inner"]


@pytest.mark.parametrize(
    "url",
    ["ftp://host/x", "s3://", "file://host/x", "s3://key:secret@bucket", "s3://b?x=1", "az://"],
)
def test_an_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="is no object store: give a folder"):
        open_objects(url)


def test_a_file_url_is_a_folder(tmp_path: Path) -> None:
    objects = open_objects(f"file://{tmp_path}/of%20mine")
    objects.put("x", b"1")
    assert (tmp_path / "of mine" / "x").read_bytes() == b"1"


def test_a_silent_server_is_silent_after_the_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    with socket.socket() as bound:  # nobody listens
        bound.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": address}).items():
            monkeypatch.setenv(name, value)
        objects = open_objects("s3://bucket/x", patience_s=0.3)
        for ask in (lambda: objects.put("k", b"1"), lambda: objects.record("k")):
            with pytest.raises(StoreSilent, match=r"s3://bucket/x/k: .*127\.0\.0\.1"):
                ask()
        with pytest.raises(StoreSilent, match=r"s3://bucket/x/"):
            list(objects.list())


def test_a_missing_bucket_is_a_mistake_of_the_user(bucket: str) -> None:
    with pytest.raises(UserError, match="s3://other: there is no such bucket"):
        open_objects("s3://other", patience_s=1).put("x", b"1")


def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    objects = open_objects(str(tmp_path / "store"))
    with pytest.raises((UserError, StoreSilent), match="store/a/b"):
        objects.put("a/b", b"1")


def test_a_put_that_was_killed_can_be_found_and_deleted(tmp_path: Path) -> None:
    objects = open_objects(str(tmp_path))
    objects.put("a/x", b"whole")
    (tmp_path / "a" / ".x.0123abcd").write_bytes(b"pa")
    os.mkfifo(tmp_path / "a" / "pipe")
    keys = {each.key for each in objects.list()}
    assert keys == {"a/x", "a/.x.0123abcd"}
    objects.delete(["a/.x.0123abcd"])
    assert {each.key for each in objects.list()} == {"a/x"}
