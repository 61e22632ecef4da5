"""flowkernels' loss in TRL's GRPOTrainer:  python examples/trl_grpo.py [--steps N] [--seed N]

`FlowGRPOTrainer` stands in for TRL's trainer: sampling, rewards, advantages and the optimizer stay
TRL's, the loss is `policy_loss` on the logits of the trained tokens alone. A model of two layers
with random weights learns on the CPU to repeat the digit of its prompt. Needs trl 1.16. S:
sequences, L: longest completion, T: trained tokens, V: vocabulary.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from flowkernels import LossSpec, policy_loss, token_weights
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

METRICS = {
    "entropy": "entropy_sum",
    "clip_ratio/low_mean": "clipped_low_sum",
    "clip_ratio/high_mean": "clipped_high_sum",
}


class FlowGRPOTrainer(GRPOTrainer):
    """TRL's trainer with flowkernels' loss: `loss_type` grpo, bnpo, dr_grpo, dapo (by token or, as
    GSPO, by sequence) or cispo.
    """

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        mask_SL = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
        cu_seqlens_S1 = nn.functional.pad(mask_SL.sum(1).cumsum(0), (1, 0))

        def packed(name: str) -> Tensor | None:
            return inputs[name][mask_SL] if name in inputs else None

        logits_TV = self._logits(model, inputs, mask_SL)
        target_ids_T = inputs["completion_ids"][mask_SL]
        # The correction for vLLM, [S, L] or [S, 1], is a factor of the policy term and so of the
        # advantage.
        advantage_SL = inputs["advantages"][:, None] * inputs.get("importance_sampling_ratio", 1.0)
        out = policy_loss(
            logits_TV,
            target_ids_T,
            spec=self._spec(),
            advantage_T=advantage_SL.expand_as(mask_SL)[mask_SL],
            weight_T=self._weights(cu_seqlens_S1, len(target_ids_T), inputs["num_items_in_batch"]),
            # None if no step was taken since the tokens were sampled: the ratio is 1.
            old_logprob_T=packed("old_per_token_logps"),
            ref_logprob_T=packed("ref_per_token_logps"),
            cu_seqlens_S1=cu_seqlens_S1,
            temperature=self.temperature,
            inplace=True,
        )
        self._log_stats(out.stats)
        return out.loss

    def _logits(self, model: nn.Module, inputs: dict[str, Any], mask_SL: Tensor) -> Tensor:
        """[T, V]: the head sees only the positions that predict a trained token, so no logits of
        prompts or padding are ever made.
        """
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        before = slice(-mask_SL.shape[1] - 1, -1)
        head = self.accelerator.unwrap_model(model).get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda _, hidden: hidden[0][:, before][mask_SL])
        try:
            return model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits
        finally:
            hook.remove()

    def _spec(self) -> LossSpec:
        """Translate TRL's settings."""
        self._check_settings()
        is_cispo = self.loss_type == "cispo"
        is_sequence = self.importance_sampling_level == "sequence"
        return LossSpec(
            loss_type="cispo" if is_cispo else "gspo" if is_sequence else "clip",
            clip_low=self.epsilon_low,
            # TRL bounds the ratio of CISPO by epsilon_high itself.
            clip_high=self.epsilon_high - 1 if is_cispo else self.epsilon_high,
            dual_clip=self.args.delta,
            kl_coef=self.beta,
        )

    def _check_settings(self) -> None:
        """Refuse settings under which this loss would not be TRL's."""
        args, is_cispo = self.args, self.loss_type == "cispo"
        is_sequence = self.importance_sampling_level == "sequence"
        is_missing = {
            "loss_type": self.loss_type not in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo"),
            "cispo by sequence": is_cispo and is_sequence,
            "delta below 1 + epsilon_high": not is_cispo
            and args.delta is not None
            and args.delta < 1 + self.epsilon_high,
            "use_bias_correction_kl": self.beta != 0 and args.use_bias_correction_kl,
            "vllm_importance_sampling_mode": is_sequence
            and self.use_vllm
            and args.vllm_importance_sampling_mode.startswith("token"),
            "top_entropy_quantile": args.top_entropy_quantile < 1,
            "off_policy_mask_threshold": args.off_policy_mask_threshold is not None,
            "entropy_coef": self._entropy_bonus_enabled,
            "router_aux_loss_coef": self.aux_loss_enabled,
            "images": self._is_vlm,
        }
        if names := [name for name, is_here in is_missing.items() if is_here]:
            raise ValueError(f"FlowGRPOTrainer does not support: {', '.join(names)}")

    def _weights(
        self, cu_seqlens_S1: Tensor, num_tokens: int, num_items_in_batch: Tensor
    ) -> Tensor:
        """TRL's averaging rules, over the micro-batches of an optimizer step too."""
        num_micro_batches = self.current_gradient_accumulation_steps if self.model.training else 1
        if self.loss_type in ("dapo", "cispo"):
            # num_items_in_batch counts the tokens of all ranks and of all micro-batches that were
            # generated at once.
            share = num_micro_batches / self.args.steps_per_generation if self.model.training else 1
            num_items = num_items_in_batch.clamp(min=1) / self.accelerator.num_processes * share
            return torch.ones(num_tokens, device=num_items.device) / num_items
        if self.loss_type == "dr_grpo":
            weight_T = token_weights(
                cu_seqlens_S1, num_tokens, "constant", length=self.max_completion_length
            )
        else:
            weight_T = token_weights(
                cu_seqlens_S1, num_tokens, "sequence" if self.loss_type == "grpo" else "token"
            )
        return weight_T / num_micro_batches

    def _log_stats(self, stats: dict[str, Tensor]) -> None:
        """Means over the tokens of all ranks, under TRL's names."""
        names = METRICS | ({"kl": "kl_sum"} if self.beta != 0 else {})
        sums = torch.stack([stats["num_tokens_sum"], *(stats[name] for name in names.values())])
        num_tokens, *values = self.accelerator.reduce(sums, reduction="sum").tolist()
        for name, value in zip(names, values, strict=True):
            self._metrics["train" if self.model.training else "eval"][name].append(
                value / max(num_tokens, 1)
            )


def repeats_digit(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The reward: the share of the completion's words that are the digit of the prompt."""
    words = [completion.split() for completion in completions]
    return [
        said.count(prompt.split()[-1]) / max(len(said), 1)
        for prompt, said in zip(prompts, words, strict=True)
    ]


def new_trainer(trainer_class: type[GRPOTrainer], output_dir: str, **settings: Any) -> GRPOTrainer:
    """A tokenizer of 13 words, a model of two layers and a trainer on prompts such as "say 3";
    nothing is downloaded.
    """
    words = ["<pad>", "<end>", "say", *map(str, range(10))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    defaults = {
        "num_generations": 8,
        "per_device_train_batch_size": 40,
        "gradient_accumulation_steps": 2,
        "num_iterations": 2,
        "max_completion_length": 6,
        "epsilon_high": 0.28,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    torch.manual_seed(settings.get("seed", 0))
    trainer = trainer_class(
        model=Qwen2ForCausalLM(config),
        reward_funcs=repeats_digit,
        args=GRPOConfig(output_dir, **{**defaults, **settings}),
        train_dataset=Dataset.from_dict({"prompt": [f"say {digit}" for digit in range(10)]}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
        ),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def main(argv: Sequence[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: 40)")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the initial weights and of the sampling (default: 0)",
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # more only slow down a model this small
    with tempfile.TemporaryDirectory() as folder:
        trainer = new_trainer(FlowGRPOTrainer, folder, max_steps=args.steps, seed=args.seed)
        trainer.train()
    history = [log for log in trainer.state.log_history if "loss" in log]
    for log in history:
        print(
            f"step {log['step']:3d}",
            *(f"{name} {log[name]:.3f}" for name in ("reward", *METRICS) if name in log),
            sep="  ",
        )
    return history


if __name__ == "__main__":
    main()
