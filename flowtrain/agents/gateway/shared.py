"""Servers by address: the agents of one process share one where the port is given.

Training and evaluation have an agent each, and both live at once; workers know one address.
"""

from __future__ import annotations

import os
import threading

from flowtrain.agents.gateway.server import Gateway
from flowtrain.config.gateway import Gateway as Options
from flowtrain.types import UserError

WORKER_VARIABLE = "FLOWTRAIN_GATEWAY_TOKEN"
"""The environment variable with the token of workers."""

_lock = threading.Lock()
_servers: dict[tuple[str, int], Gateway] = {}
_num_users: dict[Gateway, int] = {}


def open_gateway(options: Options) -> Gateway:
    """Return the server of a fixed port, which may be there already, or a new one.

    Raises UserError where the address cannot be had.
    """
    port = options.port + int(os.environ.get("LOCAL_RANK", "0")) if options.port else 0
    if port > 65535:
        raise UserError(f"gateway.port={options.port} leaves no port for every rank")
    has_program = bool(options.command or options.function)
    token = "" if has_program else os.environ.get(WORKER_VARIABLE, "")
    with _lock:
        found = _servers.get((options.host, port)) if port else None
        if found is None:
            found = Gateway(options.host, port, token)
            if port:
                _servers[options.host, port] = found
        _num_users[found] = _num_users.get(found, 0) + 1
        return found


def release(gateway: Gateway) -> None:
    """Close a server once nobody uses it any more."""
    with _lock:
        _num_users[gateway] -= 1
        if _num_users[gateway]:
            return
        del _num_users[gateway]
        for address in [each for each, server in _servers.items() if server is gateway]:
            del _servers[address]
    gateway.close()
