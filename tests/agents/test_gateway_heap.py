"""A gateway per evaluation leaves no garbage behind for ever."""

from __future__ import annotations

import pytest

from flowtrain.agents.gateway import server
from flowtrain.agents.gateway.server import Gateway


def test_what_was_imported_is_set_aside_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(server.gc, "collect", lambda: called.append("collect"))
    monkeypatch.setattr(server.gc, "freeze", lambda: called.append("freeze"))
    server._keep_imports.cache_clear()
    for _ in range(2):
        Gateway().close()
    assert called == ["collect", "freeze"]
