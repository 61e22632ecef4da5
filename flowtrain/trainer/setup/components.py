"""The components of a run, built from its config.

`train.py`, `rft.py`, nodes and evaluations use the components. All checks of the input happen here,
before the run folder exists.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from flowtrain.agents.agentflow.build import check_room, make_policy
from flowtrain.agents.base import Agent, AgentContext
from flowtrain.agents.registry import AgentKind, load_kind
from flowtrain.algorithms import Algorithm, load_algorithm
from flowtrain.config import Config, Reward
from flowtrain.config.options import to_toml
from flowtrain.inference.chat_engines import ChatEngines, make_chat_engines
from flowtrain.inference.factory import (
    ModelSpec,
    make_adapter_engines,
    make_engine,
    shared_policies,
)
from flowtrain.inference.protocol import Engine, NoEngine
from flowtrain.inference.requests import name_stop_ids
from flowtrain.inference.token_chat import pass_to_template
from flowtrain.logging import RunDir, manifest
from flowtrain.records import PolicyName, UserError
from flowtrain.rewards import Judge, JudgeCache, RewardFunctions
from flowtrain.rewards.references import check_tasks
from flowtrain.tasks.sets import TaskSet, task_set, without_tasks
from flowtrain.tools import Tool
from flowtrain.tools.registry import make_tools
from flowtrain.tools.sandbox import confine_checkers
from flowtrain.trainer.devices import keep_freed_memory, threads_per_rank
from flowtrain.trainer.distributed import World
from flowtrain.trainer.model.loading import load_model
from flowtrain.trainer.model.lora import add_adapter
from flowtrain.trainer.setup.memory_plan import MemoryPlan
from flowtrain.trainer.setup.placement import Placement, memory_of, with_token_budget
from flowtrain.trainer.setup.tiny_policy import new_policy
from flowtrain.utils.seeds import derive_seed
from flowtrain.utils.waiting import waiting
from flowtrain.weights import Source
from flowtrain.weights.ranks import on_all_ranks

Scoring = tuple[Judge | None, RewardFunctions | None, Reward | None]
"""The judge, the reward functions and the bounds of rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerComponents:
    """The components of the learning half of a run."""

    placement: Placement
    algorithm: Algorithm
    tokenizer: PreTrainedTokenizerFast
    model: PreTrainedModel
    """The policy that is trained, not sharded yet: on the main rank fp32 master weights on the CPU
    or, with [lora], frozen ones in model.dtype and an adapter in fp32; on others the meta device.
    """
    policies: Mapping[PolicyName, ModelSpec]
    """All policies of the flow; none if nothing is sampled."""

    @classmethod
    def load(cls, config: Config, placement: Placement) -> LearnerComponents:
        """Load the components for training on stored rollouts, without sampling or scoring.

        Tasks are loaded only for model.path = "tiny", whose tokenizer is trained on them.
        """
        algorithm = _begin(config, placement.world)
        config = algorithm.config
        tasks = task_set(config) if config.model.path == "tiny" else TaskSet((), {}, ())
        tokenizer, model = _load_policy(config, tasks, placement.world)
        return cls(
            placement=placement,
            algorithm=with_token_budget(algorithm, model, {}, placement),
            tokenizer=tokenizer,
            model=model,
            policies={},
        )

    @property
    def config(self) -> Config:
        """The run's config, with values from the algorithm and the memory plan filled in."""
        return self.algorithm.config

    @property
    def world(self) -> World:
        return self.placement.world

    def plan_memory(self) -> MemoryPlan:
        """Return the predicted memory of a step on a training rank."""
        return memory_of(self.config, self.algorithm, self.model, self.policies, self.placement)

    def open_run_dir(self, facts: Mapping[str, Any] | None = None) -> RunDir:
        """Create the run folder, or open it to resume, and return it; collective.

        `facts` are for the manifest.
        """
        run = self.config.run
        path = Path(run.dir)
        resumes = run.resume == "auto" and (path / "manifest.json").exists()

        def create() -> None:
            if self.world.is_main and not resumes:
                run_facts = manifest(run.seed, sys.argv, self.world.size)
                RunDir.create(path, to_toml(self.config), {**run_facts, **(facts or {})})

        on_all_ranks(self.world, create, other_failed=UserError)
        return RunDir.open(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComponents(LearnerComponents):
    """The components of a sampling run, a node or an evaluation. Closing them closes the engines
    that they have started.
    """

    tasks: TaskSet
    chats: ChatEngines
    """The models behind the roles of the flow, the tools and the judge."""
    tools: dict[str, Tool]
    """By name; `agent.tools` may name a file, or all tools of an MCP server."""
    agent_kind: AgentKind
    reward_functions: RewardFunctions | None
    judge: Judge | None
    """None where `roles.judge` says so."""
    cleanup: ExitStack
    """Closes started components, the last first."""

    @classmethod
    def prepare(
        cls,
        config: Config,
        placement: Placement,
        *,
        asked_policies: Collection[PolicyName] | None = None,
        extra_roles: Mapping[str, str] | None = None,
        fictional: bool = False,
        is_node: bool = False,
    ) -> RunComponents:
        """Load and check all components; writes only the judge's cache.

        Args:
            asked_policies: policies to sample from; None: all. Others need no model unless they are
                trained: their scripts write in the tokens of the trained one.
            extra_roles: names in [engines] of models in roles outside of [roles].
            fictional: questions are about fictional entities.
            is_node: tasks come one by one, and all weights from a store. Tasks are loaded for
                model.path = "tiny" alone, whose tokenizer is trained on them.
        """
        world = placement.world
        algorithm = _begin(config, world)
        config = algorithm.config
        policy, loads_tasks = config.train.policy, not is_node or config.model.path == "tiny"
        asked_policies = config.policy_names if asked_policies is None else asked_policies
        reward_functions = RewardFunctions.load(config.reward, config.policy_names)
        with waiting("reading the questions", world.is_main):
            tasks = task_set(config, fictional) if loads_tasks else without_tasks(config)
        has_judge = config.roles.judge != "none"
        # One rank reads through all tasks; where it refuses one, all ranks end.
        on_all_ranks(
            world,
            lambda: check_tasks(tasks, reward_functions, has_judge) if world.is_main else None,
            other_failed=UserError,
        )
        # What others say may be collected without a model that says it.
        needs_weights = not is_node and (policy in asked_policies or not config.rft.collect_only)
        tokenizer, model = _load_policy(config, tasks, world, needs_weights)
        trained_spec = ModelSpec.of("model.path", config.model.path, tokenizer, model)
        policies = {
            name: trained_spec
            if name == policy or name not in asked_policies
            else ModelSpec.load(*config.path_of(name))
            for name in config.policy_names
        }
        algorithm = with_token_budget(algorithm, model, policies, placement)
        config = algorithm.config
        confine_checkers(config.agent)
        agent_kind = load_kind(config)
        algorithm.check_agent(agent_kind)
        for name, spec in policies.items():
            check_room(config, name, spec.max_positions)
            pass_to_template(spec.tokenizer, config.model.chat_template_kwargs)
        first_tokenizer = policies[config.first_policy].tokenizer
        with ExitStack() as cleanup:  # frees what has started when a later part cannot
            chats, tools = start_tools(
                config, tasks, first_tokenizer, world.device, extra_roles or {}, cleanup
            )
            if tasks.train:
                algorithm.check_inputs(tasks, tools)
            agent_kind.check(config, first_tokenizer)
            judge = make_judge(config, chats)
            open_parts = cleanup.pop_all()
        return cls(
            placement=placement,
            algorithm=algorithm,
            tokenizer=tokenizer,
            model=model,
            policies=policies,
            tasks=tasks,
            chats=chats,
            tools=tools,
            agent_kind=agent_kind,
            reward_functions=reward_functions,
            judge=judge,
            cleanup=open_parts,
        )

    def beside(self, policy: PolicyName) -> RunComponents:
        """Load another policy that the run trains: the same parts, but for what learns; collective.
        They are not closed.
        """
        algorithm = load_algorithm(self.config.beside(policy))
        algorithm.check_agent(self.agent_kind)
        tokenizer, model = _load_policy(algorithm.config, self.tasks, self.world)
        return replace(
            self,
            algorithm=algorithm,
            tokenizer=tokenizer,
            model=model,
            chats=ChatEngines({}, self.chats.roles),  # the first policy's count and close them
            judge=None,
        )

    def show_sources(self) -> None:
        """Print one line per dataset about how it is read, on the main rank."""
        if self.world.is_main:
            for source in self.tasks.sources:
                print(source.text())

    def make_policy_engines(
        self,
        stores: Mapping[str, Source],
        asked_policies: Collection[PolicyName] | None = None,
        *,
        branches: bool = False,
    ) -> dict[str, Engine]:
        """Start an engine for each policy, by name, whose weights come from its store by version.

        A policy without a store is frozen at the weights of its path. A policy outside of
        `asked_policies`, if given, gets a stand-in. `branches`: branch points are chosen by what
        the engines say of their tokens.
        """
        asked_policies = self.config.policy_names if asked_policies is None else asked_policies
        engines: dict[str, Engine] = {
            name: NoEngine(policy.max_positions) for name, policy in self.policies.items()
        }
        shared = [
            name for name in shared_policies(self.config, self.policies) if name in asked_policies
        ]
        records_entropies = branches or self.algorithm.records_entropies
        with waiting(f"starting the engine ({self.config.rollout.engine})", self.world.is_main):
            if shared:
                engines |= make_adapter_engines(
                    self.config,
                    self.policies[shared[0]],
                    self.world.device,
                    {name: stores.get(name) for name in shared},
                    records_entropies=records_entropies,
                )
            for name in asked_policies:
                if name not in shared:
                    engines[name] = make_engine(
                        self.config,
                        self.policies[name],
                        device=self.world.device,
                        store=stores.get(name),
                        records_entropies=records_entropies,
                    )
                self.cleanup.callback(engines[name].close)
        self.chats.bind(engines[self.config.first_policy])
        return engines

    def make_agent(
        self,
        engines: Mapping[str, Engine],
        max_turns: int,
        temperature: float | None = None,
        sampled: Counter[PolicyName] | None = None,
    ) -> Agent:
        """Return the agent that `agent.name` selects; the caller closes it.

        Args:
            engines: those of `make_policy_engines`.
            temperature: of all policies; None: each has its own.
            sampled: counts the tokens that its policies sample.
        """
        policies = {
            name: make_policy(
                self.config, name, engines[name], policy.tokenizer, temperature, sampled
            )
            for name, policy in self.policies.items()
        }
        roles = self.chats.roles
        return self.agent_kind.make(
            AgentContext(self.config, policies, self.tools, roles, max_turns)
        )

    def scoring(self, is_benchmark: bool = False) -> Scoring:
        """Return the scoring of rollouts; benchmarks use their own rules instead of functions."""
        functions, bounds = self.reward_functions, self.config.reward
        return (self.judge, None, None) if is_benchmark else (self.judge, functions, bounds)

    def close(self) -> None:
        self.cleanup.close()


def lock_run_dir(config: Config, world: World) -> ExitStack:
    """Hold the lock of the run folder until the result is closed; collective.

    Raises UserError on every rank if another process holds the lock.
    """
    cleanup, folder = ExitStack(), Path(config.run.dir)

    def lock() -> None:
        cleanup.enter_context(RunDir.lock(folder, "--run.dir"))

    on_all_ranks(world, lock if world.is_main else lambda: None, other_failed=UserError)
    return cleanup


def start_tools(
    config: Config,
    tasks: TaskSet,
    tokenizer: PreTrainedTokenizerFast | None,
    device: torch.device,
    extra_roles: Mapping[str, str],
    cleanup: ExitStack,
) -> tuple[ChatEngines, dict[str, Tool]]:
    """Start the models of `make_chat_engines` and the tools, which `cleanup` closes."""
    chats = make_chat_engines(config, tokenizer, device, extra_roles)
    cleanup.callback(chats.close)
    tools = make_tools(config, tasks, chats.roles.get("tools"), chats.roles)
    for tool in tools.values():
        cleanup.callback(tool.close)
    return chats, tools


def make_judge(config: Config, chats: ChatEngines) -> Judge | None:
    """Return the judge behind the rules; None without `roles.judge`."""
    engine = chats.roles.get("judge")
    return Judge(engine, JudgeCache(Path(config.judge.cache)), config.judge) if engine else None


def _load_policy(
    config: Config, tasks: TaskSet, world: World, needs_weights: bool = True
) -> tuple[PreTrainedTokenizerFast, PreTrainedModel]:
    """Load the policy that is trained: the main rank its weights, if any are needed; collective."""
    with waiting(f"loading {config.model.path}", world.is_main):
        load = partial(load_trained_policy, config, tasks, needs_weights and world.is_main)
        tokenizer, model = on_all_ranks(world, load, other_failed=UserError)
    if not needs_weights:
        model.to("meta")  # a "tiny" one has some all the same
    return tokenizer, model


def load_trained_policy(
    config: Config, tasks: TaskSet, with_weights: bool
) -> tuple[PreTrainedTokenizerFast, PreTrainedModel]:
    """Load the tokenizer and the model that `[model]` names, or make new ones; with the adapter of
    `[lora]`, if it asks for one. Without weights, the model is on the meta device, and what it
    computes in the end is the same.
    """
    path = config.model.path
    if path == "tiny":
        tokenizer, model = new_policy(config, tasks)
    else:
        spec = ModelSpec.load("model.path", path)
        tokenizer = spec.tokenizer
        # Trained weights are fp32 masters; under an adapter all are frozen, in model.dtype.
        dtype = getattr(torch, config.model.dtype) if config.lora.rank else torch.float32
        model = load_model(path, dtype) if with_weights else spec.without_weights()
        name_stop_ids(model.generation_config, tokenizer)  # what is saved ends replies by itself
    if config.lora.rank:
        torch.manual_seed(derive_seed(config.run.seed, "new adapter"))
        add_adapter(model, config.lora, path)
    return tokenizer, model


def _begin(config: Config, world: World) -> Algorithm:
    """Make the algorithm, whose config is the run's, and set up the CPU."""
    algorithm = load_algorithm(config)
    torch.set_num_threads(threads_per_rank(algorithm.config.run.threads))
    if world.device.type == "cpu":
        keep_freed_memory()
    return algorithm
