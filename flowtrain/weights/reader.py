"""The reader's side: from the version it holds to another one, in place, by the smallest way that the store offers.

Fetch and check the files; compose deltas when there are several; check that their digests lead from what is held to what is wanted; apply
all of them or none. Where deltas do not lead there, or are damaged, an anchor does, and the log says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from flowtrain import _delta
from flowtrain.weights.files import Blob, read_anchor, read_delta
from flowtrain.weights.manifest import Manifest, StoreError
from flowtrain.weights.pieces import Digest, Layout, Piece, Words, add, spec_of, subtract, words_of
from flowtrain.weights.store import Source

_log = logging.getLogger(__name__)

Step = dict[tuple[str, int], Blob]
"""Deltas between two versions by tensor and first word."""


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
    """Tensors whose words were found changed by something else, and loaded anew; None when the load did not compare all words."""
    seconds: float

    def metrics(self) -> dict[str, float]:
        compared = {} if self.num_damaged is None else {"weights_damaged": self.num_damaged}
        return {"weights_loaded_by_delta": float(self.mode == "delta"), "weights_loaded_bytes": self.num_bytes, **compared}


class WeightReader:
    """Keeps tensors at a version of a store, in place.

    CPU tensors are written to directly; others through a copy on the CPU. The tensors are in use by nobody while `load` runs.
    """

    def __init__(self, source: Source, tensors: Mapping[str, Tensor], num_threads: int = 1, scrub_every: int = 0) -> None:
        """`scrub_every`: loads between two comparisons of all words with the digests of the version; 0: never."""
        self.source = source
        self._tensors = dict(tensors)
        self._layout = {name: spec_of(name, tensor) for name, tensor in self._tensors.items()}
        self._host = {name: _host(tensor) for name, tensor in self._tensors.items()}
        self._num_threads = num_threads
        self._scrub_every, self._num_loads = scrub_every, 0
        self._manifest: Manifest | None = None
        self._written: set[str] = set()

    @property
    def version(self) -> int | None:
        """The version that the tensors hold; None before the first load."""
        return None if self._manifest is None else self._manifest.version

    def load(self, version: int) -> Loaded:
        """Bring the tensors to `version`.

        Raises:
            StoreError: no way leads there, or the store is damaged. The tensors hold the version that they held, or, when a delta from an
                anchor failed, that of the anchor: see `version`.
        """
        started = time.monotonic()
        manifest = self.source.manifest(version)
        _check_layout(self._layout, manifest.layout, version)
        loaded = self._load(manifest)
        self._num_loads += 1
        compares = self._scrub_every > 0 and self._num_loads % self._scrub_every == 0
        damaged = self.damaged() if compares else []
        if damaged:
            _log.warning("%d tensors were not those of version %d and are loaded anew: %s", len(damaged), version, ", ".join(damaged[:3]))
            self._manifest = None
            loaded = self._load(manifest)
        self._copy_to_device()
        self.source.loaded(version)
        return replace(loaded, num_damaged=len(damaged) if compares else None, seconds=time.monotonic() - started)

    def damaged(self) -> list[str]:
        """Tensors that are not those of their version, found by reading all words; a load compares only what it changes."""
        assert self._manifest is not None, "nothing was loaded"
        return [name for name, digest in self._manifest.digests.items() if _digest(self._words(name), self._num_threads) != digest]

    def _load(self, target: Manifest) -> Loaded:
        held = self._manifest
        if held is not None and held.root == target.root:
            self._manifest = target
            return Loaded(target.version, "none", "", 0, 0, None, 0.0)
        reason = "nothing is held yet"
        if held is not None:
            try:
                steps, num_bytes = self._read_steps(held, target)
                if num_bytes > target.num_bytes:
                    raise StoreError(f"the deltas from version {held.version} to {target.version} are longer than the weights")
                self._take(steps, target)
                return Loaded(target.version, "delta", "", num_bytes, len(steps), None, 0.0)
            except (StoreError, _delta.DeltaError) as error:
                reason = str(error)
            # The publisher's choice is no surprise; anything else is.
            level = logging.WARNING if target.delta_files else logging.INFO
            _log.log(level, "version %d is loaded from an anchor: %s", target.version, reason)
        try:
            num_bytes, num_steps = self._load_anchor(target)
        except _delta.DeltaError as error:
            raise StoreError(f"version {target.version} cannot be reached from the anchor of {target.anchor}: {error}") from error
        return Loaded(target.version, "anchor", reason if target.delta_files else target.reason, num_bytes, num_steps, None, 0.0)

    def _copy_to_device(self) -> None:
        for name in self._written:
            tensor = self._tensors[name]
            if self._host[name] is not tensor:
                with torch.inference_mode(False), torch.no_grad():
                    tensor.copy_(self._host[name])
        self._written.clear()

    def _words(self, name: str) -> Words:
        return words_of(self._host[name])

    def _read_steps(self, start: Manifest, target: Manifest) -> tuple[list[tuple[Step, Manifest]], int]:
        """The deltas from one version to another, each with the version it leads to, and their bytes; fetched and checked."""
        steps, num_bytes = [], 0
        changes: dict[str, Digest] = {}
        for base, manifest in find_path(self.source, start.version, target):
            step: Step = {}
            for file in manifest.delta_files[base]:
                num_bytes += file.num_bytes
                for name, blob in read_delta(self.source.fetch(manifest.version, file), self._layout, base, manifest.version).items():
                    info = _delta.info(blob)
                    step[name, info["first"]] = blob
                    changes[name] = add(changes.get(name, (0, 0)), subtract(info["target_digest"], info["base_digest"]))
            steps.append((step, manifest))
        for name, digest in start.digests.items():
            if add(digest, changes.get(name, (0, 0))) != target.digests[name]:
                raise StoreError(f"the deltas from version {start.version} to {target.version} do not lead there from this {name!r}")
        return steps, num_bytes

    def _take(self, steps: list[tuple[Step, Manifest]], target: Manifest) -> None:
        """Apply the steps, as one where that is possible: all of it or nothing."""
        if len(steps) > 1 and _can_compose([step for step, _ in steps]):
            steps = [(self._compose([step for step, _ in steps]), target)]
        for step, manifest in steps:
            slices = [self._slice(key, blob) for key, blob in step.items()]
            _delta.apply(list(step.values()), slices, num_threads=self._num_threads)
            self._written |= {name for name, _ in step}
            self._manifest = manifest

    def _compose(self, steps: list[Step]) -> Step:
        keys = sorted({key for step in steps for key in step})
        composed = {}
        for key in keys:
            blobs = [step[key] for step in steps if key in step]
            if len(blobs) > 1:
                needs_base = any(_delta.info(blob)["level"] == 2 for blob in blobs)
                base = self._slice(key, blobs[0]) if needs_base else None
                composed[key] = _delta.compose(blobs, base, num_threads=self._num_threads)
            else:
                composed[key] = blobs[0]
        return composed

    def _slice(self, key: tuple[str, int], blob: Blob) -> Words:
        """The words that a delta is for."""
        name, first = key
        words, wanted = self._words(name), _delta.info(blob)["num_words"]
        if first + wanted > len(words):
            raise StoreError(f"a delta of {name!r} covers words {first} to {first + wanted}; the tensor has {len(words)}")
        part: Words = words[first : first + wanted]
        return part

    def _load_anchor(self, target: Manifest) -> tuple[int, int]:
        """The newest anchor before the target and the deltas from there: bytes read, and deltas."""
        anchor = self.source.manifest(target.anchor)
        _check_layout(self._layout, anchor.layout, anchor.version)
        if not anchor.anchor_files:
            raise StoreError(f"version {target.anchor} should have an anchor and has none; publish a new version")
        steps, num_bytes = self._read_steps(anchor, target) if anchor.version != target.version else ([], 0)
        found = [piece for file in anchor.anchor_files for piece in read_anchor(self.source.fetch(anchor.version, file), self._layout)]
        self._check_anchor(anchor, found)
        for piece in found:  # everything was checked: nothing in this loop can fail
            words = piece.words()
            self._words(piece.name)[piece.first : piece.first + len(words)] = words
        self._written |= self._tensors.keys()
        self._manifest = anchor
        self._take(steps, target)
        return num_bytes + sum(file.num_bytes for file in anchor.anchor_files), len(steps)

    def _check_anchor(self, anchor: Manifest, found: list[Piece]) -> None:
        """Every word once, with the right digest."""
        for name, spec in self._layout.items():
            parts = sorted((piece for piece in found if piece.name == name), key=lambda piece: piece.first)
            at = 0
            for piece in parts:
                at = at + len(piece.words()) if piece.first == at else -1
            if at != spec.num_words:
                raise StoreError(f"the anchor of version {anchor.version} does not hold the whole of {name!r}")
            digests = (_digest(piece.words(), self._num_threads, piece.first) for piece in parts)
            if add(*digests) != anchor.digests[name]:
                raise StoreError(f"the anchor of version {anchor.version} is damaged at {name!r}")


def pull(source: Source, version: int, num_threads: int = 1) -> dict[str, Tensor]:
    """The whole weights of a version, as new tensors on the CPU."""
    layout = source.manifest(version).layout
    try:
        tensors = {name: torch.empty(spec.shape, dtype=spec.torch_dtype) for name, spec in layout.items()}
    except RuntimeError as error:  # torch's word for shapes that no machine holds
        raise StoreError(f"version {version} of {source} has tensors that do not fit into memory: {error}") from error
    WeightReader(source, tensors, num_threads).load(version)
    return tensors


def find_path(source: Source, start: int, target: Manifest) -> list[tuple[int, Manifest]]:
    """The deltas from version `start` to the target, as (base, manifest that lists it), by the longest skips: O(log of the distance).

    Raises:
        StoreError: the deltas do not reach back that far.
    """
    path, manifest = [], target
    while True:
        bases = [base for base in manifest.delta_files if base >= start]
        if not bases:
            raise StoreError(f"no deltas lead from version {start} to {target.version}: version {manifest.version} has none that fits")
        base = min(bases)
        path.append((base, manifest))
        if base == start:
            return path[::-1]
        manifest = source.manifest(base)


def _can_compose(steps: list[Step]) -> bool:
    """Every piece covers the same words in each step that has it: the trainer had the same number of ranks."""
    spans: dict[str, set[tuple[int, int]]] = {}
    for step in steps:
        for (name, first), blob in step.items():
            spans.setdefault(name, set()).add((first, first + _delta.info(blob)["num_words"]))
    for of_name in spans.values():
        ordered = sorted(of_name)
        if any(end > start for (_, end), (start, _) in pairwise(ordered)):
            return False
    return True


def _check_layout(ours: Layout, theirs: Layout, version: int) -> None:
    if ours != theirs:
        differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        examples = "; ".join(f"{name}: here {ours.get(name)}, there {theirs.get(name)}" for name in differing[:3])
        raise StoreError(f"version {version} holds another model than the one here: {len(differing)} tensors differ ({examples})")


def _digest(words: Words, num_threads: int, first: int = 0) -> Digest:
    digest: Digest = _delta.digest(words, first=first, num_threads=num_threads)
    return digest


def _host(tensor: Tensor) -> Tensor:
    """The tensor itself where its memory can be written to, else one like it on the CPU."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype)
