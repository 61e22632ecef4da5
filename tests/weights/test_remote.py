"""A store over HTTP: a fetch gives the manifest's file, or an error that says what to do."""

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

from flowtrain.records import UserError
from flowtrain.weights import RemoteStore, StoreError, WeightReader, WeightStore, open_source, pull
from flowtrain.weights.format.manifest import File
from flowtrain.weights.stores import http, remote

pytest_plugins = ("http_stores",)
pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture
def server(filled: WeightStore) -> Iterator[Misbehaving]:
    with hs.misbehaving(filled.root) as running:
        yield running


@pytest.fixture
def file(filled: WeightStore) -> File:
    """The snapshot of version 0."""
    return filled.manifest(0).snapshot_files[0]


@pytest.fixture
def data(filled: WeightStore, file: File) -> bytes:
    return (filled.folder(0) / file.name).read_bytes()


def refused(told: str) -> Any:
    return pytest.raises(StoreError, match=told)


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
            manifest = filled.manifest(version)
            for files in (manifest.snapshot_files, *manifest.delta_files.values()):
                for file in files:
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
    server: Misbehaving, file: File, data: bytes, tmp_path: Path, offset: int, has_length: bool
) -> None:
    at, last = offset % file.num_bytes, file.num_bytes - 1
    server.answers[file.name] = [hs.cut_after(at, has_length), hs.cut_after(3, has_length)]
    path = hs.remote(server.url, tmp_path).fetch(0, file)
    assert path.read_bytes() == data
    expected = [f"bytes={start}-{last}" for start in (0, at, at + 3)]
    assert server.ranges(file.name) == expected[: 2 if at + 3 > last else 3]
    assert [p.name for p in path.parent.iterdir()] == [file.name], "no part is left"


def test_a_file_comes_in_pieces_over_several_connections(
    filled: WeightStore, file: File, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order, with few in memory: the first is the last to come."""
    monkeypatch.setattr(remote, "_PIECE", 256)
    lock, num_asked, others = threading.Lock(), [0, 0], threading.Semaphore(0)

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
    assert path.read_bytes() == data
    assert num_asked[0] > 30 and num_asked[1] <= remote._CONNECTIONS


def test_a_server_without_a_place_says_when_to_come_back(
    server: Misbehaving, file: File, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as that is no hour."""
    pauses: list[float] = []
    monkeypatch.setattr(http.time, "sleep", pauses.append)
    server.answers[file.name] = [hs.with_status(503, Retry_After=s) for s in ("5", "3600", "x")]
    hs.remote(server.url, tmp_path).fetch(0, file)
    assert pauses == [5.0, 10.0, 0.0]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_PIECE", 5000)
    monkeypatch.setattr(remote, "_CONNECTIONS", 1)


def test_another_process_resumes_a_cut_download(
    server: Misbehaving, file: File, data: bytes, tmp_path: Path, small_pieces: None
) -> None:
    server.answers[file.name] = [hs.honest, hs.cut_after(7)]
    with refused(r"anchor-r0.safetensors: the connection was cut after 5007 bytes, 1 times"):
        hs.remote(server.url, tmp_path, retries=0).fetch(0, file)
    part = tmp_path / "v00000000" / f"{file.name}.part"
    assert part.read_bytes() == data[:5000]
    assert hs.remote(server.url, tmp_path).fetch(0, file).read_bytes() == data
    assert server.ranges(file.name)[2] == "bytes=5000-9999"


def test_a_complete_part_file_needs_no_request(
    server: Misbehaving, file: File, data: bytes, tmp_path: Path
) -> None:
    """The process ended between the last byte and the renaming."""
    part = tmp_path / "v00000000" / f"{file.name}.part"
    part.parent.mkdir()
    part.write_bytes(data)
    source = hs.remote(server.url, tmp_path)
    assert source.fetch(0, file) == source.fetch(0, file) == part.with_name(file.name)
    assert server.seen == []


def test_other_bytes_than_were_asked_for_are_not_written(
    server: Misbehaving, file: File, data: bytes, tmp_path: Path
) -> None:
    server.answers[file.name] = [hs.cut_after(5000), hs.without_ranges]
    path = hs.remote(server.url, tmp_path / "short").fetch(0, file)
    assert path.read_bytes() == data
    server.answers[file.name] = [hs.another_range] * 4
    with refused("another range than it was asked for, 4 times"):
        hs.remote(server.url, tmp_path).fetch(0, file)
    assert (tmp_path / "v00000000" / f"{file.name}.part").read_bytes() == b""


def test_a_server_that_sends_no_parts_is_of_no_use_for_a_long_file(
    server: Misbehaving, file: File, tmp_path: Path, small_pieces: None
) -> None:
    server.answers[file.name] = [hs.without_ranges] * 2
    with refused("sends no parts of files"):
        hs.remote(server.url, tmp_path).fetch(0, file)


def test_progress_resets_the_retry_count(
    filled: WeightStore, file: File, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But one that gains a few bytes each time does not go on for ever."""
    for chunk, is_enough in ((1000, True), (1001, False)):
        monkeypatch.setattr(http, "_CHUNK", chunk - 1 if is_enough else chunk)
        with hs.misbehaving(filled.root) as server:
            server.answers[file.name] = [hs.cut_after(1000)] * 10
            source = hs.remote(server.url, tmp_path / str(chunk), retries=2)
            if is_enough:
                assert source.fetch(0, file).exists() and len(server.seen) == 11
            else:
                with refused(r"cut after 3000 bytes, 3 times"):
                    source.fetch(0, file)


# ---- files that are not those of the manifest


@pytest.mark.parametrize("answer", [hs.flipped, hs.shorter, hs.with_status(416)])
def test_a_damaged_file_is_fetched_once_more(
    server: Misbehaving,
    file: File,
    data: bytes,
    tmp_path: Path,
    answer: Answer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.answers[file.name] = [answer]
    with caplog.at_level(logging.WARNING):
        path = hs.remote(server.url, tmp_path).fetch(0, file)
    assert path.read_bytes() == data
    assert "arrived damaged" in caplog.text and len(server.seen) == 2
    server.answers[file.name] = [answer, answer]
    where = f"{server.url}/v00000000/{file.name}"
    with refused(f"{where} arrived damaged twice: .*publish a full snapshot"):
        hs.remote(server.url, tmp_path / "other").fetch(0, file)
    assert list((tmp_path / "other" / "v00000000").iterdir()) == [], "nothing of it is left"


def test_never_more_bytes_than_the_manifest_says(
    server: Misbehaving, file: File, tmp_path: Path
) -> None:
    server.answers[file.name] = [hs.endless, hs.endless]
    with refused("does not have the checksum"):
        hs.remote(server.url, tmp_path).fetch(0, file)


@pytest.mark.parametrize("where", ["cached", "part", "long part"])
def test_a_damaged_cache_file_is_fetched_again(
    server: Misbehaving, file: File, data: bytes, tmp_path: Path, where: str
) -> None:
    """Also what is left of another version of that number, from before a rollback."""
    path = tmp_path / "v00000000" / file.name
    path.parent.mkdir()
    bad = data[:100] + bytes([data[100] ^ 1]) + data[101:]
    left_over = {"cached": bad, "part": bad[:9000], "long part": bad + b"more"}[where]
    (path if where == "cached" else path.with_name(f"{file.name}.part")).write_bytes(left_over)
    assert hs.remote(server.url, tmp_path).fetch(0, file) == path
    assert path.read_bytes() == data


def test_a_full_disk_is_not_retried(server: Misbehaving, file: File, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    (tmp_path / "v00000000").mkdir()
    (tmp_path / "v00000000" / f"{file.name}.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        hs.remote(server.url, tmp_path).fetch(0, file)
    assert not isinstance(caught.value, StoreError) and len(server.seen) == 1


# ---- refusals


def test_a_token_is_asked_for(filled: WeightStore, file: File, tmp_path: Path) -> None:
    with hs.serving(filled) as url:
        with refused(rf"{url}/HEAD: the server requires a token \(401\); set FLOWTRAIN_TOKEN"):
            hs.remote(url, tmp_path).head()
        with refused(r"the server refuses the token \(401\)") as caught:
            hs.remote(url, tmp_path, token="guessed").fetch(0, file)
        assert "guessed" not in str(caught.value)


def test_missing_versions_and_files_are_not_retried(server: Misbehaving, tmp_path: Path) -> None:
    source = hs.remote(server.url, tmp_path)
    with refused(rf"version 77 is not at {server.url}; the newest there is {LAST}"):
        source.manifest(77)
    with refused(r"v00000003/none.safetensors\?xxh3=0+ is not there \(404\)"):
        source.fetch(3, File("none.safetensors", 5, "0" * 16))
    assert len(server.seen) == 2, "neither is tried again"
    empty = hs.remote(f"{server.url}/v00000001", tmp_path)
    assert empty.head() is None
    with refused("the newest there is none"):
        empty.manifest(0)


@pytest.mark.parametrize("status", [500, 502, 503, 429])
def test_server_errors_are_retried(
    server: Misbehaving, file: File, tmp_path: Path, status: int
) -> None:
    trouble = [hs.with_status(status), hs.with_status(status)]
    server.answers = {"HEAD": [*trouble, hs.cut_after(0)], file.name: [*trouble]}
    source = hs.remote(server.url, tmp_path)
    assert source.head() == LAST and source.fetch(0, file).exists()
    server.answers["HEAD"] = trouble * 2
    with refused(rf"{server.url}/HEAD: the server answered {status} .*, 4 times; check"):
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
            there = f"{elsewhere.url}/HEAD"
            server.answers["HEAD"] = [hs.with_status(status, Location=there)]
            with refused(rf"redirects to '{there}' \({status}\); .*give the final address"):
                hs.remote(server.url, tmp_path, token=TOKEN).head()
        assert elsewhere.seen == []
    assert {token for _, _, token in server.seen} == {f"Bearer {TOKEN}"}


def test_endless_texts_are_cut_off(
    server: Misbehaving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_MANIFEST", 1 << 20)
    server.answers = {"manifest.json": [hs.endless]}
    source = hs.remote(server.url, tmp_path)
    with refused(r"v00000003/manifest.json is longer than 1048576 bytes"):
        source.manifest(3)
    server.answers = {"HEAD": [hs.endless]}
    with refused(r"/HEAD is longer than 64 bytes; is this the address of a weight st"):
        source.head()


@pytest.mark.parametrize("text", [b"<html>hello</html>", b"-3\n", b"", b"\xff\xfe", b"3 4\n"])
def test_an_invalid_head_is_refused(server: Misbehaving, tmp_path: Path, text: bytes) -> None:
    server.answers["HEAD"] = [lambda handler: handler.reply(200, text)]
    with refused(r"/HEAD holds .*, not a version"):
        hs.remote(server.url, tmp_path).head()


def test_a_manifest_of_another_version_or_of_nothing(
    server: Misbehaving, filled: WeightStore, tmp_path: Path
) -> None:
    other = (filled.folder(2) / "manifest.json").read_bytes()
    for text, told in (
        (other, "describes version 2"),
        (b"{}", "not the manifest"),
        *((text, "damaged") for text in (b"[" * 100_000, other[:-20], b"\xff" * 20)),
    ):
        server.answers["manifest.json"] = [lambda handler, text=text: handler.reply(200, text)]
        with refused(f"{server.url}/v00000003/manifest.json .*{told}"):
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
    assert "arrived damaged twice" in loaded.reason
    assert same(tensors, weights_at(3))


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    with hs.silent() as url, refused(rf"{url}/HEAD: no answer \(timed out\), 2 times"):
        hs.remote(url, tmp_path, retries=1, timeout_s=0.05).head()
    told = r"refused.*\), 2 times; check the address and that the server runs"
    with refused(rf"{url}/HEAD: no answer \(.*{told}"):
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
    server: Misbehaving, file: File, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock of the whole answer, which runs fast here; the socket keeps its 30 s."""
    fast = SimpleNamespace(monotonic=lambda: 100 * time.monotonic(), sleep=time.sleep)
    monkeypatch.setattr(http, "time", fast)
    server.answers[file.name] = [drip, drip]
    with refused(r"at less than 16 KiB per second.*, 2 times"):
        hs.remote(server.url, tmp_path, retries=1, timeout_s=30).fetch(0, file)


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://host/x", "file:///etc", "http://", "http://[x", "http://h:99999"),
        *("http://me:pw@h/", "http://h/?a", "http://h/#a", "http://h/ b"),
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
