"""An algorithm of your own: RLOO (arXiv 2402.14740) with an option that bounds its advantages.

python -m flowtrain.train --config configs/quickstart.toml --plugins.BoundedRloo.most 1.0 \
    --algorithm.name examples/my_algorithm.py:BoundedRloo --train.num_steps 4
"""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain.algorithms import Algorithm
from flowtrain.config import Section


class Options(Section):
    """The keys of `[plugins.BoundedRloo]`."""

    most: float = 10.0
    """advantages are clipped to this size"""


class BoundedRloo(Algorithm):
    """A rollout's baseline is the mean reward of the others of its group."""

    options_type = Options
    average = "token"

    def credit(self, rewards: Sequence[float]) -> list[float]:
        """Return an advantage for each reward."""
        most, others = self.options.most, max(len(rewards) - 1, 1)
        credits = [reward - (sum(rewards) - reward) / others for reward in rewards]
        return [max(-most, min(most, credit)) for credit in credits]
