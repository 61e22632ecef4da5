"""What a person sees of a node: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from tqdm import tqdm

_LINE_S = 30.0


class NodeProgress:
    """Groups pushed, their rate, versions, rollouts under way, and why it waits."""

    def __init__(self, num_groups: int = 0) -> None:
        """`num_groups`: to be pushed until the node ends; 0: it does not end."""
        self._bar = tqdm(
            total=num_groups or None,
            unit="group",
            file=sys.stderr,
            dynamic_ncols=True,
            disable=None,
        )  # None: no terminal
        self._num, self._num_shown = 0, -1
        self._started = self._line_at = time.monotonic()

    def pushed(self) -> None:
        self._num += 1
        self._bar.update()

    def show(self, versions: Mapping[str, int], num_rollouts: int, waiting: str) -> None:
        """The state as it is now."""
        weights = ", ".join(f"{policy} {version}" for policy, version in versions.items())
        text = f"weights: {weights}, {num_rollouts} rollouts under way" + (
            f", waits: {waiting}" if waiting else ""
        )
        self._bar.set_postfix_str(text)
        now = time.monotonic()
        if self._bar.disable and (now - self._line_at > _LINE_S or self._num_shown < 0):
            rate = 60 * self._num / max(now - self._started, 1e-9)
            print(
                f"{self._num} groups pushed ({rate:.1f} per minute), {text}",
                file=sys.stderr,
                flush=True,
            )
            self._line_at, self._num_shown = now, self._num

    def close(self) -> None:
        self._bar.close()
