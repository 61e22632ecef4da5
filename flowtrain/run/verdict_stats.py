"""Statistics of a verifier that is a policy of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flowtrain.agents.build import rule_verifier
from flowtrain.agents.memory import Memory, MemoryEntry
from flowtrain.agents.verdicts import read_verdict
from flowtrain.config import Config
from flowtrain.training.world import World
from flowtrain.types import Trajectory, Turn, Verdict


def verdict_metrics(
    trajectories: Iterable[Trajectory], config: Config, world: World
) -> dict[str, float]:
    """Compute shares of the verdicts of all ranks, and their tokens; collective. Tasks from files
    and from reasoning-gym have no rule to agree with.
    """
    counts = dict.fromkeys(("verdicts", "malformed", "stop", "agreement", "tokens"), 0.0)
    rule = None if config.tasks.name in ("file", "reasoning-gym") else rule_verifier(config)
    for trajectory in trajectories:
        counts["tokens"] += trajectory.num_tokens("verifier") - trajectory.num_shared("verifier")
        for turn, memory in _judged(trajectory):
            counts["verdicts"] += 1
            counts["malformed"] += read_verdict(turn.verdict_text) is None
            counts["stop"] += turn.verdict is Verdict.STOP
            counts["agreement"] += rule is not None and turn.verdict is rule.verdict(
                trajectory.task.question, memory
            )
    total, malformed, stop, agreement, tokens = world.sum(list(counts.values()))
    shares = {"malformed": malformed, "stop": stop} | (
        {} if rule is None else {"agreement": agreement}
    )
    found = {f"verifier/{name}_share": number / max(total, 1) for name, number in shares.items()}
    return found | {"verifier/num_sampled_tokens": tokens}


def _judged(trajectory: Trajectory) -> Iterator[tuple[Turn, Memory]]:
    """Yield each turn that a verifier policy decided on, with the memory that the policy read."""
    memory = Memory()
    for turn in trajectory.turns:
        memory = memory.add(MemoryEntry.of(turn.action, turn.command, turn.result))
        if "verifier" in turn.calls:
            yield turn, memory
