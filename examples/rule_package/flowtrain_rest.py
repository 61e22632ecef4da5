"""A prompt filter: a prompt that every rollout of a group solved rests until the policy has changed so
many times.
"""

from flowtrain.dataflow.rules import Outcome


class Rest:
    """Made once per run; what it knows is what it was told, so a service that starts again comes to
    the same state.
    """

    def __init__(self, num_versions: int = 3) -> None:
        self.num_versions = num_versions  # dataflow.prompt_filter_options = {num_versions = 3}
        self.version = 0
        self.solved_at: dict[str, int] = {}

    def admits(self, task_id: str, kind: str, draw: float) -> bool:
        return self.version - self.solved_at.get(task_id, -self.num_versions) >= self.num_versions

    def observe(self, outcome: Outcome) -> None:
        if outcome.rewards and min(outcome.rewards) == 1.0:
            self.solved_at[outcome.task_id] = self.version

    def on_version(self, version: int) -> None:
        self.version = version
