"""TRL's side of `bench.trl`: its GRPOTrainer as it is, with a clock around its stages."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.trl_sides import Job, Result, Stopwatch, digest, peak_bytes, rewards_of
from flowtrain.agents.chat.single_turn import QuestionPrompt
from flowtrain.agents.policy import Moment
from flowtrain.config import Config
from flowtrain.records import Task
from flowtrain.rewards import RewardFunctions
from flowtrain.tasks.sets import task_set
from flowtrain.trainer.devices import keep_freed_memory
from flowtrain.trainer.model.loading import load_tokenizer
from flowtrain.utils.text import final_answer


class TimedTrainer(GRPOTrainer):
    """TRL's trainer, timed; it computes what TRL's own does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.watch = Stopwatch()
        self.steps: list[dict[str, float]] = []
        self.prompts: list[str] = []
        self.peak_bytes = 0

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        with self.watch("rest"):
            return super()._prepare_inputs(generation_batch)

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        with self.watch("sampling"):
            completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.prompts.append(digest(prompt_ids))
        self._num_tokens = sum(map(len, completion_ids))
        return completion_ids, logprobs

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.watch("reward"):
            rewards: Tensor = super()._calculate_rewards(*args, **kwargs)
        self._reward_mean = float(rewards.mean())
        return rewards

    def end_step(self) -> None:
        self.peak_bytes = peak_bytes()
        notes = {"tokens": float(self._num_tokens), "reward_mean": self._reward_mean}
        self.steps.append({**self.watch.lap(), **notes})


class _Clock(TrainerCallback):
    """Gives what happens within a step to `training`, but for what the trainer has stages for."""

    trainer: TimedTrainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.trainer.watch.lap()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.trainer.watch.open("training")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.trainer.watch.close()
        self.trainer.end_step()


def run_trl(job: Job) -> Result:
    """Train with TRL on the questions that flowtrain's cursor gives, in the same order."""
    config = job.config
    torch.set_num_threads(config.run.threads)
    if job.keeps_memory:
        keep_freed_memory()
    trainer = make_trainer(job)
    trainer.train()
    folder = Path(job.out, "model")
    trainer.model.save_pretrained(folder)
    load_tokenizer(config.model.path).save_pretrained(folder)
    return Result(trainer.steps, trainer.peak_bytes, trainer.prompts, str(folder))


def make_trainer(job: Job) -> TimedTrainer:
    config = job.config
    tasks, functions = questions(config), RewardFunctions.load(config.reward)

    def reward(completions: list[Any], task: list[int], **_: Any) -> list[float]:
        texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
        asked = [tasks[number] for number in task]
        return rewards_of(asked, list(map(final_answer, texts)), functions)

    clock = _Clock()
    clock.trainer = TimedTrainer(
        model=_load(config.model.path),
        reward_funcs=reward,
        args=settings(job),
        train_dataset=Dataset.from_list(
            [{"prompt": prompt(config, each), "task": n} for n, each in enumerate(tasks)]
        ),
        processing_class=load_tokenizer(config.model.path),
        callbacks=[clock],
    )
    return clock.trainer


def _load(path: str) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
    )
    return model


def questions(config: Config) -> list[Task]:
    """Return the questions of all steps in flowtrain's order."""
    cursor = task_set(config).cursor(config.run.seed, 0)
    batches = [cursor.take(config.rollout.num_questions) for _ in range(config.train.num_steps)]
    return [task for batch in batches for task in batch]


def prompt(config: Config, task: Task) -> str | list[dict[str, str]]:
    """Return what the agent of one turn puts to the policy: a plain text, or a chat, which TRL puts
    through the template.
    """
    if config.agent.prompt == "compact":
        prompt = QuestionPrompt(config.agent.instructions, is_message=False)
        return prompt.render(Moment(task))
    text = "\n\n".join(filter(None, [task.prompt, config.agent.instructions]))
    return [{"role": "user", "content": text}]


def settings(job: Job) -> GRPOConfig:
    """Translate flowtrain's config.

    What would cost TRL time, and is on by default, is off: gradient checkpointing, bf16 on a CPU
    without it, progress bars, logs, checkpoints.
    """
    config = job.config
    rollout, train = config.rollout, config.train
    num_samples = rollout.num_questions * rollout.group_size
    micro_batch = math.gcd(job.micro_batch or num_samples, num_samples)
    return GRPOConfig(
        output_dir=str(Path(job.out, "trl")),
        seed=config.run.seed,
        max_steps=train.num_steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=num_samples // micro_batch,
        num_generations=rollout.group_size,
        max_completion_length=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        shuffle_dataset=False,
        loss_type="dapo",
        scale_rewards="group",
        beta=config.algorithm.kl_coef,
        epsilon=config.algorithm.clip_low,
        epsilon_high=config.algorithm.clip_high,
        learning_rate=train.lr,
        lr_scheduler_type="constant",
        adam_beta1=train.beta1,
        adam_beta2=train.beta2,
        weight_decay=train.weight_decay,
        max_grad_norm=train.grad_clip,
        optim="adamw_torch_fused",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        torch_empty_cache_steps=None,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
