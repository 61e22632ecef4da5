"""The reader's side: bring tensors from the version that they hold to another one, in place, by the
smallest files that the store offers.

Fetch and check the files; check that the digests of the deltas lead from the held version to the
wanted one; apply all of them or none. Where deltas do not lead there or are damaged, load a full
snapshot and log why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flowtrain import _delta
from flowtrain.utils.errors import user_error
from flowtrain.weights.format.files import read_delta, read_snapshot
from flowtrain.weights.format.manifest import Digest, Manifest, StoreError, add, total_bytes
from flowtrain.weights.format.tensor_shards import DeltaBatch, TensorShard, digest_change, digest_of
from flowtrain.weights.load.target import HostTensors, PreparedBatches, Target, check_layout
from flowtrain.weights.ranks import on_all_ranks
from flowtrain.weights.stores.folder import Source

_log = logging.getLogger(__name__)
_NOTHING = PreparedBatches(())


@dataclass(frozen=True, slots=True)
class Loaded:
    """The outcome of a load."""

    version: int
    mode: str
    """"delta", "snapshot" or "none"."""
    reason: str = ""
    """The reason for loading a full snapshot and not deltas; empty when it was not."""
    num_bytes: int = 0
    """Bytes read from the store."""
    num_deltas: int = 0
    """Batches of deltas: one for each step from version to version."""
    num_damaged: int | None = None
    """Tensors that something else had changed and that were loaded again, 1 where a delta met such
    words first; None when it did not and the load did not verify all words."""
    seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        verified = {} if self.num_damaged is None else {"weights_damaged": self.num_damaged}
        return {
            "weights_loaded_by_delta": float(self.mode == "delta"),
            "weights_loaded_bytes": self.num_bytes,
            **verified,
        }


@dataclass(frozen=True, slots=True)
class UpdatePath:
    """The deltas from a version that is held to a target: fetched, checked and prepared."""

    start: Manifest | None
    target: Manifest
    prepared: PreparedBatches = _NOTHING
    """Without a batch when both versions are the same weights."""
    num_bytes: int = 0
    obstacle: str = ""
    """The reason for which deltas do not lead to the target; empty when they do."""


class _Staged(NamedTuple):
    """A path that is found in the background."""

    version: int
    start: Manifest | None
    path: Future[UpdatePath]


class WeightReader:
    """Keeps tensors at a version of a store, in place. Nobody may use them while `load` runs.

    Where several ranks hold the tensors of one `Target`, all of them must call `load` together.
    """

    def __init__(
        self,
        source: Source,
        tensors: Mapping[str, Tensor] | Target,
        num_threads: int = 1,
        verify_every: int = 0,
    ) -> None:
        """`verify_every`: loads between two comparisons of all words with the digests of the
        version; 0: never.
        """
        self.source = source
        self._target: Target = (
            HostTensors(tensors, num_threads) if isinstance(tensors, Mapping) else tensors
        )
        self._num_threads = num_threads
        self._verify_every = verify_every
        self._num_loads = 0
        self._manifest: Manifest | None = None
        self._staged: _Staged | None = None

    @property
    def version(self) -> int | None:
        """The version that the tensors hold; None before the first load, and after a full load that
        broke off.
        """
        return None if self._manifest is None else self._manifest.version

    def stage(self, version: int) -> Future[UpdatePath]:
        """Fetch, check and prepare in the background what `load(version)` will apply. An error is
        raised there too.
        """
        pool = ThreadPoolExecutor(1)
        path = pool.submit(self._find_path, version)
        self._staged = _Staged(version, self._manifest, path)
        pool.shutdown(wait=False)
        return path

    @property
    def is_staged(self) -> bool:
        """True when nothing is being staged any more."""
        return self._staged is None or self._staged.path.done()

    def load(self, version: int) -> Loaded:
        """Bring the tensors to `version`.

        Raises:
            StoreError: the version cannot be reached, or the store is damaged. The tensors hold the
                version that they held, or, when a delta from a full snapshot failed, that of the
                snapshot: see `version`.
        """
        started = time.monotonic()
        path = on_all_ranks(self._target.ranks, lambda: self._take_path(version))
        loaded = self._follow(path)
        self._num_loads += 1
        if self._verify_every > 0 and self._num_loads % self._verify_every == 0:
            num_before, damaged = loaded.num_damaged or 0, self.damaged()
            if damaged:
                _log.warning(
                    "%d tensors were not those of version %d and are loaded again: %s",
                    len(damaged),
                    version,
                    ", ".join(damaged[:3]),
                )
                self._manifest = None
                obstacle = f"{len(damaged)} tensors were damaged"
                loaded = self._follow(replace(path, start=None, obstacle=obstacle))
            loaded = replace(loaded, num_damaged=num_before + len(damaged))
        self._target.finish()
        self.source.loaded(version)
        return replace(loaded, seconds=time.monotonic() - started)

    def damaged(self) -> list[str]:
        """Read all words and return the tensors that are not those of their version; a load checks
        only the words that it changes.
        """
        assert self._manifest is not None, "nothing was loaded"
        digests = self._target.digests().items()
        return [name for name, digest in digests if self._manifest.digests[name] != digest]

    def _take_path(self, version: int) -> UpdatePath:
        """Return the staged path if it starts from the held version, else find one now."""
        staged, self._staged = self._staged, None
        if staged and staged.version == version and staged.start is self._manifest:
            return staged.path.result()
        return self._find_path(version)

    def _find_path(self, version: int) -> UpdatePath:
        target = self.source.manifest(version)
        start = self._manifest
        self._target.check(target)
        if start is None:
            return UpdatePath(None, target, obstacle="nothing is held yet")
        if start.root == target.root:
            return UpdatePath(start, target)
        try:
            batches, num_bytes = self._read_deltas(start, target)
            # At two bytes per word, a full snapshot would be shorter.
            if num_bytes > 2 * target.num_words:
                raise StoreError(
                    f"the deltas from version {start.version} to {target.version} are longer than "
                    "the weights"
                )
            prepared = self._target.prepare(batches)
        except (StoreError, _delta.DeltaError) as error:
            return UpdatePath(start, target, obstacle=str(error))
        return UpdatePath(start, target, prepared, num_bytes)

    def _follow(self, path: UpdatePath) -> Loaded:
        target = path.target
        # A rank that cannot take the deltas keeps all of them from doing so.
        obstacle = next(filter(None, self._target.ranks.gather_text(path.obstacle)), "")
        mode, reason = "delta" if path.prepared.batches else "none", ""
        num_damaged: int | None = None
        if not obstacle:
            try:
                self._apply(path)
            except _delta.DeltaError as error:
                obstacle, num_damaged = str(error), 1
        if obstacle:
            mode, reason = "snapshot", obstacle if target.delta_files else target.reason
            if path.start is not None:
                # A snapshot that the publisher chose is no surprise; any other is.
                level = logging.WARNING if target.delta_files else logging.INFO
                message = "version %d is loaded from a full snapshot: %s"
                _log.log(level, message, target.version, obstacle)
            problem = (
                f"version {target.version} cannot be reached from the full snapshot of "
                f"{target.snapshot}"
            )
            with user_error(problem, _delta.DeltaError, raises=StoreError):
                path = self._load_snapshot(target)
        num_deltas = len(path.prepared.batches)
        return Loaded(target.version, mode, reason, path.num_bytes, num_deltas, num_damaged)

    def _apply(self, path: UpdatePath) -> None:
        if path.prepared.batches:
            self._target.apply(path.prepared)
        self._manifest = path.target

    def _read_deltas(self, start: Manifest, target: Manifest) -> tuple[list[DeltaBatch], int]:
        """Fetch and check the deltas from one version to another. Returns their batches and their
        bytes.
        """
        batches = []
        num_bytes = 0
        changes: dict[str, Digest] = {}
        for base, manifest in find_chain(self.source, start.version, target):
            batch: DeltaBatch = {}
            for file in manifest.delta_files[base]:
                num_bytes += file.num_bytes
                path = self.source.fetch(manifest.version, file)
                blobs = read_delta(path, target.layout, base=base, version=manifest.version)
                for name, blob in blobs.items():
                    batch[name, _delta.info(blob)["first"]] = blob
                    changes[name] = add(changes.get(name, (0, 0)), digest_change(blob))
            batches.append(batch)
        if missed := target.missed_by(start, changes):
            raise StoreError(
                f"the deltas from version {start.version} to {target.version} do not lead there "
                f"from this {missed[0]!r}"
            )
        return batches, num_bytes

    def _load_snapshot(self, target: Manifest) -> UpdatePath:
        """Load the newest full snapshot before the target and the deltas from there."""
        path, shards = on_all_ranks(self._target.ranks, lambda: self._read_snapshot(target))
        self._manifest = None  # until all is written: a load that breaks off leaves no version
        self._target.write(shards)
        self._manifest = path.start
        self._apply(path)
        return path

    def _read_snapshot(self, target: Manifest) -> tuple[UpdatePath, list[TensorShard]]:
        snapshot = self.source.manifest(target.snapshot)
        check_layout(target.layout, snapshot.layout, snapshot.version)
        if not snapshot.snapshot_files:
            raise StoreError(
                f"version {target.snapshot} should have a full snapshot and has none; publish a "
                "new version"
            )
        batches: list[DeltaBatch] = []
        num_bytes = total_bytes(snapshot.snapshot_files)
        if snapshot.version != target.version:
            batches, delta_bytes = self._read_deltas(snapshot, target)
            num_bytes += delta_bytes
        paths = [self.source.fetch(snapshot.version, file) for file in snapshot.snapshot_files]
        shards = [shard for path in paths for shard in read_snapshot(path, target.layout)]
        _check_snapshot(snapshot, shards, self._num_threads)
        return UpdatePath(snapshot, target, self._target.prepare(batches), num_bytes), shards


def pull(source: Source, version: int, num_threads: int = 1) -> dict[str, Tensor]:
    """Load the whole weights of a version into new CPU tensors."""
    layout = source.manifest(version).layout
    problem = f"version {version} of {source} has tensors that do not fit into memory"
    with user_error(problem, RuntimeError, raises=StoreError):
        tensors = {
            name: torch.empty(spec.shape, dtype=spec.torch_dtype) for name, spec in layout.items()
        }
    WeightReader(source, tensors, num_threads).load(version)
    return tensors


def find_chain(source: Source, start: int, target: Manifest) -> list[tuple[int, Manifest]]:
    """Find the deltas from version `start` to the target, as (base, manifest that lists it), by the
    longest skips: O(log of the distance).

    Raises:
        StoreError: the deltas do not reach back that far.
    """
    chain = []
    manifest = target
    while True:
        bases = [base for base in manifest.delta_files if base >= start]
        if not bases:
            raise StoreError(
                f"no deltas lead from version {start} to {target.version}: version "
                f"{manifest.version} has none that fits"
            )
        base = min(bases)
        chain.append((base, manifest))
        if base == start:
            return chain[::-1]
        manifest = source.manifest(base)


def _check_snapshot(snapshot: Manifest, shards: list[TensorShard], num_threads: int) -> None:
    """Check that the shards hold every word once, with the right digests."""
    for name, spec in snapshot.layout.items():
        parts = sorted((s for s in shards if s.name == name), key=lambda shard: shard.first)
        end = 0
        for shard in parts:  # -1 where one overlaps, or leaves a gap
            end = end + len(shard.words()) if shard.first == end else -1
        if end != spec.num_words:
            raise StoreError(
                f"the full snapshot of version {snapshot.version} does not hold the whole of "
                f"{name!r}"
            )
        digests = [digest_of(shard.rows(), shard.first, num_threads) for shard in parts]
        if add(*digests) != snapshot.digests[name]:
            raise StoreError(
                f"the full snapshot of version {snapshot.version} is damaged at {name!r}"
            )
