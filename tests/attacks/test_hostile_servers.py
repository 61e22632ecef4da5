"""Servers that answer as none should: every client ends as it documents, in bounded memory."""

from __future__ import annotations

import gzip
import json
import random
import tomllib
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from flowtrain.config import Chat
from flowtrain.inference import endpoint
from flowtrain.inference.endpoint import Endpoint
from flowtrain.inference.protocol import EngineError
from flowtrain.records import UserError
from flowtrain.tools import ToolError
from flowtrain.tools.retrieval.dense import Embedder
from flowtrain.tools.web import api
from flowtrain.tools.web.addresses import Rules
from flowtrain.tools.web.api import Api, Request
from flowtrain.tools.web.fetch import Fetcher
from flowtrain.tools.web.providers import HITS, hits
from flowtrain.tools.wikipedia_search import _wiki_pages
from flowtrain.utils.event_loop import run_to_end
from tests.attacks import raw_server as raw
from tests.attacks.hostile_answers import BODIES, FIELDS, VALUES, composed
from tests.attacks.raw_server import RawServer, whole
from tests.attacks.tally import Tally

pytestmark = pytest.mark.usefixtures("plain_http")
MAX_BYTES = 1 << 20
MEMORY = 24 << 20
"""Bytes that reading a body of at most MAX_BYTES may take at a time."""
VALUES_MEMORY = 64 * MAX_BYTES
"""The same with the values of its JSON."""
DEADLINE_S = 0.25
Ask = Callable[[RawServer], object]


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "MAX_BYTES", MAX_BYTES)
    monkeypatch.setattr(api, "_FIRST_PAUSE_S", 2 * DEADLINE_S)  # one attempt each
    monkeypatch.setattr(endpoint, "_MAX_BYTES", MAX_BYTES)


# ---- the clients


async def _resolve(host: str, port: int) -> list[str]:
    return [host]


def read_page(server: RawServer) -> object:
    fetcher = Fetcher(Rules((server.port,), allow_private=True), _resolve, MAX_BYTES)
    return run_to_end(fetcher.fetch(server.url, DEADLINE_S))


def search(server: RawServer) -> object:
    answer = run_to_end(Api().ask(Request(server.url), DEADLINE_S))
    return hits(answer, *HITS["serper"])


def ask_wiki(server: RawServer) -> object:
    return _wiki_pages(run_to_end(Api().ask(Request(server.url), DEADLINE_S)))


def embed(server: RawServer) -> object:
    embedder = Embedder("e", Chat(base_url=server.url, model="m", api_key_env=""))
    return run_to_end(embedder.rank("one", ["two"], 1, DEADLINE_S))


def ask_model(server: RawServer) -> object:
    options = Chat(base_url=server.url, model="m", api_key_env="", max_retries=0)
    model = Endpoint("e", options)
    try:
        reply = run_to_end(model.ask("x", deadline_s=DEADLINE_S))
        json.dumps(model.meter.metrics(), allow_nan=False)
        reply.encode()
        return reply
    finally:
        model.close()


WEB: dict[str, Ask] = {"page": read_page, "search": search, "wiki": ask_wiki, "embeddings": embed}
ENDPOINTS: dict[str, Ask] = {"model": ask_model}
CLIENTS = WEB | ENDPOINTS
ERRORS = (ToolError, EngineError, UserError)


def surface(name: str) -> str:
    return f"hostile answers of {'endpoints' if name in ENDPOINTS else 'web servers'}"


def outcome(ask: Ask, server: RawServer, memory: int = MEMORY) -> str:
    """Ask once, and return what got through: "" for a documented end within memory."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        ask(server)
    except ERRORS as error:
        if len(str(error)) > 1000:
            return f"an error of {len(str(error))} characters"
    except Exception as error:  # noqa: BLE001 - that is what must not come through
        return f"{type(error).__name__}: {str(error)[:200]}"
    grown = tracemalloc.get_traced_memory()[1] - before
    return f"{grown >> 20} MiB" if grown > memory else ""


# ---- bodies and headers


@pytest.mark.parametrize("client", ["page", "search", "model"])
def test_no_body_breaks_a_client(client: str, server: RawServer, tally: Tally) -> None:
    through = {}
    tracemalloc.start()
    try:
        for name, pieces in BODIES.items():
            server.pieces = pieces
            if problem := outcome(CLIENTS[client], server):
                through[name] = problem
    finally:
        tracemalloc.stop()
    tally.add(surface(client), len(BODIES), len(through))
    assert through == {}


@pytest.mark.parametrize("client", ["page", "search", "model"])
def test_one_compression_is_undone_and_no_other(
    client: str, server: RawServer, tally: Tally
) -> None:
    """Four levels around nothing would keep a decoder busy for a day, and its event loop too."""
    for encoding in ("gzip, gzip", "gzip,gzip,gzip", "br", "zstd", "deflate, br"):
        server.pieces = whole(raw.nothings(4), f"Content-Encoding: {encoding}")
        tally.add(surface(client), 1)
        with pytest.raises(ERRORS, match=f"the encoding '{encoding}', which was not asked for"):
            CLIENTS[client](server)


def test_the_library_bounds_compressions_too() -> None:
    """Where anything else decompresses with it; httpx2 before 2.12 makes one piece of a bomb."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "httpx2>=2.12" in project["project"]["dependencies"]
    twice = httpx2.Response(200, headers={"Content-Encoding": "gzip, gzip"})
    decoder = twice._get_content_decoder()
    pieces = decoder.decode(gzip.compress(raw.zeros(64)))
    assert max(map(len, pieces)) <= MAX_BYTES
    with pytest.raises(httpx2.DecodingError, match="more than 5"):
        httpx2.Response(200, headers={"Content-Encoding": ", ".join(["gzip"] * 6)})


def test_no_cookie_is_kept(server: RawServer, tally: Tally) -> None:
    server.pieces = BODIES["cookies"]
    options = Chat(base_url=server.url, model="m", api_key_env="", max_retries=0)
    model = Endpoint("e", options)
    with pytest.raises(EngineError):
        run_to_end(model.ask("x", deadline_s=20.0))
    num_kept = len(list(model._client.cookies.jar))
    model.close()
    tally.add(surface("model"), 1, num_kept)
    assert num_kept == 0


# ---- values


@pytest.mark.parametrize("client", FIELDS)
def test_no_value_breaks_a_client(client: str, server: RawServer, tally: Tally) -> None:
    # The long ones alone, and in a part of an answer.
    texts = [
        form.replace("%s", value)
        for number, form in enumerate(("%s", *FIELDS[client]))
        for value in (*VALUES, "-1")
        if number < 2 or len(value) < 10_000
    ]
    through = {}
    for text in texts:
        server.pieces = whole(text.encode(errors="surrogatepass"))
        if problem := outcome(CLIENTS[client], server):
            through[text[:100]] = problem
    tally.add(surface(client), len(texts), len(through))
    assert through == {}


def test_values_take_bounded_memory(server: RawServer, tally: Tally) -> None:
    """Small values are the worst: a quarter MiB of empty objects, of objects of one, of keys."""
    keys = ",".join(f'"{number}":0' for number in range(27_000))
    worst = ["[" + "{}," * 87_000 + "{}]", "[" + '{"":0},' * 37_000 + "{}]", f"{{{keys}}}"]
    through = {}
    tracemalloc.start()
    try:
        asked = [("search", '{"organic": %s}', text) for text in worst]
        for client, form, text in (*asked, ("model", '{"choices": %s}', worst[1])):
            server.pieces = whole((form % text).encode())
            if problem := outcome(CLIENTS[client], server, VALUES_MEMORY // 4):
                through[client, text[:20]] = problem
    finally:
        tracemalloc.stop()
    tally.add(surface("search"), len(worst) + 1, len(through))
    assert through == {}


# ---- composed


@pytest.mark.parametrize("client", CLIENTS)
def test_no_composed_answer_breaks_a_client(
    client: str, campaign: Iterator[int], server: RawServer, tally: Tally
) -> None:
    for seed in campaign:
        rng = random.Random(seed)
        through = {}
        for number in range(25):
            server.pieces = composed(rng)
            if problem := outcome(CLIENTS[client], server):
                through[number] = problem
        tally.add(surface(client), 25, len(through))
        assert through == {}, f"seed {seed}"
