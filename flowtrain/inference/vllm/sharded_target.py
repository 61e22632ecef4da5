"""A `Target` for weights that a model holds as strided views, on one rank or several.

Before, while the weights are used, deltas are decoded and their changes brought to the device of
the weights: four bytes each, as long as half of the free memory lasts. Then they are added through
the views, and the digest change is summed over the ranks, each part of a tensor once. When the sum
is wrong, they are taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from flowtrain import _delta
from flowtrain.weights.format.manifest import Digest, Layout, Manifest, StoreError, add
from flowtrain.weights.format.tensor_shards import (
    U16,
    Blob,
    DeltaBatch,
    ShardKey,
    TensorShard,
    digest_change,
    digest_of,
)
from flowtrain.weights.load.target import (
    PreparedBatches,
    StridedView,
    apply_batches,
    check_layout,
    slice_of,
    warm_up,
    write_shard,
)
from flowtrain.weights.load.word_changes import WordChanges, decode_pieces, side_stream
from flowtrain.weights.ranks import Ranks, gather

Addition = tuple[StridedView, WordChanges]
RegionDigests = list[tuple[str, str, Digest]]
"""Names of tensors, regions of them, and their digests or digest changes."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The places of a store's tensors in a model, on one rank."""

    layout: Layout
    views: dict[str, list[StridedView]]
    """Views by tensor; an empty list where this rank has no part of it."""
    dense: dict[str, str]
    """Tensors that only the model's loader can write, with the reason; not in `views`. The same on
    all ranks."""
    touched: dict[str, set[int]]
    """Memories that the loader writes to for a tensor of `views`, by their addresses; with
    constants, too."""


@dataclass(slots=True)
class ShardedTarget:
    """See `Target`. Deltas at level 2 need a tensor whole on every rank."""

    plan: LoadPlan
    ranks: Ranks
    load: Callable[[dict[str, Tensor]], object]
    """Loads whole tensors through the model's loader."""
    num_threads: int = 1
    _dense: dict[str, Tensor] = field(default_factory=dict)
    """Copies on the host of the dense tensors."""
    _twins: dict[str, list[str]] = field(default_factory=dict)
    """Tensors that no rank has, because the loader ties them to one of the named tensors."""

    def __post_init__(self) -> None:
        """Raise ValueError for a tensor that no rank has and that cannot be tied to another."""
        layout = self.plan.layout
        for name in self.plan.dense:
            self._dense[name] = torch.empty(layout[name].shape, dtype=layout[name].torch_dtype)
        local_names = [name for name in layout if self.plan.views.get(name) or name in self._dense]
        held = {name for names in gather(self.ranks, local_names) for name in names}
        for name in layout.keys() - held:
            self._twins[name] = [other for other in held if layout[other] == layout[name]]
            if not self._twins[name]:
                raise ValueError(
                    f"the model's loader ignores {name!r}: the store holds another model, or one "
                    "with an untied head"
                )

    def check(self, manifest: Manifest) -> None:
        check_layout(self.plan.layout, manifest.layout, manifest.version)
        for name, twins in self._twins.items():
            if manifest.digests[name] not in [manifest.digests[twin] for twin in twins]:
                raise StoreError(
                    f"version {manifest.version} has {name!r} apart; the model here ties it to "
                    "another tensor"
                )

    def prepare(self, batches: Sequence[DeltaBatch]) -> PreparedBatches:
        additions: list[dict[ShardKey, list[Addition]]] = []
        with side_stream(self._device) as room:
            warm_up(self._device)
            for batch in batches:
                additions.append({})
                for key, blob in batch.items():
                    # Level 2 needs the weights as they will be.
                    if self._is_view(key[0]) and _delta.info(blob)["level"] == 1:
                        found = additions[-1][key] = []
                        for views, changes in self._decode(*key, blob):
                            if changes.num_bytes <= room:  # the rest goes there piece by piece
                                changes = changes.to(self._device)
                                room -= changes.num_bytes
                            found += [(view, changes) for view in views]
        return PreparedBatches(batches, additions)

    def apply(self, prepared: PreparedBatches) -> None:
        batches = prepared.batches
        undo = ExitStack()
        try:
            changes = self._change(prepared, undo)
        # The other ranks are blocked in a gather: report to them before raising.
        except BaseException as error:
            is_delta = isinstance(error, _delta.DeltaError)
            reports = gather(self.ranks, ["delta" if is_delta else "other", str(error), []])
            undo.close()
            if is_delta and any(kind == "other" for kind, _, _ in reports):
                raise StoreError("another rank could not apply the deltas") from error
            raise
        # The same gather as above: a rank that failed sends its error in place of its changes.
        reports = gather(self.ranks, ["", "", changes])
        failures = sorted((kind, text) for kind, text, _ in reports if kind)
        sums = sum_regions([changes for _, _, changes in reports])
        wrong = [] if failures else self._missed(batches, sums)
        if failures or wrong:
            undo.close()
        if wrong:
            raise _delta.WrongBase(f"the words of {wrong[0]!r} were not its base, or were damaged")
        if failures:
            kind, text = failures[-1]
            if kind == "other":
                raise StoreError(f"another rank could not apply the deltas: {text}")
            raise _delta.DeltaError(text)

    def write(self, shards: Sequence[TensorShard]) -> None:
        for shard in shards:
            if shard.name in self._dense:
                write_shard(self._dense[shard.name], shard)
            elif self._is_view(shard.name):
                flat = torch.from_numpy(shard.u16().view(np.int16))
                for view in self.plan.views[shard.name]:
                    view.write(flat, shard.first)
        self._load_dense(self._dense)

    def digests(self) -> dict[str, Digest]:
        regions = [
            (name, view.region, view.digest(self.num_threads))
            for name, views in self.plan.views.items()
            for view in views
        ]
        sums = sum_regions(gather(self.ranks, regions))
        digests = {n: sums.get(n) or (-1, -1) for n in self.plan.views if n not in self._twins}
        for name, tensor in self._dense.items():
            digests[name] = digest_of(tensor, num_threads=self.num_threads)
        return digests

    def finish(self) -> None:
        """Do nothing: the words were written where they are used."""

    def _change(self, prepared: PreparedBatches, undo: ExitStack) -> RegionDigests:
        """Apply this rank's part of the deltas. Returns the digest change of each region."""
        undo.callback(self._wait)  # memory of changes is given back after
        regions: list[tuple[str, str]] = []
        found: list[Tensor] = []
        for batch, ready in zip(prepared.batches, prepared.additions, strict=True):
            for key, blob in batch.items():
                if not self._is_view(key[0]):
                    continue
                is_ready = key in ready
                for view, changes in ready[key] if is_ready else self._decode_level_2(*key, blob):
                    found.append(view.scatter(changes, self.num_threads).to(self._device))
                    undo.callback(view.scatter, changes, self.num_threads, is_undo=True)
                    regions.append((key[0], view.region))
        self._change_dense(prepared.batches, undo)
        sums: dict[tuple[str, str], Digest] = {}
        # The host waits for the device here alone.
        changed = torch.stack(found).tolist() if found else []
        for region, change in zip(regions, changed, strict=True):
            sums[region] = add(sums.get(region, (0, 0)), change)
        return [(*region, change) for region, change in sums.items()]

    @property
    def _device(self) -> torch.device:
        views = chain.from_iterable(self.plan.views.values())
        return next((view.memory.device for view in views), torch.device("cpu"))

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _is_view(self, name: str) -> bool:
        return name not in self._dense and name not in self._twins

    def _decode(
        self, name: str, first: int, blob: Blob, base: U16 | None = None
    ) -> Iterator[tuple[list[StridedView], WordChanges]]:
        """Decode what this rank has of a delta's words, by views that overlap."""
        info, num_words, num_changed = _delta.info(blob), 0, 0
        for views in overlapping(self.plan.views[name]):
            begin = max(first, views[0].first)
            end = min(first + info["num_words"], max(view.end for view in views))
            num_words += max(0, end - begin)
            for changes in decode_pieces(blob, first, begin, end, base, self.num_threads):
                num_changed += len(changes.diffs)
                start, stop = changes.first, changes.end
                yield [view for view in views if view.first < stop and start < view.end], changes
        if num_words == info["num_words"] and num_changed != info["num_changed"]:
            raise _delta.CorruptDelta(
                f"the delta of {name!r} has another number of changes than its header says"
            )

    def _decode_level_2(self, name: str, first: int, blob: Blob) -> Iterator[Addition]:
        """Decode a delta that needs the tensor's current words."""
        num_words = _delta.info(blob)["num_words"]
        base = slice_of(name, self._read_whole(name), first, num_words)
        for views, changes in self._decode(name, first, blob, base):
            yield from ((view, changes) for view in views)

    def _read_whole(self, name: str) -> Tensor:
        """Return a tensor's current words. Raises DeltaError when this rank has a part of them."""
        words = torch.empty(self.plan.layout[name].num_words, dtype=torch.int16)
        if sum(view.num_words for view in self.plan.views[name]) != len(words):
            raise _delta.DeltaError(
                f"a delta of {name!r} is at level 2, but no rank has that tensor whole; publish at "
                "level 1"
            )
        for view in self.plan.views[name]:
            view.of_tensor(words).copy_(view.live())
        return words

    def _change_dense(self, batches: Sequence[DeltaBatch], undo: ExitStack) -> None:
        names = {name for batch in batches for name, _ in batch} & self._dense.keys()
        old = {name: self._dense[name].clone() for name in names}

        def restore() -> None:
            for name, tensor in old.items():
                self._dense[name].copy_(tensor)
            self._load_dense(names)

        undo.callback(restore)
        apply_batches(batches, self._dense, self.num_threads)
        self._load_dense(names)

    def _load_dense(self, names: Iterable[str]) -> None:
        if tensors := {name: self._dense[name] for name in names}:
            self.load(tensors)

    def _missed(self, batches: Sequence[DeltaBatch], sums: dict[str, Digest | None]) -> list[str]:
        """Return the tensors whose digests did not change as their deltas say."""
        expected: dict[str, Digest] = {}
        for (name, _), blob in chain.from_iterable(batch.items() for batch in batches):
            if self._is_view(name):
                expected[name] = add(expected.get(name, (0, 0)), digest_change(blob))
        return [name for name, change in expected.items() if sums.get(name, (0, 0)) != change]


def overlapping(views: Iterable[StridedView]) -> list[list[StridedView]]:
    """Put the views of a tensor whose spans overlap together, in order of their first words."""
    groups: list[list[StridedView]] = []
    end = 0
    for view in sorted(views, key=lambda view: view.first):
        if groups and view.first < end:
            groups[-1].append(view)
        else:
            groups.append([view])
        end = max(end, view.end)
    return groups


def sum_regions(reports: list[RegionDigests]) -> dict[str, Digest | None]:
    """Sum the region digests of all ranks by tensor, each region once; None where two ranks that
    hold the same region disagree.
    """
    parts: dict[str, dict[str, set[Digest]]] = {}
    for name, region, (a, b) in chain.from_iterable(reports):
        parts.setdefault(name, {}).setdefault(region, set()).add((a, b))
    return {
        name: add(*chain(*regions.values())) if all(len(d) == 1 for d in regions.values()) else None
        for name, regions in parts.items()
    }
