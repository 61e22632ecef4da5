"""The files that a version gets beside its delta: now and then a full snapshot, and at every fourth
version skips, which are deltas over several versions.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowtrain.weights.format.deltas import Blob, compose_batches

_SKIP = 4
"""Every 4th version has a skip over 4 versions, every 16th over 16, every 64th over 64."""
_NUM_TIERS = 3


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
    """Deltas from one full snapshot to the next at most."""
    max_delta_share: float = 0.35
    """A delta above this share of the full size is not kept: a full snapshot replaces it."""

    def is_dense(self, delta_bytes: int, full_bytes: int) -> bool:
        """Tell whether a full snapshot replaces the delta."""
        return delta_bytes > self.max_delta_share * full_bytes

    def reason(self, chain: DeltaChain, delta_bytes: int, full_bytes: int) -> str:
        """Say why a full snapshot is due with the delta after `chain`; empty when it is not."""
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
class SkipTiers:
    """Deltas that wait to be composed, by tier; immutable, so that a failed publish leaves no
    trace.
    """

    tiers: tuple[tuple[tuple[int, dict[str, Blob]], ...], ...] = ((),) * _NUM_TIERS

    def plus(
        self, base: int, blobs: dict[str, Blob], num_threads: int
    ) -> tuple[SkipTiers, dict[int, dict[str, Blob]]]:
        """Add the delta from version `base`. Return the new tiers, and the skips that this delta
        completes by the version that they start from.
        """
        tiers = list(self.tiers)
        skips = {}
        for i, waiting in enumerate(tiers):
            tiers[i] = (*waiting, (base, blobs))
            if len(tiers[i]) < _SKIP:
                break
            base = tiers[i][0][0]
            blobs = compose_batches([batch for _, batch in tiers[i]], num_threads)
            tiers[i] = ()
            skips[base] = blobs
        return SkipTiers(tuple(tiers)), skips
