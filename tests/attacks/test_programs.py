"""Hostile programs in the sandbox: each run ends, reaches nothing, and leaves the next unharmed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest

from flowtrain.tools.sandbox.host import ProcessSandbox
from tests.attacks import sandboxes
from tests.attacks.programs import ASLEEP, ATTACKS
from tests.attacks.sandboxes import KINDS, outcome, server_pid
from tests.attacks.tally import Tally

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")


@pytest.fixture(scope="module", params=KINDS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[ProcessSandbox]:
    box = sandboxes.make(request.param)
    yield box
    box.close()


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_fails_and_next_run_works(
    sandbox: ProcessSandbox, name: str, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = sandbox.backend.name
    program = ATTACKS[name]
    expected = getattr(program, kind)
    if not expected:
        pytest.skip("not stopped by limits alone, as docs/tools.md says")
    if expected == ASLEEP:
        monkeypatch.setitem(sandbox._workers.limits, "wall_s", 1.0)
    server = server_pid(sandbox)
    result = outcome(sandbox, program.code).strip()
    monkeypatch.undo()
    is_next_run_well = outcome(sandbox, "6 * 7") == "42\n"
    # With a scratch folder it may end because of a file.
    is_server_well = bool(sandbox.backend.scratch) or server_pid(sandbox) == server
    is_stopped = bool(re.search(expected, result)) and is_next_run_well and is_server_well
    tally.add(f"programs in the sandbox ({kind})", 1, 0 if is_stopped else 1)
    assert re.search(expected, result), result
    assert is_next_run_well
    assert is_server_well, "the code reached its server"
