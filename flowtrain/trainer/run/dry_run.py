"""Dry run of a training run, `--run.dry_run true`: loads and checks all inputs, shows two scored
rollouts, and writes nothing.

A single rank does the work; the others only join, so that the memory plan covers all ranks. A model
that is made for the run, and the verdicts of a judge, pass through a temporary folder.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowtrain.agents.agentflow.flow import Flow
from flowtrain.agents.agentflow.scripts import scripted
from flowtrain.agents.base import Agent
from flowtrain.config import Config
from flowtrain.evaluation.benchmarks import load_benchmarks
from flowtrain.evaluation.evaluator import roll_out
from flowtrain.inference.chat_engines import teacher_role
from flowtrain.inference.protocol import EngineError, NoEngine
from flowtrain.inference.vllm.process import check_installed
from flowtrain.records import Call, FinishReason, Sampling, Task, Trajectory, Turn, UserError
from flowtrain.trainer.distributed import World
from flowtrain.trainer.setup.components import RunComponents
from flowtrain.trainer.setup.learner import publish_start
from flowtrain.trainer.setup.placement import Placement
from flowtrain.utils.errors import user_error
from flowtrain.utils.event_loop import run_to_end
from flowtrain.utils.seeds import derive_seed
from flowtrain.utils.terminal import hand_out
from flowtrain.utils.text import printable
from flowtrain.weights import WeightStore

NUM_PROMPTS = 200
"""Number of tasks whose first prompts are measured."""
NUM_ROLLOUTS = 2
_LIMITS = {
    FinishReason.LENGTH: ", by rollout.max_new_tokens = {limit}",
    FinishReason.DEADLINE: ", by rollout.request_timeout_s = {config.rollout.request_timeout_s:g}",
}
"""Options that cut a response, where the agent itself asked for no less."""
_BUILT_IN_AGENTS = ("agentflow", "single", "tools")
"""Agents whose first prompt depends on the question alone, and costs nothing to make."""


def dry_run(config: Config) -> int:
    """Print a preview of a run on the main rank, and return the exit code.

    Raises UserError for any problem that would prevent the run from starting.
    """
    with ExitStack() as cleanup:
        world = World.join(config.run.device)
        cleanup.callback(world.leave)
        placement = Placement.of(config, world)
        if not world.is_main:
            return 0
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="flowtrain-dry-")))
        judge = config.judge.model_copy(update={"cache": str(folder / "judge.sqlite")})
        config = config.model_copy(update={"judge": judge})
        alone = World(0, 1, world.device)
        placement, roles = Placement(alone, placement.trainers, alone), teacher_role(config)
        components = RunComponents.prepare(config, placement, extra_roles=roles)
        cleanup.callback(components.close)
        for name in config.trained_beside:
            components.beside(name)
        components.show_sources()
        for name, tasks in load_benchmarks(components.config).items():
            _say(f"benchmark {name}: {len(tasks)} questions, {tasks[0].question!r} first")
        _say(_prompt_lengths(components))
        plan = components.plan_memory()
        plan.check(components.config)
        _say(plan.text())
        rollouts = _roll_out(components, folder, cleanup)
        for number, trajectory in enumerate(rollouts, start=1):
            _say(f"\n==== rollout {number} of {len(rollouts)}")
            for line in _RolloutText(components, trajectory).lines():
                _say(line)
        _say("\ndry run finished: nothing was written")
        if all(trajectory.error for trajectory in rollouts):
            raise UserError(f"all rollouts failed, the first with: {rollouts[0].error}")
    return 0


# ---- prompts


class _FirstPrompt(BaseException):
    """The first prompt is there, so that its rollout can end; no agent takes it for a failure."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens


class _PromptMeter(NoEngine):
    """Takes a prompt of any length and ends the rollout."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Call:
        raise _FirstPrompt(len(prompt_ids))


def _prompt_lengths(components: RunComponents) -> str:
    """Return the lengths of some tasks' first prompts, without an analyst's text."""
    config = components.config
    if config.agent.name not in _BUILT_IN_AGENTS or config.agent.environment:
        return "first prompts: see the rollouts below, because third-party code writes them"
    roles = config.roles.model_copy(update={"analyst": "none"})
    config = config.model_copy(update={"roles": roles})
    components = replace(components, algorithm=components.algorithm.with_config(config))
    tasks = components.tasks.train[:NUM_PROMPTS]
    agent = components.make_agent(
        {name: _PromptMeter(1 << 40) for name in components.policies}, config.agent.max_turns
    )
    try:
        lengths = run_to_end(_first_prompts(agent, tasks))
    finally:
        agent.close()
    positions = components.policies[config.first_policy].max_positions
    max_prompt_tokens = positions - config.rollout.max_new_tokens
    too_long = sum(length > max_prompt_tokens for length in lengths)
    return (
        f"first prompts of {len(lengths)} tasks: {min(lengths)} to {max(lengths)} tokens, median "
        f"{statistics.median(lengths):g}; the model has {positions} positions, and a response "
        f"takes up to {config.rollout.max_new_tokens}"
        + (f": {too_long} prompts are too long" if too_long else "")
    )


async def _first_prompts(agent: Agent, tasks: Sequence[Task]) -> list[int]:
    lengths = []
    for task in tasks:
        try:
            trajectory = await agent.run(task, 0)
        except _FirstPrompt as prompt:
            lengths.append(prompt.num_tokens)
        else:
            raise UserError(
                f"task {task.id} has no prompt: "
                f"{trajectory.error or 'the agent sampled no response'}"
            )
    return lengths


# ---- rollouts


def _roll_out(
    components: RunComponents, folder: Path, cleanup: ExitStack
) -> tuple[Trajectory, ...]:
    """Return scored rollouts of the first questions of a step."""
    config = components.config
    agent = _agent(components, folder, cleanup)
    tasks = components.tasks.cursor(config.run.seed, 0).take(NUM_ROLLOUTS)
    with user_error("the rollouts failed", EngineError):
        return roll_out(
            components, agent, tasks, derive_seed(config.run.seed, "train", 1), "a dry run"
        )


def _agent(components: RunComponents, folder: Path, cleanup: ExitStack) -> Agent:
    """Return the run's agent, with an expert in place of a policy without an installed engine."""
    config = components.config
    missing_reason = _missing_engine(config)
    if missing_reason:
        engines = components.make_policy_engines({}, ())
        agent = components.make_agent(engines, config.agent.max_turns)
        cleanup.callback(agent.close)
        if not isinstance(agent, Flow) or not all(task.plan for task in components.tasks.train):
            raise UserError(f"{missing_reason}; and no scripted expert can solve these tasks")
        _say(f"rollouts of a scripted expert, because the engine is unavailable: {missing_reason}")
        return scripted(agent, 0.0)
    stores = {}
    if config.model.path == "tiny":  # which no folder has
        stores[config.train.policy] = WeightStore(folder / "weights")
        publish_start(components, stores[config.train.policy])
    engines = components.make_policy_engines(stores)
    for name in stores:
        engines[name].load(0)
    _say(f"rollouts of {config.model.path} with rollout.engine={config.rollout.engine!r}")
    agent = components.make_agent(engines, config.agent.max_turns)
    cleanup.callback(agent.close)
    return agent


def _missing_engine(config: Config) -> str:
    """Return why the policies' engine is unavailable; "" if it is available."""
    try:
        if config.rollout.engine == "vllm":
            check_installed()
    except UserError as error:
        return str(error)
    return ""


# ---- what people see


def _say(text: str) -> None:
    hand_out(printable(text))


@dataclass(frozen=True, slots=True)
class _RolloutText:
    """A rollout as text, in full: of a prompt that goes on from the one before, the new part."""

    components: RunComponents
    trajectory: Trajectory

    def lines(self) -> Iterator[str]:
        rollout = self.trajectory
        yield f"task {rollout.task.id}: {rollout.task.question}"
        yield from _labelled("analysis", rollout.analysis)
        previous_ids: dict[str, tuple[int, ...]] = {}
        for number, turn in enumerate(rollout.turns, start=1):
            yield f"---- turn {number}"
            for name, call in turn.calls.items():
                yield from self._call(name, call, previous_ids.get(name, ()))
                previous_ids[name] = call.prompt_ids + call.response_ids
            yield from _turn_results(turn)
            if self.components.config.agent.name == "agentflow":
                yield f"verdict: {turn.verdict}"
        yield "----"
        yield from _labelled("failed", rollout.error)
        yield from _labelled("ended early", rollout.truncated)
        yield f"answer: {rollout.answer}"
        accepted = " | ".join(rollout.task.answers)
        yield from _labelled("accepted", accepted)
        reward_parts = {**rollout.reported, **rollout.reward_parts}
        parts_text = "".join(f", {name} {value:g}" for name, value in reward_parts.items())
        yield f"reward: {rollout.reward} (scored by {rollout.scored_by or 'nobody'}{parts_text})"

    def _call(self, name: Any, call: Any, previous_ids: tuple[int, ...]) -> Iterator[str]:
        decode = self.components.policies[name].tokenizer.decode
        config = self.components.config
        prompt_ids, num_previous = call.prompt_ids, len(previous_ids)
        continues = bool(previous_ids) and prompt_ids[:num_previous] == previous_ids
        new_ids = prompt_ids[num_previous:] if continues else prompt_ids
        prefix_note = f", the first {num_previous} as above" if continues else ""
        policy_word, finish_text = config.word_for(name), str(call.finish_reason)
        limit = config.sampling_of(name).max_new_tokens
        if call.finish_reason != FinishReason.LENGTH or len(call.response_ids) == limit:
            finish_text += _LIMITS.get(call.finish_reason, "").format(limit=limit, config=config)
        yield f"{policy_word} reads {len(prompt_ids)} tokens{prefix_note}:\n{decode(list(new_ids))}"
        yield f"{policy_word} writes {len(call.response_ids)} tokens ({finish_text}):\n{call.text}"


def _turn_results(turn: Turn) -> Iterator[str]:
    """Return the results of a turn as text."""
    for tool_call in turn.tool_calls:
        yield f"tool {tool_call.name}({tool_call.arguments}): {tool_call.result.text}"
    if turn.problem:
        yield f"malformed: {turn.problem}"
    if turn.evidence:
        yield f"evidence: {turn.evidence}"


def _labelled(label: str, text: str) -> list[str]:
    return [f"{label}: {text}"] if text else []
