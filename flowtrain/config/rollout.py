"""Options of sampling: rollouts, and the engine vLLM."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from flowtrain.config.section import Section

TOP_P_CAP = 128
"""The top_k of a top_p below 1 that comes without one, because training needs to know all tokens
that were kept."""


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
    """temperature of policies, in sampling and in the log-probs of training"""
    top_k: int = Field(0, ge=0)
    """sample from the so many likeliest tokens, and train the probabilities among them; 0: all"""
    top_p: float = Field(1.0, gt=0, le=1)
    """sample, among those, from the fewest tokens whose probabilities sum to this (AgentFlow's
    code: 0.99), at most 128 of them; kept_at_cap_share in the metrics tells how often there were
    that many"""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """a token's logit loses this for each time that the response has it already (AgentFlow's code:
    1.2); the trained policy knows no penalty, so it needs train.rescore"""
    max_new_tokens: PositiveInt = 2048
    """tokens per response of a policy (AgentFlow: 2048)"""
    request_timeout_s: PositiveFloat = 500.0
    """seconds per response of a policy"""
    max_batch_size: PositiveInt = 256
    """responses that the torch engine samples at a time"""
    max_in_flight: PositiveInt = 512
    """rollouts of a rank under way at a time"""
    straggler_share: float = Field(1.0, gt=0, le=1)
    """once this share of a rank's rollouts of a step is done, the rest have straggler_s more
    seconds; 1: wait for all"""
    straggler_s: PositiveFloat = 60.0
    """seconds after which a late rollout ends like one that is out of time: it answers from its
    finished turns, and is counted"""

    @property
    def num_kept(self) -> int:
        """Most tokens that sampling keeps of a row, 0 for all."""
        return self.top_k or (TOP_P_CAP if self.top_p < 1 else 0)


class Vllm(Section):
    tensor_parallel_size: PositiveInt = 1
    """cut the model for so many GPUs: that of the rank or node and those after it, or so many
    processes on a CPU"""
    gpu_memory_utilization: float = Field(0.4, gt=0, le=1)
    """share of a GPU's memory for vLLM's weights and KV cache; the rank that trains beside it needs
    the rest"""
    kv_cache_gb: float = Field(0.0, ge=0)
    """GiB of KV cache; 0: what gpu_memory_utilization leaves beside the weights, or 1 on a CPU"""
    max_model_len: int = Field(0, ge=0)
    """tokens of prompt and response together, at most the positions of every model that vLLM runs;
    0: as many as the model has positions"""
    max_num_seqs: PositiveInt = 256
    """responses that are sampled at a time; more wait in vLLM"""
    sleep: bool = False
    """while the rank trains, move vLLM's weights to the host and drop its cache, which leaves the
    trainer its share of the GPU"""
    enforce_eager: bool = False
    """start sooner and sample slower: no CUDA graphs, no compilation (always so on a CPU)"""
