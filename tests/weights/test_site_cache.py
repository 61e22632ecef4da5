"""nginx with deploy/nginx/weights.conf fetches each byte once, for those who have the token."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import http_stores as hs
import pytest
import torch
from http_servers import running
from http_stores import LAST, TOKEN, same, weights_at
from nginx import needs_nginx, nginx

from flowtrain.weights import Publisher, StoreError, WeightReader, WeightStore, open_source
from flowtrain.weights.format.manifest import File
from flowtrain.weights.stores.serve import make_app

CONFIG = Path(__file__).parents[2] / "deploy" / "nginx" / "weights.conf"
pytest_plugins = ("http_stores",)
pytestmark = [needs_nginx, pytest.mark.usefixtures("clean_environment")]
SLICE = 4096
READERS = 20


class Origin:
    """The server of a store, which counts the bytes that it sends by address."""

    def __init__(self, store: WeightStore) -> None:
        self.sent: Counter[str] = Counter()
        self.is_damaged = False
        self._app: Any = make_app(store, TOKEN)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        address = f"{scope['path']}?{scope['query_string'].decode()}"

        async def counting(message: Any) -> None:
            body = message.get("body", b"")
            self.sent[address] += len(body)
            await send(message | ({"body": bytes(len(body))} if self.is_damaged and body else {}))

        await self._app(scope, receive, counting)


@contextlib.contextmanager
def caching(folder: Path, origin: str) -> Iterator[str]:
    """Run the cache before a server; yields its URL."""
    folder.mkdir()
    ours = {
        "http://10.0.0.6:8321": origin,
        "/var/cache/nginx/weights": f"{folder}/cache",
        "TOKEN-OF-THE-NODES": TOKEN,
        "slice 8m": f"slice {SLICE}",
    }
    with nginx(folder, CONFIG, "8322", ours) as port:
        yield f"http://127.0.0.1:{port}"


def address(version: int, file: File) -> str:
    return f"/v{version:08d}/{file.name}?xxh3={file.xxh3}"


def ask(url: str, path: str, token: str = TOKEN, **headers: str) -> tuple[int, bytes]:
    client = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    with contextlib.closing(client):
        client.request("GET", path, headers={"Authorization": f"Bearer {token}", **headers})
        response = client.getresponse()
        return response.status, response.read()


def test_readers_at_once_fetch_each_byte_once(filled: WeightStore, tmp_path: Path) -> None:
    origin, start = Origin(filled), threading.Barrier(READERS)

    def follow(number: int) -> None:
        tensors = {name: torch.empty_like(tensor) for name, tensor in weights_at(0).items()}
        reader = WeightReader(open_source(site, tmp_path / f"reader-{number}", TOKEN), tensors)
        for version in (0, 3, LAST):
            start.wait(60)
            reader.load(version)
            assert same(tensors, weights_at(version))

    with (
        running(origin) as url,
        caching(tmp_path / "nginx", url) as site,
        ThreadPoolExecutor(READERS) as pool,
    ):
        list(pool.map(follow, range(READERS)))
    sizes = {address(v, f): f.num_bytes for v in range(LAST + 1) for f in filled.manifest(v).files}
    found = {path: size for path, size in origin.sent.items() if "safetensors" in path}
    assert address(0, filled.manifest(0).snapshot_files[0]) in found
    assert max(sizes.values()) > 2 * SLICE, "or no file has several slices"
    assert found == {path: sizes[path] for path in found}


def test_parts_of_files_come_from_the_cache_too(filled: WeightStore, tmp_path: Path) -> None:
    origin, (file,) = Origin(filled), filled.manifest(0).snapshot_files
    whole = (filled.folder(0) / file.name).read_bytes()
    with running(origin) as url, caching(tmp_path / "nginx", url) as site:
        for _ in range(2):
            for cut in (slice(5000, 9000), slice(0, 1), slice(7, len(whole))):
                asked = f"bytes={cut.start}-{cut.stop - 1}"
                assert ask(site, address(0, file), Range=asked) == (206, whole[cut])
            assert ask(site, address(0, file)) == (200, whole)
        assert ask(site, address(0, file), Range=f"bytes={len(whole)}-")[0] == 416
    assert origin.sent[address(0, file)] == len(whole)


@pytest.mark.parametrize("token", ["wrong", TOKEN[:-1], TOKEN + "x", TOKEN.upper()])
def test_a_wrong_token_is_refused_by_the_cache_itself(
    filled: WeightStore, tmp_path: Path, token: str
) -> None:
    (file,) = filled.manifest(0).snapshot_files
    with running(Origin(filled)) as url, caching(tmp_path / "nginx", url) as site:
        assert ask(site, address(0, file))[0] == 200
        for path in ("/HEAD", "/nothing", address(0, file)):
            assert ask(site, path, token)[0] == 401
        with pytest.raises(StoreError, match="refuses the token"):
            open_source(site, tmp_path, token).head()


def test_a_rollback_is_seen_at_once(copied: WeightStore, tmp_path: Path) -> None:
    """The same numbers are other weights afterwards, at other addresses."""
    other = {name: tensor * 2 for name, tensor in weights_at(LAST).items()}
    tensors = {name: torch.empty_like(tensor) for name, tensor in other.items()}
    with hs.serving(copied) as url, caching(tmp_path / "nginx", url) as site:
        source = open_source(site, tmp_path / "reader", TOKEN)
        WeightReader(source, tensors).load(LAST)
        copied.rollback(LAST - 1)
        assert source.head() == LAST - 1
        Publisher(copied).publish(other, LAST)
        assert source.head() == LAST
        WeightReader(source, tensors).load(LAST)
    assert same(tensors, other)


def test_what_was_kept_damaged_is_fetched_anew(filled: WeightStore, tmp_path: Path) -> None:
    """By the address of the second attempt, which the cache keeps too."""
    origin, (file,) = Origin(filled), filled.manifest(0).snapshot_files
    whole = (filled.folder(0) / file.name).read_bytes()
    with running(origin) as url, caching(tmp_path / "nginx", url) as site:
        origin.is_damaged = True
        assert ask(site, address(0, file))[1] != whole
        origin.is_damaged = False
        for number in range(2):
            source = open_source(site, tmp_path / str(number), TOKEN)
            assert source.fetch(0, file).read_bytes() == whole
    assert sum(origin.sent.values()) == 2 * len(whole)
