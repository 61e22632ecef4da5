"""Every option of a run, with its default and meaning; `flowtrain.config.options` reads them from a
file and the command line.

This package is the only source of options and loads no torch, so help, sweeps and checks start at
once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import Field, model_validator

from flowtrain.config.agents import (
    BY_THE_POLICY,
    NO_ENGINE,
    OWN,
    OWN_ROLES,
    Agent,
    Chat,
    Judge,
    McpServer,
    Policy,
    PolicyKey,
    Roles,
)
from flowtrain.config.algorithm import Algorithm, Appo, Distill, Infoflow
from flowtrain.config.dataflow import Dataflow
from flowtrain.config.gateway import Gateway
from flowtrain.config.lora import Lora
from flowtrain.config.model import Model, Tiny
from flowtrain.config.reward import Reward
from flowtrain.config.rollout import Rollout, Vllm
from flowtrain.config.run import Checkpoint, Eval, Log, Run, Weights
from flowtrain.config.search import Corpus, WebReader, WebSearch, Wikipedia
from flowtrain.config.section import Section
from flowtrain.config.tasks import Tasks
from flowtrain.config.train import Rft, Train
from flowtrain.config.validate import validate
from flowtrain.records import PolicyName


class PolicySampling(NamedTuple):
    """The options by which a policy samples a response."""

    max_new_tokens: int
    temperature: float


class Config(Section):
    """The options of a run."""

    run: Run = Run()
    model: Model = Model()
    tiny: Tiny = Tiny()
    tasks: Tasks = Tasks()
    agent: Agent = Agent()
    gateway: Gateway = Gateway()
    roles: Roles = Roles()
    """Without AgentFlow, executor, verifier and generator default to rules, and tools to none."""
    engines: dict[str, Chat] = Field(default_factory=dict)
    """Named language models for the roles."""
    policies: dict[PolicyKey, Policy] = Field(default_factory=dict)
    """The policies by name, with the models of policies that this run does not train; AgentFlow's
    are planner and, by [roles], verifier and refiner."""
    plugins: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of what an option names by NAME or FILE.py:NAME: tools, an environment, an algorithm,
    loggers, rules of the dataflow."""
    mcp: dict[str, McpServer] = Field(default_factory=dict)
    """MCP servers whose tools agent.tools names (pip install -e '.[mcp]')."""
    reward: Reward = Reward()
    judge: Judge = Judge()
    web_search: WebSearch = WebSearch()
    wikipedia: Wikipedia = Wikipedia()
    web_reader: WebReader = WebReader()
    corpus: Corpus = Corpus()
    rollout: Rollout = Rollout()
    vllm: Vllm = Vllm()
    algorithm: Algorithm = Field(default_factory=lambda: Algorithm.model_validate({}))
    appo: Appo = Appo()
    distill: Distill = Distill()
    infoflow: Infoflow = Infoflow()
    train: Train = Train()
    lora: Lora = Lora()
    dataflow: Dataflow = Dataflow()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    weights: Weights = Weights()
    log: Log = Log()
    rft: Rft = Rft()

    @model_validator(mode="before")
    @classmethod
    def _roles_of_its_agent(cls, options: Any) -> Any:
        """Fill in what the agent decides: AgentFlow's modules are models, the policy as it is by
        default; of another agent's policies the first is trained, if nothing else is said.
        """
        agent, roles = options.get("agent", {}), options.get("roles", {})
        if not (isinstance(agent, dict) and isinstance(roles, dict)):
            return options
        if agent.get("name", "agentflow") == "agentflow":
            return options | {"roles": BY_THE_POLICY | roles}
        train, names = options.get("train", {}), options.get("policies", {})
        if isinstance(train, dict) and isinstance(names, dict) and names:
            return options | {"train": {"policy": next(iter(names))} | train}
        return options

    @model_validator(mode="after")
    def _validate(self) -> Config:
        validate(self)
        return self

    def options_of(self, name: str) -> dict[str, Any]:
        """Return the table [plugins.NAME] of what an option names, as NAME or FILE.py:NAME."""
        return self.plugins.get(name.rpartition(":")[2], {})

    @property
    def policy_names(self) -> tuple[PolicyName, ...]:
        """The policies of the agent: those of [policies], AgentFlow's by [roles]. Roles of
        "policy" are the first one's words.
        """
        if self.agent.name != "agentflow":
            return tuple(self.policies) or (self.train.policy,)
        return ("planner", *(name for name in OWN_ROLES if getattr(self.roles, name) == OWN))

    @property
    def first_policy(self) -> PolicyName:
        return self.policy_names[0]

    @property
    def trained_beside(self) -> tuple[PolicyName, ...]:
        """The policies that the run trains after train.policy."""
        names = (name for name in self.policy_names if name != self.train.policy)
        return tuple(name for name in names if self.policies.get(name, Policy()).trained)

    def beside(self, policy: PolicyName) -> Config:
        """Return the config by which another policy of the run is trained; it measures nothing."""
        frozen = {
            name: spec.model_copy(update={"trained": False}) for name, spec in self.policies.items()
        }
        trained_options = frozen.get(self.train.policy, Policy())
        frozen[self.train.policy] = trained_options.model_copy(update={"path": self.model.path})
        updates: dict[str, Any] = {
            "policies": frozen,
            "model": self.model.model_copy(update={"path": self.policies[policy].path}),
            "train": self.train.model_copy(update={"policy": policy}),
            "run": self.run.model_copy(update={"dir": f"{self.run.dir}/policies/{policy}"}),
            "eval": self.eval.model_copy(update={"every": 0, "at_ends": False, "benchmarks": ()}),
            # One more, or a kill between the two could leave no step that both have.
            "checkpoint": self.checkpoint.model_copy(update={"keep": self.checkpoint.keep + 1}),
        }
        return self.model_copy(update=updates)

    @property
    def samples_here(self) -> bool:
        """A run needs engines; with dataflow.url nodes have them."""
        return not self.dataflow.url

    def sampling_of(self, policy: PolicyName) -> PolicySampling:
        """Return a policy's tokens per response and its temperature."""
        options = self.policies.get(policy, Policy())
        return PolicySampling(
            options.max_new_tokens or self.rollout.max_new_tokens,
            options.temperature or self.rollout.temperature,
        )

    @property
    def teacher_engine(self) -> str:
        """Return the name in [engines] of the teacher that a run asks; "": it asks none."""
        name = self.distill.teacher
        return name if self.algorithm.name == "distill" and name in self.engines else ""

    def word_for(self, policy: PolicyName) -> str:
        """Return what people call a policy: one alone, of no name, is "policy"."""
        is_named = self.agent.name == "agentflow" or policy in self.policies
        return policy if is_named else "policy"

    def path_of(self, policy: PolicyName) -> tuple[str, str]:
        """Return the key that says where a policy's model is, and its value."""
        if policy == self.train.policy:
            return "model.path", self.model.path
        return f"policies.{policy}.path", self.policies.get(policy, Policy()).path


__all__ = [
    "NO_ENGINE",
    "OWN",
    "OWN_ROLES",
    "Agent",
    "Algorithm",
    "Appo",
    "Chat",
    "Checkpoint",
    "Config",
    "Corpus",
    "Dataflow",
    "Distill",
    "Eval",
    "Gateway",
    "Infoflow",
    "Judge",
    "Log",
    "Lora",
    "McpServer",
    "Model",
    "Policy",
    "Reward",
    "Rft",
    "Roles",
    "Rollout",
    "Run",
    "Section",
    "Tasks",
    "Tiny",
    "Train",
    "Vllm",
    "WebReader",
    "WebSearch",
    "Weights",
    "Wikipedia",
]
