"""Small stores, over HTTP and for the command line, and a server that misbehaves on request."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from http_servers import running
from torch import Tensor

from flowtrain.utils.net.serving import address
from flowtrain.weights import Publisher, PublishOptions, RemoteStore, WeightStore
from flowtrain.weights.__main__ import main
from flowtrain.weights.format.files import seal, write_snapshot
from flowtrain.weights.format.manifest import File
from flowtrain.weights.format.tensor_shards import local_shards
from flowtrain.weights.stores.http import HttpObjects
from flowtrain.weights.stores.serve import make_app

TOKEN = "a-token-of-the-tests"
LAST = 5


def weights_at(version: int) -> dict[str, Tensor]:
    """All versions differ, and the later ones in a few words only."""
    rng = torch.Generator().manual_seed(0)
    weights = {
        "layer.weight": torch.randn(64, 96, generator=rng).bfloat16(),
        "norm": torch.ones(7),
        "step": torch.tensor(float(version)),
    }
    for step in range(1, version + 1):
        weights["layer.weight"].view(-1)[torch.randint(0, 64 * 96, (40,), generator=rng)] += step
    return weights


def fill(root: Path, level: int = 1) -> WeightStore:
    """Versions 0 to 5: a full snapshot, then deltas, at 4 also one from 0."""
    store = WeightStore(root)
    publisher = Publisher(store, PublishOptions(level=level))
    for version in range(LAST + 1):
        publisher.publish(weights_at(version), version)
    return store


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def remote(
    url: str, cache: Path, token: str = "", *, retries: int = 3, timeout_s: float = 20.0
) -> RemoteStore:
    """A store over HTTP that pauses for nothing."""
    return RemoteStore(HttpObjects(url, token, timeout_s, retries, backoff_s=0.0), cache)


def serving(store: WeightStore, token: str = TOKEN) -> contextlib.AbstractContextManager[str]:
    """The URL of a real server."""
    return running(make_app(store, token))


Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Honest about byte ranges, unless the server has another answer for the file."""

    protocol_version = "HTTP/1.1"
    server: Misbehaving

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].rpartition("/")[2]
        self.server.seen.append(
            (name, self.headers.get("Range"), self.headers.get("Authorization"))
        )
        answers = self.server.answers.get(name, [])
        (answers.pop(0) if answers else honest)(self)

    def data(self) -> bytes | None:
        path = self.server.root / self.path.partition("?")[0][1:]
        return path.read_bytes() if path.is_file() else None

    def asked(self) -> tuple[int, int]:
        """The bytes that are asked for, of those that there are."""
        size = len(self.data() or b"")
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        return (int(asked[1]), min(int(asked[2]) + 1, size)) if asked else (0, size)

    def reply(self, status: int, body: bytes = b"", **headers: object) -> None:
        self.send_response(status)
        for key, value in {"Content_Length": len(body), **headers}.items():
            if value is not None:
                self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()
        with contextlib.suppress(OSError):  # the reader may have heard enough
            self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


class Misbehaving(ThreadingHTTPServer):
    """`answers`: by file name, what to do with its next requests; then it is honest."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.answers: dict[str, list[Answer]] = {}
        self.seen: list[tuple[str, str | None, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def ranges(self, name: str) -> list[str | None]:
        return [asked for seen, asked, _ in self.seen if seen == name]


@contextlib.contextmanager
def misbehaving(root: Path) -> Iterator[Misbehaving]:
    with Misbehaving(root) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(20)


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """Listen and never answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield address(listener)


# ---- answers


def honest(handler: Handler) -> None:
    data, (start, stop) = handler.data(), handler.asked()
    if data is None:
        handler.reply(404)
    elif start >= len(data) > 0 and handler.headers.get("Range"):
        handler.reply(416, Content_Range=f"bytes */{len(data)}")
    else:
        send_part(handler, data, start, stop)


def send_part(handler: Handler, data: bytes, start: int, stop: int, **headers: object) -> None:
    """A part of a file, as a range where one was asked for."""
    is_range = bool(handler.headers.get("Range"))
    if is_range:
        headers["Content_Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
    handler.reply(206 if is_range else 200, data[start:stop], **headers)


def cut_after(num_bytes: int, has_length: bool = True) -> Answer:
    """The right answer up to a byte of the body, then the connection ends."""

    def answer(handler: Handler) -> None:
        data, (start, stop) = handler.data() or b"", handler.asked()
        cut = data[: start + num_bytes]
        send_part(handler, cut, start, stop, Content_Length=stop - start if has_length else None)

    return answer


def without_ranges(handler: Handler) -> None:
    handler.reply(200, handler.data() or b"")


def another_range(handler: Handler) -> None:
    """As long as the one that was asked for, a byte later."""
    data, (start, stop) = handler.data() or b"", handler.asked()
    send_part(handler, data, start + 1, stop + 1)


def with_status(status: int, **headers: object) -> Answer:
    return lambda handler: handler.reply(status, **headers)


def changed(change: Callable[[bytes], bytes]) -> Answer:
    """The right answer for a file that was changed."""

    def answer(handler: Handler) -> None:
        data, (start, stop) = change(handler.data() or b""), handler.asked()
        send_part(handler, data, start, min(stop, len(data)))

    return answer


flipped = changed(lambda data: data[:-1] + bytes([data[-1] ^ 1]))
shorter = changed(lambda data: data[:-1])


def endless(handler: Handler) -> None:
    handler.send_response(200)
    handler.end_headers()
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(b" " * 65536)


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    """A store that tests only read."""
    return fill(tmp_path_factory.mktemp("store") / "weights")


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy for local addresses, and no token."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("FLOWTRAIN_TOKEN", raising=False)


# ---- the command line, and stores to damage

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command; returns exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = int(exit.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


@pytest.fixture
def copied(filled: WeightStore, tmp_path: Path) -> WeightStore:
    """A store that tests may damage."""
    shutil.copytree(filled.root, tmp_path / "weights")
    return WeightStore(tmp_path / "weights")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def delta_path(store: WeightStore, base: int, version: int) -> Path:
    return store.folder(version) / f"delta-{base:08d}-r0.safetensors"


def rewrite(store: WeightStore, version: int, **changes: Any) -> None:
    """Change fields of a manifest; it stays valid."""
    manifest = replace(store.manifest(version), **changes)
    (store.folder(version) / "manifest.json").write_text(manifest.to_json())


def reseal(store: WeightStore, base: int, version: int) -> None:
    """Put the present checksum of a delta file into its manifest."""
    manifest = store.manifest(version)
    rewrite(
        store,
        version,
        delta_files=manifest.delta_files | {base: (seal(delta_path(store, base, version)),)},
    )


def add_snapshot(store: WeightStore, version: int) -> File:
    return write_snapshot(
        store.folder(version) / "anchor-r0.safetensors",
        local_shards(weights_at(version), None, 0, 1),
    )
