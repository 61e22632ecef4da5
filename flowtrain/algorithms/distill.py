"""On-policy distillation: the policy acts, a teacher says of each of its tokens what it would have
written (GKD, arXiv 2306.13649, eq. 4 with lambda = 1; MiniLLM, arXiv 2306.08543).

The divergence is over the whole vocabulary, so every token says more than a reward does, and no
rollout needs others beside it. A teacher that is the policy itself knows more by a hint in its
prompt, such as the answer. One behind an endpoint tells its likeliest tokens, or no more than the
log-probs of those that were sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flowtrain.algorithms.advantages import normalise
from flowtrain.algorithms.base import Algorithm, Values
from flowtrain.config import Algorithm as Options
from flowtrain.records import Group, Sample, Task, TrainBatch, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from flowtrain.trainer.distillation import DistillSpec


class Distill(Algorithm):
    """The divergence from a teacher and, times `distill.reward_coef`, Flow-GRPO's policy term."""

    def credit(self, rewards: Sequence[float]) -> list[float]:
        coef = self.config.distill.reward_coef
        return [coef * advantage for advantage in normalise(rewards)]

    def defaults(self, chosen: Options) -> Values:
        return super().defaults(chosen) | {"kl_coef": 0.0}

    def check(self) -> None:
        super().check()
        distill, options = self.config.distill, self.config.algorithm
        if distill.teacher == "policy" and not distill.hint:
            raise UserError(
                "distill.teacher='policy' learns from itself and needs a distill.hint that it does "
                "not read; or name 'start' or the folder of a model"
            )
        if options.equal_groups == "drop":
            raise UserError(
                "algorithm.equal_groups='drop' leaves out what a teacher says of rollouts with one "
                f"reward: algorithm.name={options.name!r} takes 'keep'"
            )
        if self._has_model and options.kl_coef:
            raise UserError(
                f"algorithm.kl_coef={options.kl_coef} must be 0 with distill.teacher="
                f"{distill.teacher!r}, which takes the place of the reference policy"
            )

        if self.config.teacher_engine:
            self._check_endpoint()
        elif distill.top_k:
            raise UserError(
                f"distill.top_k={distill.top_k} is for teachers of [engines]: distill.teacher="
                f"{distill.teacher!r} tells whole distributions"
            )

    def _check_endpoint(self) -> None:
        """Check that the teacher's log-probs are comparable with the policy's."""
        config, distill, rollout = self.config, self.config.distill, self.config.rollout
        name, kind = distill.teacher, config.engines[distill.teacher].kind
        if kind != "openai":
            raise UserError(
                f"engines.{name}.kind={kind!r} must be 'openai' for distill.teacher={name!r}: an "
                "endpoint tells log-probs of prompts"
            )
        temperature = config.sampling_of(config.train.policy).temperature
        needed: dict[str, tuple[object, object]] = {"rollout.temperature": (temperature, 1.0)}
        if not distill.top_k:  # what the sampler's log-probs are of
            needed |= {
                "distill.divergence": (distill.divergence, "reverse_kl"),
                "rollout.top_k": (rollout.top_k, 0),
                "rollout.top_p": (rollout.top_p, 1.0),
                "rollout.frequency_penalty": (rollout.frequency_penalty, 0.0),
            }
        needed["log.replay"] = (config.log.replay, False)  # it has not what the teacher said
        for key, (value, must) in needed.items():
            if value != must:
                raise UserError(
                    f"{key}={value!r} must be {must!r} with distill.teacher={name!r} of [engines] "
                    f"and distill.top_k={distill.top_k}"
                )

    @property
    def _has_model(self) -> bool:
        teacher = self.config.distill.teacher
        return teacher not in ("policy", "start", self.config.teacher_engine)

    @property
    def needs_reference(self) -> bool:
        is_elsewhere = self.config.distill.teacher in ("policy", self.config.teacher_engine)
        return super().needs_reference or not is_elsewhere

    @property
    def reference_path(self) -> str:
        return self.config.distill.teacher if self._has_model else ""

    def distill_spec(self) -> DistillSpec | None:
        from flowtrain.trainer.distillation import DistillSpec

        distill, is_endpoint = self.config.distill, bool(self.config.teacher_engine)
        if is_endpoint and not distill.top_k:
            return None  # all that it says is in the advantages
        is_policy = distill.teacher == "policy"
        return DistillSpec(
            distill.divergence,
            distill.mix,
            "endpoint" if is_endpoint else "policy" if is_policy else "reference",
        )

    def for_teacher(
        self, batch: TrainBatch, groups: Sequence[Group], tokenizer: PreTrainedTokenizerFast
    ) -> TrainBatch:
        if not self.config.distill.hint:
            return batch
        hints = {g.index: self._hint(g.trajectories[0].task, tokenizer) for g in groups}

        def hinted(sample: Sample) -> Sample:
            assert sample.sample_id is not None
            prompt, hint = sample.prompt_ids, hints[sample.sample_id.group]
            first = int(prompt[0] == tokenizer.bos_token_id)
            return replace(sample, teacher_prompt_ids=prompt[:first] + hint + prompt[first:])

        return replace(batch, samples=tuple(map(hinted, batch.samples)))

    def _hint(self, task: Task, tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
        text = self.config.distill.hint.replace("{answer}", "; ".join(task.answers))
        return tuple(tokenizer.encode(text, add_special_tokens=False))
