"""Which rank trains and which samples."""

from __future__ import annotations

import pytest
import torch

from flowtrain.config import Config
from flowtrain.records import UserError
from flowtrain.trainer.distributed import World
from flowtrain.trainer.setup.placement import Placement


def config(num_engine_ranks: int, num_questions: int = 12) -> Config:
    rollout = {"num_engine_ranks": num_engine_ranks, "num_questions": num_questions}
    return Config.model_validate({"rollout": rollout, "train": {"num_minibatches": 1}})


def world(size: int, rank: int = 0) -> World:
    return World(rank, size, torch.device("cpu"))


def test_colocated_ranks_both_train_and_sample() -> None:
    placement = Placement.of(config(0), world(4, rank=2))
    assert placement.trainers is placement.samplers is placement.world and not placement.is_split
    assert placement.of_first_sampler({"a": 1.0}) == {"a": 1.0}


@pytest.mark.parametrize(
    ("num_engines", "num_questions", "size", "message"),
    [
        (2, 12, 2, "num_engine_ranks=2 leaves none of torchrun's 2 ranks for training"),
        (1, 12, 1, "num_engine_ranks=1 leaves none of torchrun's 1 ranks"),
        (3, 10, 8, r"num_questions=10 must be a multiple of rollout\.num_engine_ranks=3"),
        (0, 12, 8, "num_questions=12 must be a multiple of the 8 ranks that torchrun started"),
    ],
)
def test_what_cannot_be_placed_names_its_keys(
    num_engines: int, num_questions: int, size: int, message: str
) -> None:
    with pytest.raises(UserError, match=rf"rollout\.{message}"):
        Placement.of(config(num_engines, num_questions), world(size))


def test_engines_of_several_gpus_do_not_overlap() -> None:
    options = {"rollout": {"engine": "vllm"}, "vllm": {"tensor_parallel_size": 2}}
    pair = config(0).model_copy(update=dict(Config.model_validate(options)))
    on_gpu = World(0, 4, torch.device("cuda", 0))
    message = r"vllm\.tensor_parallel_size=2 uses the GPUs after a rank's own"
    with pytest.raises(UserError, match=message):
        Placement.of(pair, on_gpu)
    assert Placement.of(pair, world(4)).world.size == 4, "a CPU has no devices to share"
    assert Placement.of(pair, World(0, 1, torch.device("cuda", 0))).world.size == 1
