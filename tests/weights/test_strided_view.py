"""Load plans watched and proved through a loader; deltas through strided views, on any ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from many_ranks import Meeting, ThreadRank
from test_delta import resealed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from toy_model import SHAPES, Toy, held_by, toy_weights
from weight_samples import same_bits

from flowtrain import _delta
from flowtrain.inference.vllm.plan import make_plan, prove
from flowtrain.inference.vllm.sharded_target import LoadPlan, ShardedTarget
from flowtrain.weights import (
    Publisher,
    PublishOptions,
    SnapshotPolicy,
    StoreError,
    WeightReader,
    WeightStore,
)
from flowtrain.weights.format.manifest import Layout
from flowtrain.weights.format.tensor_shards import spec_of
from flowtrain.weights.load import target as load_target
from flowtrain.weights.load import word_changes
from flowtrain.weights.load.target import StridedView
from flowtrain.weights.ranks import Ranks, SingleRank

NUM_VERSIONS = 12


def layout_of(found: dict[str, Tensor]) -> Layout:
    return {name: spec_of(name, tensor) for name, tensor in found.items()}


def plan_of(toy: Toy, found: dict[str, Tensor], ranks: Ranks) -> LoadPlan:
    """Make a plan and prove it."""
    plan = make_plan(layout_of(found), toy.load_weights, toy.held.values(), ranks)
    prove(plan, toy.load_weights, toy.held.values(), ranks)
    return plan


def target_of(toy: Toy, found: dict[str, Tensor], ranks: Ranks) -> ShardedTarget:
    return ShardedTarget(
        plan_of(toy, found, ranks), ranks, lambda whole: toy.load_weights(whole.items())
    )


def loaded(store: WeightStore, ranks: Ranks) -> tuple[Toy, WeightReader]:
    """Version 2 on this rank."""
    toy = Toy(ranks.rank, ranks.size)
    reader = WeightReader(store, target_of(toy, toy_weights(0), ranks))
    reader.load(2)
    return toy, reader


def on_ranks(size: int, run: Callable[[Ranks], Any]) -> list[Any]:
    """Collect what `run` returns on each rank, or the exception that it raised there."""
    meeting = Meeting(size)

    def one(rank: int) -> Any:
        try:
            return run(ThreadRank(rank, meeting))
        except (StoreError, ValueError, MemoryError, KeyError) as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def publish(
    store: WeightStore,
    policy: SnapshotPolicy | None = None,
    dtype: torch.dtype = torch.bfloat16,
    level: int = 1,
) -> None:
    publisher = Publisher(store, PublishOptions(level=level), policy=policy or SnapshotPolicy())
    for version in range(1, NUM_VERSIONS + 1):
        publisher.publish(toy_weights(version, dtype), version)


def test_a_plan_is_found_without_touching_what_is_held() -> None:
    toy = Toy()
    before = {name: tensor.clone() for name, tensor in toy.held.items()}
    plan = plan_of(toy, toy_weights(0), SingleRank())
    assert same_bits(toy.held, before), "padding that the loader zeroes, too"
    assert not plan.dense and plan.views.keys() == SHAPES.keys()
    found = {
        name: [(view.sizes, view.strides, view.to_strides, view.to_first) for view in views]
        for name, views in plan.views.items()
    }
    assert found["k"] == [((2560,), (1,), (1,), 5120)]
    assert found["turned"] == [((40, 20), (20, 1), (1, 40), 0)], "a transposed copy is affine, too"
    assert found["scalar"] == [((1,), (1,), (1,), 0)]


def test_cuts_of_columns_and_wider_types_are_counted_in_words() -> None:
    toy = Toy(1, 2, torch.float32)
    watched = make_plan(
        layout_of(toy_weights(0, torch.float32)), toy.load_weights, toy.held.values(), SingleRank()
    )
    (down,) = watched.views["down"]
    found = (down.sizes, down.strides, down.to_strides, down.first)
    assert found == ((24, 96), (192, 1), (96, 1), 96)


@pytest.mark.parametrize(
    ("places", "cuts", "num_views"),
    [((0, 1, 2), 2, 1), ((0, 2, 1), 2, 6), ((0, 1, 2), 3, 9)],
    ids=["in order", "shuffled", "cut unequally"],
)
def test_views_of_experts_are_one_where_they_follow_each_other_evenly(
    places: Sequence[int], cuts: int, num_views: int
) -> None:
    held = torch.randn(3, 8, 5)

    def load(found: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in found:
            for place, expert in zip(places, tensor, strict=True):
                starts = (0, 4, 6)[:cuts]
                for start, rows in zip(starts, expert.tensor_split(starts[1:]), strict=True):
                    held[place, start : start + len(rows)].copy_(rows)

    plan = make_plan(layout_of({"experts": torch.zeros(3, 8, 5)}), load, [held], SingleRank())
    assert len(plan.views["experts"]) == num_views
    prove(plan, load, [held], SingleRank())


class Words(TorchDispatchMode):
    """Counts the words of all results."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.number += result.numel() if isinstance(result, Tensor) else 0
        return result


def test_proving_a_plan_takes_work_in_proportion_to_the_experts_of_a_memory() -> None:
    def words(num_experts: int) -> int:
        held = torch.zeros(num_experts, 64, 8)

        def load(found: Iterable[tuple[str, Tensor]]) -> None:
            for name, tensor in found:
                held[int(name)].copy_(tensor)

        found = {str(number): torch.zeros(64, 8) for number in range(num_experts)}
        plan = make_plan(layout_of(found), load, [held], SingleRank())
        with Words() as counted:
            prove(plan, load, [held], SingleRank())
        return counted.number

    assert words(64) < 5 * words(16)


def test_two_names_of_the_same_words_are_refused_in_any_order() -> None:
    held = torch.zeros(64, 8)

    def load(found: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in found:
            held.copy_(tensor)

    for first, second in ("ab", "ba"):
        found = {first: torch.zeros(64, 8), second: torch.zeros(64, 8)}
        plan = make_plan(layout_of(found), load, [held], SingleRank())
        with pytest.raises(ValueError, match=r"'[ab]': its loader also changes '[ab]'"):
            prove(plan, load, [held], SingleRank())


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts of tensors that end within rows, and within what views have."""
    monkeypatch.setattr(word_changes, "PIECE_WORDS", 701)


@pytest.fixture(params=["host", "device"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a GPU as well, whose kernel has a twin for a CPU."""
    if request.param == "device":
        monkeypatch.setattr(load_target, "_add_on_host", load_target._add_on_device)


@pytest.mark.usefixtures("way", "small_pieces")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_readers_on_all_ranks_hold_what_the_loader_would_have_written(
    store: WeightStore, size: int, dtype: torch.dtype
) -> None:
    publish(store, dtype=dtype)

    def run(ranks: Ranks) -> list[str]:
        toy = Toy(ranks.rank, size, dtype)
        target = target_of(toy, toy_weights(0, dtype), ranks)
        reader = WeightReader(store, target, verify_every=3)
        modes = []
        for version in (*range(1, 7), 12, 5, 9):
            modes.append(reader.load(version).mode)
            wanted = held_by(toy_weights(version, dtype), ranks.rank, size, dtype)
            wanted["table"][max(0, 60 - ranks.rank * 64 // size) :] = toy.held["table"][
                max(0, 60 - ranks.rank * 64 // size) :
            ]  # padding
            assert same_bits(toy.held, wanted)
            assert target.digests() == store.manifest(version).digests and reader.damaged() == []
        return modes

    for modes in on_ranks(size, run):
        assert modes == ["snapshot", *["delta"] * 6, "snapshot", "delta"], modes


@pytest.mark.usefixtures("small_pieces")
def test_level_2_needs_whole_tensors_and_a_snapshot_replaces_it_elsewhere(
    store: WeightStore,
) -> None:
    publish(store, SnapshotPolicy(max_deltas=3), level=2)

    def run(ranks: Ranks) -> list[str]:
        reader = WeightReader(store, target_of(Toy(ranks.rank, ranks.size), toy_weights(0), ranks))
        reader.load(1)
        said = []
        for version in (4, 5):
            try:
                loaded = reader.load(version)
                said.append(f"{loaded.mode} {loaded.reason}")
            except StoreError as error:
                said.append(str(error))
            assert reader.damaged() == []
        return [*said, f"at {reader.version}"]

    assert on_ranks(1, run) == [["delta ", "delta ", "at 5"]]
    for of_four, of_five, version in on_ranks(2, run):
        assert re.fullmatch(
            "snapshot a delta of '.*' is at level 2, but no rank has that tensor whole; publish at "
            "level 1",
            of_four,
        ), of_four
        assert re.fullmatch(
            "version 5 cannot be reached from the full snapshot of 4: a delta of .* publish at "
            "level 1",
            of_five,
        ), of_five
        assert version == "at 4"


@pytest.mark.usefixtures("way", "small_pieces")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_wrong_base_is_found_and_everything_is_undone(store: WeightStore, size: int) -> None:
    """On every rank, though one alone was damaged."""
    publish(store)
    at = int(
        (toy_weights(2)["down"].view(torch.int16) != toy_weights(3)["down"].view(torch.int16))
        .flatten()
        .nonzero()[0]
    )

    def run(ranks: Ranks) -> str:
        toy = Toy(ranks.rank, size)
        target = target_of(toy, toy_weights(0), ranks)
        reader = WeightReader(store, target)
        reader.load(1)
        row, column = at // 96, at % 96
        if column // (96 // size) == ranks.rank:
            toy.held["down"].view(torch.int16)[row, column % (96 // size)] += 1
        damaged = {name: tensor.clone() for name, tensor in toy.held.items()}
        prepared = reader._find_path(3).prepared
        assert len(prepared.batches) == 2, "the first alone could be applied"
        told = "the words of 'down' were not its base, or were damaged"
        with pytest.raises(_delta.WrongBase, match=told):
            target.apply(prepared)
        assert same_bits(toy.held, damaged), "taken back"
        loaded = reader.load(3)
        assert loaded.mode == "snapshot" and reader.damaged() == []
        return loaded.reason

    assert on_ranks(size, run) == ["the words of 'down' were not its base, or were damaged"] * size


def test_what_is_staged_was_found_without_reading_a_weight(store: WeightStore) -> None:
    publish(store)
    toy, reader = loaded(store, SingleRank())
    kept = {name: tensor.clone() for name, tensor in toy.held.items()}
    for tensor in toy.held.values():
        tensor.view(torch.int16).fill_(-1)
    reader.stage(3).result()
    for name, tensor in toy.held.items():
        assert bool((tensor.view(torch.int16) == -1).all()), "nor written one"
        tensor.copy_(kept[name])
    assert reader.load(3).mode == "delta" and reader.damaged() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("has_room", [True, False])
def test_a_gpu_adds_what_it_or_the_host_was_sent(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    publish(store)
    toy = Toy()
    toy.held = {name: tensor.cuda() for name, tensor in toy.held.items()}
    reader = WeightReader(store, target_of(toy, toy_weights(0), SingleRank()))
    reader.load(1)
    if not has_room:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 0))
    for version in (2, 3, 7):
        prepared = reader.stage(version).result().prepared
        found = [each for batch in prepared.additions for each in batch.values()]
        devices = {changes.diffs.device.type for each in found for _, changes in each}
        assert devices == {"cuda" if has_room else "cpu"}
        assert reader.load(version).mode == "delta" and reader.damaged() == []
    toy.held["down"].view(torch.int16)[0, 0] += 1
    before = {name: tensor.clone() for name, tensor in toy.held.items()}
    with pytest.raises(_delta.WrongBase):
        reader._target.apply(prepared)
    assert same_bits(toy.held, before), "taken back"


def test_what_is_prepared_twice_is_the_same_and_is_applied_once(store: WeightStore) -> None:
    publish(store)
    toy, reader = loaded(store, SingleRank())
    before = {name: tensor.clone() for name, tensor in toy.held.items()}
    batches = reader._find_path(4).prepared.batches
    first, second = (reader._target.prepare(batches) for _ in range(2))
    reader._target.apply(first)
    assert same_bits(toy.held, held_by(toy_weights(4), 0, 1) | {"table": toy.held["table"]})
    changed = {name: tensor.clone() for name, tensor in toy.held.items()}
    with pytest.raises(_delta.WrongBase):
        reader._target.apply(second)
    assert same_bits(toy.held, changed) and not same_bits(toy.held, before)
    assert reader.stage(4).result().prepared is not reader.stage(4).result().prepared


@pytest.mark.usefixtures("small_pieces")
def test_a_wrong_number_of_changes_is_found_before_a_word_is_written(store: WeightStore) -> None:
    publish(store)
    toy, reader = loaded(store, SingleRank())
    before = {name: tensor.clone() for name, tensor in toy.held.items()}
    (batch,) = reader._find_path(3).prepared.batches
    whole = batch["down", 0]
    cut = whole.copy()
    cut[24] += 1  # num_changed
    told = "another number of changes than its header says"
    with pytest.raises(_delta.CorruptDelta, match=told):
        reader._target.prepare([batch | {("down", 0): resealed(cut)}])
    torn = whole.copy()
    torn[-1] ^= 1
    with pytest.raises(_delta.CorruptDelta, match="checksum"):
        reader._target.prepare([batch | {("down", 0): torn}])
    assert same_bits(toy.held, before)


def test_a_rank_without_a_part_of_a_tensor_reads_nothing_of_its_deltas(store: WeightStore) -> None:
    publish(store)

    def run(ranks: Ranks) -> list[str]:
        toy = Toy(ranks.rank, ranks.size)
        target = target_of(toy, toy_weights(0), ranks)
        if ranks.rank == 1:  # as the second stage of a pipeline
            target.plan.views["norm"] = []
        reader = WeightReader(store, target)
        modes = [reader.load(version).mode for version in (1, 2, 3)]
        assert reader.damaged() == []
        return modes

    assert on_ranks(2, run) == [["snapshot", "delta", "delta"]] * 2


def test_damage_of_a_copy_that_another_rank_holds_too_is_found(store: WeightStore) -> None:
    publish(store)
    at = int(
        (
            toy_weights(2)["norm"].view(torch.int16) != toy_weights(3)["norm"].view(torch.int16)
        ).nonzero()[0]
    )

    def run(ranks: Ranks) -> str:
        toy, reader = loaded(store, ranks)
        if ranks.rank == 1:
            toy.held["norm"].view(torch.int16)[at] += 1
        return reader.load(3).reason

    assert on_ranks(2, run) == ["the words of 'norm' were not its base, or were damaged"] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_an_exception_during_apply_is_undone_on_every_rank(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    publish(store)
    real, fails = StridedView.scatter, [False]
    meeting: list[int] = []

    def scatter(view: StridedView, changes: Any, *args: Any, **options: Any) -> Tensor:
        if fails[0] and not options and view.memory.data_ptr() in meeting:
            raise IndexError("what is before the table has been written by now")
        return real(view, changes, *args, **options)

    monkeypatch.setattr(StridedView, "scatter", scatter)

    def run(ranks: Ranks) -> tuple[bool, str]:
        toy, reader = loaded(store, ranks)
        before = {name: tensor.clone() for name, tensor in toy.held.items()}
        if ranks.rank == size - 1:
            meeting.append(toy.held["table"].data_ptr())
        ranks.gather_text("")
        fails[0] = True
        ranks.gather_text("")
        try:
            reader.load(3)
            failure = ""
        except (StoreError, RuntimeError, IndexError) as error:
            failure = type(error).__name__
        unchanged = same_bits(toy.held, before) and reader.version == 2
        ranks.gather_text("")
        fails[0] = False
        ranks.gather_text("")
        assert reader.load(3).mode == "delta" and reader.damaged() == []
        return unchanged, failure

    found = on_ranks(size, run)
    assert all(unchanged for unchanged, _ in found), found
    assert [failure for _, failure in found] == [*["StoreError"] * (size - 1), "IndexError"]


def test_a_store_that_one_rank_cannot_read_fails_on_all(store: WeightStore) -> None:
    publish(store)

    class Cut(WeightStore):
        def manifest(self, version: int) -> Any:
            raise StoreError("the disk of this rank is gone" if version == 3 else "never")

    def run(ranks: Ranks) -> str:
        _, reader = loaded(store, ranks)
        if ranks.rank == 1:
            reader.source = Cut(store.root)
        with pytest.raises(StoreError) as failure:
            reader.load(3)
        reader.source = store
        assert reader.version == 2 and reader.load(3).mode == "delta"
        return str(failure.value)

    assert on_ranks(2, run) == [
        "rank 1: StoreError: the disk of this rank is gone",
        "the disk of this rank is gone",
    ]


# ---- what is not an affine copy


class Odd(Toy):
    """Loaders that do more than copy."""

    def load_norm(self, tensor: Tensor) -> None:
        self.held["norm"].copy_(tensor + 1)

    def load_scalar(self, tensor: Tensor) -> None:
        self.held["scalar"].fill_(tensor.item())

    def load_turned(self, tensor: Tensor) -> None:
        self.held["turned"].copy_(tensor.float().t())


@pytest.mark.parametrize("size", [1, 2])
def test_tensors_that_a_loader_computes_with_go_through_the_loader(
    store: WeightStore, size: int
) -> None:
    publish(store)

    def run(ranks: Ranks) -> dict[str, str]:
        toy = Odd(ranks.rank, size)
        target = target_of(toy, toy_weights(0), ranks)
        reader = WeightReader(store, target)
        for version in (1, 2, 3, 7):
            assert reader.load(version).mode == ("snapshot" if version == 1 else "delta")
            wanted = Odd(ranks.rank, size)
            wanted.load_weights(toy_weights(version).items())
            assert all(
                torch.equal(toy.held[name].view(torch.int16), wanted.held[name].view(torch.int16))
                for name in ("norm", "turned", "down")
            )
            assert target.digests() == store.manifest(version).digests
        return target.plan.dense

    for dense in on_ranks(size, run):
        assert dense.keys() == {"norm", "scalar", "turned"}
        assert "computes with it (aten.add" in dense["norm"], dense


def test_a_cast_is_named_as_the_obstacle() -> None:
    toy = Toy(dtype=torch.bfloat16)
    plan = make_plan(
        layout_of(toy_weights(0, torch.float32)), toy.load_weights, toy.held.values(), SingleRank()
    )
    assert plan.dense["norm"] == "its loader casts it from float32 to bfloat16"


def test_a_dense_tensor_is_restored_when_its_loader_fails(store: WeightStore) -> None:
    publish(store)
    toy = Odd()
    reader = WeightReader(store, target_of(toy, toy_weights(0), SingleRank()))
    reader.load(2)
    before, real = {name: tensor.clone() for name, tensor in toy.held.items()}, toy.load_scalar
    calls: list[int] = []

    def load(tensor: Tensor) -> None:
        real(tensor)
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError("no memory")

    toy.load_scalar = load
    with pytest.raises(MemoryError, match="no memory"):
        reader.load(3)
    assert same_bits(toy.held, before) and reader.version == 2
    assert reader.load(3).mode == "delta" and reader.damaged() == []


def test_a_tied_tensor_is_recognised_by_its_digest(store: WeightStore) -> None:
    publisher = Publisher(store)
    for version in (1, 2, 3):
        found = toy_weights(version)
        found["head"] = found["table"].clone()
        if version == 3:
            found["head"][0, 0] += 1
        publisher.publish(found, version)
    toy = Toy()
    reader = WeightReader(store, target_of(toy, found, SingleRank()))
    reader.load(1)
    assert reader.load(2).mode == "delta" and reader.damaged() == []
    told = "version 3 has 'head' apart; the model here ties it to another tensor"
    with pytest.raises(StoreError, match=told):
        reader.load(3)
    assert reader.version == 2 and reader.damaged() == []


def test_a_tensor_that_the_loader_ignores_is_refused() -> None:
    found = toy_weights(0) | {"head": torch.zeros(9, 9, dtype=torch.bfloat16)}
    with pytest.raises(
        ValueError,
        match="the model's loader ignores 'head': the store holds another model, or one with an "
        "untied head",
    ):
        target_of(Toy(), found, SingleRank())


def refused(method: str, load: Callable[[Toy, Tensor], None], message: str) -> None:
    toy = type("Wrong", (Toy,), {method: load})()
    before = {name: tensor.clone() for name, tensor in toy.held.items()}
    with pytest.raises(ValueError, match=message):
        plan_of(toy, toy_weights(0), SingleRank())
    assert same_bits(toy.held, before)


def test_plans_that_the_proof_refutes_are_refused_by_name() -> None:
    def also(toy: Toy, tensor: Tensor) -> None:
        toy.held["norm"].copy_(tensor)
        toy.held["down"][0].fill_(0)

    def half(toy: Toy, tensor: Tensor) -> None:
        toy.held["norm"][:4].copy_(tensor[:4])

    def by_value(toy: Toy, tensor: Tensor) -> None:
        toy.held["norm"].copy_(tensor)
        toy.held["norm"][0] = 0

    def raises(toy: Toy, tensor: Tensor) -> None:
        raise KeyError("norm")

    refused("load_norm", also, "cannot be updated in place: 'norm': its loader also changes 'down'")
    refused(
        "load_norm",
        half,
        "cannot be updated in place: 'norm': the ranks together do not hold each of its words once",
    )
    refused(
        "load_norm",
        by_value,
        "cannot be updated in place: 'norm': its words are not where its loader seemed to put them",
    )
    refused(
        "load_norm",
        raises,
        r"the model's loader does not take 'norm' \(bfloat16 \(7,\)\): KeyError: 'norm'",
    )


def test_a_loader_that_replaces_a_parameter_is_refused_and_the_parameter_is_put_back() -> None:
    def replaces(toy: Toy, tensor: Tensor) -> None:
        toy.held["norm"].data = tensor.clone()

    refused("load_norm", replaces, r"replaces a parameter of shape \(7,\)")


def test_load_applies_a_staged_version_unless_another_load_came_between(store: WeightStore) -> None:
    publish(store)
    toy = Toy()
    reader = WeightReader(store, target_of(toy, toy_weights(0), SingleRank()))
    reader.load(1)
    reader.stage(2)
    for version in (2, 3):
        if version == 3:
            reader.stage(2)
        assert reader.load(version).mode == "delta" and reader.damaged() == []
    reader.stage(99)
    with pytest.raises(StoreError, match="version 99 is not in"):
        reader.load(99)
    assert reader.version == 3 and reader.load(4).mode == "delta"
