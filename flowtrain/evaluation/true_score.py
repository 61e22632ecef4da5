"""A second scorer of held-out rollouts, which training never sees: what is really wanted, where the
reward that trains is only something like it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flowtrain.config import Config, Reward
from flowtrain.rewards import RewardFunctions, score
from flowtrain.training.world import World
from flowtrain.types import Group, Task, Trajectory

KEY = "eval.true_scorer"
_WIDEST = 1e6
"""Greatest size of a true score, which has no bounds of its own."""


@dataclass(frozen=True, slots=True)
class TrueScorer:
    """The scorer that `eval.true_scorer` names."""

    functions: RewardFunctions

    @classmethod
    def load(cls, config: Config, held_out: Sequence[Task]) -> TrueScorer | None:
        """Import the scorer as those of `reward.function` are; None where it is unset.

        Raises UserError for one that is not there, or that cannot score a held-out task.
        """
        name = config.eval.true_scorer
        if not name:
            return None
        options = {"timeout_s": config.reward.timeout_s, "low": -_WIDEST, "high": _WIDEST}
        functions = RewardFunctions.load(Reward(function={name: 1.0}, **options), KEY)
        assert functions is not None
        functions.check(held_out)
        return cls(functions)

    def metrics(self, trajectories: Sequence[Trajectory], world: World) -> dict[str, float]:
        """Score this rank's rollouts, and compute the mean of all ranks with its standard error;
        collective.

        Rollouts that failed have no score, and neither have those that the scorer failed, which are
        counted.
        """
        finished = [replace(each, reward=None) for each in trajectories if not each.error]
        (group,) = score([Group(0, tuple(finished))], functions=self.functions)
        scores = [each.reward for each in group.trajectories if each.reward is not None]
        own = [len(scores), math.fsum(scores), math.fsum(s * s for s in scores)]
        num, total, squares, num_failed = world.sum([*own, len(finished) - len(scores)])
        found = {"eval_true_failed": num_failed} if num_failed else {}
        if not num:
            return found
        mean = total / num
        deviation = math.sqrt(max(squares / num - mean**2, 0.0))
        metrics = {"eval_true_score": mean, "eval_true_score_error": deviation / math.sqrt(num)}
        return metrics | found
