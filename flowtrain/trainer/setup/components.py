"""Everything that a run is made of, built from its config.

`train.py`, `rft.py`, nodes and evaluations say what is done with the parts. Everything that can be
wrong with the input is found out here, before the run folder is made.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from flowtrain.agents.agentflow.build import check_room, make_policy
from flowtrain.agents.base import Agent, AgentContext
from flowtrain.agents.registry import AgentKind, load_kind
from flowtrain.algorithms import Algorithm, load_algorithm
from flowtrain.config import Config
from flowtrain.config.options import to_toml
from flowtrain.inference.chat_engines import TEACHER, ChatEngines, make_chat_engines
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
from flowtrain.rollouts.contract import Register
from flowtrain.tasks.sets import TaskSet, task_set, without_tasks
from flowtrain.tools import Tool
from flowtrain.tools.registry import make_tools
from flowtrain.tools.sandbox import confine_checkers
from flowtrain.trainer.devices import keep_freed_memory, threads_per_rank
from flowtrain.trainer.distributed import World
from flowtrain.trainer.model.loading import load_model
from flowtrain.trainer.model.lora import add_adapter
from flowtrain.trainer.setup.memory_plan import MemoryPlan, plan_memory
from flowtrain.trainer.setup.placement import Placement
from flowtrain.trainer.setup.tiny_policy import new_policy
from flowtrain.utils.seeds import derive_seed
from flowtrain.utils.waiting import waiting
from flowtrain.weights import Source
from flowtrain.weights.ranks import together


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerComponents:
    """The parts of the half of a run that learns."""

    world: World
    algorithm: Algorithm
    tokenizer: PreTrainedTokenizerFast
    model: PreTrainedModel
    """The policy that is trained, not sharded yet: on the main rank fp32 master weights on the CPU
    or, with [lora], frozen ones in model.dtype and an adapter in fp32; on others the meta device.
    """

    @classmethod
    def load(cls, config: Config, world: World) -> LearnerComponents:
        """Load what training from stored rollouts takes; nothing can be asked or scored.

        Tasks are loaded only for model.path = "tiny", whose tokenizer is trained on them.
        """
        algorithm = _begin(config, world)
        config = algorithm.config
        tasks = task_set(config) if config.model.path == "tiny" else TaskSet((), {}, ())
        load = partial(load_trained_policy, config, tasks, with_weights=world.is_main)
        tokenizer, model = together(world, load, other_failed=UserError)
        return cls(world=world, algorithm=algorithm, tokenizer=tokenizer, model=model)

    @property
    def config(self) -> Config:
        """The run's, with what it leaves to the algorithm filled in."""
        return self.algorithm.config

    def with_config(self, config: Config) -> Self:
        """Return the same parts under another config."""
        return replace(self, algorithm=self.algorithm.with_config(config))

    @property
    def sampled_sizes(self) -> Sequence[int]:
        """Numbers of parameters of the models that engines of this run hold."""
        return ()

    @property
    def size_beside(self) -> int:
        """Number of parameters of the models that are trained beside this one."""
        return 0

    def plan_memory(self, placement: Placement) -> MemoryPlan:
        """Predict the memory of a step of a rank that trains."""
        device = placement.world.device
        is_gpu = device.type == "cuda"
        return plan_memory(
            self.config,
            self.model,
            self.sampled_sizes,
            size_beside=self.size_beside,
            num_ranks=placement.trainers.size,
            gpu_bytes=torch.cuda.get_device_properties(device).total_memory if is_gpu else 0,
            has_reference=self.algorithm.needs_reference,
        )

    def open_run_dir(self, facts: Mapping[str, Any] | None = None) -> RunDir:
        """Create the folder of the run, or open it to resume; collective, the same on every rank.

        `facts` are for the manifest.
        """
        run = self.config.run
        path = Path(run.dir)
        resumes = run.resume == "auto" and (path / "manifest.json").exists()

        def create() -> None:
            if self.world.is_main and not resumes:
                begun = manifest(run.seed, sys.argv, self.world.size)
                RunDir.create(path, to_toml(self.config), {**begun, **(facts or {})})

        together(self.world, create, other_failed=UserError)
        return RunDir.open(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComponents(LearnerComponents):
    """The parts of a run that samples too, of a node or of an evaluation; close them, and with them
    the engines that they have started, when done.
    """

    tasks: TaskSet
    policies: Mapping[PolicyName, ModelSpec]
    """All policies of the flow."""
    chats: ChatEngines
    """The models behind the roles of the flow, the tools and the judge."""
    tools: dict[str, Tool]
    """By name; `agent.tools` may name a file, or all tools of an MCP server."""
    agent_kind: AgentKind
    reward_functions: RewardFunctions | None
    cleanup: ExitStack
    """Closes what was started, the last first."""

    @classmethod
    def prepare(
        cls,
        config: Config,
        world: World,
        *,
        fictional: bool = False,
        scripted: bool = False,
        with_weights: bool = True,
        with_tasks: bool = True,
        teacher: str = "",
    ) -> RunComponents:
        """Load and check everything; write nothing.

        Args:
            fictional: the questions are about made-up entities.
            scripted: no policy is asked anything. Policies that are not trained then need no model;
                their scripts write in the tokens of the one that is.
            with_weights: the policy is trained or asked; else its shape and tokenizer will do.
            with_tasks: else tasks come one by one, as to a node; they are loaded for
                model.path = "tiny" alone, whose tokenizer is trained on them.
            teacher: the name in [engines] of a model that demonstrates; "": there is none.
        """
        algorithm = _begin(config, world)
        config = algorithm.config
        functions = RewardFunctions.load(config.reward, config.policy_names)
        with waiting("reading the questions", world.is_main):
            is_given = with_tasks or config.model.path == "tiny"
            tasks = task_set(config, fictional) if is_given else without_tasks(config)
        has_judge = config.roles.judge != "none"
        together(
            world,
            lambda: check_tasks(tasks, functions, has_judge) if world.is_main else None,
            other_failed=UserError,
        )
        with waiting(f"loading {config.model.path}", world.is_main):
            has_weights = with_weights and world.is_main
            load = partial(load_trained_policy, config, tasks, has_weights)
            tokenizer, model = together(world, load, other_failed=UserError)
        if not with_weights:
            model.to("meta")  # a "tiny" one has some all the same
        trained = ModelSpec.of("model.path", config.model.path, tokenizer, model)
        policies = {
            name: trained
            if scripted or name == config.train.policy
            else ModelSpec.load(*config.path_of(name))
            for name in config.policy_names
        }
        confine_checkers(config.agent)
        agent_kind = load_kind(config)
        algorithm.check_agent(agent_kind)
        for name, policy in policies.items():
            check_room(config, name, policy.max_positions)
            pass_to_template(policy.tokenizer, config.model.chat_template_kwargs)
        with ExitStack() as cleanup:  # frees what has started when a later part cannot
            first_tokenizer = policies[config.first_policy].tokenizer
            others = {TEACHER: teacher} if teacher else {}
            chats = make_chat_engines(config, first_tokenizer, world.device, others)
            cleanup.callback(chats.close)
            tools = make_tools(config, tasks, chats.roles.get("tools"), chats.roles)
            for tool in tools.values():
                cleanup.callback(tool.close)
            if tasks.train:
                algorithm.check_inputs(tasks, tools)
            agent_kind.check(config, first_tokenizer)
            started = cleanup.pop_all()
        return cls(
            world=world,
            algorithm=algorithm,
            tokenizer=tokenizer,
            model=model,
            tasks=tasks,
            policies=policies,
            chats=chats,
            tools=tools,
            agent_kind=agent_kind,
            reward_functions=functions,
            cleanup=started,
        )

    def show_sources(self) -> None:
        """Print how the files of questions are read, a line each, on the main rank."""
        if self.world.is_main:
            for source in self.tasks.sources:
                print(source.text())

    @property
    def sampled_sizes(self) -> Sequence[int]:
        if not self.config.samples_here:
            return ()
        shared = shared_policies(self.config, self.policies)[1:]  # the first has the weights
        return [spec.num_parameters() for name, spec in self.policies.items() if name not in shared]

    @property
    def size_beside(self) -> int:
        return sum(self.policies[name].num_parameters() for name in self.config.trained_beside)

    def registration(self, step: int) -> Register:
        """Describe the trained policy to the dataflow, for a run that goes on at `step`."""
        config, shape = self.config, self.model.config
        dtype = getattr(torch, config.model.dtype)
        return Register(
            policy=config.train.policy,
            layout=self.policies[config.train.policy].layout(dtype, config.lora),
            store=config.dataflow.store or str((Path(config.run.dir) / "weights").resolve()),
            num_groups=config.rollout.num_questions,
            max_staleness=config.dataflow.max_staleness,
            vocab_size=shape.vocab_size,
            max_positions=shape.max_position_embeddings,
            step=step,
        )

    def make_policy_engines(
        self,
        stores: Mapping[str, Source],
        names: Collection[PolicyName] | None = None,
        *,
        branches: bool = False,
    ) -> dict[str, Engine]:
        """Start an engine for each policy, by name, whose weights come from its store by version.

        A policy without a store is frozen at the weights of its path. One that is not among the
        `names`, if these are given, is asked nothing and gets a stand-in. `branches`: branch points
        are chosen by what the engines say of their tokens.
        """
        engines = self.make_no_engines()
        asked = list(self.policies if names is None else names)
        shared = [name for name in shared_policies(self.config, self.policies) if name in asked]
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
            for name in asked:
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

    def make_no_engines(self) -> dict[str, Engine]:
        """Stand in for the policy engines where none is asked."""
        return {name: NoEngine(policy.max_positions) for name, policy in self.policies.items()}

    @property
    def branches(self) -> bool:
        """Whether some rollouts of a group leave others of it."""
        return self.algorithm.num_roots != self.config.rollout.group_size

    def make_agent(
        self,
        engines: Mapping[str, Engine],
        max_turns: int,
        temperature: float | None = None,
        sampled: Counter[PolicyName] | None = None,
    ) -> Agent:
        """Build the agent that `agent.name` asks for; close it when done.

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

    def make_judge(self) -> Judge | None:
        """Build the judge; None where `roles.judge` says so."""
        return make_judge(self.config, self.chats)

    def close(self) -> None:
        self.cleanup.close()


def lock_run_dir(config: Config, world: World) -> ExitStack:
    """Take the lock of the run's folder until the result is closed; collective.

    Raises UserError on every rank when another process has it.
    """
    cleanup = ExitStack()

    def lock() -> None:
        if world.is_main:
            cleanup.enter_context(RunDir.lock(Path(config.run.dir), "--run.dir"))

    together(world, lock, other_failed=UserError)
    return cleanup


def make_judge(config: Config, chats: ChatEngines) -> Judge | None:
    """Build the judge behind the rules; None where `roles.judge` says so."""
    engine = chats.roles.get("judge")
    if engine is None:
        return None
    return Judge(engine, JudgeCache(Path(config.judge.cache)), config.judge)


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
