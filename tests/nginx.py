"""nginx with one of our example files."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from ports import free_port

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin") or ""
needs_nginx = pytest.mark.skipif(not NGINX, reason="nginx is not installed")
_PLACES = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@contextlib.contextmanager
def nginx(folder: Path, example: Path, listen: str, ours: Mapping[str, str]) -> Iterator[int]:
    """Run nginx in `folder` with an example, at a free port, which is yielded.

    Args:
        listen: the port as the example gives it.
        ours: what replaces other parts of its text, which must be there once.
    """
    port = free_port()
    text = example.read_text()
    for given, new in {f"listen {listen}": f"listen 127.0.0.1:{port}", **ours}.items():
        assert text.count(given) == 1, given
        text = text.replace(given, new)
    (folder / "server.conf").write_text(text)
    paths = " ".join(f"{place}_temp_path {folder}/{place};" for place in _PLACES)
    (folder / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{ access_log off; {paths} include {folder}/server.conf; }}\n"
    )
    process = subprocess.Popen([NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf")])
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None, (folder / "error.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait(20)
