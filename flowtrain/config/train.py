"""Options of training, and of the fine-tuning on demonstrations before it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from flowtrain.config.agents import PolicyKey
from flowtrain.config.section import Section

EXPERTS = ("scripted", "policy")
"""Values of rft.expert that are no teacher's name."""


class Train(Section):
    policy: PolicyKey = "planner"
    """policy to train; other policies stay frozen at policies.NAME.path, except for those with
    policies.NAME.trained"""
    num_steps: int = Field(100, ge=0)
    """number of steps, each with one batch of rollouts; 0: only evaluate"""
    max_idle_steps: int = Field(100, ge=0)
    """end the run after this many consecutive steps without a signal, for example because all
    rewards are equal; 0: never"""
    lr: PositiveFloat = 1e-6
    """learning rate (AgentFlow: 1e-6 for 7B; use about 1e-4 for a tiny model)"""
    warmup_steps: int = Field(0, ge=0)
    """steps over which the learning rate rises from 0 to lr; 0: no warm-up"""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW: decay rate of the gradients' running mean"""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW: decay rate of the squared gradients' running mean"""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW: decoupled weight decay, for matrices only"""
    decay_all: bool = False
    """AdamW: apply weight decay to norms, biases and other vectors too, as verl does"""
    grad_clip: float = Field(1.0, ge=0)
    """upper bound of the global gradient norm; 0: off"""
    num_minibatches: int = Field(2, ge=0)
    """optimizer steps per batch of rollouts, with equally many questions each; 0, the default if
    minibatch_size is set: use minibatch_size"""
    minibatch_size: int = Field(0, ge=0)
    """largest number of samples per optimizer step over all ranks, instead of num_minibatches; the
    number of steps per batch then depends on its number of turns (AgentFlow's code: 64); 0: off"""
    token_budget: int | Literal["auto"] = "auto"
    """largest number of tokens per pass (one micro-batch), with shared prefixes counted once; a
    larger tree is processed in pieces; auto: as many as the memory plan allows, at most 65536
    (docs/memory.md)"""
    recompute: bool = False
    """gradient checkpointing: keep only the layers' inputs and recompute activations in the
    backward pass, which saves most activation memory for about a third more time"""
    attention: Literal["auto", "sdpa", "flex", "rectangles", "flash"] = "auto"
    """attention over token trees: torch's SDPA on runs of tokens; FlexAttention with Triton (flex),
    with cuDNN for the prefixes that all later tokens see (rectangles), or with the package
    flash-attn-4 (flash); auto: flex on a GPU, else sdpa"""
    compile: bool = False
    """compile each decoder layer"""
    fused_layers: bool = True
    """compute RMSNorms, rotary embeddings and gated MLPs with flowkernels if the results are
    bit-identical, which saves memory (docs/kernels.md); not with compile"""
    reshard: bool = True
    """for models of over 50 M parameters: gather the weights of each layer again for the backward
    pass; false: keep them gathered"""
    optimizer: Literal["adamw", "adamw_8bit", "adamw_bf16_sr"] = "adamw"
    """adamw: fp32 weights and moments; 8bit: 8-bit moments; bf16_sr: weights, gradients and moments
    in bf16 with stochastic rounding of weights, for model.dtype = "bfloat16"; the last two need
    torchao (docs/memory.md)"""
    offload: Literal["none", "frozen", "all"] = "none"
    """tensors kept in CPU memory. frozen: the reference policy, whose layers each scoring pass
    fetches one by one, and the last published weights, so that a publish copies all weights in
    model.dtype to the host; all: also master weights, gradients and moments, and AdamW runs on the
    CPU"""
    max_mismatch_kl: float = Field(0.05, ge=0)
    """KL between trainer and sampler, in nats per token, above which a step warns; three such steps
    in a row, or one step above 100 times this value, end the run with the likely causes
    (docs/watching.md); 0: off"""
    rescore: bool = False
    """use log-probs recomputed by the trainer, not the sampler's, as the ratio's denominator"""

    @property
    def row_budget(self) -> int:
        """`token_budget` as `trainer/setup/placement.py` has made a number of it."""
        assert isinstance(self.token_budget, int), "nobody has resolved train.token_budget"
        return self.token_budget

    @field_validator("token_budget", mode="before")
    @classmethod
    def _counts(cls, budget: Any) -> Any:
        if budget != "auto" and not (isinstance(budget, int | float) and budget >= 1):
            raise ValueError("a row has at least 1 token; or 'auto'")
        return budget

    @model_validator(mode="before")
    @classmethod
    def _one_size(cls, options: Any) -> Any:
        if isinstance(options, dict) and options.get("minibatch_size"):
            return {"num_minibatches": 0} | options
        return options


class Rft(Section):
    expert: str = "scripted"
    """source of the demonstrations: scripted (knows each plan but makes errors), policy (the model
    itself), or a teacher in [engines], which plays train.policy (docs/fine-tuning.md)"""
    conversations: str = ""
    """file of conversations to imitate instead of demonstrations: rows {"messages": [...], "tools":
    [...]} (docs/fine-tuning.md)"""
    expert_error: float = Field(0.6, ge=0, le=1)
    """probability per turn that the scripted expert guesses instead of following the plan"""
    fictional: bool = False
    """tasks.name = "facts": demonstrate on fictional entities, so that a new model learns to copy
    names instead of remembering them"""
    num_rollouts: PositiveInt = 12000
    """demonstrations to collect"""
    keep: Literal["scored", "all"] = "scored"
    """scored: keep only rollouts with the largest reward, reward.high (rejection sampling); all:
    imitate the expert including its errors"""
    screen: Literal["none", "shortcuts"] = "none"
    """shortcuts: drop kept rollouts that guessed: no tool returned the answer, or the rollout
    reached none of the task's sub-goals (docs/fine-tuning.md)"""
    collect_only: bool = False
    """stop once a teacher's demonstrations are in run.dir; --run.resume auto then imitates them"""
    max_tokens: int = Field(0, ge=0)
    """largest total number of prompt and response tokens of an imitated sample (InfoFlow: 16384);
    0: the model's positions"""
    num_steps: int = Field(1500, ge=0)
    """number of optimizer steps; 0, the default if num_epochs is set: use num_epochs"""
    num_epochs: float = Field(0.0, ge=0)
    """passes over the samples, instead of num_steps (InfoFlow: 3); 0: off"""
    batch_size: PositiveInt = 16
    """turns per optimizer step over all ranks"""
    lr: PositiveFloat = 3e-3
    """peak learning rate, which falls linearly to 0"""
    warmup_steps: int = Field(50, ge=0)
    """steps over which the learning rate rises from 0"""
    prompt_weight: float = Field(0.0, ge=0, le=1)
    """weight of prompt tokens in the loss; with 0.2 a new model learns to copy sooner"""

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, options: Any) -> Any:
        if isinstance(options, dict) and options.get("num_epochs"):
            return {"num_steps": 0} | options
        return options
