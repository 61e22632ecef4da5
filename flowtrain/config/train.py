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
    """policy that is trained; others, if there are any, stay as policies.NAME.path holds them, but
    for those of policies.NAME.trained"""
    num_steps: int = Field(100, ge=0)
    """steps: one batch of rollouts each; 0: only evaluate"""
    max_idle_steps: int = Field(100, ge=0)
    """end a run after so many steps in a row that had nothing to learn from, as when all rewards
    are equal; 0: never"""
    lr: PositiveFloat = 1e-6
    """learning rate (AgentFlow: 1e-6 for 7B; a tiny model wants 1e-4)"""
    warmup_steps: int = Field(0, ge=0)
    """steps over which the learning rate rises from 0; 0: it starts at lr"""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW: decay of the mean of gradients"""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW: decay of the mean of squared gradients"""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW: decoupled weight decay, of matrices"""
    decay_all: bool = False
    """AdamW: decay norms, biases and other vectors, too, as verl does"""
    grad_clip: float = Field(1.0, ge=0)
    """upper bound of the global gradient norm; 0: off"""
    num_minibatches: int = Field(2, ge=0)
    """optimizer steps per batch of rollouts, with as many questions each; 0, and by default so:
    where minibatch_size is set"""
    minibatch_size: int = Field(0, ge=0)
    """samples per optimizer step, at most and over all ranks, instead of num_minibatches: a batch
    then takes as many steps as its turns fill (AgentFlow's code: 64); 0: off"""
    token_budget: int | Literal["auto"] = "auto"
    """tokens per pass (one micro-batch) at most, shared prefixes counted once; a larger tree is
    walked; auto: what there is memory for by the plan, 65536 at most (docs/memory.md)"""
    recompute: bool = False
    """keep only the layers' inputs and recompute the rest in the backward pass: far less memory for
    about a third more time"""
    attention: Literal["auto", "sdpa", "flex", "rectangles", "flash"] = "auto"
    """attention over token trees: torch's SDPA on runs of tokens; FlexAttention by Triton (flex),
    with cuDNN for what all that follows sees (rectangles), or by the package flash-attn-4 (flash);
    auto: flex on a GPU, else sdpa"""
    compile: bool = False
    """compile each decoder layer"""
    fused_layers: bool = True
    """compute RMSNorms, rotary embeddings and gated MLPs by flowkernels where that gives the same
    bits, with less memory (docs/kernels.md); not with compile"""
    reshard: bool = True
    """layers of models of over 50 M parameters gather their weights again for the backward pass;
    false: they keep them gathered"""
    optimizer: Literal["adamw", "adamw_8bit", "adamw_bf16_sr"] = "adamw"
    """adamw: fp32 weights and moments; 8bit: moments of 8 bits; bf16_sr: weights, gradients and
    moments in bf16, with weights rounded stochastically, for model.dtype = "bfloat16"; the last
    two need torchao (docs/memory.md)"""
    offload: Literal["none", "frozen", "all"] = "none"
    """what is kept in the memory of the CPU: frozen: the reference policy, whose layers each
    scoring pass fetches one by one, and the weights that were published last, to which a publish
    then copies all weights in model.dtype; all: master weights, gradients and moments too, and
    AdamW steps there"""
    max_mismatch_kl: float = Field(0.05, ge=0)
    """KL of trainer and sampler in nats per token above which a step warns; three such steps in a
    row, or one of 100 times that, end the run with the likely causes (docs/watching.md); 0: off"""
    rescore: bool = False
    """take ratios against log-probs that the trainer recomputes, instead of the sampler's"""

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
    """author of the demonstrations: scripted (it knows each plan but errs), policy (the model
    itself), or the name in [engines] of a teacher, which plays train.policy (docs/fine-tuning.md)
    """
    conversations: str = ""
    """a file of conversations whose replies are imitated instead of demonstrations: rows
    {"messages": [...], "tools": [...]} (docs/fine-tuning.md)"""
    expert_error: float = Field(0.6, ge=0, le=1)
    """probability per turn that the scripted expert guesses instead of following the plan"""
    fictional: bool = False
    """tasks.name = "facts": demonstrate on made-up entities, so that a new model learns to copy
    names, not to remember them"""
    num_rollouts: PositiveInt = 12000
    """demonstrations to collect"""
    keep: Literal["scored", "all"] = "scored"
    """scored: only rollouts with reward.high, which is 1 (rejection sampling); all: imitate the
    expert, errors included"""
    screen: Literal["none", "shortcuts"] = "none"
    """shortcuts: of what is kept, leave out rollouts that guessed: no tool returned the answer, or
    none of the task's sub-goals was reached (docs/fine-tuning.md)"""
    collect_only: bool = False
    """end once a teacher's demonstrations are in run.dir; --run.resume auto imitates them"""
    max_tokens: int = Field(0, ge=0)
    """longest prompt and response that are imitated, in tokens together (InfoFlow: 16384); 0: as
    many as the model has positions"""
    num_steps: int = Field(1500, ge=0)
    """optimizer steps; 0, and by default so: where num_epochs is set"""
    num_epochs: float = Field(0.0, ge=0)
    """passes over the samples, instead of num_steps (InfoFlow: 3); 0: off"""
    batch_size: PositiveInt = 16
    """turns per optimizer step over all ranks"""
    lr: PositiveFloat = 3e-3
    """peak learning rate; it falls linearly to 0"""
    warmup_steps: int = Field(50, ge=0)
    """steps over which the learning rate rises from 0"""
    prompt_weight: float = Field(0.0, ge=0, le=1)
    """weight of prompt tokens in the loss; a new model learns to copy sooner with 0.2"""

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, options: Any) -> Any:
        if isinstance(options, dict) and options.get("num_epochs"):
            return {"num_steps": 0} | options
        return options
