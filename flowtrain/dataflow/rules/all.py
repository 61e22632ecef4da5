"""Every prompt, and every group."""

from __future__ import annotations

from flowtrain.dataflow.rules.base import Outcome


class AllPrompts:
    def admits(self, task_id: str, kind: str, draw: float) -> bool:
        return True

    def observe(self, outcome: Outcome) -> None:
        pass

    def on_version(self, version: int) -> None:
        pass


class AllGroups:
    def keeps(self, outcome: Outcome) -> bool:
        return True
