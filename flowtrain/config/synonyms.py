"""Names that other trainers have for options, for those who type it from habit."""

from __future__ import annotations

import difflib
from collections.abc import Collection

SYNONYMS = {
    "train.lr": ("learning_rate",),
    "train.num_steps": ("max_steps", "total_training_steps", "num_rollout"),
    "train.grad_clip": ("max_grad_norm", "max_norm", "clip_grad"),
    "train.minibatch_size": ("ppo_mini_batch_size",),
    "train.recompute": ("gradient_checkpointing", "enable_gradient_checkpointing"),
    "rollout.num_questions": ("train_batch_size", "rollout_batch_size"),
    "rollout.group_size": ("num_generations", "n", "n_samples_per_prompt"),
    "rollout.max_new_tokens": (
        "max_completion_length",
        "max_response_length",
        "max_tokens",
        "rollout_max_response_len",
        "generate_max_len",
    ),
    "rollout.engine": ("use_vllm", "vllm_mode"),
    "vllm.tensor_parallel_size": ("tensor_model_parallel_size", "vllm_tensor_parallel_size"),
    "vllm.gpu_memory_utilization": ("vllm_gpu_memory_utilization",),
    "algorithm.name": ("adv_estimator", "advantage_estimator"),
    "algorithm.loss": ("loss_type", "loss_mode"),
    "algorithm.kl_coef": ("beta", "kl_loss_coef", "init_kl_coef"),
    "algorithm.clip_low": ("epsilon", "clip_ratio", "clip_ratio_low", "eps_clip"),
    "algorithm.clip_high": ("epsilon_high", "clip_ratio_high", "eps_clip_high"),
    "algorithm.entropy_coef": ("entropy_coeff",),
    "reward.function": ("reward_funcs", "custom_reward_function"),
    "model.path": ("model_name_or_path", "pretrain", "hf_checkpoint"),
    "model.dtype": ("torch_dtype",),
    "tasks.path": ("train_files", "prompt_data", "dataset_name"),
    "lora.rank": ("lora_r", "lora_rank"),
    "lora.alpha": ("lora_alpha",),
    "lora.targets": ("target_modules", "lora_target_modules"),
    "run.dir": ("output_dir", "default_local_dir"),
    "run.resume": ("resume_from_checkpoint", "resume_mode"),
    "checkpoint.every": ("save_steps", "save_freq", "save_interval"),
    "checkpoint.keep": ("save_total_limit", "max_actor_ckpt_to_keep"),
    "eval.every": ("eval_steps", "test_freq", "eval_interval"),
    "log.loggers": ("report_to", "logger"),
}
"""By option, its names in TRL's `GRPOConfig`, verl, OpenRLHF and slime, without their sections."""
_BY_SYNONYM = {word: option for option, words in SYNONYMS.items() for word in words}
_CLOSE = 0.8


def meant(key: str, options: Collection[str]) -> list[str]:
    """Return the options that somebody may mean by a key that there is not: what other trainers
    call so, what is spelt nearly so, or what has this name in other sections.
    """
    section, _, name = key.replace("-", "_").rpartition(".")
    if name in _BY_SYNONYM:
        return [_BY_SYNONYM[name]]
    if section and (close := difflib.get_close_matches(key, options, n=1, cutoff=_CLOSE)):
        return close
    elsewhere = [option for option in options if option.rpartition(".")[2] == name]
    words = difflib.get_close_matches(name, _BY_SYNONYM, n=1, cutoff=_CLOSE)
    return elsewhere or [_BY_SYNONYM[word] for word in words]
