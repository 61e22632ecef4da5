"""A model that the main rank cannot load ends all. Run as a script, this file is the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import fork, launch
from safetensors.torch import load_file, save_file

from flowtrain.config import Config
from flowtrain.records import UserError
from flowtrain.trainer.distributed import World
from flowtrain.trainer.setup.components import LearnerComponents, RunComponents
from flowtrain.trainer.setup.placement import Placement
from flowtrain.utils.commands import end_process

pytestmark = pytest.mark.dist


def load(path: str, out: Path) -> None:
    """Only the main rank reads the weights, so that it alone finds them broken."""
    world = World.join("cpu")
    tasks = {"name": "gameof24", "num_train": 20}
    config = Config.model_validate(
        {"model": {"path": path}, "tasks": tasks, "agent": {"name": "single", "tools": []}}
    )
    for kind in (LearnerComponents.load, RunComponents.prepare):
        with pytest.raises(UserError, match="holds non-finite numbers") as refused:
            kind(config, Placement.colocated(world))
    (out / str(world.rank)).write_text(str(refused.value))
    end_process(0)


def test_what_the_main_rank_finds_broken_is_told_to_all(tiny_path: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in Path(tiny_path).iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    weights = {
        name: tensor.clone() for name, tensor in load_file(model / "model.safetensors").items()
    }
    weights["model.norm.weight"].fill_(torch.nan)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    launch(__file__, [(2, (str(model), str(tmp_path)))])
    told = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert told[1] == f"rank 0: UserError: {told[0]}" and "model.path=" in told[0]


if __name__ == "__main__":
    fork(lambda path, out: load(path, Path(out)))
