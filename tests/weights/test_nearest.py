"""Several servers of a store: the nearest one that gives a file does, and none of them leads back
to an older version.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import http_stores as hs
import pytest
import torch
from http_stores import LAST, TOKEN, Misbehaving, same, weights_at

from flowtrain.weights import HttpStore, Publisher, StoreError, WeightReader, WeightStore
from flowtrain.weights import nearest as module
from flowtrain.weights.listing import AGE, ORIGIN_S, Head, Listing
from flowtrain.weights.manifest import File, Manifest, NotThere
from flowtrain.weights.nearest import NearestStore
from flowtrain.weights.remote import open_source

pytest_plugins = ("http_stores",)
pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture
def two(copied: WeightStore) -> Iterator[tuple[Misbehaving, Misbehaving]]:
    with hs.misbehaving(copied.root) as one, hs.misbehaving(copied.root) as other:
        one.lists = other.lists = True
        yield one, other


def slow(handler: hs.Handler) -> None:
    time.sleep(0.2)
    hs.honest(handler)


def nearest(*urls: str, cache: Path) -> NearestStore:
    return NearestStore(
        [HttpStore(url, cache, TOKEN, timeout_s=5.0, retries=0) for url in urls], (0.0, 0.0)
    )


def files_of(server: Misbehaving) -> list[str]:
    return [name for name, _, _ in server.seen if name != "HEAD"]


def test_urls_with_commas_are_several_servers(tmp_path: Path) -> None:
    source = open_source("http://a/w, http://b/w/", tmp_path)
    assert isinstance(source, NearestStore) and str(source) == "http://a/w,http://b/w"


def test_files_come_from_the_nearest(
    two: tuple[Misbehaving, Misbehaving], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    far, near = two
    far.answers["HEAD"] = [slow] * 9
    source = nearest(far.url, near.url, cache=tmp_path)
    tensors = weights_at(0)
    reader = WeightReader(source, tensors)
    for version in range(LAST + 1):
        reader.load(version)
        assert same(tensors, weights_at(version))
    assert files_of(far) == [] and files_of(near)
    assert caplog.text.count("weights come from") == 1 and near.url in caplog.text
    assert not list(tmp_path.glob("v*")), "loaded versions leave the cache"


@pytest.mark.parametrize("trouble", [hs.with_status(500), hs.flipped, hs.with_status(404)])
def test_the_next_one_takes_over(
    two: tuple[Misbehaving, Misbehaving],
    tmp_path: Path,
    trouble: hs.Answer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    far, near = two
    far.answers["HEAD"] = [slow] * 9
    delta = WeightStore(near.root).manifest(2).delta_files[1][0]
    near.answers[delta.name] = [trouble] * 9
    tensors = weights_at(0)
    reader = WeightReader(nearest(far.url, near.url, cache=tmp_path), tensors)
    reader.load(1)
    loaded = reader.load(2)
    assert loaded.mode == "delta" and same(tensors, weights_at(2))
    assert files_of(far) == [delta.name], "and only what the nearest one could not give"
    assert f"weights come from {far.url}" in caplog.text


def test_a_dead_server_is_asked_again_after_a_while(
    two: tuple[Misbehaving, Misbehaving],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    far, near = two
    source = nearest(far.url, near.url, cache=tmp_path)
    near.answers["HEAD"] = [hs.with_status(503)]
    assert source.head() == LAST and "is left out for now" in caplog.text
    num_seen = len(near.seen)
    assert source.head() == LAST and len(near.seen) == num_seen, "it rests"
    monkeypatch.setattr(module, "_REST_S", 0.0)
    far.answers["HEAD"] = [hs.with_status(503)]
    assert source.head() == LAST, "all others failed"
    assert f"{near.url} answers again" in caplog.text


def test_silence_costs_little(
    two: tuple[Misbehaving, Misbehaving], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.1)
    with hs.silent() as url:
        source = nearest(url, two[0].url, cache=tmp_path)
        began = time.monotonic()
        assert source.head() == LAST and source.manifest(LAST).version == LAST
        assert time.monotonic() - began < 25, "less than the timeout"


def test_where_nobody_answers_the_error_says_so(tmp_path: Path) -> None:
    with hs.silent() as url:
        source = NearestStore([HttpStore(url, tmp_path, TOKEN, 0.05, 0)], (0.0,))
        with pytest.raises(StoreError, match=r"HEAD\?manifests: no answer"):
            source.head()


# ---- which HEAD counts


class Told:
    """A server whose HEAD is given."""

    def __init__(self, head: int | None, asked_at: float, said_at: float) -> None:
        self.answer = None if head is None else Head(Listing(head), asked_at, said_at, 0.0)

    def head(self) -> int | None:
        return None if self.answer is None else self.answer.listing.head

    def ask(self) -> Head | None:
        return self.answer

    def read_manifest(self, version: int, checksum: str) -> Manifest:
        raise NotThere("none")

    manifest = read_manifest  # type: ignore[assignment]

    def fetch(self, version: int, file: File) -> Path:
        raise NotThere("none")

    def loaded(self, version: int) -> None:
        pass


@pytest.mark.parametrize(
    ("servers", "head"),
    [
        ([Told(5, 10, 11), Told(7, 12, 13)], 7),
        ([Told(7, 10, 11), Told(5, 12, 13)], 5),  # rolled back, and the first has not heard of it
        ([Told(5, 10, 13), Told(7, 9, 10)], 7),  # at the same time: the one that knows more
        ([Told(7, 9, 10), Told(5, 10, 13)], 7),
        ([Told(None, 0, 0), Told(5, 1, 2)], 5),
        ([Told(None, 0, 0)], None),
    ],
)
def test_what_was_said_last_counts(servers: list[Told], head: int | None) -> None:
    assert NearestStore(servers).head() == head


def test_a_server_that_lags_leads_nobody_back() -> None:
    relay, origin = Told(5, 1, 2), Told(7, 12, 13)
    source = NearestStore([relay, origin], (0.0,))
    assert source.head() == 7
    source._sources.remove(origin)  # it fell silent
    assert source.head() == 7
    relay.answer = Head(Listing(6), 14, 15, 0.0)
    assert source.head() == 6, "the relay has asked since: the run was rolled back"
    with pytest.raises(NotThere, match="version 7 is not at"):
        source.manifest(7)


def test_a_relay_that_lags_is_asked_by_checksum(
    two: tuple[Misbehaving, Misbehaving], tmp_path: Path
) -> None:
    """Its HEAD is of an earlier time, and it is the nearest; the newest version comes from it."""
    far, near = two

    def old(handler: hs.Handler) -> None:
        store = WeightStore(near.root)
        listing = store.listing()
        assert listing is not None
        text = Listing(LAST - 1, {v: c for v, c in listing.manifests.items() if v < LAST})
        handler.reply(200, text.to_text().encode(), **{AGE: 5.0, ORIGIN_S: 0.0})

    near.answers["HEAD"] = [old] * 9
    far.answers["HEAD"] = [slow] * 9
    source = nearest(far.url, near.url, cache=tmp_path)
    tensors = {name: torch.empty_like(tensor) for name, tensor in weights_at(0).items()}
    assert source.head() == LAST
    WeightReader(source, tensors).load(LAST)
    assert same(tensors, weights_at(LAST)) and files_of(far) == []


def test_weights_of_before_a_rollback_are_never_loaded(copied: WeightStore, tmp_path: Path) -> None:
    """A relay still serves the former version of that number, which is not the one that counts."""
    other = {name: tensor * 2 for name, tensor in weights_at(LAST).items()}
    with contextlib.ExitStack() as stack:
        relay = stack.enter_context(hs.misbehaving(copied.root))
        relay.lists = True
        listing = copied.listing()
        assert listing is not None
        was = listing.to_text().encode()
        relay.answers["HEAD"] = [lambda h: h.reply(200, was, **{AGE: 100.0})] * 9
        copied.rollback(LAST - 1)
        Publisher(copied).publish(other, LAST)
        origin = stack.enter_context(hs.serving(copied))
        source = nearest(relay.url, origin, cache=tmp_path)
        tensors = {name: torch.empty_like(tensor) for name, tensor in other.items()}
        WeightReader(source, tensors).load(LAST)
    assert same(tensors, other)
