"""Ports for what a test starts in another process."""

from __future__ import annotations

import os
import random
import socket

_RANGE = 20_000, 32_000
"""Below the ports that the system gives to connections, which would take one again."""
_random = random.Random()


def free_port() -> int:
    """A port that nothing listens on; other processes of tests hardly choose the same."""
    _random.seed(os.urandom(8))  # a fork must not choose what its parent chooses
    while True:
        port = _random.randrange(*_RANGE)
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
