"""Random seeds that depend on names, not on the order of events."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Derive a 63-bit seed from the parts, the same in every process and on every machine.

    A rollout's seed comes from (run seed, step, place in the batch, task id, rollout number) and a
    response's from (rollout seed, turn), so no random state has to be saved to resume a run, and a
    rollout does not depend on what was sampled beside it.
    """
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def derive_uniform(*parts: int | str) -> float:
    """Derive a number in [0, 1) from the parts: 53 bits, so that no float is rounded up to 1."""
    return (derive_seed(*parts) >> 10) / 2**53
