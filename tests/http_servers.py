"""Run our ASGI applications on loopback."""

from __future__ import annotations

import contextlib
import faulthandler
import threading
from collections.abc import Iterator
from typing import Any

from flowtrain.utils.net.serving import address, make_server


@contextlib.contextmanager
def running(app: Any, port: int = 0, **options: Any) -> Iterator[str]:
    """Run a real server in a thread and yield its URL; it accepts connections at once."""
    server, listener = make_server(app, port=port, **options)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield address(listener)
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        if thread.is_alive():
            faulthandler.dump_traceback()
            raise AssertionError("the server has not ended; what its threads do is in stderr")
