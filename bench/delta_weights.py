"""Synthetic 16-bit weights before and after an optimizer step, and their entropy bounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.delta_rivals import U16

_CHUNK = 1 << 24
_ROW = 4096


@dataclass(frozen=True)
class Step:
    """The weights of a tensor before and after an optimizer step."""

    name: str
    old: U16
    new: U16


def synthetic(num_bytes: int, density: float) -> Step:
    """Make one tensor of normal(0, 0.02) weights in rows of 4,096 whose scales are log-normal
    (sigma 0.5), with fp32 masters.

    Every master moves by lr times a clipped Adam ratio, normal(0, 0.5) within +-1; lr is solved so
    that a share `density` of the bf16 words changes.
    """
    num_words = num_bytes // 2
    lr = _solve_lr(density)
    old = np.empty(num_words, np.uint16)
    new = np.empty(num_words, np.uint16)
    for seed, start in enumerate(range(0, num_words, _CHUNK)):
        master, ratio = _masters(min(_CHUNK, num_words - start), seed)
        old[start : start + _CHUNK] = _bf16(master)
        new[start : start + _CHUNK] = _bf16(master - np.float32(lr) * ratio)
    return Step(f"synthetic, lr {lr:.2g}", old, new)


def _masters(num_words: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    scale = 0.02 * np.exp(0.5 * rng.standard_normal(-(-num_words // _ROW), dtype=np.float32))
    master = rng.standard_normal(num_words, dtype=np.float32)
    master *= np.repeat(scale, _ROW)[:num_words]
    ratio = rng.standard_normal(num_words, dtype=np.float32)
    ratio *= np.float32(0.5)
    return master, np.clip(ratio, -1, 1, out=ratio)


def _solve_lr(density: float) -> float:
    master, ratio = _masters(1 << 21, seed=0)
    old = _bf16(master)
    low, high = 1e-9, 1e-1
    for _ in range(30):
        middle = (low * high) ** 0.5
        if (_bf16(master - np.float32(middle) * ratio) != old).mean() < density:
            low = middle
        else:
            high = middle
    return high


def _bf16(values: NDArray[np.float32]) -> U16:
    """Round to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class Bounds:
    """Lower bounds in bytes per changed word for codes that treat all words alike, and for codes
    that know the old exponent.
    """

    num_changed: int
    density: float
    plain: float
    conditioned: float


def bounds(step: Step) -> Bounds:
    """Compute the bounds: h(d)/d bits for the position of a change and the entropy of the wrap
    differences for its value; conditioned, each exponent has a density and values of its own.
    """
    words = np.zeros(256, np.int64)
    changed = np.zeros(256, np.int64)
    values = np.zeros((256, 65536), np.int64)
    for start in range(0, len(step.old), _CHUNK):
        was = step.old[start : start + _CHUNK]
        now = step.new[start : start + _CHUNK]
        words += np.bincount((was >> 7) & 0xFF, minlength=256)
        where = np.flatnonzero(was != now)
        exponent = (was[where] >> 7) & 0xFF
        diff = now[where] - was[where]
        changed += np.bincount(exponent, minlength=256)
        for one in np.unique(exponent).tolist():
            values[one] += np.bincount(diff[exponent == one], minlength=65536)
    total = int(changed.sum())
    plain = _bits(words.sum(), total) + _value_bits(values.sum(axis=0))
    conditioned = sum(_bits(words[e], changed[e]) + _value_bits(values[e]) for e in range(256))
    return Bounds(
        num_changed=total,
        density=total / float(words.sum()),
        plain=plain / 8 / total,
        conditioned=conditioned / 8 / total,
    )


def _bits(num_words: int, num_changed: int) -> float:
    if num_changed in (0, num_words):
        return 0.0
    d = num_changed / num_words
    return float(-num_words * (d * np.log2(d) + (1 - d) * np.log2(1 - d)))


def _value_bits(counts: NDArray[np.int64]) -> float:
    there = counts[counts > 0]
    return float(-(there * np.log2(there / there.sum())).sum())
