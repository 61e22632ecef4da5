"""A server with S3's protocol on loopback: moto's, in a process of its own."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}
_CODE = """
import sys, time, urllib.request
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
host, port = server.get_host_and_port()
for name in sys.argv[1:]:
    urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/{name}", method="PUT"))
print(f"at {port}", flush=True)
sys.stdin.read()
"""


@contextmanager
def s3_server(*buckets: str) -> Iterator[str]:
    """The address of a server with these buckets; skips where moto is missing."""
    for package in ("moto", "flask", "obstore"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is missing: pip install -e '.[s3-tests]'")
    with subprocess.Popen(
        [sys.executable, "-c", _CODE, *buckets],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        try:
            found = next(filter(None, (re.match(r"at (\d+)", line) for line in server.stdout)))
            yield f"http://127.0.0.1:{found[1]}"
        finally:
            server.stdin.close()
            server.kill()
