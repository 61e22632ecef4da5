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
from typing import TYPE_CHECKING, Literal

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
                "algorithm.equal_groups='drop' excludes rollouts with equal rewards, from which a "
                f"teacher can teach: algorithm.name={options.name!r} requires 'keep'"
            )
        if self.reference_path and options.kl_coef:
            raise UserError(
                f"algorithm.kl_coef={options.kl_coef} must be 0 with distill.teacher="
                f"{distill.teacher!r}, which takes the place of the reference policy"
            )
        if self._source == "endpoint":
            self._check_endpoint()
        elif distill.top_k:
            raise UserError(
                f"distill.top_k={distill.top_k} is for teachers of [engines]: distill.teacher="
                f"{distill.teacher!r} tells whole distributions"
            )

    def _check_endpoint(self) -> None:
        """Check that what the teacher tells can be compared with the policy."""
        config, distill, rollout = self.config, self.config.distill, self.config.rollout
        temperature = config.sampling_of(config.train.policy).temperature
        needed: dict[str, tuple[object, object]] = {
            f"engines.{distill.teacher}.kind": (config.engines[distill.teacher].kind, "openai"),
            "rollout.temperature": (temperature, 1.0),
            "log.replay": (config.log.replay, False),  # which has not what the teacher said
        }
        if not distill.top_k:  # by the sampler's log-probs
            needed |= {
                "distill.divergence": (distill.divergence, "reverse_kl"),
                "rollout.top_k": (rollout.top_k, 0),
                "rollout.top_p": (rollout.top_p, 1.0),
                "rollout.frequency_penalty": (rollout.frequency_penalty, 0.0),
            }
        for key, (value, must) in needed.items():
            if value != must:
                raise UserError(
                    f"{key}={value!r} must be {must!r} with distill.teacher={distill.teacher!r} of "
                    f"[engines] and distill.top_k={distill.top_k}"
                )

    @property
    def _source(self) -> Literal["policy", "reference", "endpoint"]:
        if self.config.teacher_engine:
            return "endpoint"
        return "policy" if self.config.distill.teacher == "policy" else "reference"

    @property
    def needs_reference(self) -> bool:
        return super().needs_reference or self._source == "reference"

    @property
    def reference_path(self) -> str:
        name = self.config.distill.teacher
        return name if self._source == "reference" and name != "start" else ""

    def distill_spec(self) -> DistillSpec | None:
        from flowtrain.trainer.distillation import DistillSpec

        distill, source = self.config.distill, self._source
        if source == "endpoint" and not distill.top_k:
            return None  # all that it says is in the advantages
        return DistillSpec(distill.divergence, distill.mix, source)

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
