"""Sessions of the sandbox against hostile programs: as without sessions, and none gets at a fork,
at another session, or at what is run from the same state.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Iterator

import pytest

from flowtrain.tools.sandbox import seccomp
from flowtrain.tools.sandbox.sessions import CodeSession, SessionSandbox
from tests.attacks.programs import ATTACKS, NATIVE
from tests.attacks.sandboxes import TIMEOUT_S, children_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")

FORK = f"{56 if os.uname().machine == 'x86_64' else 220}, 0x8011, 0, 0, 0, 0"
"""The one call that a state makes."""


@pytest.fixture(scope="module")
def box() -> Iterator[SessionSandbox]:
    made = SessionSandbox(
        seccomp.backend(), num_workers=2, timeout_s=TIMEOUT_S, memory_mb=128, max_output_chars=2000
    )
    yield made
    made.close()


async def says(session: CodeSession, code: str) -> str:
    ran = await session.run(code)
    return (ran.output if ran.error is None else ran.error).strip()


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_fails_and_other_sessions_go_on(box: SessionSandbox, name: str) -> None:
    async def main() -> tuple[str, list[str]]:
        session, bystander = box.open(), box.open()
        await bystander.run("x = 6")
        await session.run("y = 1")
        state = session.snapshot()
        # The harness of sessions is a module of its own beside that of other runs.
        code = ATTACKS[name].code.replace("g['", "vars(g['child'])['")
        result = await says(session, code)
        others = [await says(bystander, "x * 7"), await says(state.restore(), "y")]
        for each in (session, bystander, state):
            each.close()
        return result, others

    result, others = asyncio.run(main())
    assert re.search(ATTACKS[name].seccomp, result), result
    assert others == ["42", "1"]


def test_code_that_forks_has_ended_its_run_and_multiplies_no_further(box: SessionSandbox) -> None:
    """However often it asks; each copy is one that the host has asked for."""
    bomb = f"{NATIVE}\nprint('before', flush=True)\nwhile True: call({FORK})"

    async def main() -> None:
        session = box.open()
        await session.run("x = 1")
        (supervisor,) = [
            pid
            for server in children_of(os.getpid())
            for pid in children_of(server)
            if session._state in children_of(pid)
        ]
        assert await says(session, bomb) == "before"
        for _ in range(5):
            await session.run("print('never read')")
            assert len(children_of(supervisor)) <= 2
        session.close()

    asyncio.run(main())


@pytest.mark.parametrize("flags", [0x11, 0x01200011, 0x8000, 0x100 | 0x8011, 0x10000000 | 0x8011])
def test_other_forms_of_clone_are_refused(box: SessionSandbox, flags: int) -> None:
    """fork, vfork, threads, namespaces, and a child without a signal."""
    code = f"{NATIVE}\nprint(*call({FORK.replace('0x8011', hex(flags))}))"

    async def main() -> str:
        session = box.open()
        try:
            return await says(session, code)
        finally:
            session.close()

    assert asyncio.run(main()) == "-1 1"


def test_a_state_learns_nothing_of_what_is_run_from_it(box: SessionSandbox) -> None:
    """Its code takes the harness's place, forks by itself, and reads its stdin ever after. The copy
    has the code; what stays behind, and hence a second copy, does not.
    """
    code = f"""{NATIVE}
import sys
seen = []
read = {0 if os.uname().machine == "x86_64" else 63}
buffer = native["create_string_buffer"](200)
address = native["cast"](buffer, native["c_void_p"]).value
def look():
    num, _ = call(read, 0, address, 200)
    return bytes(buffer[:max(num, 0)])
while True:
    got, _ = call({FORK})
    seen.append(look())
    if got == 1:
        sys.stdout.write(repr((len(seen), seen)))
        sys.stdout.flush()
"""

    async def main() -> list[str]:
        session = box.open()
        await session.run(code)
        state = session.snapshot()
        return [await says(state.restore(), f"secret {n}") for n in range(2)]

    first, second = asyncio.run(main())
    assert "secret 0" in first and "secret 1" in second
    assert "secret 0" not in second, "the state has told one branch of another"
