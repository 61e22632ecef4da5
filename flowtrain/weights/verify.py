"""Whether a store holds what its manifests say: every file, every delta against the weights it
starts from, every version as pulled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from flowtrain import _delta
from flowtrain.weights.files import Blob, read_delta
from flowtrain.weights.manifest import File, Manifest, StoreError
from flowtrain.weights.reader import pull
from flowtrain.weights.remote import NotThere
from flowtrain.weights.store import Source, WeightStore
from flowtrain.weights.tensor_shards import Digest, Words, add, subtract, words_of


class Verifier:
    """Collects what is wrong, in words that name the file or version."""

    def __init__(self, source: Source, num_threads: int = 1) -> None:
        self.source = source
        self.problems: list[str] = []
        self.num_files = self.num_bytes = 0
        self._num_threads = num_threads
        self._bad: set[tuple[int, str]] = set()
        """Files that were found damaged, by version."""

    def run(self, versions: Iterable[int]) -> list[str]:
        """All problems of these versions. Each is pulled once, and so is each version from which a
        delta leads to one of them.
        """
        manifests = self._manifests(versions)
        starting: dict[int, list[Manifest]] = {version: [] for version in manifests}
        for manifest in manifests.values():
            for base in manifest.delta_files:
                starting.setdefault(base, []).append(manifest)
        files = [(manifest, file) for manifest in manifests.values() for file in _files(manifest)]
        with tqdm(
            total=len(files) + len(starting), desc="verify", leave=False, disable=None
        ) as bar:
            for manifest, file in files:
                self._check_file(manifest.version, file)
                bar.update()
            for base in sorted(starting):
                self._check_version(base, base in manifests, starting[base])
                bar.update()
        return self.problems

    def _manifests(self, versions: Iterable[int]) -> dict[int, Manifest]:
        found = {}
        for version in versions:
            try:
                found[version] = self.source.manifest(version)
            except StoreError as error:
                self.problems.append(str(error))
        return found

    def _check_file(self, version: int, file: File) -> None:
        self.num_files, self.num_bytes = self.num_files + 1, self.num_bytes + file.num_bytes
        try:
            self.source.fetch(version, file)
        except StoreError as error:
            self._bad.add((version, file.name))
            self.problems.append(str(error))

    def _check_version(self, version: int, is_asked: bool, targets: list[Manifest]) -> None:
        """Pull a version, compare its digests, and lay the deltas that start from it on its words."""
        if not is_asked and self._was_collected(version):
            for target in targets:
                self._check_deltas(version, None, None, target)
            return
        try:
            manifest = self.source.manifest(version)
            words = {
                name: words_of(tensor)
                for name, tensor in pull(self.source, version, self._num_threads).items()
            }
        except (StoreError, _delta.DeltaError) as error:
            self.problems.append(f"version {version} cannot be pulled: {error}")
            manifest, words = None, None
        if manifest is not None and words is not None:
            for name, digest in manifest.digests.items():
                if _delta.digest(words[name], num_threads=self._num_threads) != digest:
                    self.problems.append(
                        f"version {version}: {name!r} as pulled does not have the digest of the "
                        "manifest"
                    )
        for target in targets:
            self._check_deltas(version, manifest, words, target)

    def _was_collected(self, version: int) -> bool:
        """It was deleted with all before it: what leads from there is of no more use, and no
        damage. Over HTTP any gap looks like this.
        """
        if isinstance(self.source, WeightStore):
            return version < min(self.source.versions())
        try:
            self.source.manifest(version)
        except NotThere:
            return True
        except StoreError:
            return False  # pulling it says why
        return False

    def _check_deltas(
        self, version: int, base: Manifest | None, words: dict[str, Words] | None, target: Manifest
    ) -> None:
        """`base` and `words` are None where the version cannot be had; then only the structure is
        checked.
        """
        if base is not None and base.layout != target.layout:
            self.problems.append(
                f"version {target.version} has a delta from version {version}, which has another "
                "layout"
            )
            return
        changes: dict[str, Digest] = {}
        files = [
            file
            for file in target.delta_files[version]
            if (target.version, file.name) not in self._bad
        ]
        for file in files:
            for name, change in self._changes(file, version, words, target).items():
                changes[name] = add(changes.get(name, (0, 0)), change)
        if base is None or len(files) < len(target.delta_files[version]):
            return
        for name, digest in target.digests.items():
            if add(base.digests[name], changes.get(name, (0, 0))) != digest:
                self.problems.append(
                    f"version {target.version}: its deltas from version {version} do not lead to "
                    f"its digest of {name!r}"
                )

    def _changes(
        self, file: File, base: int, words: dict[str, Words] | None, target: Manifest
    ) -> dict[str, Digest]:
        """By tensor, what the deltas of a file add to its digest."""
        place = f"version {target.version}: {file.name}"
        try:
            blobs = read_delta(
                self.source.fetch(target.version, file), target.layout, base, target.version
            )
        except StoreError as error:
            self.problems.append(f"{place}: {error}")
            return {}
        changes = {}
        for name, blob in blobs.items():
            try:
                info = self._validate(blob, None if words is None else words[name])
            except _delta.DeltaError as error:
                self.problems.append(f"{place}: the delta of {name!r} is damaged: {error}")
                continue
            changes[name] = subtract(info["target_digest"], info["base_digest"])
        return changes

    def _validate(self, blob: Blob, words: Words | None) -> dict[str, Any]:
        info = _delta.info(blob)
        if words is not None:
            part = words[info["first"] : info["first"] + info["num_words"]]
            return _delta.validate(blob, part, num_threads=self._num_threads)
        return info if info["level"] == 2 else _delta.validate(blob, num_threads=self._num_threads)


def _files(manifest: Manifest) -> list[File]:
    return [
        *manifest.anchor_files,
        *(file for files in manifest.delta_files.values() for file in files),
    ]
