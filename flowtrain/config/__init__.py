"""Every option of a run, with its default and meaning; `flowtrain.config.options` reads them from a
file and the command line.

This module is the only source of options and loads no torch, so help, sweeps and checks start at
once.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from flowtrain.config.agents import NO_ENGINE, OWN, Agent, Chat, Judge, Policy, Roles
from flowtrain.config.algorithm import Algorithm, Appo, Infoflow
from flowtrain.config.dataflow import Dataflow
from flowtrain.config.search import Corpus, WebReader, WebSearch, Wikipedia
from flowtrain.config.section import Section
from flowtrain.config.train import Train
from flowtrain.types import PolicyName


class Run(Section):
    dir: str = "runs/default"
    """folder of the run: config, manifest, metrics, checkpoints, weights, curves"""
    seed: int = 0
    """decides task order, sampling and new weights"""
    resume: Literal["never", "auto"] = "never"
    """auto: continue the run in run.dir from its newest checkpoint, or start it if there is none"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the ranks compute"""
    threads: int = Field(0, ge=0)
    """CPU threads per rank; 0: the cores divided by the ranks of this machine"""


class Tiny(Section):
    vocab_size: PositiveInt = 512
    """tokens of the byte-level BPE that is trained on the training tasks; at least 258"""
    hidden_size: PositiveInt = 96
    """width of the decoder; num_heads divides it"""
    num_layers: PositiveInt = 3
    """decoder layers"""
    num_heads: PositiveInt = 6
    """attention heads"""
    max_positions: PositiveInt = 256
    """tokens of prompt and response together"""


class Model(Section):
    path: str = "tiny"
    """folder or hub name of a Hugging Face causal LM; "tiny": a new decoder with random weights,
    built as [tiny] says"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """type of the forward and backward pass and of the engine's weights; master weights are float32
    """


class Tasks(Section):
    name: Literal["facts", "gameof24", "file"] = "facts"
    """facts: 1 to 3 turn questions over the shipped corpus; gameof24: all solvable puzzles; file:
    questions of your own"""
    path: str = ""
    """name = "file": JSON, JSONL or Parquet with question, answer and optionally id, kind,
    num_turns, choices, scorer"""
    mixture: dict[str, PositiveFloat] = Field(default_factory=dict)
    """name = "file": several files instead of path, each with its weight; every step has questions
    of all of them"""
    preset: Literal["auto", "own", "search-r1", "deepmath", "agentflow"] = "auto"
    """name = "file": whose columns the files have; auto: each file's are recognised"""
    question_key: str = ""
    """name = "file": column of the question, where it is not the preset's; "a.b" looks into an
    object"""
    answer_key: str = ""
    """name = "file": column of the accepted answers, where it is not the preset's"""
    scorer: Literal["", "exact", "qa", "f1", "math", "choice", "gameof24"] = ""
    """name = "file": rule for questions that name none; empty: the preset's"""
    corpus: str = ""
    """passages to search: a JSON file shaped like flowtrain/tasks/data/corpus.json; empty: the
    shipped one"""
    kinds: tuple[Literal["lookup", "arithmetic", "chain", "sum", "sum4", "sum5"], ...] = (
        "lookup",
        "arithmetic",
        "chain",
        "sum",
    )
    """name = "facts": kinds of questions, in equal parts; sum4 and sum5 take four and five turns"""
    num_train: PositiveInt = 16000
    """training questions to generate; gameof24 and file use all they have"""
    benchmarks: str = ""
    """folder of benchmark files; training leaves out questions that nearly repeat one of theirs
    (see flowtrain.tasks.overlap)"""
    held_out_share: float = Field(0.1, gt=0, lt=1)
    """name = "file": share of the questions that is kept for evaluation"""


class Rollout(Section):
    engine: Literal["torch", "vllm"] = "torch"
    """torch: sampling in this process; vllm: by vLLM in processes of its own, one per rank"""
    num_engine_ranks: int = Field(0, ge=0)
    """0: every rank samples and trains; else the last so many ranks only sample, with an engine
    each, and the others only train"""
    num_questions: PositiveInt = 16
    """questions per step over all ranks (AgentFlow: 32); the number of ranks that sample divides it
    """
    group_size: PositiveInt = 8
    """rollouts per question (AgentFlow: 8)"""
    temperature: PositiveFloat = 1.0
    """of the planner, in sampling and in the log-probs of training"""
    top_k: int = Field(0, ge=0)
    """sample from so many most likely tokens, and train the probabilities among them; 0: from all
    """
    top_p: float = Field(1.0, gt=0, le=1)
    """of those, from the fewest whose probabilities sum to this; below 1 it needs a top_k, which
    bounds how many tokens are kept"""
    max_new_tokens: PositiveInt = 48
    """tokens per planner response (AgentFlow: 2048)"""
    request_timeout_s: PositiveFloat = 60.0
    """seconds per planner response"""
    max_batch_size: PositiveInt = 256
    """responses that the torch engine samples at a time"""
    max_in_flight: PositiveInt = 512
    """rollouts of a rank under way at a time"""
    straggler_share: float = Field(1.0, gt=0, le=1)
    """once this share of a rank's rollouts of a step is done, the rest have straggler_s seconds
    more; 1: all are waited for"""
    straggler_s: PositiveFloat = 60.0
    """then a rollout that still takes turns ends like one that is out of time: it answers from its
    finished turns, and is counted"""


class Vllm(Section):
    gpu_memory_utilization: float = Field(0.4, gt=0, le=1)
    """share of a GPU's memory for vLLM's weights and KV cache; the rank that trains beside it needs
    the rest"""
    kv_cache_gb: float = Field(0.0, ge=0)
    """GiB of KV cache; 0: what gpu_memory_utilization leaves beside the weights, or 1 on a CPU"""
    max_model_len: int = Field(0, ge=0)
    """tokens of prompt and response together; 0: as many as the model has positions"""
    max_num_seqs: PositiveInt = 256
    """responses that are sampled at a time; more wait in vLLM"""
    sleep: bool = False
    """while the rank trains, vLLM's weights go to the host and its cache away, which leaves the
    trainer its share of the GPU"""
    enforce_eager: bool = False
    """start sooner and sample slower: no CUDA graphs, no compilation (always so on a CPU)"""
    start_timeout_s: PositiveFloat = 600.0
    """seconds until vLLM must be ready"""
    load_timeout_s: PositiveFloat = 300.0
    """seconds for a weight update; then vLLM is started anew"""
    hang_timeout_s: PositiveFloat = 120.0
    """seconds without a sign of life; then vLLM is started anew"""


class Eval(Section):
    every: int = Field(10, ge=0)
    """steps between evaluations on held-out question texts; 0: only at the ends"""
    num_tasks: PositiveInt = 200
    """held-out questions per split"""
    at_ends: bool = True
    """evaluate before the first and after the last step; if false and every = 0, a run with
    dataflow.url needs no engine"""


class Checkpoint(Section):
    every: int = Field(25, ge=0)
    """steps between checkpoints; 0: only at the end"""
    keep: PositiveInt = 2
    """newest checkpoints that stay on disk"""


class Weights(Section):
    keep: PositiveInt = 2
    """newest versions that stay in run.dir/weights, with the anchors and deltas that lead to them
    """
    level: Literal[1, 2] = 1
    """2 makes deltas about a quarter smaller and several times slower to code (CPU only): for links
    between sites"""
    anchor_every: PositiveInt = 64
    """versions between two whole copies at most"""
    dense_share: float = Field(0.35, gt=0, le=1)
    """a delta above this share of the full size gives way to a whole copy"""
    verify_every: int = Field(10, ge=0)
    """loads between two comparisons of all of an engine's weights with the digests of their
    version; 0: only what changes is compared"""


class Log(Section):
    tensorboard: bool = True
    """write TensorBoard files into run.dir"""
    wandb_project: str = ""
    """also log to this Weights & Biases project (pip install 'flowtrain[wandb]')"""
    num_rollouts: int = Field(5, ge=0)
    """held-out rollouts to print at the end"""


class Rft(Section):
    expert: Literal["scripted", "policy"] = "scripted"
    """who makes the demonstrations: a script that knows each plan but errs, or the model itself"""
    expert_error: float = Field(0.6, ge=0, le=1)
    """probability per turn that the scripted expert guesses instead of following the plan"""
    fictional: bool = False
    """tasks.name = "facts": demonstrate on made-up entities, so that a new model learns to copy
    names, not to remember them"""
    num_rollouts: PositiveInt = 12000
    """demonstrations to collect"""
    keep: Literal["scored", "all"] = "scored"
    """scored: only rollouts with reward 1 (rejection sampling); all: imitate the expert, errors
    included"""
    num_steps: PositiveInt = 1500
    """optimizer steps"""
    batch_size: PositiveInt = 16
    """turns per optimizer step over all ranks"""
    lr: PositiveFloat = 3e-3
    """peak learning rate; it falls linearly to 0"""
    warmup_steps: int = Field(50, ge=0)
    """steps over which the learning rate rises from 0"""
    early_stop: float = Field(0.3, ge=0, le=1)
    """roles.verifier = "own": probability per turn that the scripted verifier says STOP, whatever
    the memory holds"""
    prompt_weight: float = Field(0.0, ge=0, le=1)
    """weight of prompt tokens in the loss; a new model learns to copy sooner with 0.2"""
    max_seconds: float = Field(0.0, ge=0)
    """stop fine-tuning after so many seconds; 0: run all steps"""


class Config(Section):
    """What a run needs to know."""

    run: Run = Run()
    model: Model = Model()
    tiny: Tiny = Tiny()
    tasks: Tasks = Tasks()
    agent: Agent = Agent()
    roles: Roles = Roles()
    engines: dict[str, Chat] = Field(default_factory=dict)
    """Named language models for the roles."""
    policies: dict[PolicyName, Policy] = Field(default_factory=dict)
    """Models of the policies that are not trained here, and how the verifier samples."""
    plugins: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of tools from other packages, by tool."""
    judge: Judge = Judge()
    web_search: WebSearch = WebSearch()
    wikipedia: Wikipedia = Wikipedia()
    web_reader: WebReader = WebReader()
    corpus: Corpus = Corpus()
    rollout: Rollout = Rollout()
    vllm: Vllm = Vllm()
    algorithm: Algorithm = Field(default_factory=lambda: Algorithm.model_validate({}))
    appo: Appo = Appo()
    infoflow: Infoflow = Infoflow()
    train: Train = Train()
    dataflow: Dataflow = Dataflow()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    weights: Weights = Weights()
    log: Log = Log()
    rft: Rft = Rft()

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        if self.tiny.hidden_size % self.tiny.num_heads:
            raise ValueError(
                f"tiny.num_heads={self.tiny.num_heads} must divide "
                f"tiny.hidden_size={self.tiny.hidden_size}"
            )
        if self.train.num_minibatches > self.rollout.num_questions:
            raise ValueError(
                f"train.num_minibatches={self.train.num_minibatches} must be at most "
                f"rollout.num_questions={self.rollout.num_questions}"
            )
        if self.web_reader.overlap_words >= self.web_reader.chunk_words:
            reader = self.web_reader
            raise ValueError(
                f"web_reader.overlap_words={reader.overlap_words} must be below "
                f"web_reader.chunk_words={reader.chunk_words}"
            )
        if self.rollout.top_p < 1 and not self.rollout.top_k:
            raise ValueError(
                f"rollout.top_p={self.rollout.top_p} needs rollout.top_k above 0, say 50: it "
                "bounds the tokens kept for training"
            )
        for key, value in (("tis", self.algorithm.tis), ("mis", self.algorithm.mis)):
            if value is not None and not self.train.rescore:
                raise ValueError(
                    f"algorithm.{key}={value} needs train.rescore = true, or the ratio is that of "
                    "the sampler to itself"
                )
        if (
            self.algorithm.mis is not None
            and not 0 <= self.algorithm.mis[0] < self.algorithm.mis[1]
        ):
            raise ValueError(
                f"algorithm.mis={self.algorithm.mis} must be [low, high] with 0 <= low < high"
            )
        if self.algorithm.m2po is not None and self.algorithm.loss != "clip":
            raise ValueError(
                f"algorithm.m2po={self.algorithm.m2po} needs algorithm.loss='clip', which is "
                f"{self.algorithm.loss!r}"
            )
        if self.agent.python_packages and self.agent.sandbox == "seccomp":
            packages = list(self.agent.python_packages)
            raise ValueError(
                f"agent.python_packages={packages} needs files, which agent.sandbox='seccomp' has "
                "not; 'auto' finds one that has"
            )
        if self.vllm.sleep and self.rollout.num_engine_ranks:
            raise ValueError(
                "vllm.sleep=true does not go with "
                f"rollout.num_engine_ranks={self.rollout.num_engine_ranks}: no engine shares a GPU "
                "then"
            )
        tasks = self.tasks
        if (tasks.name == "file") != bool(tasks.path or tasks.mixture):
            key = (
                f"tasks.mixture={tasks.mixture}" if tasks.mixture else f"tasks.path={tasks.path!r}"
            )
            raise ValueError(f"{key} goes with tasks.name = 'file', which is {tasks.name!r}")
        if tasks.path and tasks.mixture:
            raise ValueError(
                f"tasks.path={tasks.path!r} and tasks.mixture={tasks.mixture}: name files in one "
                "of them"
            )
        if self.algorithm.name == "appo":
            self._budgets_fit()
        self._policies_fit()
        if self.dataflow.url:
            self._nodes_sample()
        return self

    @property
    def policy_names(self) -> tuple[PolicyName, ...]:
        """The modules that are policies, the planner first."""
        return ("planner", "verifier") if self.roles.verifier == OWN else ("planner",)

    def sampling_of(self, policy: PolicyName) -> tuple[int, float]:
        """A policy's tokens per response and its temperature."""
        own = self.policies.get(policy, Policy())
        return (
            own.max_new_tokens or self.rollout.max_new_tokens,
            own.temperature or self.rollout.temperature,
        )

    def path_of(self, policy: PolicyName) -> tuple[str, str]:
        """The key that says where a policy's model is, and its value."""
        if policy == self.train.policy:
            return "model.path", self.model.path
        return f"policies.{policy}.path", self.policies.get(policy, Policy()).path

    def _policies_fit(self) -> None:
        policy = self.train.policy
        if policy not in self.policy_names:
            raise ValueError(
                f"train.policy={policy!r} needs roles.verifier={OWN!r}, which is "
                f"{self.roles.verifier!r}"
            )
        if policy != "planner" and self.algorithm.name == "appo":
            raise ValueError(
                f"train.policy={policy!r} must be 'planner' with algorithm.name = 'appo', which "
                "branches within its responses"
            )
        for key, value in self.policies.get("planner", Policy()):
            if key != "path" and value is not None:
                raise ValueError(f"policies.planner.{key}={value}: the planner's is rollout.{key}")

    def _nodes_sample(self) -> None:
        if self.algorithm.name == "appo":
            raise ValueError(
                "algorithm.name='appo' branches where the trainer's scores say; it does not go "
                "with dataflow.url"
            )
        if self.rollout.num_engine_ranks:
            raise ValueError(
                f"rollout.num_engine_ranks={self.rollout.num_engine_ranks} must be 0 with "
                "dataflow.url: nodes sample"
            )

    def _budgets_fit(self) -> None:
        """APPO's N roots and M rollouts, and what its places need."""
        appo, rollout = self.appo, self.rollout
        branches = rollout.group_size - appo.num_roots
        if branches < 1:
            raise ValueError(
                f"appo.num_roots={appo.num_roots} must be below "
                f"rollout.group_size={rollout.group_size}, which counts branches too"
            )
        places = (
            appo.num_roots
            * self.agent.max_turns
            * (1 + (rollout.max_new_tokens - 1) // max(appo.spacing, 1))
        )
        if appo.rule != "arpo" and branches > places:
            raise ValueError(
                f"appo.num_roots={appo.num_roots} roots hold at most {places} places "
                f"{appo.spacing} tokens apart (appo.spacing), "
                f"too few for the {branches} branches that rollout.group_size={rollout.group_size} "
                "asks for"
            )
        if rollout.num_engine_ranks:
            raise ValueError(
                f"rollout.num_engine_ranks={rollout.num_engine_ranks} must be 0 with "
                "algorithm.name = 'appo': samplers score"
            )
        if appo.future_low > appo.future_high:
            raise ValueError(
                f"appo.future_low={appo.future_low} must be at most "
                f"appo.future_high={appo.future_high}"
            )
        if self.algorithm.loss == "gspo" and appo.future_coef:
            raise ValueError(
                "algorithm.loss='gspo' has no ratio of a token; appo.future_coef must be 0 with it"
            )


__all__ = [
    "NO_ENGINE",
    "OWN",
    "Agent",
    "Algorithm",
    "Appo",
    "Chat",
    "Checkpoint",
    "Config",
    "Corpus",
    "Dataflow",
    "Eval",
    "Infoflow",
    "Judge",
    "Log",
    "Model",
    "Policy",
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
