"""Downloads in pieces over several connections: the bytes are those of the file, in their order,
whatever the server does.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path

import http_stores as hs
import pytest
from http_stores import TOKEN, Answer

from flowtrain.weights import HttpStore, StoreError, WeightStore
from flowtrain.weights.stores import http, pieces

pytest_plugins = ("http_stores",)
pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of the size of these files, from the first read on."""
    for module in (pieces, http):
        monkeypatch.setattr(module, "SMALLEST", 256)
    monkeypatch.setattr(pieces, "_LARGEST", 256)
    monkeypatch.setattr(http, "_ALONE_S", -1.0)
    monkeypatch.setattr(http, "_PATIENT_S", -1.0)
    monkeypatch.setattr(http, "_CHUNK", 1000)


def store_at(url: str, cache: Path) -> HttpStore:
    return HttpStore(url, cache, TOKEN, retries=2, backoff_s=0.0)


def ranged(most: int = 1 << 20, shift: int = 0) -> Answer:
    """The range that was asked for, or its first `most` bytes, `shift` bytes further on."""

    def answer(handler: hs.Handler) -> None:
        data = handler.data() or b""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", ""))
        start = int(asked[1]) + shift if asked else 0
        end = min(int(asked[2]) + 1 + shift, len(data)) if asked and asked[2] else len(data)
        handler.reply(
            206 if asked else 200,
            data[start:end][:most],
            Content_Length=end - start,
            Accept_Ranges="bytes",
            Content_Range=f"bytes {start}-{end - 1}/{len(data)}" if asked else None,
        )

    return answer


def whole(handler: hs.Handler) -> None:
    """Ranges are announced, and never sent."""
    handler.reply(200, handler.data() or b"", Accept_Ranges="bytes")


def test_a_long_download_gets_more_connections(filled: WeightStore, tmp_path: Path) -> None:
    """From the real server."""
    file = filled.manifest(0).snapshot_files[0]
    asked: list[tuple[int, int]] = []

    class Noted(HttpStore):
        def _piece(self, url: str, start: int, end: int, num_bytes: int) -> bytes:
            asked.append((start, end))
            return super()._piece(url, start, end, num_bytes)

    with hs.serving(filled) as url:
        path = Noted(url, tmp_path, TOKEN).fetch(0, file)
    assert path.read_bytes() == (filled.folder(0) / file.name).read_bytes()
    asked.sort()
    assert len(asked) > 30 and asked[-1][1] == file.num_bytes
    assert [end for _, end in asked[:-1]] == [start for start, _ in asked[1:]]


@pytest.mark.parametrize("most", [0, 1, 100])
def test_a_piece_that_was_cut_is_completed(filled: WeightStore, tmp_path: Path, most: int) -> None:
    file = filled.manifest(0).snapshot_files[0]
    with hs.misbehaving(filled.root) as server:
        server.answers[file.name] = [ranged(), *[ranged(most)] * 2, *[ranged()] * 200]
        path = store_at(server.url, tmp_path).fetch(0, file)
        assert path.read_bytes() == (filled.folder(0) / file.name).read_bytes()
        assert len(set(server.ranges(file.name))) > 30


def test_a_server_that_only_announces_ranges_sends_the_whole_file(
    filled: WeightStore, tmp_path: Path
) -> None:
    file = filled.manifest(0).snapshot_files[0]
    with hs.misbehaving(filled.root) as server:
        server.answers[file.name] = [whole] * 200
        path = store_at(server.url, tmp_path).fetch(0, file)
        assert path.read_bytes() == (filled.folder(0) / file.name).read_bytes()
        asked = [each for each in server.ranges(file.name) if each is None or each[-1] == "-"]
        assert len(asked) == 2, "at first, and once more when pieces did not come"


def test_another_range_is_no_piece(filled: WeightStore, tmp_path: Path) -> None:
    file = filled.manifest(0).snapshot_files[0]
    with hs.misbehaving(filled.root) as server:
        server.answers[file.name] = [ranged(), *[ranged(shift=1)] * 200]
        with pytest.raises(StoreError, match=r"another range than it was asked for, 3 times"):
            store_at(server.url, tmp_path).fetch(0, file)


@pytest.mark.parametrize(
    ("got", "missing", "seconds", "is_slow"),
    [
        (100_000, 8_000_000, 5.0, True),
        (100_000, 8_000_000, 3.0, False),  # it may still gather speed
        (3_000_000, 8_000_000, 5.0, True),
        (5_000_000, 8_000_000, 5.0, False),  # 8 s more
        (1000, 400_000, 9.0, False),  # two pieces would not be worth it
    ],
)
def test_only_a_download_that_takes_long_is_split(
    monkeypatch: pytest.MonkeyPatch, got: int, missing: int, seconds: float, is_slow: bool
) -> None:
    monkeypatch.undo()
    assert http._is_slow(got, missing, seconds) is is_slow


def test_pieces_come_in_order_and_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is the last to come."""
    data, others = bytes(range(256)) * 256, threading.Semaphore(0)
    lock, under_way, most = threading.Lock(), [0], [0]

    def fetch(start: int, end: int) -> bytes:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        if start == 7:
            for _ in range(2 * pieces._FEWEST - 1):
                assert others.acquire(timeout=20)
        others.release()
        with lock:
            under_way[0] -= 1
        return data[start:end]

    assert b"".join(pieces.in_pieces(fetch, 7, len(data), 100.0)) == data[7:]
    assert most[0] == pieces._FEWEST


class Link:
    """A clock, and a link that is `width` connections wide; each has 1,000 bytes per second."""

    def __init__(self, width: float) -> None:
        self.width, self.now = width, 0.0

    def monotonic(self) -> float:
        return self.now

    def send(self, num_bytes: int, num_connections: int) -> None:
        self.now += num_bytes / (1000 * min(self.width, num_connections))


@pytest.mark.parametrize(
    ("width", "nums"),
    [
        (99.0, [2, 4, 8, 16]),  # a long way: each connection has its own rate
        (1.0, [2]),  # the link was full with one
        (2.0, [2, 4, 2]),
        (3.0, [2, 4, 8, 4]),
        (16.0, [2, 4, 8, 16]),
    ],
)
def test_connections_grow_only_while_the_rate_does(
    monkeypatch: pytest.MonkeyPatch, width: float, nums: list[int]
) -> None:
    link = Link(width)
    monkeypatch.setattr(pieces, "time", link)
    connections = pieces.Connections(1000.0)
    found = [connections.num]
    for _ in range(500):
        link.send(500, connections.num)
        connections.note(500)
        if connections.num != found[-1]:
            found.append(connections.num)
    assert found == nums


def test_what_is_short_is_the_last() -> None:
    whole = bytes(range(200)) * 50
    found = list(pieces.in_pieces(lambda a, b: whole[a : min(b, 3000)], 0, len(whole), 100.0))
    assert b"".join(found) == whole[:3000]


def test_an_error_ends_it() -> None:
    def fetch(start: int, end: int) -> bytes:
        if start > 3000:
            raise StoreError("there is no more")
        return bytes(end - start)

    with pytest.raises(StoreError, match="no more"):
        list(pieces.in_pieces(fetch, 0, 100_000, 100.0))
