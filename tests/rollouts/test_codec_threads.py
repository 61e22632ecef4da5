"""Records are decoded by many threads at once, those of a kind that was never decoded included."""

from __future__ import annotations

import subprocess
import sys

FIRST_DECODING = """
import sys, threading
from flowtrain.rollouts import codec
from flowtrain.records import Group

sys.setswitchinterval(1e-6)
data, start = codec.pack(Group(0, ())), threading.Barrier(8)

def decode():
    start.wait()
    assert codec.unpack(data, Group) == Group(0, ())

threads = [threading.Thread(target=decode) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_that_decode_the_first_group_together_do_not_crash() -> None:
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_DECODING],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
