"""A relay: each file comes from the origin once, whole and as its checksum says, or not at all."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import http_stores as hs
import pytest
import torch
from http_servers import running
from http_stores import LAST, TOKEN, Misbehaving, same, weights_at
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.net.credentials import Role, TokenFile, issue
from flowtrain.weights import HttpStore, Publisher, StoreError, WeightReader, WeightStore, pull
from flowtrain.weights.cache import FileCache, NoRoom
from flowtrain.weights.checksums import checksum_of
from flowtrain.weights.listing import AGE
from flowtrain.weights.manifest import File
from flowtrain.weights.relay import Relay, RelayOptions

pytest_plugins = ("http_stores",)
pytestmark = pytest.mark.usefixtures("clean_environment")
BIG = 10**9


@pytest.fixture
def origin(copied: WeightStore) -> Iterator[Misbehaving]:
    """It counts requests and misbehaves on request."""
    with hs.misbehaving(copied.root) as server:
        server.lists = True
        yield server


@contextlib.contextmanager
def relaying(
    url: str, folder: Path, cache_bytes: int = BIG, token: str = TOKEN, **options: Any
) -> Iterator[str]:
    relay = Relay(url, folder, RelayOptions(cache_bytes, **options), token)
    with running(relay.make_app(TOKEN)) as at:
        yield at


def store_at(url: str, cache: Path) -> HttpStore:
    return HttpStore(url, cache, TOKEN, timeout_s=20.0, retries=1, backoff_s=0.0)


def ask(url: str, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, Any]:
    client = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    client.request(method, path, headers={"Authorization": f"Bearer {TOKEN}", **headers})
    response = client.getresponse()
    with contextlib.closing(client):
        return response.status, response.read(), response.headers


def address(file: File, version: int) -> str:
    return f"/v{version:08d}/{file.name}?xxh3={file.xxh3}"


def test_readers_behind_two_relays_ask_the_origin_once_per_file(
    origin: Misbehaving, tmp_path: Path
) -> None:
    def follow(number: int) -> None:
        tensors = {name: torch.empty_like(tensor) for name, tensor in weights_at(0).items()}
        reader = WeightReader(store_at(site, tmp_path / f"reader-{number}"), tensors)
        for version in range(LAST + 1):
            start.wait(60)
            reader.load(version)
            assert same(tensors, weights_at(version))

    start = threading.Barrier(6)
    with (
        relaying(origin.url, tmp_path / "far") as region,
        relaying(region, tmp_path / "near") as site,
        ThreadPoolExecutor(6) as pool,
    ):
        list(pool.map(follow, range(6)))
    names = [name for name, _, _ in origin.seen]
    manifests = [name for name in names if name == "manifest.json"]
    files = [name for name in names if name.endswith(".safetensors")]
    assert sorted(files) == sorted(set(files)) and len(files) == LAST + 1
    assert len(manifests) == LAST + 1


def test_a_plain_file_server_can_be_relayed(origin: Misbehaving, tmp_path: Path) -> None:
    """Its HEAD lists no checksums: manifests are asked for each time, data files once."""
    origin.lists = False
    with relaying(origin.url, tmp_path / "relay") as url:
        for number in range(2):
            source = store_at(url, tmp_path / str(number))
            assert same(pull(source, LAST), weights_at(LAST))
    files = [name for name, _, _ in origin.seen if name.endswith(".safetensors")]
    assert files and len(files) == len(set(files))


def test_answers_are_those_of_the_server(copied: WeightStore, tmp_path: Path) -> None:
    (file,) = copied.manifest(0).snapshot_files
    data = (copied.folder(0) / file.name).read_bytes()
    manifest = (copied.folder(0) / "manifest.json").read_bytes()
    with hs.serving(copied) as url, relaying(url, tmp_path) as relay:
        for path in (
            "/HEAD",
            "/HEAD?manifests",
            "/v00000000/manifest.json",
            f"/v00000000/manifest.json?xxh3={checksum_of(manifest)}",
            address(file, 0),
            f"/v00000000/{file.name}",
            f"/v00000000/{file.name}?xxh3={'0' * 16}",
            f"/v00000000/manifest.json?xxh3={'0' * 16}",
            "/v00000000/none.safetensors",
            "/v00000077/manifest.json",
            "/nothing",
        ):
            for method in ("GET", "HEAD"):
                for asked in ("", "bytes=5-", "bytes=5-9"):
                    headers = {"Range": asked} if asked else {}
                    ours, theirs = (ask(at, path, method, **headers) for at in (relay, url))
                    assert ours[0] == theirs[0] and (ours[0] == 404 or ours[1] == theirs[1]), path
                    for name in ("cache-control", "content-range", "content-length"):
                        assert ours[0] == 404 or ours[2][name] == theirs[2][name], (path, name)
        assert ask(relay, address(file, 0), Range=f"bytes={len(data)}-")[0] == 416
        assert ask(relay, address(file, 0))[1] == data
        assert ask(relay, "/HEAD", "POST")[0] == 405
        assert ask(relay, "/HEAD", Authorization="Bearer guessed")[0] == 401
        assert ask(relay, address(file, 0), Authorization="Bearer guessed")[0] == 401


def test_tokens_of_nodes_open_it_and_the_origin_gets_its_own(
    copied: WeightStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = tmp_path / "tokens.json"
    token = issue(tokens, "eu-1", Role.NODE)
    with hs.serving(copied) as url:
        for of_origin, status in ((TOKEN, 200), ("guessed", 502)):
            folder = tmp_path / of_origin
            relay = Relay(url, folder, RelayOptions(BIG), of_origin)
            with running(relay.make_app("", TokenFile(tokens))) as at:
                assert ask(at, "/HEAD", Authorization=f"Bearer {token}")[0] == status
                assert ask(at, "/HEAD")[0] == 401
    assert "the server refuses the token (401)" in caplog.text and "guessed" not in caplog.text


# ---- bytes that are not the file


@pytest.mark.parametrize("answer", [hs.flipped, hs.shorter, hs.longer, hs.cut_after(3000)])
def test_damaged_bytes_do_not_arrive(
    origin: Misbehaving, tmp_path: Path, answer: hs.Answer
) -> None:
    (file,) = WeightStore(origin.root).manifest(0).snapshot_files
    right = (origin.root / "v00000000" / file.name).read_bytes()
    origin.answers[file.name] = [answer]
    with relaying(origin.url, tmp_path / "relay") as url:
        source = store_at(url, tmp_path / "cache")
        assert source.head() == LAST
        assert source.fetch(0, file).read_bytes() == right
        assert ask(url, address(file, 0))[1] == right
        assert len(origin.ranges(file.name)) == 2


def test_a_file_that_stays_damaged_is_neither_served_nor_kept(
    origin: Misbehaving, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (file,) = WeightStore(origin.root).manifest(0).snapshot_files
    origin.answers[file.name] = [hs.flipped] * 2
    with relaying(origin.url, tmp_path / "relay") as url:
        with contextlib.suppress(http.client.IncompleteRead):
            status, body, _ = ask(url, address(file, 0))
            # Twice, or once where the reader is told before the second one has come.
            assert status == 502 and b"came damaged" in body
        kept = [path.name for path in (tmp_path / "relay").rglob(f"{file.name}*")]
        assert file.name not in kept

        def status() -> int:
            # The first reader may be cut off before the origin is asked for the second time.
            with contextlib.suppress(http.client.IncompleteRead):
                return ask(url, address(file, 0))[0]
            return 0

        assert 200 in [status() for _ in range(3)], "the next one asks again"
        assert "came damaged" in caplog.text


def test_the_last_byte_waits_for_the_checksum(tmp_path: Path) -> None:
    """Readers have all but the last byte of a file under way, and are cut if it is damaged."""
    go_on = threading.Event()
    data = bytes(range(100))
    file = File("a.safetensors", len(data), checksum_of(data))

    def fetch(folder: Path, version: int, file: File) -> Path:
        path = folder / f"v{version:08d}" / file.name
        part = path.with_name(f"{file.name}.part")
        part.write_bytes(data[:50] + b"x" * 50)
        assert go_on.wait(20)
        part.unlink()
        part.write_bytes(data)
        return part.replace(path)

    cache = FileCache(tmp_path, BIG, fetch)
    first, second = cache.open(0, file), cache.open(0, file)
    assert first.inode is second.inode, "one fetch"
    while first.num_ready() == 0:
        time.sleep(0.001)
    assert first.num_ready() in (50, 99)
    go_on.set()
    first.inode.result(20)
    with pytest.raises(StoreError, match="came damaged"):
        first.num_ready()
    third = cache.open(0, file)
    assert third.num_ready() == 100 and third.data.read() == data
    for opened in (first, second, third):
        opened.data.close()


# ---- room


def counting(seen: list[str], data: dict[str, bytes]) -> Any:
    def fetch(folder: Path, version: int, file: File) -> Path:
        seen.append(file.name)
        path = folder / f"v{version:08d}" / file.name
        part = path.with_name(f"{file.name}.part")
        if part.read_bytes() != data[file.name]:
            part.write_bytes(data[file.name])
        return part.replace(path)

    return fetch


def open_whole(cache: FileCache, file: File) -> None:
    opened = cache.open(0, file)
    with opened.data:
        opened.inode.result(20)
        assert opened.num_ready() == file.num_bytes


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    order=st.lists(st.integers(0, 5), max_size=20),
    restarts=st.sets(st.integers(0, 19), max_size=2),
)
def test_files_never_take_more_than_the_cache(
    sizes: list[int], order: list[int], restarts: set[int], tmp_path_factory: Any
) -> None:
    """And those that stay are the ones used last, across restarts."""
    folder = tmp_path_factory.mktemp("cache")
    data = {f"f{n}.safetensors": bytes([n]) * size for n, size in enumerate(sizes)}
    files = [File(name, len(each), checksum_of(each)) for name, each in data.items()]
    cache = FileCache(folder, 100, counting([], data))
    used: list[File] = []
    for step, number in enumerate(order):
        if step in restarts:
            cache = FileCache(folder, 100, counting([], data))
        file = files[number % len(files)]
        open_whole(cache, file)
        os.utime(next(folder.glob(f"*-{file.name}")), (step, step))
        used = [each for each in used if each is not file] + [file]
        while sum(each.num_bytes for each in used) > 100:
            used.pop(0)
        on_disk = [path for path in folder.rglob("*") if path.is_file()]
        assert {path.name for path in on_disk} == {each.name for each in used}
        assert sum(path.stat().st_size for path in on_disk) == cache.num_bytes <= 100
    shutil.rmtree(folder)


def test_a_file_larger_than_the_cache_is_refused_with_the_option(
    origin: Misbehaving, tmp_path: Path
) -> None:
    (file,) = WeightStore(origin.root).manifest(0).snapshot_files
    with relaying(origin.url, tmp_path, cache_bytes=file.num_bytes - 1) as url:
        status, body, _ = ask(url, address(file, 0))
        assert (status, origin.ranges(file.name)) == (507, [])
        assert f"a file of {file.num_bytes:,} bytes is larger".encode() in body
        assert b"--cache-gb" in body


def test_files_under_way_keep_their_room(tmp_path: Path) -> None:
    go_on = threading.Event()
    data = {"a.safetensors": b"a" * 60, "b.safetensors": b"b" * 60}
    plain = counting([], data)

    def fetch(folder: Path, version: int, file: File) -> Path:
        assert go_on.wait(20)
        path: Path = plain(folder, version, file)
        return path

    cache = FileCache(tmp_path, 100, fetch)
    files = [File(name, 60, checksum_of(each)) for name, each in data.items()]
    opened = cache.open(0, files[0])
    with pytest.raises(NoRoom, match="under way"):
        cache.open(0, files[1])
    go_on.set()
    opened.inode.result(20)
    opened.data.close()
    open_whole(cache, files[1])


def test_a_full_disk_poisons_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = {"a.safetensors": b"a" * 60}
    seen: list[str] = []
    plain = counting(seen, data)

    def fetch(folder: Path, version: int, file: File) -> Path:
        if not seen:
            seen.append("full")
            raise OSError(28, "No space left on device")
        path: Path = plain(folder, version, file)
        return path

    cache = FileCache(tmp_path, 100, fetch)
    file = File("a.safetensors", 60, checksum_of(data["a.safetensors"]))
    opened = cache.open(0, file)
    with opened.data, pytest.raises(OSError, match="No space left"):
        opened.inode.result(20)
    assert list(tmp_path.iterdir()) == [] and cache.num_bytes == 0
    open_whole(cache, file)


# ---- an origin that is away, rolled back, or another one


def test_while_the_origin_is_silent_its_last_head_is_served(
    origin: Misbehaving, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with relaying(origin.url, tmp_path / "relay", head_s=0.0, stale_s=2.0) as url:
        assert same(pull(store_at(url, tmp_path / "a"), LAST), weights_at(LAST))
        origin.answers["HEAD"] = [hs.with_status(503)] * 99
        status, body, headers = ask(url, "/HEAD")
        assert (status, body) == (200, f"{LAST}\n".encode()) and float(headers[AGE]) > 0
        assert "the last HEAD is served on" in caplog.text
        assert same(pull(store_at(url, tmp_path / "b"), LAST), weights_at(LAST))
    num_seen = len(origin.seen)
    with relaying("http://127.0.0.1:9", tmp_path / "relay") as url:
        assert ask(url, "/HEAD")[0] == 502, "that of another origin"
    with relaying(origin.url, tmp_path / "relay", stale_s=60.0) as url:
        assert same(pull(store_at(url, tmp_path / "c"), LAST), weights_at(LAST)), "after a restart"
        assert {name for name, _, _ in origin.seen[num_seen:]} == {"HEAD"}
    os.utime(tmp_path / "relay" / "head.json", (0, 0))
    with relaying(origin.url, tmp_path / "relay") as url:
        status, body, _ = ask(url, "/HEAD")
        assert status == 502 and b"HEAD is older than 600 s" in body


def test_a_rollback_goes_through_relays(
    copied: WeightStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same numbers are other weights afterwards, and what is cached of the old ones stays
    where it is.
    """
    other = {name: tensor * 2 for name, tensor in weights_at(LAST).items()}
    with (
        hs.serving(copied) as url,
        relaying(url, tmp_path / "far", head_s=0.0) as region,
        relaying(region, tmp_path / "near", head_s=0.0) as site,
    ):
        source = store_at(site, tmp_path / "cache")
        tensors = {name: torch.empty_like(tensor) for name, tensor in weights_at(0).items()}
        reader = WeightReader(source, tensors)
        reader.load(LAST)
        copied.rollback(LAST - 2)
        assert source.head() == LAST - 2
        reader.load(LAST - 2)
        assert same(tensors, weights_at(LAST - 2))
        Publisher(copied).publish(other, LAST)
        reader.load(LAST)
        assert same(tensors, other)
    assert f"HEAD of {url} went back from {LAST} to {LAST - 2}" in caplog.text


def test_a_collected_version_is_still_served_from_the_cache(
    copied: WeightStore, tmp_path: Path
) -> None:
    manifest = copied.manifest(0)
    (file,) = manifest.snapshot_files
    with hs.serving(copied) as url, relaying(url, tmp_path, head_s=0.0) as relay:
        status, body, _ = ask(relay, address(file, 0))
        shutil.rmtree(copied.folder(0))
        assert ask(url, address(file, 0))[0] == 404
        assert status == 200 and ask(relay, address(file, 0))[:2] == (200, body)


def test_a_killed_relay_goes_on_where_it_was(origin: Misbehaving, tmp_path: Path) -> None:
    (file,) = WeightStore(origin.root).manifest(0).snapshot_files
    half = file.num_bytes // 2
    is_half = threading.Event()

    def stall(handler: hs.Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(file.num_bytes))
        handler.end_headers()
        handler.wfile.write((handler.data() or b"")[:half])
        handler.wfile.flush()
        is_half.set()
        handler.rfile.read(1)  # until the relay is gone

    def start() -> tuple[subprocess.Popen[str], str]:
        words = ("relay", origin.url, "--cache-gb", "1", "--port", "0", "--dir", "relay")
        process = subprocess.Popen(
            [sys.executable, "-m", "flowtrain.weights", *words],
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "FLOWTRAIN_TOKEN": TOKEN, "PYTHONUNBUFFERED": "1"},
        )
        assert process.stdout is not None
        found = re.search(r"at (http\S+)", process.stdout.readline())
        assert found is not None
        return process, found[1]

    origin.answers[file.name] = [stall]
    process, url = start()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, url, address(file, 0))
        assert is_half.wait(60)
        part = tmp_path / "relay"
        while sum(path.stat().st_size for path in part.rglob("*.part")) < half:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert isinstance(asked.exception(20), http.client.HTTPException | OSError)
    process.communicate()
    process, url = start()
    try:
        assert ask(url, address(file, 0))[1] == (origin.root / "v00000000" / file.name).read_bytes()
        assert origin.ranges(file.name) == [None, f"bytes={half}-"]
    finally:
        process.terminate()
        process.communicate(timeout=20)


def test_a_damaged_cache_is_checked_after_a_restart(origin: Misbehaving, tmp_path: Path) -> None:
    (file,) = WeightStore(origin.root).manifest(0).snapshot_files
    with relaying(origin.url, tmp_path / "relay") as url:
        right = ask(url, address(file, 0))[1]
    (path,) = (tmp_path / "relay").rglob(file.name)
    hs.flip(path)
    with relaying(origin.url, tmp_path / "relay") as url:
        source = store_at(url, tmp_path / "cache")
        assert source.fetch(0, file).read_bytes() == right
    assert len(origin.ranges(file.name)) == 2


def test_a_file_that_is_damaged_at_once_is_no_trouble_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fetch may have deleted its part before the first reader goes on."""
    deleted = threading.Event()

    def fetch(folder: Path, version: int, file: File) -> Path:
        next(folder.rglob("*.part")).unlink()
        deleted.set()
        raise StoreError("it came damaged twice")

    class AtOnce(threading.Thread):
        def start(self) -> None:
            super().start()
            assert deleted.wait(20)

    monkeypatch.setattr("flowtrain.weights.cache.Thread", AtOnce)
    opened = FileCache(tmp_path, 100, fetch).open(0, File("a", 4, "0" * 16))
    with opened.data, pytest.raises(StoreError, match="came damaged twice"):
        opened.inode.result(20)
