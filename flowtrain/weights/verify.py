"""Check that a store holds what its manifests say: every file, every delta against the weights it
starts from, every version as pulled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from flowtrain import _delta
from flowtrain.weights.deltas import Blob, digest_change
from flowtrain.weights.files import read_delta
from flowtrain.weights.manifest import File, Manifest, StoreError
from flowtrain.weights.reader import pull
from flowtrain.weights.remote import NotThere
from flowtrain.weights.store import Source, WeightStore
from flowtrain.weights.tensor_shards import U16, Digest, add, u16_view


class Verifier:
    """Collects problems, each with the name of its file or version."""

    def __init__(self, source: Source, num_threads: int = 1) -> None:
        self.source = source
        self.problems: list[str] = []
        self.num_files = 0
        self.num_bytes = 0
        self._num_threads = num_threads
        self._good: set[tuple[int, str]] = set()
        """Files that were found undamaged, by version."""

    def run(self, versions: Iterable[int]) -> list[str]:
        """Return all problems of these versions. Each version is pulled once, and so is each one
        from which a delta leads to them.
        """
        manifests = {}
        for version in versions:
            with self._noting(""):
                manifests[version] = self.source.manifest(version)
        targets: dict[int, list[Manifest]] = {version: [] for version in manifests}
        for manifest in manifests.values():
            for base in manifest.delta_files:
                targets.setdefault(base, []).append(manifest)
        files = [(m.version, file) for m in manifests.values() for file in m.files]
        total = len(files) + len(targets)
        with tqdm(total=total, desc="verify", leave=False, disable=None) as bar:
            for version, file in files:
                self.num_files += 1
                self.num_bytes += file.num_bytes
                with self._noting(""):
                    self.source.fetch(version, file)
                    self._good.add((version, file.name))
                bar.update()
            for base in sorted(targets):
                self._check_version(base, base in manifests, targets[base])
                bar.update()
        return self.problems

    @contextmanager
    def _noting(self, place: str) -> Iterator[None]:
        """Add an error inside the block to the problems, after `place`, and go on."""
        try:
            yield
        except (StoreError, _delta.DeltaError) as error:
            self.problems.append(f"{place}{error}")

    def _check_version(self, version: int, is_asked: bool, targets: list[Manifest]) -> None:
        """Pull a version, compare its digests, and check the deltas that start from it."""
        manifest: Manifest | None = None
        words: dict[str, U16] | None = None
        if is_asked or not self._was_collected(version):
            with self._noting(f"version {version} cannot be pulled: "):
                manifest = self.source.manifest(version)
                pulled = pull(self.source, version, self._num_threads)
                words = {name: u16_view(tensor) for name, tensor in pulled.items()}
                for name, digest in manifest.digests.items():
                    if _delta.digest(words[name], num_threads=self._num_threads) != digest:
                        self.problems.append(
                            f"version {version}: {name!r} as pulled does not have the digest of "
                            "the manifest"
                        )
        for target in targets:
            self._check_deltas(
                version, manifest if words is not None else None, words, target=target
            )

    def _was_collected(self, version: int) -> bool:
        """Tell whether a version was deleted together with all before it: deltas from there are no
        longer of use, and not damaged. Over HTTP every gap looks like this.
        """
        if isinstance(self.source, WeightStore):
            return version < min(self.source.versions())
        try:
            self.source.manifest(version)
        except StoreError as error:
            return isinstance(error, NotThere)  # pulling the version reports any other error
        return False

    def _check_deltas(
        self, version: int, base: Manifest | None, words: dict[str, U16] | None, target: Manifest
    ) -> None:
        """Check the deltas from `version` to `target`; only their structure when `base` and `words`
        are None, because the version cannot be pulled.
        """
        if base is not None and base.layout != target.layout:
            self.problems.append(
                f"version {target.version} has a delta from version {version}, which has another "
                "layout"
            )
            return
        changes: dict[str, Digest] = {}
        all_files = target.delta_files[version]
        files = [file for file in all_files if (target.version, file.name) in self._good]
        for file in files:
            for name, change in self._changes(file, version, words, target=target).items():
                changes[name] = add(changes.get(name, (0, 0)), change)
        if base is None or len(files) < len(all_files):
            return
        self.problems += [
            f"version {target.version}: its deltas from version {version} do not lead to its "
            f"digest of {name!r}"
            for name in target.missed_by(base, changes)
        ]

    def _changes(
        self, file: File, base: int, words: dict[str, U16] | None, target: Manifest
    ) -> dict[str, Digest]:
        """Return what the deltas of a file add to the digests, by tensor."""
        place = f"version {target.version}: {file.name}: "
        blobs: dict[str, Blob] = {}
        with self._noting(place):
            path = self.source.fetch(target.version, file)
            blobs = read_delta(path, target.layout, base=base, version=target.version)
        changes = {}
        for name, blob in blobs.items():
            with self._noting(f"{place}the delta of {name!r} is damaged: "):
                self._validate(blob, None if words is None else words[name])
                changes[name] = digest_change(blob)
        return changes

    def _validate(self, blob: Blob, words: U16 | None) -> None:
        info = _delta.info(blob)
        if words is not None:
            words = words[info["first"] : info["first"] + info["num_words"]]
        if words is not None or info["level"] == 1:
            _delta.validate(blob, words, num_threads=self._num_threads)
