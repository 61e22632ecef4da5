"""Options of the flow and of the language models in it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from flowtrain.config.model import ModelPath
from flowtrain.config.section import Section
from flowtrain.records import PolicyName

PolicyKey = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
"""The name of a policy: it names folders, metrics and options, too."""

OWN = "own"
"""Value in `[roles]` of a module that is a policy besides the planner."""
OWN_ROLES: tuple[PolicyName, ...] = ("verifier", "refiner")
"""Roles that may be so."""
NO_ENGINE = ("none", "rules", OWN)
"""Values in `[roles]` of modules that ask no chat engine."""


ToolFormatName = Literal[
    "auto", "hermes", "llama3", "mistral", "xml", "tool_calls", "nemotron", "granite", "cohere",
    "apertus", "gigachat", "functionary", "deepseek_v3", "deepseek_v31", "kimi_k2",
    "harmony", "gemma4", "pythonic", "qwen3_coder", "seed_oss", "glm", "minimax_m2",
    "deepseek_v32", "muse", "json",
]  # fmt: skip


class Agent(Section):
    name: str = "agentflow"
    """agentflow: planner, tools, verifier and generator take turns; single: one response, which is
    the answer (RLVR); tools: the policy calls tools through its own chat template and reads their
    results until it answers (docs/agents/tools.md); gateway: a program that calls an
    OpenAI-compatible endpoint ([gateway], docs/agents/gateway.md); FILE.py:NAME or
    PACKAGE.MODULE:NAME: a custom agent; or an entry point flowtrain.agents"""
    instructions: str = ""
    """name = "single": text after the question; name = "tools": the system message. The answer is
    the content of the last response's last <answer>...</answer>, or else the whole response"""
    tool_format: ToolFormatName = "auto"
    """name = "tools" or "gateway": format of the policy's tool calls (docs/agents/tools.md); auto:
    the chat template's, or xml for a template without tools"""
    history: Literal["growing", "as_deployed"] = "growing"
    """name = "tools" or "gateway": earlier replies in later prompts; growing: the sampled ids;
    as_deployed: the chat template's rendering, without the thinking that it removes, encoded anew
    (docs/agents/tools.md)"""
    prompt: Literal["compact", "full"] = "full"
    """full: instructions, tool metadata and all four fields, through the chat template; compact:
    under 100 tokens, for the tiny planner; with name = "single" full is the chat template around
    the question, and compact a plain text; name = "tools" needs full"""
    prompt_order: Literal["shared", "paper"] = "shared"
    """prompt = "full": shared puts the memory last, so that turns share a longer prefix and cost
    less; paper: AgentFlow's order"""
    environment: str = ""
    """name = "tools": FILE.py:NAME or PACKAGE.MODULE:NAME of a callable that creates the
    environment of a rollout from its task, with its own tools and user
    (docs/agents/environments.md)"""
    tools: tuple[str, ...] = ("Base_Generator", "Python_Coder", "Wikipedia_Search")
    """tools that the planner (or the policy, with name = "tools") may call; at least 1 without an
    environment. Further tools: Web_Search, Web_Reader, Search, FILE.py:NAME of a custom function or
    class, tools of installed packages (docs/tools.md), and "NAME.tool" or "NAME.*" of the server
    [mcp.NAME]"""
    tool_engines: dict[str, str] = Field(default_factory=dict)
    """engines of single tools, instead of roles.tools, by tool: {Python_Coder = "coder"}"""
    max_turns: PositiveInt = 3
    """turns per rollout in training (AgentFlow: 3)"""
    eval_max_turns: PositiveInt = 10
    """turns per rollout in evaluation (AgentFlow: 10)"""
    rollout_timeout_s: PositiveFloat = 500.0
    """seconds after which no further turn starts (AgentFlow: 500)"""
    num_passages: PositiveInt = 1
    """number of passages that the tool Search returns; more than one is useful with a refiner"""
    tool_timeout_s: PositiveFloat = 120.0
    """seconds per tool command (AgentFlow: 120); for Python_Coder it limits the model's reply and
    code_timeout_s, not the wait for a process and a core"""
    sandbox: Literal["auto", "seccomp", "bubblewrap", "limits"] = "auto"
    """sandbox for the code of Python_Coder (docs/tools.md); auto: seccomp, or bubblewrap if
    python_packages is set"""
    python_packages: tuple[str, ...] = ()
    """packages that the code may import, with all that is installed beside them: ["numpy", "sympy"]
    """
    code_timeout_s: PositiveFloat = Field(10.0, le=3600)
    """CPU seconds for the code, at most tool_timeout_s; code that sleeps ends after ten times as
    many seconds of wall time (AgentFlow: 10 s of wall time)"""
    max_result_chars: PositiveInt = 8000
    """largest length of a tool result in the memory or the conversation"""
    memory_tokens: int = Field(0, ge=0)
    """largest length of the memory in a prompt; longer memories lose the middle of tool results,
    oldest first, but never commands; 0: no limit"""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_its_name(cls, options: Any) -> Any:
        name = options.get("name", "agentflow") if isinstance(options, dict) else "agentflow"
        if name == "agentflow":
            return options
        if name == "tools" and not options.get("environment"):
            return {"tools": ("Python_Coder", "Wikipedia_Search")} | options
        defaults: dict[str, Any] = {"tools": ()}
        if name == "single":
            defaults |= {"max_turns": 1, "eval_max_turns": 1}
        return defaults | options

    @model_validator(mode="after")
    def _fits_its_name(self) -> Agent:
        if self.instructions and self.name == "agentflow":
            raise ValueError(
                f"agent.instructions={self.instructions!r} cannot be combined with "
                "agent.name='agentflow'"
            )
        if self.environment and self.name != "tools":
            raise ValueError(
                f"agent.environment={self.environment!r} requires agent.name = 'tools', which is "
                f"{self.name!r}"
            )
        if self.history != "growing" and self.name not in ("tools", "gateway"):
            raise ValueError(
                f"agent.history={self.history!r} requires agent.name = 'tools' or 'gateway', not "
                f"{self.name!r}"
            )
        if self.name == "tools" and self.prompt != "full":
            raise ValueError(
                f"agent.prompt={self.prompt!r} cannot be combined with agent.name='tools', which "
                "needs 'full'"
            )
        if self.name != "single":
            return self
        for key, value in (("tools", ()), ("max_turns", 1), ("eval_max_turns", 1)):
            if (actual := getattr(self, key)) != value:
                raise ValueError(
                    f"agent.{key}={actual!r} cannot be combined with agent.name='single': it "
                    "takes one turn, without tools"
                )
        return self

    @field_validator("tools")
    @classmethod
    def _tool_names(cls, tools: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        has_own = bool(info.data.get("environment"))
        if not tools and not has_own and info.data.get("name") in ("agentflow", "tools"):
            raise ValueError("must name at least 1 tool")
        if twice := [name for place, name in enumerate(tools) if name in tools[:place]]:
            raise ValueError(f"{twice[0]!r} is listed twice")
        return tools


class McpServer(Section):
    command: tuple[str, ...] = ()
    """program with its arguments, which speaks over stdin and stdout: ["python", "server.py"]"""
    env: tuple[str, ...] = ()
    """command: names of environment variables that the program gets of ours, besides HOME, LOGNAME,
    PATH, SHELL, TERM and USER"""
    url: str = ""
    """instead of command: address of a server that speaks streamable HTTP"""
    token_env: str = ""
    """url: environment variable that holds the bearer token; empty: the server needs none"""
    timeout_s: PositiveFloat = 30.0
    """seconds per call, instead of agent.tool_timeout_s, and for the start"""


class Chat(Section):
    kind: Literal["openai", "torch", "vllm"] = "openai"
    """openai: an endpoint that speaks OpenAI's chat completions (vLLM, SGLang, ...); torch, vllm: a
    frozen model started here"""
    model: str = ""
    """name at the endpoint; folder or hub name for torch and vllm"""
    base_url: str = "https://api.openai.com/v1"
    """address of the endpoint, /v1 included"""
    api_key_env: str = "OPENAI_API_KEY"
    """environment variable with the API key; empty: the endpoint needs no key"""
    temperature: float = Field(0.0, ge=0)
    """sampling temperature; 0: the most likely reply"""
    max_tokens: PositiveInt = 2048
    """tokens per reply"""
    timeout_s: PositiveFloat = 120.0
    """timeout of an attempt"""
    max_retries: int = Field(5, ge=0)
    """retries after a rejection, a failure or a timeout, with growing pauses"""
    max_concurrency: PositiveInt = 64
    """largest number of concurrent requests; further ones wait"""
    price_in: float = Field(0.0, ge=0)
    """price of a million prompt tokens, for the cost meter"""
    price_out: float = Field(0.0, ge=0)
    """price of a million reply tokens, for the cost meter"""


BY_THE_POLICY = dict.fromkeys(("executor", "verifier", "generator", "tools"), "policy")
"""The roles of agent.name = "agentflow" that the config does not set."""


class Roles(Section):
    analyst: str = "none"
    """model that analyses the question before the first turn: none, policy, or a name in
    [engines]"""
    executor: str = "rules"
    """model that writes the tool command for a sub-goal: rules, policy (tokens of the policy that
    are not trained), or a name in [engines]"""
    verifier: str = "rules"
    """model that decides between STOP and CONTINUE: rules, policy, own (a policy besides the
    planner: train.policy), or a name in [engines]"""
    generator: str = "rules"
    """model that writes the answer: rules, policy, or a name in [engines]"""
    tools: str = "none"
    """model of the tools that need one: none, policy, or a name in [engines]"""
    refiner: str = "none"
    """model that condenses search results to evidence for the memory: none, rules, policy, own (a
    policy besides the planner: train.policy), or a name in [engines]"""
    judge: str = "none"
    """model that judges answers which the rule scorers reject: none, or a name in [engines]"""

    @model_validator(mode="after")
    def _own_policies(self) -> Roles:
        if misused := [role for role, name in self if role not in OWN_ROLES and name == OWN]:
            raise ValueError(
                f"roles.{misused[0]}={OWN!r}: only the roles {' and '.join(OWN_ROLES)} can have "
                "their own policies"
            )
        return self


class Policy(Section):
    path: ModelPath = ""
    """model of a policy that is not trained: a folder, a hub name or "quickstart"; the trained
    policy's model is model.path"""
    temperature: PositiveFloat | None = None
    """temperature for sampling and for the log-probs of training; unset: rollout.temperature"""
    max_new_tokens: PositiveInt | None = None
    """tokens per response; unset: rollout.max_new_tokens"""
    trained: bool = False
    """train this policy too, on the same rollouts and ranks, after train.policy; its checkpoints
    and metrics are in run.dir/policies/NAME (docs/agents/workflows.md)"""


JudgeMode = Literal["rules-first", "judge-first", "judge-only"]


class Judge(Section):
    mode: JudgeMode = "rules-first"
    """role of the judge for answers of exact, qa, math and choice: rules-first asks the judge if
    the rule gives 0; judge-first falls back to the rule without a verdict; judge-only fails a
    rollout without a verdict"""
    cache: str = "runs/judge.sqlite"
    """file on a local disk that caches verdicts, so that the judge sees no question twice; runs and
    ranks may share it"""
