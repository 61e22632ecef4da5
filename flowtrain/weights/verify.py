"""Verification of a store against its manifests: every file, every delta against the weights it
starts from, every version after a pull.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flowtrain import _delta
from flowtrain.utils.terminal import bar
from flowtrain.weights.format.files import read_delta
from flowtrain.weights.format.manifest import Digest, File, Manifest, NotThere, StoreError, add
from flowtrain.weights.format.tensor_shards import U16, Blob, digest_change, u16_view
from flowtrain.weights.load.reader import pull
from flowtrain.weights.load.target import check_layout
from flowtrain.weights.stores.folder import Source, WeightStore


class Verifier:
    """Collects problems, each with the name of its file or version."""

    def __init__(self, source: Source, num_threads: int = 1) -> None:
        self.source = source
        self.problems: list[str] = []
        self.num_files = 0
        self.num_bytes = 0
        self._num_threads = num_threads

    def run(self, versions: Iterable[int]) -> list[str]:
        """Return all problems of these versions. Each version is pulled once, and so is each one
        from which a delta leads to them.
        """
        manifests = {}
        for version in versions:
            with self._collect(""):
                manifests[version] = self.source.manifest(version)
        targets: dict[int, list[Manifest]] = {version: [] for version in manifests}
        for manifest in manifests.values():
            for base in manifest.delta_files:
                targets.setdefault(base, []).append(manifest)
        for base in bar(sorted(targets), desc="verify", leave=False, disable=None):
            for file in manifests[base].snapshot_files if base in manifests else ():
                with self._collect(""):
                    self._fetch(base, file)
            # One version at a time in memory, for all the deltas that start from it.
            words: dict[str, U16] | None = None
            if base in manifests or not self._was_collected(base):
                with self._collect(f"version {base} cannot be pulled: "):
                    pulled = pull(self.source, base, self._num_threads)
                    words = {name: u16_view(tensor) for name, tensor in pulled.items()}
            for target in targets[base]:
                self._check_deltas(base, target, words)
        return self.problems

    @contextmanager
    def _collect(self, place: str) -> Iterator[None]:
        """Record an error inside the block as a problem, prefixed by `place`, and continue."""
        try:
            yield
        except (StoreError, _delta.DeltaError) as error:
            self.problems.append(f"{place}{error}")

    def _fetch(self, version: int, file: File) -> Path:
        self.num_files += 1
        self.num_bytes += file.num_bytes
        return self.source.fetch(version, file)

    def _was_collected(self, version: int) -> bool:
        """Return whether garbage collection deleted a version and all before it, so that deltas
        from it are unusable but not damaged. Over HTTP every gap looks like this.
        """
        if isinstance(self.source, WeightStore):
            return version < min(self.source.versions())
        try:
            self.source.manifest(version)
        except StoreError as error:
            return isinstance(error, NotThere)  # pulling the version reports any other error
        return False

    def _check_deltas(self, version: int, target: Manifest, words: dict[str, U16] | None) -> None:
        """Check the deltas from `version` to `target`; only their structure when `words` is None,
        because the version cannot be pulled.
        """
        changes: dict[str, Digest] = {}
        num_problems = len(self.problems)
        for file in target.delta_files[version]:
            place = f"version {target.version}: {file.name}: "
            blobs: dict[str, Blob] = {}
            with self._collect(place):
                path = self._fetch(target.version, file)
                blobs = read_delta(path, target.layout, base=version, version=target.version)
            for name, blob in blobs.items():
                with self._collect(f"{place}the delta of {name!r} is damaged: "):
                    self._validate(blob, None if words is None else words.get(name))
                    changes[name] = add(changes.get(name, (0, 0)), digest_change(blob))
        if words is None or len(self.problems) > num_problems:
            return
        with self._collect(""):
            start = self.source.manifest(version)
            check_layout(start.layout, target.layout, target.version)
            for name in target.missed_by(start, changes):
                self.problems.append(
                    f"version {target.version}: its deltas from version {version} do not "
                    f"reproduce its digest of {name!r}"
                )

    def _validate(self, blob: Blob, words: U16 | None) -> None:
        info = _delta.info(blob)
        if words is not None:
            words = words[info["first"] : info["first"] + info["num_words"]]
        # Level 2 cannot be decoded without its base.
        if words is not None or info["level"] == 1:
            _delta.validate(blob, words, num_threads=self._num_threads)
