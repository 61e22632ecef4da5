"""Checks of options that depend on each other, by topic. Each raises ValueError with both keys."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from flowtrain.config.agents import OWN, OWN_ROLES
from flowtrain.config.gateway import Gateway
from flowtrain.config.lora import Lora
from flowtrain.config.reward import Reward
from flowtrain.config.run import Eval
from flowtrain.config.train import EXPERTS, Rft

if TYPE_CHECKING:
    from flowtrain.config import Config

_MAX_NAME = 255
"""Bytes that Linux's file systems allow a name."""


def validate(config: Config) -> None:
    """Check everything that involves more than one option, and what a run finds out too late."""
    _check_folder(config)
    _check_sizes(config)
    _check_sampling(config)
    _check_ratios(config)
    _check_sandbox(config)
    _check_mcp(config)
    _check_task_files(config)
    _check_benchmarks(config)
    _check_reward(config)
    _check_policies(config)
    _check_trained(config)
    _check_roles(config)
    _check_engine_ranks(config)
    _check_parallel(config)
    _check_gateway(config)
    _check_rft(config)
    _check_plugins(config)
    _check_lora(config)


def _check_folder(config: Config) -> None:
    longest = max(config.run.dir.split("/"), key=len)
    if len(longest.encode()) > _MAX_NAME:
        raise ValueError(
            f"run.dir={config.run.dir!r}: a name has {len(longest.encode())} bytes, and files may "
            f"have {_MAX_NAME}"
        )


def _check_sizes(config: Config) -> None:
    tiny = config.tiny
    if tiny.hidden_size % tiny.num_heads:
        raise ValueError(
            f"tiny.num_heads={tiny.num_heads} must divide tiny.hidden_size={tiny.hidden_size}"
        )
    train = config.train
    if bool(train.num_minibatches) == bool(train.minibatch_size):
        raise ValueError(
            f"train.num_minibatches={train.num_minibatches} and train.minibatch_size="
            f"{train.minibatch_size}: one of them must be above 0, and the other 0"
        )
    if "bf16" in train.optimizer and config.model.dtype != "bfloat16":
        raise ValueError(
            f"train.optimizer={train.optimizer!r} needs model.dtype = 'bfloat16': it keeps "
            "weights in bf16"
        )
    if config.train.num_minibatches > config.rollout.num_questions:
        raise ValueError(
            f"train.num_minibatches={config.train.num_minibatches} must be at most "
            f"rollout.num_questions={config.rollout.num_questions}"
        )


def _check_sampling(config: Config) -> None:
    rollout = config.rollout
    if not rollout.frequency_penalty:
        return
    if not config.train.rescore:
        raise ValueError(
            f"rollout.frequency_penalty={rollout.frequency_penalty} needs train.rescore = true: "
            "the sampler's log-probs include the penalty, and the trainer's do not"
        )
    if config.algorithm.name == "appo":
        raise ValueError(
            f"rollout.frequency_penalty={rollout.frequency_penalty} cannot be combined with "
            "algorithm.name='appo', whose branches would restart the count of a response's tokens"
        )


def _check_ratios(config: Config) -> None:
    algorithm = config.algorithm
    for key in ("tis", "mis"):
        value = getattr(algorithm, key)
        if value is not None and not config.train.rescore:
            raise ValueError(
                f"algorithm.{key}={value} needs train.rescore = true, otherwise the ratio "
                "compares the sampler with itself"
            )
    if algorithm.mis is not None and not 0 <= algorithm.mis[0] < algorithm.mis[1]:
        raise ValueError(f"algorithm.mis={algorithm.mis} must be [low, high] with 0 <= low < high")
    if algorithm.m2po is not None and algorithm.loss != "clip":
        raise ValueError(
            f"algorithm.m2po={algorithm.m2po} needs algorithm.loss='clip', which is "
            f"{algorithm.loss!r}"
        )


def _check_sandbox(config: Config) -> None:
    agent = config.agent
    if agent.python_packages and agent.sandbox == "seccomp":
        raise ValueError(
            f"agent.python_packages={list(agent.python_packages)} needs a sandbox with file "
            "access, which agent.sandbox='seccomp' lacks; 'auto' selects one"
        )


def _check_mcp(config: Config) -> None:
    for name, server in config.mcp.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", name):
            raise ValueError(
                f"[mcp.{name}]: a server's name must have 1 to 40 letters, digits, '_' and '-'"
            )
        if server.command and server.url:
            raise ValueError(
                f"mcp.{name}.command={list(server.command)} and mcp.{name}.url={server.url!r}: "
                "set exactly one of them"
            )
        if server.command and server.token_env:
            raise ValueError(
                f"mcp.{name}.token_env={server.token_env!r} requires mcp.{name}.url; a command "
                f"gets its variables from mcp.{name}.env"
            )
        if server.url and server.env:
            raise ValueError(f"mcp.{name}.env={list(server.env)} requires mcp.{name}.command")
        if server.url and not server.url.startswith(("http://", "https://")):
            raise ValueError(f"mcp.{name}.url={server.url!r} must begin with http:// or https://")


def _check_task_files(config: Config) -> None:
    tasks = config.tasks
    if (tasks.name == "file") != bool(tasks.path or tasks.mixture):
        key = f"tasks.mixture={tasks.mixture}" if tasks.mixture else f"tasks.path={tasks.path!r}"
        raise ValueError(f"{key} requires tasks.name = 'file', which is {tasks.name!r}")
    if (tasks.name == "verifiers") != bool(tasks.verifiers):
        raise ValueError(
            f"tasks.verifiers={tasks.verifiers} requires tasks.name = 'verifiers', which is "
            f"{tasks.name!r}"
        )
    if tasks.verifiers and config.agent.name != "gateway":
        raise ValueError(
            "tasks.name='verifiers': its environments drive their own rollouts; set agent.name = "
            "'gateway' and gateway.function = 'flowtrain.agents.gateway.hub:solve'"
        )
    if tasks.path and tasks.mixture:
        raise ValueError(
            f"tasks.path={tasks.path!r} and tasks.mixture={tasks.mixture}: set only one of them"
        )


def _check_benchmarks(config: Config) -> None:
    """Check options of benchmarks, whose names are checked where their files are read."""
    options = config.eval
    if not options.benchmarks:
        default = dict(Eval())
        for key in ("rows", "trials", "temperature"):
            if getattr(options, key) != default[key]:
                raise ValueError(f"eval.{key}={getattr(options, key)} requires eval.benchmarks")
        return
    option = f"eval.benchmarks={list(options.benchmarks)}"
    if not options.every and not options.at_ends:
        raise ValueError(f"{option} is never evaluated with eval.every=0 and eval.at_ends=false")
    if config.tasks.verifiers:
        raise ValueError(
            f"{option} cannot be combined with tasks.name='verifiers', whose environment runs the "
            "evaluation"
        )
    folder_names = [name for name in options.benchmarks if "=" not in name]
    if folder_names and not config.tasks.benchmarks:
        raise ValueError(
            f"{option} needs tasks.benchmarks, the folder with {folder_names[0]}.json, or "
            f"'{folder_names[0]}=FILE'"
        )


def _check_reward(config: Config) -> None:
    reward = config.reward
    if reward.low >= reward.high:
        raise ValueError(f"reward.low={reward.low:g} must be below reward.high={reward.high:g}")
    if reward.function:
        if config.roles.judge != "none":
            raise ValueError(
                f"roles.judge={config.roles.judge!r} cannot be combined with "
                f"reward.function={list(reward.function)}: a judge only backs up the scorers of "
                "tasks"
            )
        return
    agent = config.agent
    is_reported = agent.environment or agent.name not in ("agentflow", "single", "tools")
    default = dict(Reward())
    for key, value in reward:
        if value != default[key] and not (is_reported and key in ("low", "high")):
            raise ValueError(f"reward.{key}={value} needs reward.function")


def _check_policies(config: Config) -> None:
    policy, modules = config.train.policy, ("planner", *OWN_ROLES)
    if config.agent.name != "agentflow":
        if policy not in config.policy_names:
            known = ", ".join(config.policies)
            raise ValueError(f"train.policy={policy!r} is not among [policies]: {known}")
        if own_roles := [role for role, engine in config.roles if engine == OWN]:
            raise ValueError(
                f"roles.{own_roles[0]}={OWN!r} requires agent.name='agentflow'; policies of "
                f"agent.name={config.agent.name!r} are defined in [policies]"
            )
        return
    if unknown := [name for name in (policy, *config.policies) if name not in modules]:
        raise ValueError(
            f"{unknown[0]!r} is not a policy of agent.name='agentflow', whose modules are "
            f"{', '.join(modules)}"
        )
    if policy not in config.policy_names:
        raise ValueError(
            f"train.policy={policy!r} needs roles.{policy}={OWN!r}, which is "
            f"{getattr(config.roles, policy)!r}"
        )


def _check_trained(config: Config) -> None:
    for name in (name for name, options in config.policies.items() if options.trained):
        if config.dataflow.url:
            raise ValueError(
                f"policies.{name}.trained=true cannot be combined with "
                f"dataflow.url={config.dataflow.url!r}: with nodes each policy has a trainer of "
                "its own"
            )
        if name not in config.policy_names:
            raise ValueError(f"policies.{name}.trained=true needs roles.{name}={OWN!r}")


def _check_roles(config: Config) -> None:
    if config.agent.name != "single":  # agents of users may have any
        return
    for role, engine in config.roles:
        if role != "judge" and engine not in ("none", "rules"):
            raise ValueError(
                f"roles.{role}={engine!r} cannot be combined with "
                f"agent.name={config.agent.name!r}, which has no roles"
            )


def _check_engine_ranks(config: Config) -> None:
    num_ranks = config.rollout.num_engine_ranks
    if not num_ranks:
        return
    if config.vllm.sleep:
        raise ValueError(
            f"vllm.sleep=true cannot be combined with rollout.num_engine_ranks={num_ranks}: the "
            "engines then have GPUs of their own"
        )
    if config.dataflow.url:
        raise ValueError(
            f"rollout.num_engine_ranks={num_ranks} must be 0 with dataflow.url, because nodes "
            "sample"
        )


def _check_parallel(config: Config) -> None:
    size = config.vllm.tensor_parallel_size
    uses_vllm = any(chat.kind == "vllm" for chat in config.engines.values())
    if size > 1 and config.rollout.engine != "vllm" and not uses_vllm:
        raise ValueError(
            f"vllm.tensor_parallel_size={size} needs rollout.engine='vllm': the engine "
            f"{config.rollout.engine!r} runs on one device"
        )


def _check_gateway(config: Config) -> None:
    if config.agent.name == "gateway":
        return
    default = dict(Gateway())
    for key, value in config.gateway:
        if value != default[key]:
            raise ValueError(
                f"gateway.{key}={value!r} needs agent.name='gateway', which is "
                f"{config.agent.name!r}"
            )


def _check_rft(config: Config) -> None:
    rft = config.rft
    if rft.expert not in (*EXPERTS, *config.engines):
        raise ValueError(
            f"rft.expert={rft.expert!r} may be {EXPERTS[0]!r}, {EXPERTS[1]!r} or a name in "
            f"[engines], which holds {', '.join(config.engines) or 'nothing yet'}"
        )
    if bool(rft.num_steps) == bool(rft.num_epochs):
        raise ValueError(
            f"rft.num_steps={rft.num_steps} and rft.num_epochs={rft.num_epochs:g}: one of them "
            "must be above 0, and the other 0"
        )
    if rft.screen != "none" and config.agent.name == "single":
        raise ValueError(
            f"rft.screen={rft.screen!r} cannot be combined with agent.name='single', which has no "
            "tools"
        )
    if rft.conversations and rft.expert != Rft().expert:
        raise ValueError(
            f"rft.conversations={rft.conversations!r} replaces rft.expert={rft.expert!r}: set "
            "only one of them"
        )
    if rft.collect_only and rft.expert in EXPERTS:
        raise ValueError(
            "rft.collect_only=true requires a name in [engines] as rft.expert, not "
            f"{rft.expert!r}, whose demonstrations are not saved"
        )


def _check_plugins(config: Config) -> None:
    agent, dataflow = config.agent, config.dataflow
    named_options = (*agent.tools, agent.environment, config.algorithm.name, *config.log.loggers)
    named_options += (dataflow.prompt_filter, dataflow.group_filter)
    named_options += (dataflow.selector, dataflow.replay_selector)
    names = {name.rpartition(":")[2] for name in named_options if name}
    if unknown := sorted(config.plugins.keys() - names):
        raise ValueError(
            f"plugins.{unknown[0]}: no plugin of this name is used by the config; it uses "
            f"{', '.join(sorted(names))}"
        )


def _check_lora(config: Config) -> None:
    lora = config.lora
    if not lora.rank:
        default = dict(Lora())
        for key, value in lora:
            if value != default[key]:
                raise ValueError(f"lora.{key}={value!r} needs lora.rank above 0")
        return
    if config.model.path == "tiny":
        raise ValueError(
            f"lora.rank={lora.rank} needs a pretrained model, but model.path='tiny' has random "
            "weights"
        )
