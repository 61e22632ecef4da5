"""A store over HTTP: whatever the server does, a fetch returns the file of the manifest or raises
an error that says what to do.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import http_stores as hs
import pytest
import torch
from http_stores import LAST, TOKEN, Answer, Misbehaving, same, weights_at

from flowtrain.types import UserError
from flowtrain.weights import RemoteStore, StoreError, WeightReader, WeightStore, open_source, pull
from flowtrain.weights.format.manifest import File
from flowtrain.weights.stores import http, remote, timed_http

pytest_plugins = ("http_stores",)
pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture
def server(filled: WeightStore) -> Iterator[Misbehaving]:
    with hs.misbehaving(filled.root) as running:
        yield running


def snapshot_of(filled: WeightStore) -> File:
    return filled.manifest(0).snapshot_files[0]


# ---- the real server


def test_a_reader_follows_a_store_over_http(filled: WeightStore, tmp_path: Path) -> None:
    with hs.serving(filled) as url:
        source = open_source(url, tmp_path / "cache", TOKEN)
        assert isinstance(source, RemoteStore) and str(source) == url and source.head() == LAST
        tensors = {name: torch.empty_like(tensor) for name, tensor in weights_at(0).items()}
        reader = WeightReader(source, tensors)
        for version, mode, num_deltas in ((0, "snapshot", 0), (1, "delta", 1), (LAST, "delta", 4)):
            loaded = reader.load(version)
            assert (loaded.mode, loaded.num_deltas) == (mode, num_deltas)
            assert same(tensors, weights_at(version))
        for version in range(LAST + 1):
            assert same(pull(source, version), weights_at(version))
            assert source.manifest(version) == filled.manifest(version)


def test_loaded_versions_leave_the_cache(filled: WeightStore, tmp_path: Path) -> None:
    with hs.serving(filled) as url:
        source = hs.remote(url, tmp_path, token=TOKEN)
        for version in (0, 1, 2):
            for file in (
                *filled.manifest(version).snapshot_files,
                *(f for fs in filled.manifest(version).delta_files.values() for f in fs),
            ):
                source.fetch(version, file)
    (tmp_path / "v00000001.keep").mkdir()
    source.loaded(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v00000001.keep", "v00000002"]


def test_open_source_tells_paths_from_urls(tmp_path: Path) -> None:
    assert isinstance(open_source(tmp_path, tmp_path), WeightStore)
    assert isinstance(open_source("https://host/weights/", tmp_path), RemoteStore)


# ---- downloads that are cut


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("offset", [0, 1, 7, 4096, -1])
def test_a_cut_download_is_resumed(
    server: Misbehaving, filled: WeightStore, tmp_path: Path, offset: int, has_length: bool
) -> None:
    file = snapshot_of(filled)
    at, last = offset % file.num_bytes, file.num_bytes - 1
    server.answers[file.name] = [hs.cut_after(at, has_length), hs.cut_after(3, has_length)]
    path = hs.remote(server.url, tmp_path).fetch(0, file)
    assert path.read_bytes() == (filled.folder(0) / file.name).read_bytes()
    expected = [f"bytes={start}-{last}" for start in (0, at, at + 3)]
    assert server.ranges(file.name) == expected[: 2 if at + 3 > last else 3]
    assert [p.name for p in path.parent.iterdir()] == [file.name], "no part is left"


def test_a_file_comes_in_pieces_over_several_connections(
    filled: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order, with few in memory: the first is the last to come."""
    monkeypatch.setattr(remote, "_PIECE", 256)
    file, lock, num_asked = snapshot_of(filled), threading.Lock(), [0, 0]
    others = threading.Semaphore(0)

    class Late(http.HttpObjects):
        def piece(self, key: str, start: int, stop: int, *rest: Any, **options: Any) -> bytes:
            with lock:
                num_asked[0] += 1
                num_asked[1] = max(num_asked[1], num_asked[0] - start // 256)
            if start == 0:
                assert all(others.acquire(timeout=20) for _ in range(3))
            data = super().piece(key, start, stop, *rest, **options)
            others.release()
            return data

    with hs.serving(filled) as url:
        path = RemoteStore(Late(url, TOKEN), tmp_path).fetch(0, file)
    assert path.read_bytes() == (filled.folder(0) / file.name).read_bytes()
    assert num_asked[0] > 30 and num_asked[1] <= remote._CONNECTIONS


def test_a_server_without_a_place_says_when_to_come_back(
    server: Misbehaving, filled: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as that is no hour."""
    pauses: list[float] = []
    monkeypatch.setattr(http.time, "sleep", pauses.append)
    file = snapshot_of(filled)
    server.answers[file.name] = [hs.with_status(503, Retry_After=s) for s in ("5", "3600", "x")]
    hs.remote(server.url, tmp_path).fetch(0, file)
    assert pauses == [5.0, 10.0, 0.0]


def test_another_process_resumes_a_cut_download(
    server: Misbehaving, filled: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_PIECE", 5000)
    monkeypatch.setattr(remote, "_CONNECTIONS", 1)
    file = snapshot_of(filled)
    server.answers[file.name] = [hs.honest, hs.cut_after(7)]
    with pytest.raises(
        StoreError, match=r"anchor-r0.safetensors: the connection was cut after 5007 bytes, 1 times"
    ):
        hs.remote(server.url, tmp_path, retries=0).fetch(0, file)
    data = (filled.folder(0) / file.name).read_bytes()
    part = tmp_path / "v00000000" / f"{file.name}.part"
    assert part.read_bytes() == data[:5000]
    assert hs.remote(server.url, tmp_path).fetch(0, file).read_bytes() == data
    assert server.ranges(file.name)[2] == "bytes=5000-9999"


def test_a_complete_part_file_needs_no_request(
    server: Misbehaving, filled: WeightStore, tmp_path: Path
) -> None:
    """The process ended between the last byte and the renaming; and what is whole is not fetched
    again.
    """
    file = snapshot_of(filled)
    part = tmp_path / "v00000000" / f"{file.name}.part"
    part.parent.mkdir()
    part.write_bytes((filled.folder(0) / file.name).read_bytes())
    source = hs.remote(server.url, tmp_path)
    assert source.fetch(0, file) == source.fetch(0, file) == part.with_name(file.name)
    assert server.seen == []


def test_other_bytes_than_were_asked_for_are_not_written(
    server: Misbehaving, filled: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = snapshot_of(filled)
    server.answers[file.name] = [hs.cut_after(5000), hs.without_ranges]
    path = hs.remote(server.url, tmp_path / "short").fetch(0, file)
    assert path.read_bytes() == (filled.folder(0) / file.name).read_bytes()
    monkeypatch.setattr(remote, "_PIECE", 5000)
    monkeypatch.setattr(remote, "_CONNECTIONS", 1)
    server.answers[file.name] = [hs.without_ranges] * 2
    with pytest.raises(StoreError, match="sends no parts of files"):
        hs.remote(server.url, tmp_path / "long").fetch(0, file)
    monkeypatch.undo()
    server.answers[file.name] = [hs.another_range] * 4
    with pytest.raises(StoreError, match="another range than it was asked for, 4 times"):
        hs.remote(server.url, tmp_path).fetch(0, file)
    assert (tmp_path / "v00000000" / f"{file.name}.part").read_bytes() == b""


def test_progress_resets_the_retry_count(
    filled: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long download over a poor line ends; one that gains a few bytes each time does not go on
    for ever.
    """
    file = snapshot_of(filled)
    for chunk, is_enough in ((1000, True), (1001, False)):
        monkeypatch.setattr(http, "_CHUNK", chunk - 1 if is_enough else chunk)
        with hs.misbehaving(filled.root) as server:
            server.answers[file.name] = [hs.cut_after(1000)] * 10
            source = hs.remote(server.url, tmp_path / str(chunk), retries=2)
            if is_enough:
                assert source.fetch(0, file).exists() and len(server.seen) == 11
            else:
                with pytest.raises(StoreError, match=r"cut after 3000 bytes, 3 times"):
                    source.fetch(0, file)


# ---- files that are not those of the manifest


@pytest.mark.parametrize("answer", [hs.flipped, hs.shorter, hs.with_status(416)])
def test_a_damaged_file_is_fetched_once_more(
    server: Misbehaving,
    filled: WeightStore,
    tmp_path: Path,
    answer: Answer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = snapshot_of(filled)
    server.answers[file.name] = [answer]
    with caplog.at_level(logging.WARNING):
        path = hs.remote(server.url, tmp_path).fetch(0, file)
    assert path.read_bytes() == (filled.folder(0) / file.name).read_bytes()
    assert "came damaged" in caplog.text and len(server.seen) == 2
    server.answers[file.name] = [answer, answer]
    with pytest.raises(
        StoreError,
        match=f"{server.url}/v00000000/{file.name} came damaged twice: .*publish a full snapshot",
    ):
        hs.remote(server.url, tmp_path / "other").fetch(0, file)
    assert list((tmp_path / "other" / "v00000000").iterdir()) == [], "nothing of it is left"


def test_never_more_bytes_than_the_manifest_says(filled: WeightStore, tmp_path: Path) -> None:
    file = snapshot_of(filled)
    with hs.misbehaving(filled.root) as server:
        server.answers[file.name] = [hs.endless, hs.endless]
        with pytest.raises(StoreError, match="does not have the checksum"):
            hs.remote(server.url, tmp_path).fetch(0, file)


@pytest.mark.parametrize("where", ["cached", "part", "long part"])
def test_a_damaged_cache_file_is_fetched_again(
    server: Misbehaving, filled: WeightStore, tmp_path: Path, where: str
) -> None:
    """Also what is left of another version of that number, from before a rollback."""
    file = snapshot_of(filled)
    path = tmp_path / "v00000000" / file.name
    path.parent.mkdir()
    data = bytearray((filled.folder(0) / file.name).read_bytes())
    data[100] ^= 1
    left_over = {"cached": data, "part": data[:9000], "long part": data + b"more"}[where]
    (path if where == "cached" else path.with_name(f"{file.name}.part")).write_bytes(left_over)
    assert hs.remote(server.url, tmp_path).fetch(0, file) == path
    assert path.read_bytes() == (filled.folder(0) / file.name).read_bytes()


def test_a_full_disk_is_not_retried(
    server: Misbehaving, filled: WeightStore, tmp_path: Path
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    file = snapshot_of(filled)
    (tmp_path / "v00000000").mkdir()
    (tmp_path / "v00000000" / f"{file.name}.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        hs.remote(server.url, tmp_path).fetch(0, file)
    assert not isinstance(caught.value, StoreError) and len(server.seen) == 1


# ---- refusals


def test_a_token_is_asked_for(filled: WeightStore, tmp_path: Path) -> None:
    with hs.serving(filled) as url:
        with pytest.raises(
            StoreError,
            match=rf"{url}/HEAD: the server wants a token \(401\); set FLOWTRAIN_TOKEN",
        ):
            hs.remote(url, tmp_path).head()
        with pytest.raises(StoreError, match=r"the server refuses the token \(401\)") as caught:
            hs.remote(url, tmp_path, token="guessed").fetch(0, snapshot_of(filled))
        assert "guessed" not in str(caught.value)


def test_missing_versions_and_files_are_not_retried(
    server: Misbehaving, filled: WeightStore, tmp_path: Path
) -> None:
    source = hs.remote(server.url, tmp_path)
    with pytest.raises(
        StoreError, match=rf"version 77 is not at {server.url}; the newest there is {LAST}"
    ):
        source.manifest(77)
    with pytest.raises(
        StoreError, match=r"v00000003/none.safetensors\?xxh3=0+ is not there \(404\)"
    ):
        source.fetch(3, File("none.safetensors", 5, "0" * 16))
    assert len(server.seen) == 2, "neither is tried again"
    empty = hs.remote(f"{server.url}/v00000001", tmp_path)
    assert empty.head() is None
    with pytest.raises(StoreError, match="the newest there is none"):
        empty.manifest(0)


@pytest.mark.parametrize("status", [500, 502, 503, 429])
def test_server_errors_are_retried(
    server: Misbehaving, filled: WeightStore, tmp_path: Path, status: int
) -> None:
    file, trouble = snapshot_of(filled), [hs.with_status(status), hs.with_status(status)]
    server.answers = {"HEAD": [*trouble, hs.cut_after(0)], file.name: [*trouble]}
    source = hs.remote(server.url, tmp_path)
    assert source.head() == LAST and source.fetch(0, file).exists()
    server.answers["HEAD"] = trouble * 2
    with pytest.raises(
        StoreError,
        match=rf"{server.url}/HEAD: the server answered {status} .*, 4 times; check",
    ):
        source.head()
    assert server.answers["HEAD"] == []


def test_pauses_grow(server: Misbehaving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(http.time, "sleep", pauses.append)
    server.answers["HEAD"] = [hs.with_status(500)] * 7
    store = RemoteStore(http.HttpObjects(server.url, retries=7), tmp_path)
    assert store.head() == LAST
    middles = (0.5, 1, 2, 4, 8, 10, 10)
    assert all(0.5 <= s / middle <= 1.5 for s, middle in zip(pauses, middles, strict=True))


def test_redirects_are_refused(server: Misbehaving, filled: WeightStore, tmp_path: Path) -> None:
    """Nobody but the server that was meant sees the token."""
    with hs.misbehaving(filled.root) as elsewhere:
        for status in (301, 302, 303, 307, 308):
            server.answers["HEAD"] = [hs.with_status(status, Location=f"{elsewhere.url}/HEAD")]
            with pytest.raises(
                StoreError,
                match=rf"redirects to '{elsewhere.url}/HEAD' \({status}\); .*give the final "
                rf"address",
            ):
                hs.remote(server.url, tmp_path, token=TOKEN).head()
        assert elsewhere.seen == []
    assert {token for _, _, token in server.seen} == {f"Bearer {TOKEN}"}


def test_endless_texts_are_cut_off(
    server: Misbehaving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_MANIFEST", 1 << 20)
    server.answers = {"manifest.json": [hs.endless]}
    source = hs.remote(server.url, tmp_path)
    with pytest.raises(StoreError, match=r"v00000003/manifest.json is longer than 1048576 bytes"):
        source.manifest(3)
    server.answers = {"HEAD": [hs.endless]}
    with pytest.raises(
        StoreError,
        match=r"/HEAD is longer than 64 bytes; is this the address of a weight st",
    ):
        source.head()


@pytest.mark.parametrize("text", [b"<html>hello</html>", b"-3\n", b"", b"\xff\xfe", b"3 4\n"])
def test_an_invalid_head_is_refused(server: Misbehaving, tmp_path: Path, text: bytes) -> None:
    server.answers["HEAD"] = [lambda handler: handler.reply(200, text)]
    with pytest.raises(StoreError, match=r"/HEAD holds .*, not a version"):
        hs.remote(server.url, tmp_path).head()


def test_a_manifest_of_another_version_or_of_nothing(
    server: Misbehaving, filled: WeightStore, tmp_path: Path
) -> None:
    other = (filled.folder(2) / "manifest.json").read_bytes()
    texts = [other, b"{}", b"[" * 100_000, other[:-20], b"\xff" * 20]
    for text, message in zip(
        texts, ("describes version 2", "no manifest", "damaged", "damaged", "damaged"), strict=True
    ):
        server.answers["manifest.json"] = [lambda handler, text=text: handler.reply(200, text)]
        with pytest.raises(StoreError, match=f"{server.url}/v00000003/manifest.json .*{message}"):
            hs.remote(server.url, tmp_path).manifest(3)


def test_a_reader_falls_back_to_the_full_snapshot(
    server: Misbehaving, filled: WeightStore, tmp_path: Path
) -> None:
    tensors = weights_at(2)
    source = hs.remote(server.url, tmp_path)
    reader = WeightReader(source, tensors)
    reader.load(2)
    delta = filled.manifest(3).delta_files[2][0]
    server.answers[delta.name] = [hs.flipped, hs.flipped]
    loaded = reader.load(3)
    assert loaded.mode == "snapshot"
    assert "came damaged twice" in loaded.reason
    assert same(tensors, weights_at(3))


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    with (
        hs.silent() as url,
        pytest.raises(StoreError, match=rf"{url}/HEAD: no answer \(timed out\), 2 times"),
    ):
        hs.remote(url, tmp_path, retries=1, timeout_s=0.05).head()
    with pytest.raises(
        StoreError,
        match=rf"{url}/HEAD: no answer \(.*refused.*\), 2 times; check the address and "
        rf"that the server runs",
    ):
        hs.remote(url, tmp_path, retries=1).head()


def drip(handler: hs.Handler) -> None:
    """A byte now and then, for as long as the reader stays."""
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(handler.data() or b"")))
    handler.end_headers()
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(b"x")
            time.sleep(0.01)


def test_a_slow_answer_is_cut(
    server: Misbehaving, filled: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock of the whole answer, which runs fast here; the socket keeps its 30 s."""
    fast = SimpleNamespace(monotonic=lambda: 100 * time.monotonic())
    monkeypatch.setattr(timed_http, "time", fast)
    file = snapshot_of(filled)
    server.answers[file.name] = [drip, drip]
    with pytest.raises(StoreError, match=r"slower than 16 KiB per second.*, 2 times"):
        hs.remote(server.url, tmp_path, retries=1, timeout_s=30).fetch(0, file)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/x",
        "file:///etc",
        "http://",
        "http://[x",
        "http://h:99999",
        "http://me:pw@h/",
        "http://h/?a",
        "http://h/#a",
        "http://h/ b",
    ],
)
def test_invalid_urls_are_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(UserError, match="url must be"):
        open_source(url, tmp_path)


@pytest.mark.parametrize("token", ["two words", "line\nX-Header: 1", "tökén"])
def test_invalid_tokens_are_refused(tmp_path: Path, token: str) -> None:
    with pytest.raises(UserError, match="printable ASCII") as caught:
        open_source("http://host", tmp_path, token)
    assert token not in str(caught.value)
