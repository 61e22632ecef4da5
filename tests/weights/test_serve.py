"""The server of a store serves published versions to clients with the token, and nothing else."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import http_stores as hs
import pytest
from http_servers import running
from http_stores import LAST, TOKEN

from flowtrain.records import UserError
from flowtrain.utils.net.credentials import Role, TokenFile, issue, revoke
from flowtrain.utils.net.serving import address, make_server
from flowtrain.weights import WeightStore
from flowtrain.weights.format.manifest import Manifest
from flowtrain.weights.stores.serve import make_app

pytest_plugins = ("http_stores",)
pytestmark = pytest.mark.usefixtures("clean_environment")

SNAPSHOT = "/v00000000/anchor-r0.safetensors"


@pytest.fixture(scope="module")
def store(filled: WeightStore, tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    """With things beside it and in it that are nobody's business."""
    root = tmp_path_factory.mktemp("served") / "weights"
    shutil.copytree(filled.root, root)
    secret = root.parent / "secret.safetensors"
    secret.write_text("secret")
    (root.parent / "HEAD").write_text("secret")
    (root / "leases").mkdir()
    (root / "leases" / "engine.json").write_text("{}")
    (root / "notes.txt").write_text("secret")
    shutil.copytree(root / "v00000001", root / "v00000006.writing")
    shutil.copytree(root / "v00000001", root / f"v{LAST + 1:08d}")
    here = root / "v00000001"
    (here / "out.safetensors").symlink_to(secret)
    (here / "folder.safetensors").mkdir()
    (here / "loop.safetensors").symlink_to(here / "loop.safetensors")
    (here / "in.safetensors").symlink_to(root / "v00000000" / "anchor-r0.safetensors")
    (here / ".hidden.safetensors").write_text("secret")
    (here / "notes.json").write_text("secret")
    (root / "v00000009").symlink_to(root.parent)
    return WeightStore(root)


@pytest.fixture(scope="module")
def connection(store: WeightStore) -> Iterator[HTTPConnection]:
    with hs.serving(store) as url:
        client = HTTPConnection(url.removeprefix("http://"), timeout=20)
        yield client
        client.close()


def ask(
    client: HTTPConnection,
    path: str,
    method: str = "GET",
    token: str | None = TOKEN,
    **headers: str,
) -> tuple[int, bytes, dict[str, str]]:
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    client.request(method, path, headers=headers)
    response = client.getresponse()
    lower = {key.lower(): value for key, value in response.getheaders()}
    return response.status, response.read(), lower


# ---- what is served


def test_the_files_of_published_versions(connection: HTTPConnection, store: WeightStore) -> None:
    assert ask(connection, "/HEAD")[:2] == (200, f"{LAST}\n".encode())
    files = ("3/manifest.json", "4/delta-00000000-r0.safetensors", "1/in.safetensors")
    for path in (SNAPSHOT, *(f"/v0000000{file}" for file in files)):
        status, body, headers = ask(connection, path)
        assert status == 200 and body == (store.root / path[1:]).read_bytes()
        assert headers["cache-control"] == "no-cache" and "server" not in headers
        status, nothing, head = ask(connection, path, "HEAD")
        assert (status, nothing, head["content-length"]) == (200, b"", str(len(body)))


def test_a_file_asked_for_by_its_checksum_never_changes(
    connection: HTTPConnection, store: WeightStore
) -> None:
    """So that what lies between may keep it; another file in its place is not there."""
    (file,) = store.manifest(0).snapshot_files
    assert SNAPSHOT.endswith(file.name)
    status, body, headers = ask(connection, f"{SNAPSHOT}?xxh3={file.xxh3}")
    assert (status, len(body)) == (200, file.num_bytes)
    assert headers["cache-control"] == "max-age=31536000, immutable"
    for wrong in (f"{SNAPSHOT}?xxh3={'0' * 16}", f"/HEAD?xxh3={file.xxh3}"):
        assert ask(connection, wrong)[0] == 404
    assert ask(connection, f"{SNAPSHOT}?other=1")[2]["cache-control"] == "no-cache"


def test_ranges(connection: HTTPConnection, store: WeightStore) -> None:
    whole = (store.root / SNAPSHOT[1:]).read_bytes()
    size = len(whole)
    ranges = {"5-": (5, size), "0-0": (0, 1), "100-199": (100, 200), "-10": (size - 10, size)}
    for asked, (start, stop) in ranges.items():
        status, body, headers = ask(connection, SNAPSHOT, Range=f"bytes={asked}")
        assert (status, body) == (206, whole[start:stop])
        assert headers["content-range"] == f"bytes {start}-{stop - 1}/{size}"
    status, _, headers = ask(connection, SNAPSHOT, Range=f"bytes={size}-")
    assert (status, headers["content-range"]) in [(416, f"bytes */{size}"), (416, f"*/{size}")]


def test_a_manifest_is_read_once_for_all_parts_of_its_files(
    copied: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again when it is another one, as after a rollback."""
    read: list[str] = []
    parse = Manifest.from_json
    monkeypatch.setattr(
        Manifest, "from_json", lambda text, path: read.append(path) or parse(text, path)
    )
    (file,) = copied.manifest(0).snapshot_files
    read.clear()
    with hs.serving(copied) as url:
        client = HTTPConnection(url.removeprefix("http://"), timeout=20)
        for start in range(5):
            asked = f"bytes={start}-{start}"
            assert ask(client, f"{SNAPSHOT}?xxh3={file.xxh3}", Range=asked)[0] == 206
        assert len(read) == 1
        hs.rewrite(copied, 0, snapshot_files=(replace(file, xxh3="0" * 16),))
        assert ask(client, f"{SNAPSHOT}?xxh3={file.xxh3}")[0] == 404
        client.close()


def test_serving_a_file_imports_no_torch(filled: WeightStore) -> None:
    """It takes seconds, and the memory of a small machine."""
    (file,) = filled.manifest(0).snapshot_files
    code = f"""
import sys
from pathlib import Path
from urllib.request import Request, urlopen
from http_servers import running
from flowtrain.weights.stores.serve import make_app
from flowtrain.weights.stores.folder import WeightStore

with running(make_app(WeightStore(Path({str(filled.root)!r})), {TOKEN!r})) as url:
    for path in ("/HEAD", "/v00000000/manifest.json", "{SNAPSHOT}?xxh3={file.xxh3}"):
        request = Request(url + path, headers={{"Authorization": "Bearer {TOKEN}"}})
        assert urlopen(request, timeout=60).read()
assert "torch" not in sys.modules
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "no_proxy": "*"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


# ---- what is not


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "x", "t\xf6k\xe9n"])
@pytest.mark.parametrize("path", ["/HEAD", SNAPSHOT, "/nothing", "/../HEAD"])
def test_without_the_token_every_answer_is_401(
    connection: HTTPConnection, token: str | None, path: str
) -> None:
    for method in ("GET", "HEAD", "POST"):
        status, body, headers = ask(connection, path, method, token)
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert TOKEN.encode() not in body


def test_every_role_reads_weights_until_its_token_is_revoked(
    store: WeightStore, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.json"
    tokens = {role: issue(path, role, role) for role in (Role.NODE, Role.TRAINER)}
    with running(make_app(store, "", TokenFile(path))) as url:
        client = HTTPConnection(url.removeprefix("http://"), timeout=20)
        for role, token in tokens.items():
            assert ask(client, "/HEAD", token=token)[0] == 200
            assert ask(client, "/HEAD", token=token[:-1])[0] == 401
            assert ask(client, "/HEAD", token="")[0] == 401
            revoke(path, role)
            assert ask(client, "/HEAD", token=token)[0] == 401
        client.close()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "PROPFIND"])
def test_other_methods_are_refused(
    connection: HTTPConnection, store: WeightStore, method: str
) -> None:
    status, _, headers = ask(connection, "/HEAD", method)
    assert (status, headers["allow"]) == (405, "GET, HEAD")
    assert store.head() == LAST


NOWHERE = """
/ // /v00000001 /v00000001/ /leases /leases/ /leases/engine.json /notes.txt /HEAD/ /HEAD.writing
/../HEAD /%2e%2e/HEAD /..%2fHEAD /v00000001/../../HEAD /./HEAD
/v00000001/%2e%2e/%2e%2e/secret.safetensors /v00000001/..%2f..%2fsecret.safetensors
/v00000001/..%5c..%5csecret.safetensors //etc/passwd /%2fetc/passwd /etc/passwd
/HEAD%00 /HEAD%0a /HEAD%0d%0aX:y /v00000001/manifest.json%00.safetensors
/v00000001/%00.safetensors /%ff /head /v00000001/out.safetensors /v00000001/loop.safetensors
/v00000001/folder.safetensors /v00000001/.hidden.safetensors /v00000001/notes.json
/v00000009/secret.safetensors /v1/manifest.json /v000000001/manifest.json
/v00000006.writing/manifest.json /v99999999/manifest.json
"""
DIGITS = (f"{LAST + 1:08d}", "9" * 40, ("\u0660" * 7 + "\u0661").encode().decode("latin-1"))
"""Versions that are not published, or no numbers."""


@pytest.mark.parametrize(
    "path", [*NOWHERE.split(), *(f"/v{digits}/manifest.json" for digits in DIGITS)]
)
def test_no_other_path_leads_anywhere(connection: HTTPConnection, path: str) -> None:
    answer = ask_raw(connection, path)
    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400")), answer[:100]
    assert b"secret" not in answer and b"engine" not in answer
    assert ask_raw(connection, "/HEAD").startswith(b"HTTP/1.1 200")


def ask_raw(connection: HTTPConnection, path: str) -> bytes:
    """A client would tidy the path up."""
    with socket.create_connection((connection.host, connection.port), timeout=20) as raw:
        raw.sendall(
            f"GET {path} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {TOKEN}\r\nConnection: "
            "close\r\n\r\n".encode("latin-1")
        )
        return raw.makefile("rb").read()


def test_a_damaged_head_publishes_nothing(filled: WeightStore, tmp_path: Path) -> None:
    root = tmp_path / "weights"
    shutil.copytree(filled.root, root)
    with hs.serving(WeightStore(root)) as url:
        client = HTTPConnection(url.removeprefix("http://"), timeout=20)
        (root / "HEAD").write_text("a lot")
        assert ask(client, SNAPSHOT)[0] == 404
        found = ask(client, "/HEAD")[:2]
        assert found == (200, b"a lot"), "so that the reader can say what is wrong"
        (root / "HEAD").unlink()
        assert ask(client, SNAPSHOT)[0] == 404 and ask(client, "/HEAD")[0] == 404
        client.close()


# ---- starting it


def test_it_listens_on_loopback_unless_told(filled: WeightStore) -> None:
    _, listener = make_server(make_app(filled, TOKEN))
    with listener:
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "or answers wait 40 ms"
        host, port = listener.getsockname()
        assert host == "127.0.0.1" and port > 0 and address(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(UserError, match=f"cannot listen at 127.0.0.1 port {port}: .*in use"):
            make_server(make_app(filled, TOKEN), port=port)
    with pytest.raises(UserError, match=r"cannot listen at 203.0.113.1"):
        make_server(make_app(filled, TOKEN), host="203.0.113.1")


@pytest.mark.parametrize("missing", ["starlette.requests", "uvicorn"])
def test_the_extra_is_named_when_it_is_missing(
    filled: WeightStore, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=rf"{missing}: pip install -e '\.\[serve\]'"):
        make_server(make_app(filled, TOKEN))


def test_there_is_no_server_without_a_token(filled: WeightStore) -> None:
    for token in ("", "two words"):
        with pytest.raises(UserError, match="token must be"):
            make_app(filled, token)


def test_importing_the_store_needs_no_server() -> None:
    code = (
        "import sys, flowtrain.weights, flowtrain.weights.stores.serve; assert not {'starlette', "
        "'uvicorn'} & set(sys.modules)"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
