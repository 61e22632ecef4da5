"""A prompt filter: after every rollout of a group solved its prompt, the prompt rests for some
versions.
"""

from flowtrain.rollouts.rules import Outcome


class Rest:
    """Its state follows from `observe` and `on_version` alone, so a restarted service comes to the
    same state.
    """

    def __init__(self, num_versions: int = 3) -> None:
        self.num_versions = num_versions  # [plugins.Rest] num_versions = 3
        self.version = 0
        self.solved_at: dict[str, int] = {}

    def admits(self, task_id: str, kind: str, draw: float) -> bool:
        return self.version - self.solved_at.get(task_id, -self.num_versions) >= self.num_versions

    def observe(self, outcome: Outcome) -> None:
        if outcome.rewards and min(outcome.rewards) == 1.0:
            self.solved_at[outcome.task_id] = self.version

    def on_version(self, version: int) -> None:
        self.version = version
