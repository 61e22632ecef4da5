"""Two FSDP2 ranks publish what one publishes. Run as a script, this file publishes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import fork, launch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from flowtrain.trainer import sharding
from flowtrain.trainer.distributed import World
from flowtrain.trainer.model import loading as models
from flowtrain.utils.commands import end_process
from flowtrain.weights import Publisher, PublishOptions, WeightStore, pull
from flowtrain.weights.publish import publisher as module

pytestmark = pytest.mark.dist

NUM_VERSIONS, FAILS_AT = 7, 4
TEXTS = ["", "one ünïcode text", "x" * 3000]


def change(model: torch.nn.Module, version: int) -> None:
    """The same change of one weight in fifty, however the model is sharded."""
    for number, parameter in enumerate(model.parameters()):
        rng = torch.Generator().manual_seed(1000 * version + number)
        amount = torch.randn(parameter.shape, generator=rng) * (
            torch.rand(parameter.shape, generator=rng) < 0.02
        )
        if isinstance(parameter, DTensor):
            amount = distribute_tensor(amount, parameter.device_mesh, parameter.placements)
        with torch.no_grad():
            parameter.add_(amount)


def run(path: str, out: Path) -> None:
    """Publish seven versions on every rank; the fourth fails at first, on the last rank alone."""
    torch.set_num_threads(1)
    world = World.join("cpu", timeout_s=60)
    gathered = world.gather_text(TEXTS[world.rank])
    texts = world.gather_text(TEXTS[2 - world.rank])
    sharding._SMALL = 0  # layer by layer
    model = sharding.shard(
        models.load_model(path, torch.float32), world, sharding.ShardSpec(torch.bfloat16)
    )
    store = WeightStore(out / "weights")
    publisher = Publisher(store, PublishOptions(torch.bfloat16), world)
    published, failures = [], []
    for version in range(1, NUM_VERSIONS + 1):
        change(model, version)
        if version == FAILS_AT and world.rank == world.size - 1:
            real, module.write_delta = module.write_delta, fail
        try:
            published.append(publisher.publish(models.named_weights(model), version).num_changed)
        except OSError as error:
            failures.append(str(error))
            assert store.head() == version - 1 and not store.scratch(version).exists()
            if world.rank == world.size - 1:
                module.write_delta = real
            published.append(publisher.publish(models.named_weights(model), version).num_changed)
    fresh = Publisher(store, PublishOptions(torch.bfloat16), world)
    resumed = fresh.resume(models.named_weights(model), NUM_VERSIONS)
    change(model, NUM_VERSIONS + 1)
    published.append(fresh.publish(models.named_weights(model), NUM_VERSIONS + 1).num_changed)
    report = {
        "published": published,
        "failures": failures,
        "resumed": resumed,
        "gathered": gathered,
        "texts": texts,
    }
    (out / f"{world.rank}.json").write_text(json.dumps(report))
    end_process(0)


def fail(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.fixture(scope="module")
def results(tiny_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The folder that one rank and that two ranks filled."""
    places = {size: tmp_path_factory.mktemp(f"ranks{size}") for size in (1, 2)}
    launch(__file__, [(size, (tiny_path, str(place))) for size, place in places.items()])
    return places


def report(results: dict[int, Path], size: int, rank: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads((results[size] / f"{rank}.json").read_text())
    return found


def test_two_ranks_publish_what_one_publishes(results: dict[int, Path]) -> None:
    one, two = (WeightStore(results[size] / "weights") for size in (1, 2))
    assert one.versions() == two.versions() == list(range(1, NUM_VERSIONS + 2))
    for version in one.versions():
        ours, theirs = one.manifest(version), two.manifest(version)
        found = (ours.root, ours.digests, ours.num_changed)
        assert found == (theirs.root, theirs.digests, theirs.num_changed)
        assert sorted(ours.delta_files) == sorted(theirs.delta_files)
        weights = [pull(store, version) for store in (one, two)]
        assert all(
            torch.equal(weights[0][name].view(torch.int16), w.view(torch.int16))
            for name, w in weights[1].items()
        )
    assert (
        report(results, 1, 0)["published"]
        == report(results, 2, 0)["published"]
        == report(results, 2, 1)["published"]
    )


def test_each_rank_encodes_its_own_rows(results: dict[int, Path]) -> None:
    """Nothing was gathered: both ranks have a file of about the same size."""
    sizes = [
        file.num_bytes for file in WeightStore(results[2] / "weights").manifest(3).delta_files[2]
    ]
    assert len(sizes) == 2 and max(sizes) < 2 * min(sizes)
    assert len(WeightStore(results[2] / "weights").manifest(1).snapshot_files) == 2


def test_a_failure_on_one_rank_fails_all_and_loses_nothing(results: dict[int, Path]) -> None:
    for size, rank in ((1, 0), (2, 0), (2, 1)):
        (failure,) = report(results, size, rank)["failures"]
        assert "No space left on device" in failure
    found = sorted(WeightStore(results[2] / "weights").manifest(FAILS_AT).delta_files)
    assert found == [FAILS_AT - 1]


def test_all_ranks_resume_together(results: dict[int, Path]) -> None:
    assert all(
        report(results, size, rank)["resumed"] is True for size, rank in ((1, 0), (2, 0), (2, 1))
    )
    found = sorted(WeightStore(results[2] / "weights").manifest(NUM_VERSIONS + 1).delta_files)
    assert found == [NUM_VERSIONS]


def test_texts_of_any_length_are_gathered(results: dict[int, Path]) -> None:
    assert report(results, 1, 0)["gathered"] == TEXTS[:1]
    for rank in (0, 1):
        assert report(results, 2, rank)["gathered"] == TEXTS[:2]
        assert report(results, 2, rank)["texts"] == [TEXTS[2], TEXTS[1]]


def test_other_placements_are_refused(monkeypatch: pytest.MonkeyPatch, store: WeightStore) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world = World.join("cpu")
    try:
        mesh = init_device_mesh("cpu", (1,))
        columns = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)])
        told = r"tensor 'w' is placed as .*; the store needs Shard.0. over all 1"
        with pytest.raises(ValueError, match=told):
            Publisher(store).publish({"w": columns}, 1)
        Publisher(store).publish({"w": distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])}, 1)
    finally:
        world.leave()
    assert torch.equal(pull(store, 1)["w"], torch.ones(4, 4))


if __name__ == "__main__":
    fork(lambda path, out: run(path, Path(out)))
