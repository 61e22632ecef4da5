"""On-policy distillation: the policy acts, a teacher says of each of its tokens what it would have
written (GKD, arXiv 2306.13649, eq. 4 with lambda = 1; MiniLLM, arXiv 2306.08543).

The divergence is over the whole vocabulary, so every token says more than a reward does, and no
rollout needs others beside it. A teacher that is the policy itself knows more by a hint in its
prompt, such as the answer.
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

    @property
    def _has_model(self) -> bool:
        return self.config.distill.teacher not in ("policy", "start")

    @property
    def needs_reference(self) -> bool:
        return super().needs_reference or self.config.distill.teacher != "policy"

    @property
    def reference_path(self) -> str:
        return self.config.distill.teacher if self._has_model else ""

    def distill_spec(self) -> DistillSpec:
        from flowtrain.trainer.distillation import DistillSpec

        distill = self.config.distill
        return DistillSpec(distill.divergence, distill.mix, distill.teacher == "policy")

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
