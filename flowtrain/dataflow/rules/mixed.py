"""Dynamic sampling (DAPO, arXiv 2503.14476): a group whose rewards are all the same has no
advantages, so it teaches nothing.
"""

from __future__ import annotations

from flowtrain.dataflow.rules.base import Outcome


class Mixed:
    def keeps(self, outcome: Outcome) -> bool:
        return outcome.is_mixed
