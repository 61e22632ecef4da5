"""Programs that tests run to their end."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run_program(words: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program for at most two minutes, and keep what it says."""
    given = {"timeout": 120, "check": False, **options}
    return subprocess.run([*map(str, words)], capture_output=True, text=True, **given)
