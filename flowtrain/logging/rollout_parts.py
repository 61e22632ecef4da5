"""Statistics of the parts of a rollout: rewards of functions, truncated sampling, lenient parsing,
and verifiers and refiners that are policies of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from flowtrain.agents.agentflow.build import most_kept
from flowtrain.agents.agentflow.memory import Memory, MemoryEntry
from flowtrain.agents.agentflow.replies import RULES, read_verdict
from flowtrain.agents.agentflow.verifier import RuleVerifier
from flowtrain.config import OWN, Config
from flowtrain.logging.tally import Tally
from flowtrain.records import PolicyName, Trajectory, Turn, Verdict
from flowtrain.rewards.functions import FAILURES, failure_of

_RESCUED = "rescued_share/"


def count_parts(tally: Tally, trajectories: Sequence[Trajectory], config: Config) -> None:
    """Count what the config has of these parts."""
    count_rewards(tally, trajectories, bool(config.reward.function))
    count_kept(tally, trajectories, most_kept(config))
    count_rescued(tally, trajectories)
    if len(config.policy_names) > 1:
        for policy in config.policy_names:
            count_policy(tally, trajectories, policy)
    if config.roles.verifier == OWN:
        count_verdicts(tally, trajectories)
    if config.roles.refiner == OWN:
        count_evidence(tally, trajectories)


def part_metrics(total: Tally) -> dict[str, float]:
    """Return metrics for the log; rules of parsing that rescued nothing are left out."""
    means = total.all_means().items()
    metrics = {name: mean for name, mean in means if mean or not name.startswith(_RESCUED)}
    names = (*(f"reward_failures/{reason}" for reason in FAILURES), "verifier/num_sampled_tokens")
    return metrics | {name: total.sums[name] for name in names if name in total.sums}


def count_policy(tally: Tally, trajectories: Sequence[Trajectory], policy: PolicyName) -> None:
    """Count the rollouts in which a policy was asked, and what it was paid there."""
    finished = [trajectory for trajectory in trajectories if not trajectory.error]
    asked_rollouts = [r for t in finished if not (r := t.of_policy(policy)).error]
    reward_sum = sum(rollout.reward or 0.0 for rollout in asked_rollouts)
    tally.mean(f"{policy}/asked_share", len(asked_rollouts), len(finished))
    tally.mean(f"{policy}/reward_mean", reward_sum, len(asked_rollouts))


def count_rewards(
    tally: Tally, trajectories: Sequence[Trajectory], has_functions: bool = True
) -> None:
    """Count each part of the reward over the rollouts that have it, be it given by a function or
    reported; with functions, the rollouts that they failed, by reason.
    """
    for trajectory in trajectories:
        for part, value in trajectory.reward_parts.items():
            tally.mean(f"reward/{part}", value, 1)
    if has_functions:
        failures = Counter(failure_of(t.scored_by) for t in trajectories if t.error)
        tally.add({f"reward_failures/{reason}": failures[reason] for reason in FAILURES})


def count_kept(tally: Tally, trajectories: Sequence[Trajectory], max_kept: int) -> None:
    """Count how many tokens the policies' were sampled from, and for how many tokens these were
    `max_kept`, the number allowed; 0: no limit.
    """
    calls = [call for t in trajectories for turn in t.turns for call in turn.calls.values()]
    masks = [call.sampling_mask for call in calls if call.sampling_mask]
    counts = [count for mask in masks for count in mask.counts]
    if max_kept and counts:
        tally.mean("kept_tokens_mean", sum(counts), len(counts))
        tally.mean("kept_at_cap_share", sum(count >= max_kept for count in counts), len(counts))


def count_rescued(tally: Tally, trajectories: Sequence[Trajectory]) -> None:
    """Count the turns, and for the generator the rollouts, that each rule of lenient parsing helped
    to read.
    """
    num_by_rule: Counter[str] = Counter()
    for trajectory in trajectories:
        num_by_rule.update(trajectory.rescued)
        for turn in trajectory.turns:
            num_by_rule.update(turn.rescued)
    num_turns = sum(len(trajectory.turns) for trajectory in trajectories)
    for rule in RULES:
        num_read = len(trajectories) if rule.startswith("generator/") else num_turns
        tally.mean(f"{_RESCUED}{rule}", num_by_rule[rule], num_read)


def count_verdicts(tally: Tally, trajectories: Sequence[Trajectory]) -> None:
    """Count the verdicts of the verifier, and its tokens. Only tasks with rules of their own have
    verdicts to agree with.
    """
    for name in ("malformed", "stop"):
        tally.mean(f"verifier/{name}_share", 0, 0)
    for trajectory in trajectories:
        num_tokens = trajectory.num_tokens("verifier") - trajectory.num_shared("verifier")
        tally.add({"verifier/num_sampled_tokens": num_tokens})
        for turn, memory in _judged(trajectory):
            verdict, rules = read_verdict(turn.verdict_text)
            tally.mean("verifier/malformed_share", verdict is None or bool(rules), 1)
            tally.mean("verifier/stop_share", turn.verdict is Verdict.STOP, 1)
            if trajectory.task.rules:
                is_alike = turn.verdict is RuleVerifier().verdict(trajectory.task, memory)
                tally.mean("verifier/agreement_share", is_alike, 1)


def _judged(trajectory: Trajectory) -> Iterator[tuple[Turn, Memory]]:
    """Yield each turn that a verifier policy decided on, with the memory that the policy read."""
    memory = Memory()
    for turn in trajectory.turns:
        memory = memory.add(MemoryEntry.of(turn))
        if "verifier" in turn.calls:
            yield turn, memory


def count_evidence(tally: Tally, trajectories: Sequence[Trajectory]) -> None:
    """Count the refiner's replies that left the passages as they were, and the characters of
    evidence to those of the passages that it stands for.
    """
    tally.mean("refiner/empty_share", 0, 0)
    tally.mean("refiner/kept_share", 0, 0)
    for turn in (turn for trajectory in trajectories for turn in trajectory.turns):
        if "refiner" in turn.calls:
            tally.mean("refiner/empty_share", not turn.evidence, 1)
        if "refiner" in turn.calls and turn.evidence:
            num_chars = sum(len(tool_call.result.output) for tool_call in turn.tool_calls)
            tally.mean("refiner/kept_share", len(turn.evidence), num_chars)
