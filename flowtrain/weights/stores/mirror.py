"""Mirror a weight store to a bucket, so that nodes load from there and not from the trainer.

A version's files are put before its manifest, and that before HEAD: who reads the mirror sees a
whole version or none, whenever this is killed; the next pass goes on. Versions that were rolled
back or collected leave the mirror, the former after HEAD has gone back.
"""

from __future__ import annotations

import logging
import re
import time
from collections import defaultdict
from contextlib import suppress

from flowtrain.net.objects import MissingObject, Objects, StoreSilent, read_object
from flowtrain.weights.format.manifest import MAX_MANIFEST, Manifest, StoreError, read_whole
from flowtrain.weights.stores.bucket import read_head
from flowtrain.weights.stores.downloads import folder_of
from flowtrain.weights.stores.folder import WeightStore

_log = logging.getLogger(__name__)

_KEY = re.compile(r"v([0-9]{8,18})/\.?[A-Za-z0-9_-][A-Za-z0-9._-]*")
_MANIFEST = "manifest.json"


class Mirror:
    """One process at a time mirrors a store."""

    def __init__(self, store: WeightStore, objects: Objects) -> None:
        self._store, self._objects = store, objects
        self._known: dict[int, str] = {}
        """The manifests that the mirror is known to have."""

    def update(self) -> list[int]:
        """Make the mirror as the store is, and return the versions that were put there. A store
        without any version is taken for one that is not there yet.

        Raises StoreError, MissingObject, StoreSilent, OSError, after which it can be tried again,
        and UserError.
        """
        texts = {version: self._text(version) for version in self._store.versions()}
        if not texts:
            return []
        keys = self._keys()
        there = read_head(self._objects)
        is_same = {v: v in texts and texts[v] == self._text_there(v) for v in keys}
        gone = [v for v in keys if not is_same[v] and v >= min(texts)]
        kept = [v for v in keys if is_same[v] and v < min([*gone, v + 1])]
        if there is not None and there > max(kept, default=-1):
            there = max(kept, default=None)
            self._set_head(there)
        self._delete(keys, [v for v in keys if v >= min(texts) and v not in kept])
        for version, text in texts.items():
            if version not in kept:
                self._put(Manifest.from_json(text, str(self._store)), text)
            if there is None or version > there:
                there = version
                self._set_head(version)
        self._delete(keys, [v for v in keys if v < min(texts)])
        return [v for v in texts if v not in kept]

    def follow(self, every_s: float) -> None:
        """Update the mirror for ever, with pauses; what fails is said and tried again."""
        while True:
            try:
                if made := self.update():
                    _log.warning("%s has version %d now", self._objects.url, made[-1])
            except (StoreError, MissingObject, StoreSilent, OSError) as error:
                _log.warning("%s is not up to date: %s", self._objects.url, error)
            time.sleep(every_s)

    def _text(self, version: int) -> str:
        path = self._store.folder(version) / _MANIFEST
        return read_whole(path, MAX_MANIFEST).decode(errors="replace")

    def _text_there(self, version: int) -> str:
        if version not in self._known:
            key = f"{folder_of(version)}/{_MANIFEST}"
            with suppress(MissingObject):
                data = read_object(self._objects, key, MAX_MANIFEST)
                self._known[version] = data.decode(errors="replace")
        return self._known.get(version, "")

    def _keys(self) -> dict[int, list[str]]:
        """List the objects of the mirror by version, in order."""
        keys: dict[int, list[str]] = defaultdict(list)
        for record in self._objects.list():
            if match := _KEY.fullmatch(record.key):
                keys[int(match[1])].append(record.key)
        return dict(sorted(keys.items()))

    def _put(self, manifest: Manifest, text: str) -> None:
        folder = folder_of(manifest.version)
        for file in manifest.files:
            self._objects.put(f"{folder}/{file.name}", self._store.fetch(manifest.version, file))
        self._objects.put(f"{folder}/{_MANIFEST}", text.encode())
        self._known[manifest.version] = text

    def _set_head(self, version: int | None) -> None:
        if version is None:
            self._objects.delete(["HEAD"])
        else:
            self._objects.put("HEAD", f"{version}\n".encode())

    def _delete(self, keys: dict[int, list[str]], versions: list[int]) -> None:
        """Delete versions, the manifest of each before its files."""
        for version in versions:
            manifest = f"{folder_of(version)}/{_MANIFEST}"
            self._known.pop(version, None)
            self._objects.delete([manifest])
            self._objects.delete([key for key in keys[version] if key != manifest])
