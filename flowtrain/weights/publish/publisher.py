"""The publisher of versions: each rank encodes the changes of its own rows, rank 0 writes the
manifest and moves HEAD.

The baselines, copies of the published words, advance only after HEAD has moved. A publish that
fails on any rank leaves store and baselines unchanged, and the next publish starts from the same
version.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from flowtrain import _delta
from flowtrain.utils.lock import Lock
from flowtrain.weights.format.files import check_storable, write_delta, write_snapshot
from flowtrain.weights.format.manifest import (
    Digest,
    File,
    Layout,
    Manifest,
    add_up,
    num_words_of,
    total_bytes,
)
from flowtrain.weights.format.tensor_shards import Blob, TensorShard, local_shards, spec_of
from flowtrain.weights.publish.baseline import (
    Baseline,
    Change,
    SkipTiers,
    encode_all,
    make_baseline,
)
from flowtrain.weights.ranks import Ranks, SingleRank, gather, on_all_ranks
from flowtrain.weights.stores.folder import WeightStore

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class DeltaChain:
    """The deltas that lead from a full snapshot to the newest version."""

    snapshot: int
    """Version of the full snapshot."""
    num_deltas: int = 0
    num_bytes: int = 0
    """Size of the deltas of all ranks."""

    def plus(self, delta_bytes: int) -> DeltaChain:
        """Return the chain with one more delta."""
        return DeltaChain(self.snapshot, self.num_deltas + 1, self.num_bytes + delta_bytes)


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """Decides which versions get a full snapshot."""

    max_deltas: int = 64
    """Largest number of deltas between two full snapshots."""
    max_delta_share: float = 0.35
    """A full snapshot replaces a delta larger than this share of the full size."""

    def is_dense(self, delta_bytes: int, full_bytes: int) -> bool:
        """Return whether a full snapshot replaces the delta."""
        return delta_bytes > self.max_delta_share * full_bytes

    def reason(self, chain: DeltaChain, delta_bytes: int, full_bytes: int) -> str:
        """Return why the delta after `chain` needs a full snapshot beside it; "" if it does not."""
        if self.is_dense(delta_bytes, full_bytes):
            return f"the delta would be {delta_bytes / max(full_bytes, 1):.0%} of the full size"
        chain = chain.plus(delta_bytes)
        if chain.num_bytes > full_bytes / 2:
            share = chain.num_bytes / max(full_bytes, 1)
            return (
                f"the deltas since version {chain.snapshot} add up to {share:.0%} of the full size"
            )
        if chain.num_deltas >= self.max_deltas:
            return f"the last full snapshot is {chain.num_deltas} versions old"
        return ""


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """The encoding options of a publisher."""

    dtype: torch.dtype | None = None
    """The dtype that weights are cast to; None keeps their own."""
    level: int = 1
    """Level of compression. Level 2 makes deltas about a quarter smaller and several times slower
    to encode, for slow links between sites."""
    num_threads: int = 1
    on_host: bool = False
    """Keep the published words in host memory even if the weights are on a GPU. Every publish then
    copies all weights to the host."""


@dataclass(frozen=True, slots=True)
class Published:
    """The outcome of a publish."""

    version: int
    num_changed: int
    """Number of 16-bit words that differ from the previous version."""
    num_words: int
    delta_bytes: int
    """Size of the delta files, without merged deltas over several versions; 0 without deltas."""
    snapshot_bytes: int
    reason: str
    """The reason for a full snapshot; empty when there is none."""

    def metrics(self) -> dict[str, float | str]:
        metrics: dict[str, float | str] = {
            "weights_density": self.num_changed / max(self.num_words, 1),
            "weights_delta_bytes": self.delta_bytes,
            "weights_snapshot_bytes": self.snapshot_bytes,
        }
        if self.delta_bytes and self.num_changed:
            metrics["weights_bytes_per_change"] = self.delta_bytes / self.num_changed
        if self.reason:
            metrics["weights_snapshot_reason"] = self.reason
        return metrics


@dataclass(frozen=True, slots=True)
class _Base:
    """The version that this rank published last."""

    version: int
    layout: Layout
    baselines: dict[str, Baseline]
    """Baselines of this rank's shards by tensor."""
    chain: DeltaChain
    skips: SkipTiers = field(default_factory=SkipTiers)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A version before it is written, on this rank."""

    baselines: dict[str, Baseline]
    digests: dict[str, Digest]
    """Digests of this rank's shards by tensor."""
    num_changed: int
    """Changed words of all ranks."""
    reason: str
    """The reason for a full snapshot; empty when there is none."""
    deltas: dict[int, dict[str, Blob]] = field(default_factory=dict)
    """Deltas to be written, by the version that they start from."""
    skips: SkipTiers = field(default_factory=SkipTiers)


@dataclass(slots=True)
class Publisher:
    """Publishes versions of one model. All ranks must call its methods together."""

    store: WeightStore
    options: PublishOptions = field(default_factory=PublishOptions)
    ranks: Ranks = field(default_factory=SingleRank)
    policy: SnapshotPolicy = field(default_factory=SnapshotPolicy)
    _base: _Base | None = None
    _lock: Lock | None = None
    """Rank 0's, from its first publish until `close`: meanwhile no other process may publish."""

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> Published:
        """Write the tensors (plain, or DTensors sharded by rows) to the store as `version`.

        Raises:
            StoreError: the version is not newer than HEAD.
            UserError: another process is publishing to the store.
            OSError: a disk is full or read-only. Store and publisher are unchanged, on every rank.
            ValueError: the store cannot hold a tensor; the message names it.
        """
        layout, shards = self._split(tensors)
        base = self._base if self._base is not None and self._base.layout == layout else None
        draft = self._draft_next(base, shards) if base else self._draft_first(layout, shards)
        # The folder must be there before any rank writes into it.
        self._on_main(version, lambda: self._begin(version))
        files = self._all_or_none(
            version, lambda: self._write(version, layout, shards, draft=draft)
        )
        chain = DeltaChain(version) if base is None or draft.reason else base.chain
        manifest = self._manifest(version, layout, draft, snapshot=chain.snapshot, files=files)
        self._on_main(version, lambda: self.store.commit(manifest))

        # HEAD has moved: now the baselines may.
        for shard in shards if base is not None else []:
            draft.baselines[shard.name].advance(shard, draft.digests[shard.name])
        delta_bytes = 0
        if base is not None:
            delta_bytes = total_bytes(manifest.delta_files.get(base.version, ()))
            chain = chain if draft.reason else chain.plus(delta_bytes)
        self._base = _Base(version, layout, draft.baselines, chain=chain, skips=draft.skips)
        return Published(
            version=version,
            num_changed=draft.num_changed,
            num_words=manifest.num_words,
            delta_bytes=delta_bytes,
            snapshot_bytes=total_bytes(manifest.snapshot_files),
            reason=draft.reason,
        )

    def close(self) -> None:
        """Release the store's lock, so that other processes may publish. Deleting the last
        reference to a publisher releases its lock too.
        """
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _begin(self, version: int) -> None:
        if self._lock is None:
            self._lock = self.store.claim()
        self._lock.check()
        self.store.begin(version)

    def resume(self, tensors: Mapping[str, Tensor], version: int) -> bool:
        """Continue from `version` and return True if it is HEAD and holds exactly these tensors;
        otherwise change nothing and return False.
        """
        if self.store.head() != version:
            return False
        manifest = self.store.manifest(version)
        layout, shards = self._split(tensors)
        draft = self._draft_first(layout, shards)
        digests = add_up(layout, gather(self.ranks, draft.digests))
        if (manifest.layout, manifest.digests) != (layout, digests):
            return False
        chain = DeltaChain(manifest.snapshot)
        while manifest.version != chain.snapshot:
            base = max(manifest.delta_files)  # not a skip, which starts further back
            chain = chain.plus(total_bytes(manifest.delta_files[base]))
            manifest = self.store.manifest(base)
        self._base = _Base(version, layout, draft.baselines, chain=chain)
        return True

    def _split(self, tensors: Mapping[str, Tensor]) -> tuple[Layout, list[TensorShard]]:
        dtype = self.options.dtype
        layout = {name: spec_of(name, tensor, dtype) for name, tensor in sorted(tensors.items())}
        return layout, local_shards(tensors, dtype, self.ranks.rank, num_ranks=self.ranks.size)

    def _draft_first(self, layout: Layout, shards: list[TensorShard]) -> _Draft:
        """Draft a version without deltas."""
        check_storable(layout)
        options = self.options
        make = partial(Baseline, on_device=False) if options.on_host else make_baseline
        baselines = {s.name: make(s, options.level, options.num_threads) for s in shards}
        return _Draft(
            baselines=baselines,
            digests={name: baseline.digest for name, baseline in baselines.items()},
            num_changed=num_words_of(layout),
            reason="the layout of the model changed"
            if self._base is not None
            else "the publisher has just started",
        )

    def _draft_next(self, base: _Base, shards: list[TensorShard]) -> _Draft:
        """Draft the version after `base`; collective."""
        blobs, num_bytes, full_bytes = self._encode(base, shards)
        changes = {
            shard.name: Change.of_delta(blobs[shard.name])
            if shard.name in blobs
            else base.baselines[shard.name].compare(shard)
            for shard in shards
        }
        deltas: dict[int, dict[str, Blob]] = {}
        skips = SkipTiers()
        if not self.policy.is_dense(num_bytes, full_bytes):
            changed = {name: blobs[name] for name, change in changes.items() if change.num_words}
            # Level 1 composes without the weights that each delta starts from.
            level_1 = {name: base.baselines[name].to_level_1(x) for name, x in changed.items()}
            skips, deltas = base.skips.plus(base.version, level_1, self.options.num_threads)
            deltas[base.version] = changed
        return _Draft(
            baselines=base.baselines,
            digests={name: change.digest for name, change in changes.items()},
            num_changed=sum(gather(self.ranks, sum(c.num_words for c in changes.values()))),
            reason=self.policy.reason(base.chain, num_bytes, full_bytes),
            deltas=deltas,
            skips=skips,
        )

    def _encode(self, base: _Base, shards: list[TensorShard]) -> tuple[dict[str, Blob], int, int]:
        """Encode this rank's deltas from `base`, or only a sample of them when that is dense;
        collective.

        Returns the deltas by tensor and, over all ranks, their bytes and the full size of what
        they cover.
        """
        blobs: dict[str, Blob] = {}
        num_bytes = full_bytes = 0
        for part in _split_sample(shards):
            # All ranks take the same decision, so none waits for another's sizes in vain.
            if not self.policy.is_dense(num_bytes, full_bytes):
                blobs |= encode_all([(base.baselines[shard.name], shard) for shard in part])
                words = sum(_delta.info(blob)["num_words"] for blob in blobs.values())
                sizes = gather(self.ranks, (sum(map(len, blobs.values())), 2 * words))
                num_bytes, full_bytes = map(sum, zip(*sizes, strict=True))
        return blobs, num_bytes, full_bytes

    def _write(
        self, version: int, layout: Layout, shards: list[TensorShard], draft: _Draft
    ) -> dict[str, dict[str, Any]]:
        """Write this rank's files. Returns their records by "snapshot" or the delta's base."""
        folder = self.store.scratch(version)
        rank = self.ranks.rank
        files = {}
        if draft.reason and shards:
            files["snapshot"] = write_snapshot(folder / f"anchor-r{rank}.safetensors", shards)
        for base, blobs in draft.deltas.items():
            changed = {n: blob for n, blob in blobs.items() if _delta.info(blob)["num_changed"]}
            if changed:
                path = folder / f"delta-{base:08d}-r{rank}.safetensors"
                files[str(base)] = write_delta(path, changed, layout, base=base, version=version)
        return {kind: asdict(file) for kind, file in files.items()}

    def _manifest(
        self,
        version: int,
        layout: Layout,
        draft: _Draft,
        *,
        snapshot: int,
        files: dict[str, dict[str, Any]],
    ) -> Manifest:
        """Join the digests and file records of all ranks; collective."""
        records = gather(self.ranks, files)

        def files_of(kind: str) -> tuple[File, ...]:
            return tuple(File(**record[kind]) for record in records if kind in record)

        return Manifest(
            version=version,
            layout=layout,
            digests=add_up(layout, gather(self.ranks, draft.digests)),
            snapshot=snapshot,
            snapshot_files=files_of("snapshot"),
            delta_files={base: files_of(str(base)) for base in sorted(draft.deltas)},
            num_changed=draft.num_changed,
            reason=draft.reason,
        )

    def _on_main(self, version: int, action: Callable[[], object]) -> None:
        self._all_or_none(version, lambda: action() if self.ranks.rank == 0 else None)

    def _all_or_none(self, version: int, action: Callable[[], _T]) -> _T:
        """Run `action` on every rank. When it fails on one, every rank raises and the unfinished
        version is deleted.
        """
        try:
            return on_all_ranks(self.ranks, action, other_failed=OSError)
        # Not after Ctrl-C: the other ranks may be in no collective then, and not answer.
        except Exception:
            if self._lock is not None:
                self.store.abort(version)
            self.ranks.gather_text("")  # no rank raises before the store is clean
            raise


def _split_sample(shards: list[TensorShard]) -> tuple[list[TensorShard], list[TensorShard]]:
    """Split off a sample of at least an eighth of the weights.

    A hash of the names picks it, so that it has tensors of all kinds and layers.
    """
    remaining = sorted(shards, key=lambda shard: zlib.crc32(shard.name.encode()))
    sample: list[TensorShard] = []
    num_wanted = sum(shard.source.numel() for shard in shards) / 8
    while num_wanted > 0:
        sample.append(remaining.pop())
        num_wanted -= sample[-1].source.numel()
    return sample, remaining
