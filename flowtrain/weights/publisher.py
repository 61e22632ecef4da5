"""The trainer's side: each rank encodes what changed in its own rows, rank 0 writes the manifest
and moves HEAD.

The baseline, a copy of the published words, moves only after HEAD has: a publish that fails, on
whichever rank, leaves store and baseline as they were, and the next one starts from the same
version.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from flowtrain import _delta
from flowtrain.weights.baseline import Copy, make_copy
from flowtrain.weights.files import Blob, write_anchor, write_delta
from flowtrain.weights.manifest import File, Manifest, StoreError
from flowtrain.weights.ranks import Alone, Ranks
from flowtrain.weights.store import WeightStore
from flowtrain.weights.tensor_shards import Digest, Layout, Piece, add, pieces, spec_of

_SKIP = 4
"""Every fourth delta also comes composed with the three before it, every sixteenth with the
fifteen, every 64th with the 63."""
_NUM_TIERS = 3


@dataclass(frozen=True, slots=True)
class PublishOptions:
    dtype: torch.dtype | None = None
    """What weights are cast to; None: their own."""
    level: int = 1
    """2 makes deltas about a quarter smaller and several times slower to code: for links between
    sites."""
    anchor_every: int = 64
    """Versions between anchors at most."""
    dense_share: float = 0.35
    """A delta above this share of the full size gives way to an anchor."""
    num_threads: int = 1


@dataclass(frozen=True, slots=True)
class Published:
    """What a publish did."""

    version: int
    num_changed: int
    """Words that differ from the version before."""
    num_words: int
    delta_bytes: int
    """Of the delta files; 0 when there are none."""
    anchor_bytes: int
    reason: str
    """Why there is an anchor; empty when there is none."""

    def metrics(self) -> dict[str, float | str]:
        per_change = (
            {"weights_bytes_per_change": self.delta_bytes / self.num_changed}
            if self.delta_bytes and self.num_changed
            else {}
        )
        return {
            "weights_density": self.num_changed / max(self.num_words, 1),
            "weights_delta_bytes": self.delta_bytes,
            "weights_anchor_bytes": self.anchor_bytes,
            **per_change,
            **({"weights_anchor_reason": self.reason} if self.reason else {}),
        }


@dataclass(slots=True)
class _Baseline:
    """What this rank has published."""

    version: int
    layout: Layout
    copies: dict[str, Copy]
    """By tensor; of this rank's pieces."""
    anchor: int
    num_bytes_since: int
    """Deltas of all ranks since the anchor."""


@dataclass(frozen=True, slots=True)
class Skips:
    """Deltas that wait to be composed, four to a tier; immutable, so that a failed publish leaves
    no trace.
    """

    tiers: tuple[tuple[tuple[int, dict[str, Blob]], ...], ...] = ((),) * _NUM_TIERS

    def plus(
        self, base: int, blobs: dict[str, Blob], num_threads: int
    ) -> tuple[Skips, list[tuple[int, dict[str, Blob]]]]:
        """With the delta from version `base`; and the compositions that this one completes, each
        with the version it starts from.
        """
        tiers, completed, carried = list(self.tiers), [], (base, blobs)
        for i, waiting in enumerate(tiers):
            tiers[i] = (*waiting, carried)
            if len(tiers[i]) < _SKIP:
                break
            carried = (tiers[i][0][0], compose_pieces([part for _, part in tiers[i]], num_threads))
            tiers[i] = ()
            completed.append(carried)
        return Skips(tuple(tiers)), completed


def compose_pieces(steps: list[dict[str, Blob]], num_threads: int) -> dict[str, Blob]:
    """Deltas of pieces that follow each other, as one; a piece that a step leaves out did not
    change in it.
    """
    names = sorted({name for step in steps for name in step})
    parts = {name: [step[name] for step in steps if name in step] for name in names}
    return {
        name: _delta.compose(blobs, num_threads=num_threads) if len(blobs) > 1 else blobs[0]
        for name, blobs in parts.items()
    }


@dataclass(slots=True)
class Publisher:
    """Publishes versions of one model. All ranks must call its methods together."""

    store: WeightStore
    options: PublishOptions = field(default_factory=PublishOptions)
    ranks: Ranks = field(default_factory=Alone)
    _baseline: _Baseline | None = None
    _skips: Skips = field(default_factory=Skips)

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> Published:
        """Put the tensors (plain, or DTensors sharded by rows) into the store as `version`.

        Raises:
            StoreError: the version is not newer than HEAD.
            OSError: a disk is full or read-only; store and publisher are as before, on every rank.
            ValueError: a tensor that the store cannot hold, with its name.
        """
        layout, found = (
            self._layout(tensors),
            pieces(tensors, self.options.dtype, self.ranks.rank, self.ranks.size),
        )
        base = (
            self._baseline
            if self._baseline is not None and self._baseline.layout == layout
            else None
        )
        blobs = (
            {}
            if base is None
            else {
                p.name: base.copies[p.name].encode(p, self.options.level, self.options.num_threads)
                for p in found
            }
        )
        infos = {name: _delta.info(blob) for name, blob in blobs.items()}
        totals = self._sum(
            {
                "bytes": sum(map(len, blobs.values())),
                "changed": sum(info["num_changed"] for info in infos.values()),
            }
        )
        reason, with_delta = self._judge(layout, totals["bytes"])
        skips = Skips()
        deltas: list[tuple[int, dict[str, Blob]]] = []
        if base is not None and with_delta:
            skips, composed = self._skips.plus(
                base.version, self._plain(blobs), self.options.num_threads
            )
            deltas = [(base.version, blobs), *composed]
        copies = (
            {}
            if base is not None
            else {piece.name: make_copy(piece, self.options.num_threads) for piece in found}
        )
        own = {name: info["target_digest"] for name, info in infos.items()} | {
            name: copy.digest for name, copy in copies.items()
        }

        self._together(version, lambda: self._on_main(lambda: self.store.begin(version)))
        records = self._together(
            version, lambda: self._write(version, layout, found if reason else [], deltas, own)
        )
        num_changed = _num_words(layout) if base is None else totals["changed"]
        manifest = self._manifest(version, layout, records, num_changed, reason)
        self._together(version, lambda: self._on_main(lambda: self.store.commit(manifest)))

        # HEAD has moved: now the baseline may.
        delta_bytes = _size(manifest, base.version) if base is not None else 0
        if base is None:
            self._baseline = _Baseline(version, layout, copies, manifest.anchor, 0)
        else:
            for piece in found:
                base.copies[piece.name].advance(piece, blobs[piece.name], self.options.num_threads)
            base.num_bytes_since = 0 if reason else base.num_bytes_since + delta_bytes
            base.version, base.anchor = version, manifest.anchor
        self._skips = skips
        return Published(
            version, num_changed, manifest.num_words, delta_bytes, _size(manifest, None), reason
        )

    def resume(self, tensors: Mapping[str, Tensor], version: int) -> bool:
        """Go on from `version` when it is HEAD and holds exactly these tensors; else nothing
        happens. Reads these tensors only.
        """
        if self.store.head() != version:
            return False
        manifest = self.store.manifest(version)
        layout, found = (
            self._layout(tensors),
            pieces(tensors, self.options.dtype, self.ranks.rank, self.ranks.size),
        )
        copies = {piece.name: make_copy(piece, self.options.num_threads) for piece in found}
        own = json.dumps({name: copy.digest for name, copy in copies.items()})
        whole = _whole_digests(layout, [json.loads(text) for text in self.ranks.gather_text(own)])
        if (manifest.layout, manifest.digests) != (layout, whole):
            return False
        self._baseline = _Baseline(
            version, layout, copies, manifest.anchor, self._bytes_since_anchor(manifest)
        )
        return True

    def _bytes_since_anchor(self, manifest: Manifest) -> int:
        num_bytes, anchor = 0, manifest.anchor
        while manifest.version != anchor:
            base = max(manifest.delta_files)
            num_bytes += _size(manifest, base)
            manifest = self.store.manifest(base)
        return num_bytes

    def _layout(self, tensors: Mapping[str, Tensor]) -> Layout:
        return {
            name: spec_of(name, tensor, self.options.dtype)
            for name, tensor in sorted(tensors.items())
        }

    def _plain(self, blobs: dict[str, Blob]) -> dict[str, Blob]:
        """At level 1, which can be composed without the weights that each delta starts from;
        unchanged pieces left out.
        """
        assert self._baseline is not None
        changed = {name: blob for name, blob in blobs.items() if _delta.info(blob)["num_changed"]}
        return {
            name: self._baseline.copies[name].plain(blob, self.options.num_threads)
            for name, blob in changed.items()
        }

    def _judge(self, layout: Layout, delta_bytes: int) -> tuple[str, bool]:
        """Why an anchor is due, and whether there is a delta too. The same on all ranks."""
        base, options, full = self._baseline, self.options, 2 * _num_words(layout)
        if base is None:
            return "the publisher has just started", False
        if base.layout != layout:
            return "the layout of the model changed", False
        if delta_bytes > options.dense_share * full:
            return f"the delta would be {delta_bytes / max(full, 1):.0%} of the full size", False
        since = base.num_bytes_since + delta_bytes
        if since > full / 2:
            return (
                f"the deltas since version {base.anchor} add up to {since / max(full, 1):.0%} of "
                "the full size",
                True,
            )
        if self._num_since_anchor() >= options.anchor_every:
            return f"the last anchor is {options.anchor_every} versions old", True
        return "", True

    def _num_since_anchor(self) -> int:
        assert self._baseline is not None
        return sum(1 for version in self.store.versions() if version >= self._baseline.anchor)

    def _write(
        self,
        version: int,
        layout: Layout,
        anchored: list[Piece],
        deltas: list[tuple[int, dict[str, Blob]]],
        own: dict[str, Digest],
    ) -> dict[str, Any]:
        """This rank's files, and what the manifest needs to know of them."""
        folder, rank = self.store.scratch(version), self.ranks.rank
        anchors = (
            [_record(write_anchor(folder / f"anchor-r{rank}.safetensors", anchored))]
            if anchored
            else []
        )
        listed = {}
        for base, blobs in deltas:
            changed = {
                name: blob for name, blob in blobs.items() if _delta.info(blob)["num_changed"]
            }
            files = (
                [
                    write_delta(
                        folder / f"delta-{base:08d}-r{rank}.safetensors",
                        changed,
                        layout,
                        base,
                        version,
                    )
                ]
                if changed
                else []
            )
            listed[base] = [_record(file) for file in files]
        return {"digests": own, "anchor": anchors, "deltas": listed}

    def _manifest(
        self,
        version: int,
        layout: Layout,
        records: list[dict[str, Any]],
        num_changed: int,
        reason: str,
    ) -> Manifest:
        bases = {base for record in records for base in record["deltas"]}
        anchor = version if reason else self._baseline.anchor if self._baseline else version
        return Manifest(
            version=version,
            layout=layout,
            digests=_whole_digests(layout, [record["digests"] for record in records]),
            anchor=anchor,
            anchor_files=tuple(File(*file) for record in records for file in record["anchor"]),
            delta_files={
                int(base): tuple(File(*f) for r in records for f in r["deltas"][base])
                for base in sorted(bases, key=int)
            },
            num_changed=num_changed,
            reason=reason,
        )

    def _sum(self, numbers: dict[str, int]) -> dict[str, int]:
        each = [json.loads(text) for text in self.ranks.gather_text(json.dumps(numbers))]
        return {key: sum(one[key] for one in each) for key in numbers}

    def _on_main(self, action: Callable[[], object]) -> None:
        if self.ranks.rank == 0:
            action()

    def _together(self, version: int, action: Callable[[], Any]) -> list[Any]:
        """What `action` returned on each rank, as JSON gives it back. When it failed on one, every
        rank raises and the store is cleaned.
        """
        result, failure = None, None
        try:
            result = action()
        except (OSError, SafetensorError, StoreError) as error:
            failure = error
        report = {
            "result": result,
            "failure": None if failure is None else f"rank {self.ranks.rank}: {failure}",
        }
        reports = [json.loads(text) for text in self.ranks.gather_text(json.dumps(report))]
        failures = [r["failure"] for r in reports if r["failure"]]
        if failures:
            self._on_main(lambda: self.store.abort(version))
            self.ranks.gather_text("")  # no rank raises before the store is clean
            raise failure or OSError(failures[0])
        return [r["result"] for r in reports]


def _whole_digests(layout: Layout, each: list[dict[str, Digest]]) -> dict[str, Digest]:
    return {
        name: add(*((own[name][0], own[name][1]) for own in each if name in own)) for name in layout
    }


def _num_words(layout: Layout) -> int:
    return sum(spec.num_words for spec in layout.values())


def _size(manifest: Manifest, base: int | None) -> int:
    """Bytes of the deltas from version `base`; None: of the anchor."""
    files = manifest.anchor_files if base is None else manifest.delta_files.get(base, ())
    return sum(file.num_bytes for file in files)


def _record(file: File) -> tuple[str, int, str]:
    return file.name, file.num_bytes, file.xxh3
