"""Which ranks train and which sample: every rank both (colocated), or the last
`rollout.num_engine_ranks` sample and the others train.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from flowtrain.config import Config
from flowtrain.records import UserError
from flowtrain.trainer.distributed import World


@dataclass(frozen=True, slots=True)
class Placement:
    """The ranks of a run by what they do; the same world three times where every rank does both."""

    world: World
    trainers: World
    samplers: World

    @classmethod
    def of(cls, config: Config, world: World) -> Placement:
        """Raises UserError when no rank is left to train, the questions of a step do not divide
        among those that sample, or the GPUs of their engines overlap; collective.
        """
        num_engines, num_questions = config.rollout.num_engine_ranks, config.rollout.num_questions
        if num_engines >= world.size:
            raise UserError(
                f"rollout.num_engine_ranks={num_engines} leaves none of the {world.size} ranks "
                "that torchrun started to train: lower it"
            )
        if num_questions % (num_engines or world.size):
            number = (
                f"rollout.num_engine_ranks={num_engines}"
                if num_engines
                else f"the {world.size} ranks that torchrun started"
            )
            raise UserError(f"rollout.num_questions={num_questions} must be a multiple of {number}")
        size = config.vllm.tensor_parallel_size
        if size > 1 and (num_engines or world.size) > 1 and world.device.type == "cuda":
            raise UserError(
                f"vllm.tensor_parallel_size={size} takes the GPUs after a rank's own, so only the "
                "last rank may sample: set rollout.num_engine_ranks = 1"
            )
        if not num_engines:
            return cls(world, world, world)
        ranks = range(world.size)
        return cls(
            world, world.subworld(ranks[:-num_engines]), world.subworld(ranks[-num_engines:])
        )

    @property
    def is_split(self) -> bool:
        return self.trainers is not self.world

    def wait(self) -> None:
        """Until what one kind of ranks has done is done for the other; colocated, each knows by
        itself.
        """
        if self.is_split:
            self.world.barrier()

    def of_first_sampler(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics of an engine, also where there is none; collective. Colocated, every rank has
        its own.
        """
        if not self.is_split:
            return metrics
        found: dict[str, float] = json.loads(
            self.world.gather_text(json.dumps(metrics))[self.trainers.size]
        )
        return found
