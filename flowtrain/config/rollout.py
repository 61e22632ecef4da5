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
    """torch: sample in this process; vllm: sample with vLLM in separate processes, one per rank"""
    num_engine_ranks: int = Field(0, ge=0)
    """number of ranks, counted from the last, that only sample, with one engine each, while the
    others only train; 0: every rank samples and trains"""
    num_questions: PositiveInt = 16
    """questions per step over all ranks (AgentFlow: 32); a multiple of the sampling ranks"""
    group_size: PositiveInt = 8
    """rollouts per question (AgentFlow: 8)"""
    temperature: PositiveFloat = 1.0
    """temperature of the policies, for sampling and for the log-probs of training"""
    top_k: int = Field(0, ge=0)
    """sample from this many most likely tokens, and train with probabilities renormalised over
    them; 0: all tokens"""
    top_p: float = Field(1.0, gt=0, le=1)
    """nucleus sampling: among these, sample from the smallest set of tokens whose probabilities sum
    to this (AgentFlow's code: 0.99), at most 128 tokens; the metric kept_at_cap_share is the share
    of tokens at this cap"""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """subtracted from a token's logit for each earlier occurrence in the response (AgentFlow's
    code: 1.2); requires train.rescore, because the trained policy has no penalty"""
    max_new_tokens: PositiveInt = 2048
    """tokens per response of a policy (AgentFlow: 2048)"""
    request_timeout_s: PositiveFloat = 500.0
    """timeout of a policy's response"""
    max_batch_size: PositiveInt = 256
    """largest number of responses in a batch of the torch engine"""
    max_in_flight: PositiveInt = 512
    """largest number of concurrent rollouts per rank"""
    straggler_share: float = Field(1.0, gt=0, le=1)
    """once this share of a rank's rollouts of a step is done, the others get straggler_s more
    seconds; 1: wait for all"""
    straggler_s: PositiveFloat = 60.0
    """seconds after which a late rollout ends as if it had run out of time: it answers from its
    finished turns and is counted"""

    @property
    def num_kept(self) -> int:
        """Most tokens that sampling keeps of a row, 0 for all."""
        return self.top_k or (TOP_P_CAP if self.top_p < 1 else 0)


class Vllm(Section):
    tensor_parallel_size: PositiveInt = 1
    """number of GPUs that share the model: the GPU of the rank or node and the ones after it; on a
    CPU, the number of processes"""
    gpu_memory_utilization: float = Field(0.4, gt=0, le=1)
    """share of a GPU's memory for vLLM's weights and KV cache; a rank that trains on the same GPU
    needs the rest"""
    kv_cache_gb: float = Field(0.0, ge=0)
    """GiB of KV cache; 0: what gpu_memory_utilization leaves beside the weights; 1 on a CPU"""
    max_model_len: int = Field(0, ge=0)
    """largest total number of prompt and response tokens, at most the positions of every model that
    vLLM runs; 0: the model's positions"""
    max_num_seqs: PositiveInt = 256
    """largest number of concurrent responses; further ones wait in vLLM"""
    sleep: bool = False
    """while the rank trains, move vLLM's weights to the host and drop its KV cache, which frees its
    share of the GPU for the trainer"""
    enforce_eager: bool = False
    """disable CUDA graphs and compilation: starts sooner, samples slower (always so on a CPU)"""
