"""The reader's side: from the version it holds to another one, in place, by the smallest way that
the store offers.

Fetch and check the files; compose deltas when there are several; check that their digests lead from
what is held to what is wanted; apply all of them or none. Where deltas do not lead there, or are
damaged, an anchor does, and the log says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from flowtrain import _delta
from flowtrain.weights.files import read_anchor, read_delta
from flowtrain.weights.manifest import Manifest, StoreError
from flowtrain.weights.ranks import together
from flowtrain.weights.store import Source
from flowtrain.weights.target import HostTensors, Step, Target, check_layout
from flowtrain.weights.tensor_shards import Digest, Piece, add, subtract

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load did."""

    version: int
    mode: str
    """"delta", "anchor" or "none"."""
    reason: str
    """Why not by deltas; empty when it was."""
    num_bytes: int
    """Read from the store."""
    num_steps: int
    """Deltas that were composed."""
    num_damaged: int | None
    """Tensors whose words were found changed by something else, and loaded anew; None when the load
    did not compare all words."""
    seconds: float

    def metrics(self) -> dict[str, float]:
        compared = {} if self.num_damaged is None else {"weights_damaged": self.num_damaged}
        return {
            "weights_loaded_by_delta": float(self.mode == "delta"),
            "weights_loaded_bytes": self.num_bytes,
            **compared,
        }


@dataclass(frozen=True, slots=True)
class _Way:
    """From what is held to a version."""

    start: Manifest | None
    target: Manifest
    steps: list[tuple[Step, Manifest]]
    """Deltas, each with the version that it leads to; none when both versions are the same weights.
    """
    num_bytes: int
    num_steps: int
    """Before those that could be were composed."""
    obstacle: str = ""
    """Why deltas do not lead there; empty when they do."""


class WeightReader:
    """Keeps tensors at a version of a store, in place. They are in use by nobody while `load` runs.

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
        self._scrub_every, self._num_loads = verify_every, 0
        self._manifest: Manifest | None = None
        self._staging: tuple[int, Manifest | None, Future[_Way]] | None = None

    @property
    def version(self) -> int | None:
        """The version that the tensors hold; None before the first load, and when one broke off
        that had to write everything.
        """
        return None if self._manifest is None else self._manifest.version

    def stage(self, version: int) -> Future[_Way]:
        """Fetch, check and compose in the background what `load(version)` will apply; what goes
        wrong comes up there too.
        """
        pool = ThreadPoolExecutor(1)
        way = pool.submit(self._find_way, version)
        self._staging = version, self._manifest, way
        pool.shutdown(wait=False)
        return way

    @property
    def is_staged(self) -> bool:
        """What `stage` began is done, or nothing was begun."""
        return self._staging is None or self._staging[2].done()

    def load(self, version: int) -> Loaded:
        """Bring the tensors to `version`.

        Raises:
            StoreError: no way leads there, or the store is damaged. The tensors hold the version
                that they held, or, when a delta from an anchor failed, that of the anchor: see
                `version`.
        """
        started = time.monotonic()
        way = together(self._target.ranks, lambda: self._way(version))
        loaded = self._follow(way)
        self._num_loads += 1
        compares = self._scrub_every > 0 and self._num_loads % self._scrub_every == 0
        damaged = self.damaged() if compares else []
        if damaged:
            _log.warning(
                "%d tensors were not those of version %d and are loaded anew: %s",
                len(damaged),
                version,
                ", ".join(damaged[:3]),
            )
            self._manifest = None
            loaded = self._follow(
                replace(way, start=None, obstacle=f"{len(damaged)} tensors were damaged")
            )
        self._target.finish()
        self.source.loaded(version)
        return replace(
            loaded,
            num_damaged=len(damaged) if compares else None,
            seconds=time.monotonic() - started,
        )

    def damaged(self) -> list[str]:
        """Tensors that are not those of their version, found by reading all words; a load compares
        only what it changes.
        """
        assert self._manifest is not None, "nothing was loaded"
        return [
            name
            for name, digest in self._target.digests().items()
            if self._manifest.digests[name] != digest
        ]

    def _way(self, version: int) -> _Way:
        """What was staged, if it starts from what is held, else the same now."""
        staging, self._staging = self._staging, None
        if staging is not None and staging[0] == version and staging[1] is self._manifest:
            return staging[2].result()
        return self._find_way(version)

    def _find_way(self, version: int) -> _Way:
        target, held = self.source.manifest(version), self._manifest
        self._target.check(target)
        if held is None:
            return _Way(None, target, [], 0, 0, "nothing is held yet")
        if held.root == target.root:
            return _Way(held, target, [], 0, 0)
        try:
            steps, num_bytes = self._read_steps(held, target)
            if num_bytes > target.num_bytes:
                raise StoreError(
                    f"the deltas from version {held.version} to {target.version} are longer than "
                    "the weights"
                )
            return _Way(held, target, self._composed(steps, target), num_bytes, len(steps))
        except (StoreError, _delta.DeltaError) as error:
            return _Way(held, target, [], 0, 0, str(error))

    def _follow(self, way: _Way) -> Loaded:
        target, obstacle = (
            way.target,
            next(filter(None, self._target.ranks.gather_text(way.obstacle)), ""),
        )
        if not obstacle and not way.steps:
            self._manifest = target
            return Loaded(target.version, "none", "", 0, 0, None, 0.0)
        if not obstacle:
            try:
                self._take(way.steps)
                return Loaded(target.version, "delta", "", way.num_bytes, way.num_steps, None, 0.0)
            except _delta.DeltaError as error:
                obstacle = str(error)
        if way.start is not None:
            # The publisher's choice is no surprise; anything else is.
            level = logging.WARNING if target.delta_files else logging.INFO
            _log.log(level, "version %d is loaded from an anchor: %s", target.version, obstacle)
        try:
            num_bytes, num_steps = self._load_anchor(target)
        except _delta.DeltaError as error:
            raise StoreError(
                f"version {target.version} cannot be reached from the anchor of {target.anchor}: "
                f"{error}"
            ) from error
        return Loaded(
            target.version,
            "anchor",
            obstacle if target.delta_files else target.reason,
            num_bytes,
            num_steps,
            None,
            0.0,
        )

    def _read_steps(
        self, start: Manifest, target: Manifest
    ) -> tuple[list[tuple[Step, Manifest]], int]:
        """The deltas from one version to another, each with the version it leads to, and their
        bytes; fetched and checked.
        """
        steps, num_bytes = [], 0
        changes: dict[str, Digest] = {}
        for base, manifest in find_path(self.source, start.version, target):
            step: Step = {}
            for file in manifest.delta_files[base]:
                num_bytes += file.num_bytes
                for name, blob in read_delta(
                    self.source.fetch(manifest.version, file), target.layout, base, manifest.version
                ).items():
                    info = _delta.info(blob)
                    step[name, info["first"]] = blob
                    changes[name] = add(
                        changes.get(name, (0, 0)),
                        subtract(info["target_digest"], info["base_digest"]),
                    )
            steps.append((step, manifest))
        for name, digest in start.digests.items():
            if add(digest, changes.get(name, (0, 0))) != target.digests[name]:
                raise StoreError(
                    f"the deltas from version {start.version} to {target.version} do not lead "
                    f"there from this {name!r}"
                )
        return steps, num_bytes

    def _composed(
        self, steps: list[tuple[Step, Manifest]], target: Manifest
    ) -> list[tuple[Step, Manifest]]:
        """As one step where that is possible."""
        if len(steps) > 1 and _can_compose([step for step, _ in steps]):
            return [(self._compose([step for step, _ in steps]), target)]
        return steps

    def _take(self, steps: list[tuple[Step, Manifest]]) -> None:
        """Each step wholly or not at all."""
        for step, manifest in steps:
            self._target.apply(step)
            self._manifest = manifest

    def _compose(self, steps: list[Step]) -> Step:
        keys = sorted({key for step in steps for key in step})
        composed = {}
        for key in keys:
            blobs = [step[key] for step in steps if key in step]
            if len(blobs) > 1:
                needs_base = any(_delta.info(blob)["level"] == 2 for blob in blobs)
                base = (
                    self._target.base(*key, _delta.info(blobs[0])["num_words"])
                    if needs_base
                    else None
                )
                composed[key] = _delta.compose(blobs, base, num_threads=self._num_threads)
            else:
                composed[key] = blobs[0]
        return composed

    def _load_anchor(self, target: Manifest) -> tuple[int, int]:
        """The newest anchor before the target and the deltas from there: bytes read, and deltas."""
        anchor, found, steps, num_bytes = together(
            self._target.ranks, lambda: self._read_anchor(target)
        )
        self._manifest = None  # until all is written
        self._target.write(found)
        self._manifest = anchor
        self._take(self._composed(steps, target))
        return num_bytes + sum(file.num_bytes for file in anchor.anchor_files), len(steps)

    def _read_anchor(
        self, target: Manifest
    ) -> tuple[Manifest, list[Piece], list[tuple[Step, Manifest]], int]:
        anchor = self.source.manifest(target.anchor)
        check_layout(target.layout, anchor.layout, anchor.version)
        if not anchor.anchor_files:
            raise StoreError(
                f"version {target.anchor} should have an anchor and has none; publish a new version"
            )
        steps, num_bytes = (
            self._read_steps(anchor, target) if anchor.version != target.version else ([], 0)
        )
        found = [
            piece
            for file in anchor.anchor_files
            for piece in read_anchor(self.source.fetch(anchor.version, file), target.layout)
        ]
        _check_anchor(anchor, found, self._num_threads)
        return anchor, found, steps, num_bytes


def pull(source: Source, version: int, num_threads: int = 1) -> dict[str, Tensor]:
    """The whole weights of a version, as new tensors on the CPU."""
    layout = source.manifest(version).layout
    try:
        tensors = {
            name: torch.empty(spec.shape, dtype=spec.torch_dtype) for name, spec in layout.items()
        }
    except RuntimeError as error:  # torch's word for shapes that no machine holds
        raise StoreError(
            f"version {version} of {source} has tensors that do not fit into memory: {error}"
        ) from error
    WeightReader(source, tensors, num_threads).load(version)
    return tensors


def find_path(source: Source, start: int, target: Manifest) -> list[tuple[int, Manifest]]:
    """The deltas from version `start` to the target, as (base, manifest that lists it), by the
    longest skips: O(log of the distance).

    Raises:
        StoreError: the deltas do not reach back that far.
    """
    path, manifest = [], target
    while True:
        bases = [base for base in manifest.delta_files if base >= start]
        if not bases:
            raise StoreError(
                f"no deltas lead from version {start} to {target.version}: version "
                f"{manifest.version} has none that fits"
            )
        base = min(bases)
        path.append((base, manifest))
        if base == start:
            return path[::-1]
        manifest = source.manifest(base)


def _can_compose(steps: list[Step]) -> bool:
    """Every piece covers the same words in each step that has it: the trainer had the same number
    of ranks.
    """
    spans: dict[str, set[tuple[int, int]]] = {}
    for step in steps:
        for (name, first), blob in step.items():
            spans.setdefault(name, set()).add((first, first + _delta.info(blob)["num_words"]))
    for of_name in spans.values():
        ordered = sorted(of_name)
        if any(end > start for (_, end), (start, _) in pairwise(ordered)):
            return False
    return True


def _check_anchor(anchor: Manifest, found: list[Piece], num_threads: int) -> None:
    """Every word once, with the right digest."""
    for name, spec in anchor.layout.items():
        parts = sorted(
            (piece for piece in found if piece.name == name), key=lambda piece: piece.first
        )
        at = 0
        for piece in parts:
            at = at + len(piece.words()) if piece.first == at else -1
        if at != spec.num_words:
            raise StoreError(
                f"the anchor of version {anchor.version} does not hold the whole of {name!r}"
            )
        digests = (
            _delta.digest(piece.words(), first=piece.first, num_threads=num_threads)
            for piece in parts
        )
        if add(*digests) != anchor.digests[name]:
            raise StoreError(f"the anchor of version {anchor.version} is damaged at {name!r}")
