"""The parts of a run, put together from its config; `train.py` and `rft.py` say what is done with
them.

Everything that can be wrong with the input is found out here, before the run folder is made.
"""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from flowkernels import LossSpec
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from flowtrain import report
from flowtrain.agents.build import make_flow, make_planner, make_prompt, make_tools, make_verifier
from flowtrain.agents.flow import Flow
from flowtrain.agents.prompts import PlannerPrompt
from flowtrain.config import Config
from flowtrain.config.options import to_toml
from flowtrain.engines.chat_engines import ChatEngines, make_chat_engines
from flowtrain.engines.factory import ModelSpec, make_engine
from flowtrain.engines.protocol import Engine, NoEngine
from flowtrain.report.run_dir import writing
from flowtrain.rewards import Judge, JudgeCache, score
from flowtrain.run import recipe
from flowtrain.tasks import sub_goals
from flowtrain.tasks.sets import TaskSet, task_set, without_tasks
from flowtrain.tools import Tool
from flowtrain.training import checkpoint
from flowtrain.training import model as models
from flowtrain.training.model import ShardSpec
from flowtrain.training.trainer import OptimSpec, Trainer
from flowtrain.training.world import World
from flowtrain.types import Group, PolicyName, Trajectory, UserError
from flowtrain.utils.seeds import derive_seed
from flowtrain.weights import Publisher, PublishOptions, Source, WeightStore


@dataclass(frozen=True, slots=True)
class RunComponents:
    """What training and fine-tuning have in common."""

    config: Config
    world: World
    tasks: TaskSet
    tokenizer: PreTrainedTokenizerFast
    model: PreTrainedModel
    """Of the policy that is trained: fp32 master weights on the CPU, not sharded yet."""
    policies: Mapping[PolicyName, ModelSpec]
    """All that sample in the flow, by name."""
    chats: ChatEngines
    """The models behind the roles of the flow, the tools and the judge."""
    tools: dict[str, Tool]
    prompt: PlannerPrompt

    @classmethod
    def prepare(
        cls, config: Config, world: World, fictional: bool = False, scripted: bool = False
    ) -> RunComponents:
        """Load and check everything; writes nothing.

        `fictional`: the questions are about made-up entities. `scripted`: no policy is asked
        anything, so that those which are not trained need no model; their scripts write in the
        tokens of the one that is.
        """
        _set_threads(config.run.threads)
        tasks = task_set(config, fictional)
        _check_scorers(tasks)
        _check_algorithm(config, tasks)
        tokenizer, model = _policy(config, tasks)
        trained = ModelSpec.of("model.path", config.model.path, tokenizer, model)
        policies = {
            name: trained
            if scripted or name == config.train.policy
            else ModelSpec.load(*config.path_of(name))
            for name in config.policy_names
        }
        return cls(
            config,
            world,
            tasks,
            tokenizer,
            model,
            policies,
            *_modules(config, world, tasks, policies["planner"].tokenizer),
        )

    @classmethod
    def to_sample(cls, config: Config, world: World) -> RunComponents:
        """For who is given tasks and weights, so that neither is loaded; only a new tokenizer has
        to be made of the tasks.
        """
        if config.model.path == "tiny":
            components = cls.prepare(config, world)
            components.model.to("meta")
            return components
        _set_threads(config.run.threads)
        tasks = without_tasks(config)
        policies = {name: ModelSpec.load(*config.path_of(name)) for name in config.policy_names}
        trained = policies[config.train.policy]
        modules = _modules(config, world, tasks, policies["planner"].tokenizer)
        return cls(
            config, world, tasks, trained.tokenizer, trained.without_weights(), policies, *modules
        )

    def open_run_dir(self, facts: Mapping[str, Any] | None = None) -> report.RunDir:
        """Create the folder of the run, or open it when it is to be resumed; every rank gets the
        same. `facts` are for the manifest.
        """
        run, path = self.config.run, Path(self.config.run.dir)
        resumes = run.resume == "auto" and (path / "manifest.json").exists()
        if self.world.is_main and not resumes:
            manifest = {**report.manifest(run.seed, sys.argv, self.world.size), **(facts or {})}
            report.RunDir.create(path, to_toml(self.config), manifest)
        self.world.barrier()
        return report.RunDir.open(path)

    def make_policy_engines(self, stores: Mapping[str, Source]) -> dict[str, Engine]:
        """What samples from each policy of the flow, by its name: its weights come from its store
        by version.

        A policy without a store is frozen: its weights are those at its path.
        """
        engines: dict[str, Engine] = {}
        with ExitStack() as cleanup:  # closes what has started when another cannot
            for name, policy in self.policies.items():
                engines[name] = make_engine(
                    self.config,
                    policy,
                    self.world.device,
                    stores.get(name),
                    records_entropies=recipe.sampler_tells_entropies(self.config),
                )
                cleanup.callback(engines[name].close)
            cleanup.pop_all()
        self.chats.bind(engines["planner"])
        return engines

    def make_no_engines(self) -> dict[str, Engine]:
        """In their place where nothing is sampled."""
        return {name: NoEngine(policy.max_positions) for name, policy in self.policies.items()}

    def make_publisher(self, store: WeightStore, trainers: World) -> Publisher:
        """Publishes the policy in the dtype that engines sample with; of those that train it."""
        w, dtype = self.config.weights, getattr(torch, self.config.model.dtype)
        return Publisher(
            store,
            PublishOptions(dtype, w.level, num_threads=torch.get_num_threads()),
            trainers,
        )

    def make_flow(
        self, engines: Mapping[str, Engine], max_turns: int, temperature: float | None = None
    ) -> Flow:
        """On the engines of `make_policy_engines`. `temperature`: of all policies; None: each has
        its own.
        """
        config, policies, tools = self.config, self.policies, self.tools
        planner = make_planner(
            config, engines["planner"], policies["planner"].tokenizer, self.prompt, temperature
        )
        verifier = None
        if "verifier" in policies:
            verifier = make_verifier(
                config, engines["verifier"], policies["verifier"].tokenizer, tools, temperature
            )
        return make_flow(config, planner, tools, max_turns, self.chats.roles, verifier)

    def make_judge(self) -> Judge | None:
        """None where `roles.judge` says so."""
        return make_judge(self.config, self.chats)

    def make_trainer(self, loss: LossSpec, optim: OptimSpec, trainers: World) -> Trainer:
        """Shards the model over those that train; with a KL term a frozen copy of it becomes the
        reference policy.
        """
        spec, reference = self._shard_spec(), None
        if loss.kl_coef > 0 or recipe.branches_against_reference(self.config):
            frozen = copy.deepcopy(self.model).requires_grad_(False).eval()
            reference = models.shard(frozen, trainers, replace(spec, recompute=False))
        model = models.shard(self.model, trainers, spec)
        _, temperature = self.config.sampling_of(self.config.train.policy)
        return Trainer(
            model, trainers, loss, optim, temperature, reference, recipe.future_ratio(self.config)
        )

    def _shard_spec(self) -> ShardSpec:
        train = self.config.train
        return ShardSpec(
            getattr(torch, self.config.model.dtype),
            train.recompute,
            train.compile,
            train.reshard,
            train.offload,
        )

    def close(self) -> None:
        for tool in self.tools.values():
            tool.close()
        self.chats.close()


def _modules(
    config: Config, world: World, tasks: TaskSet, tokenizer: PreTrainedTokenizerFast
) -> tuple[ChatEngines, dict[str, Tool], PlannerPrompt]:
    """Around the policies. `tokenizer`: the planner's."""
    with ExitStack() as cleanup:  # frees what has started when a later part cannot
        chats = make_chat_engines(config, tokenizer, world.device)
        cleanup.callback(chats.close)
        tools = make_tools(config, tasks, chats.roles.get("tools"))
        _check_tools(config, tools)
        prompt = make_prompt(config, tools, tokenizer)
        cleanup.pop_all()
    return chats, tools, prompt


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """`writing` for tensors: safetensors has an error of its own, which names the system's number
    in its text.
    """
    with writing(path):
        try:
            yield
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            raise (
                OSError(int(number[1]), os.strerror(int(number[1])))
                if number
                else OSError(str(error))
            ) from error


def make_judge(config: Config, chats: ChatEngines) -> Judge | None:
    """The judge behind the rules; None where `roles.judge` says so."""
    engine = chats.roles.get("judge")
    return (
        None
        if engine is None
        else Judge(engine, JudgeCache(Path(config.judge.cache)), config.judge)
    )


def resume_point(config: Config, run_dir: report.RunDir) -> Path | None:
    """The checkpoint to continue from, if the run is to be resumed and has one."""
    return checkpoint.latest(run_dir.checkpoints) if config.run.resume == "auto" else None


def _set_threads(threads: int) -> None:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // ranks_here))


def _check_scorers(tasks: TaskSet) -> None:
    """Score an empty answer to each task: a scorer that does not exist, or that cannot use the
    task's answers, comes out before the run.
    """
    every = (*tasks.train, *(task for split in tasks.held_out.values() for task in split))
    score([Group(0, tuple(Trajectory(task, (), "", 0.0, 0) for task in every))])


def _check_algorithm(config: Config, tasks: TaskSet) -> None:
    for task in tasks.train:
        sub_goals.check(task)
    if config.algorithm.name == "infoflow" and not any(map(sub_goals.sought, tasks.train)):
        raise UserError(
            "algorithm.name='infoflow' needs tasks with sub_goals; none of the training tasks has "
            "any to find"
        )


def _check_tools(config: Config, tools: Mapping[str, Tool]) -> None:
    stateful = [name for name, tool in tools.items() if tool.card.is_stateful]
    if stateful and config.algorithm.name == "appo":
        raise UserError(
            f"algorithm.name='appo' rewinds rollouts; {stateful[0]!r} of agent.tools has a state "
            "and cannot be rewound"
        )


def _policy(config: Config, tasks: TaskSet) -> tuple[PreTrainedTokenizerFast, PreTrainedModel]:
    """The tokenizer and the model that `[model]` names."""
    if config.model.path != "tiny":
        return models.load_tokenizer(config.model.path), models.load_model(
            config.model.path, torch.float32
        )
    tiny = config.tiny
    closing = (
        "Tool Name: Base_Generator"
        if config.train.policy == "planner"
        else "Conclusion: STOP\nConclusion: CONTINUE"
    )
    tokenizer = models.new_tokenizer(_texts(tasks, closing), tiny.vocab_size)
    torch.manual_seed(derive_seed(config.run.seed, "new model"))
    return tokenizer, models.new_model(
        tokenizer, tiny.hidden_size, tiny.num_layers, tiny.num_heads, tiny.max_positions
    )


def _texts(tasks: TaskSet, closing: str) -> list[str]:
    """What a new tokenizer learns from: prompts and answers of training tasks."""
    texts = []
    for task in tasks.train[:5000]:
        actions = "\n".join(f"Sub-Goal: {s.sub_goal}\nTool Name: {s.tool_name}" for s in task.plan)
        results = "\n".join(
            f"1. {s.tool_name} | {s.sub_goal} | The {s.sub_goal} is" for s in task.plan
        )
        texts.append(f"Question: {task.question}\n{results}\n{actions}\n{closing}")
    return texts
