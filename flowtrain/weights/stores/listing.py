"""The content of HEAD: the newest version, and checksums of manifests, which make their addresses.

A version that is rolled back and published again has another manifest at the same path, but not at
the same address: so HEAD alone has to be asked for anew, and all else may be kept for ever.

    12                          the newest complete version
    12 5f0c8e2a9b1d3374         a version and the XXH3 of its manifest, the newest first
    11 09ab5cc16f2e8d10
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from flowtrain.weights.format.manifest import StoreError

MAX_BYTES = 64 << 10
"""Longest text of a listing."""
MOST = 256
"""Versions in a listing; manifests of older ones are asked for by their path alone."""
_LINE = re.compile(r"([0-9]{1,18}) ([0-9a-f]{16})")
_VERSION = re.compile("[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Listing:
    """The newest version of a store, and checksums of manifests by version."""

    head: int
    manifests: Mapping[int, str] = field(default_factory=dict)

    def to_text(self) -> str:
        newest = sorted(self.manifests.items(), reverse=True)[:MOST]
        return "".join(
            (f"{self.head}\n", *(f"{version} {checksum}\n" for version, checksum in newest))
        )

    @classmethod
    def from_text(cls, text: str, path: str) -> Listing:
        """Read a listing; HEAD of a plain file server has its first line alone.

        Raises:
            StoreError: the text is none; the message names `path`.
        """
        first, *lines = text.strip().split("\n")
        found = [_LINE.fullmatch(line) for line in lines]
        if not _VERSION.fullmatch(first) or not all(found):
            raise StoreError(
                f"{path} holds {text.strip()[:40]!r}, not a version; is this the address of a "
                "weight store?"
            )
        return cls(int(first), {int(line[1]): line[2] for line in found if line})
