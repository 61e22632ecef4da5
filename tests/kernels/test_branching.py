"""The reverse scan, the branching score and the branch points against plain fp64 Python loops."""

from __future__ import annotations

import math
import random
from itertools import accumulate, pairwise
from statistics import fmean, pstdev

import pytest
import torch
from flowkernels import (
    BranchingScore,
    branch_points,
    branching_score,
    branching_triton,
    discounted_reverse_scan,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_truth import IMPLS, device_of
from torch import Tensor

GAMMAS = (0.0, 0.5, 0.989, 1.0)
LAYOUTS = {
    "empty-first-middle-last": [0, 0, 4, 0, 7, 0],
    "length-1": [1, 1, 2, 1],
    "around-the-block": [511, 512, 513],
    "three-blocks": [1025],
    "only-empty": [0, 0],
    "no-sequence": [],
}
CELLS = [
    *(("empty-first-middle-last", gamma) for gamma in GAMMAS),
    *(("around-the-block", 0.0), ("around-the-block", 0.989), ("three-blocks", 1.0)),
    *(("three-blocks", 0.5), ("length-1", 0.989), ("only-empty", 1.0), ("no-sequence", 0.5)),
]
"""Layouts and gammas: each of both, and carries over blocks at every kind of gamma."""
OF_IMPLS = [("torch", *cell) for cell in CELLS]
OF_IMPLS += [(impl, *CELLS[i]) for impl in IMPLS[1:] for i in (2, 5, 6, 10)]
"""Triton's interpreter, which takes longer, gets one of each kind."""
UNIT = 2.0**-24
"""Largest relative error of one fp32 rounding."""
NAN = math.nan


def bounds_of(lengths: list[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))


def plain_scan(x: list[float], bounds: list[int], gamma: float, mask: list[bool]) -> list[float]:
    sums = [0.0] * len(x)
    for begin, end in pairwise(bounds):
        after = 0.0
        for i in reversed(range(begin, end)):
            after = (x[i] if mask[i] else 0.0) + gamma * after
            sums[i] = after
    return sums


def plain_omega(
    log_ratios: list[float], bounds: list[int], gamma: float, clip: float, mask: list[bool]
) -> list[float]:
    sums = plain_scan(log_ratios, bounds, gamma, mask)
    return [min(max(math.exp(min(max(s, -20), 20)), 1 - clip), 1 + clip) for s in sums]


def plain_score(
    omegas: list[float], entropies: list[float], bounds: list[int], mask: list[bool]
) -> tuple[list[float], list[bool], list[bool]]:
    """(score, candidate, whether it is plain which of the two: no z-score is near 0)."""
    scores, candidates, is_plain = [0.0] * len(mask), [False] * len(mask), [True] * len(mask)
    for begin, end in pairwise(bounds):
        tokens = [i for i in range(begin, end) if mask[i]]
        if not tokens:
            continue
        omega, entropy = [omegas[i] for i in tokens], [entropies[i] for i in tokens]
        is_flat = pstdev(omega) < 1e-6
        for i, o, h in zip(tokens, omega, entropy, strict=True):
            z_entropy = (h - fmean(entropy)) / (pstdev(entropy) + 1e-6)
            z_omega = 1.0 if is_flat else (o - fmean(omega)) / (pstdev(omega) + 1e-6)
            scores[i] = z_entropy * z_omega
            candidates[i] = z_entropy > 0 and z_omega > 0
            is_plain[i] = len(tokens) == 1 or (abs(z_entropy) > 1e-3 and abs(z_omega) > 1e-3)
    return scores, candidates, is_plain


def scan(
    x: list[float], lengths: list[int], gamma: float, impl: str, mask: list[bool] | None = None
) -> Tensor:
    device = device_of(impl)
    mask_T = None if mask is None else torch.tensor(mask, dtype=torch.bool, device=device)
    cu_seqlens = torch.tensor(bounds_of(lengths), device=device)
    scanned = discounted_reverse_scan(
        torch.tensor(x, device=device), cu_seqlens, gamma=gamma, mask_T=mask_T, impl=impl
    )
    assert scanned.dtype == torch.float32 and scanned.shape == (len(x),)
    return scanned.cpu()


def score(
    log_ratios: list[float],
    entropies: list[float],
    lengths: list[int],
    impl: str,
    mask: list[bool] | None = None,
    gamma: float = 1.0,
    clip: float = 0.2,
    dtype: torch.dtype = torch.int64,
) -> BranchingScore:
    device = device_of(impl)
    ratio_T = torch.tensor(log_ratios, device=device)
    entropy_T = torch.tensor(entropies, device=device)
    mask_T = None if mask is None else torch.tensor(mask, dtype=torch.bool, device=device)
    cu_seqlens = torch.tensor(bounds_of(lengths), device=device, dtype=dtype)
    out = branching_score(
        ratio_T,
        torch.zeros_like(ratio_T),
        entropy_T,
        cu_seqlens,
        mask_T=mask_T,
        gamma=gamma,
        clip=clip,
        impl=impl,
    )
    return BranchingScore(out.score_T.cpu(), out.omega_T.cpu(), out.is_candidate_T.cpu())


def normals(num: int, scale: float = 1.0, seed: int = 0) -> list[float]:
    """Numbers that fp32 holds exactly."""
    values: list[float] = (
        scale * torch.randn(num, generator=torch.Generator().manual_seed(seed))
    ).tolist()
    return values


def test_fp64_stays_fp64() -> None:
    """To digits that fp32 cannot hold; one number in fp64 is enough."""
    lengths, mask = [9, 0, 14], random_mask(23)
    bounds, ratio, entropy = bounds_of(lengths), normals(23), normals(23, seed=1)
    ratio_T, entropy_T = (torch.tensor(x).double() * (1 + 3e-9) for x in (ratio, entropy))
    mask_T, cu_seqlens = torch.tensor(mask), torch.tensor(bounds)
    scanned = discounted_reverse_scan(ratio_T, cu_seqlens, gamma=0.9, mask_T=mask_T)
    true_T = torch.tensor(plain_scan(ratio_T.tolist(), bounds, 0.9, mask), dtype=torch.float64)
    torch.testing.assert_close(scanned, true_T, rtol=1e-13, atol=1e-15)
    for each_T in (entropy_T, entropy_T.float()):
        out = branching_score(ratio_T, torch.zeros(23), each_T, cu_seqlens, mask_T=mask_T)
        omega = plain_omega(ratio_T.tolist(), bounds, 1.0, 0.2, mask)
        scores = plain_score(omega, each_T.tolist(), bounds, mask)[0]
        for found_T, plain in ((out.omega_T, omega), (out.score_T, scores)):
            true_T = torch.tensor(plain, dtype=torch.float64)
            torch.testing.assert_close(found_T, true_T, rtol=1e-12, atol=1e-13)


def random_mask(num: int) -> list[bool]:
    rng = random.Random(1)
    return [rng.random() < 0.7 for _ in range(num)]


def assert_scan_is_right(
    scanned: Tensor, x: list[float], lengths: list[int], gamma: float, impl: str, mask: list[bool]
) -> None:
    """Within rounding: torch sums in fp64, Triton in fp32 with a rounded gamma."""
    bounds = bounds_of(lengths)
    true_T = torch.tensor(plain_scan(x, bounds, gamma, mask), dtype=torch.float64)
    if impl == "torch":
        bound_T = 1.001 * UNIT * true_T.abs() + 1e-12
    else:
        sizes = plain_scan([abs(v) for v in x], bounds, gamma, mask)
        drifts = [0.0] * (
            len(x) + 1
        )  # sum_k k gamma^k |x_{i+k}|: what the rounding of gamma to fp32 changes, per unit
        for begin, end in pairwise(bounds):
            drifts[end] = 0.0
            for i in reversed(range(begin, end)):
                drifts[i] = gamma * (drifts[i + 1] + sizes[i + 1]) if i + 1 < end else 0.0
        roundings = 2 * 9 + 2 * (max(lengths, default=0) / 512 + 1)
        bound_T = (
            UNIT
            * torch.tensor([roundings * s + 2 * d for s, d in zip(sizes, drifts, strict=False)])
            + 1e-30
        )
    error_T = (scanned.double() - true_T).abs()
    assert (error_T <= bound_T).all(), f"worst: {(error_T / bound_T).max():.2f} times the bound"


@pytest.mark.parametrize(("impl", "layout", "gamma"), OF_IMPLS)
def test_scan_matches_the_plain_loop_whatever_masked_positions_hold(
    impl: str, layout: str, gamma: float
) -> None:
    lengths = LAYOUTS[layout]
    x = normals(sum(lengths))
    mask = random_mask(len(x))
    hidden = [
        v if m else random.Random(i).choice([NAN, math.inf, -math.inf, 1e30])
        for i, (v, m) in enumerate(zip(x, mask, strict=True))
    ]
    assert_scan_is_right(scan(x, lengths, gamma, impl), x, lengths, gamma, impl, [True] * len(x))
    assert_scan_is_right(scan(hidden, lengths, gamma, impl, mask), x, lengths, gamma, impl, mask)


@pytest.mark.parametrize("gamma", [0.989, 1.0])
@pytest.mark.parametrize(("impl", "length"), [("torch", 200_000), ("triton", 8_000)])
def test_scan_of_a_long_sequence_stays_within_rounding(
    impl: str, length: int, gamma: float
) -> None:
    x = normals(length)
    assert_scan_is_right(scan(x, [length], gamma, impl), x, [length], gamma, impl, [True] * length)


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("impl", IMPLS)
def test_scan_propagates_non_finite_values_to_earlier_positions_alone(
    impl: str, value: float
) -> None:
    lengths, spot = [5, 700, 5], 5 + 600  # in the second block of the second sequence
    x = normals(sum(lengths))
    clean = scan(x, lengths, 0.5, impl)
    x[spot] = value
    scanned = scan(x, lengths, 0.5, impl)
    is_hit = torch.zeros(len(x), dtype=torch.bool)
    is_hit[5 : spot + 1] = True
    assert not scanned[is_hit].isfinite().any()
    assert math.isinf(value) or scanned[is_hit].isnan().all()
    assert torch.equal(scanned[~is_hit], clean[~is_hit])


@pytest.mark.parametrize("impl", IMPLS)
@settings(max_examples=2, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 5) | st.just(513), min_size=2, max_size=3),
    noise=st.sampled_from([NAN, math.inf, 1e30, 0.0]),
)
def test_a_sequence_does_not_see_its_neighbours(
    impl: str, lengths: list[int], noise: float
) -> None:
    """Bit for bit each has the scan, Omega, score and candidates it has alone."""
    x, entropies = normals(sum(lengths), 0.3), normals(sum(lengths), seed=1)
    for begin, end in pairwise(bounds_of(lengths)):
        others = [v if begin <= i < end else noise for i, v in enumerate(x)]
        noisy_entropies = [v if begin <= i < end else noise for i, v in enumerate(entropies)]
        packed = score(others, noisy_entropies, lengths, impl)
        alone = score(x[begin:end], entropies[begin:end], [end - begin], impl)
        assert torch.equal(packed.score_T[begin:end], alone.score_T)
        assert torch.equal(packed.omega_T[begin:end], alone.omega_T)
        assert torch.equal(packed.is_candidate_T[begin:end], alone.is_candidate_T)
        assert torch.equal(
            scan(others, lengths, 0.989, impl)[begin:end],
            scan(x[begin:end], [end - begin], 0.989, impl),
        )


@pytest.mark.parametrize(("impl", "layout", "gamma"), OF_IMPLS)
def test_score_matches_the_plain_formula(impl: str, layout: str, gamma: float) -> None:
    """Half of the tokens are masked: what they hold in any input changes nothing."""
    lengths, clip = LAYOUTS[layout], 0.3
    bounds, num = bounds_of(lengths), sum(lengths)
    mask = random_mask(num)
    log_ratios, entropies = normals(num, 0.1), [abs(v) for v in normals(num, seed=2)]
    hidden = (
        [v if m else NAN for v, m in zip(values, mask, strict=True)]
        for values in (log_ratios, entropies)
    )
    out = score(*hidden, lengths, impl, mask, gamma, clip)
    omegas = plain_omega(log_ratios, bounds, gamma, clip, mask)
    torch.testing.assert_close(out.omega_T, torch.tensor(omegas), rtol=2e-5, atol=0)
    scores, candidates, is_plain = plain_score(omegas, entropies, bounds, mask)
    torch.testing.assert_close(out.score_T, torch.tensor(scores), rtol=1e-3, atol=1e-3)
    kept = torch.tensor(is_plain, dtype=torch.bool)
    assert kept.sum() >= 0.9 * len(kept)
    assert torch.equal(out.is_candidate_T[kept], torch.tensor(candidates, dtype=torch.bool)[kept])
    assert (out.score_T[~torch.tensor(mask, dtype=torch.bool)] == 0).all()


@pytest.mark.parametrize(
    ("base", "spread", "is_flat"),
    [
        *((base, spread, spread == 0.0) for base in (0.14, -0.14) for spread in (0.0, 2e-5)),
        *((0.0, 1e-7, True), (0.0, 2e-5, False), (0.0, 1e-4, False)),
    ],
)
@pytest.mark.parametrize("impl", IMPLS)
def test_score_is_that_of_the_entropy_where_omega_is_flat(
    impl: str, base: float, spread: float, is_flat: bool
) -> None:
    """The spread is the standard deviation of Omega about exp(base): E[x^2] - E[x]^2 in fp32 could
    not tell these apart.
    """
    num = 600
    mask = random_mask(num)
    signs = [2 * m - 1 for m in random_mask(num + 7)[7:]]
    log_ratios = [base + s * spread * math.exp(-base) for s in signs]
    entropies = normals(num, seed=3)
    out = score(log_ratios, entropies, [num], impl, mask, gamma=0.0)
    mean = fmean(h for h, m in zip(entropies, mask, strict=True) if m)
    deviation = pstdev([h for h, m in zip(entropies, mask, strict=True) if m])
    z_entropy = torch.tensor(
        [
            (h - mean) / (deviation + 1e-6) if m else 0.0
            for h, m in zip(entropies, mask, strict=True)
        ]
    )
    if is_flat:
        torch.testing.assert_close(out.score_T, z_entropy, rtol=1e-5, atol=1e-5)
        assert torch.equal(out.is_candidate_T, z_entropy > 0)
    else:
        assert torch.equal(out.is_candidate_T, (z_entropy > 0) & (torch.tensor(signs) > 0))


@pytest.mark.parametrize("impl", IMPLS)
def test_omega_clipped_everywhere_is_flat_for_any_number_of_blocks(
    impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean of equal numbers is that number."""
    monkeypatch.setattr(branching_triton, "LAUNCH", {"BLOCK": 16, "num_warps": 1})
    num = 16 * 200
    entropies = normals(num)
    out = score([0.0] * (num - 1) + [5.0], entropies, [num], impl, clip=0.986)
    assert out.omega_T.unique().numel() == 1
    mean, deviation = fmean(entropies), pstdev(entropies)
    torch.testing.assert_close(
        out.score_T, torch.tensor([(h - mean) / deviation for h in entropies]), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("num", [1, 7, 1000])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_constant_entropy_has_no_candidates(impl: str, num: int) -> None:
    for constant in (0.0, 0.1, 0.7, 2.3):
        out = score([0.0] * num, [constant] * num, [num], impl)
        assert out.score_T.abs().max() < 1e-3, f"Z of the constant {constant} is 0"
        assert not out.is_candidate_T.any()


@pytest.mark.parametrize("where", ["ratio", "entropy"])
@pytest.mark.parametrize("impl", IMPLS)
def test_nan_of_a_generated_token_shows_and_leaves_no_candidates(impl: str, where: str) -> None:
    lengths = [40, 600, 40]
    log_ratios, entropies = normals(680, 0.05), normals(680, seed=1)
    clean = score(log_ratios, entropies, lengths, impl)
    (log_ratios if where == "ratio" else entropies)[600] = NAN
    out = score(log_ratios, entropies, lengths, impl)
    others = torch.tensor([*range(40), *range(640, 680)])
    assert out.score_T[40:640].isnan().all() and not out.is_candidate_T[40:640].any()
    assert where != "ratio" or (
        out.omega_T[40:601].isnan().all() and not out.omega_T[601:].isnan().any()
    )
    assert clean.is_candidate_T[others].any()
    assert torch.equal(out.score_T[others], clean.score_T[others])


@pytest.mark.parametrize("impl", IMPLS)
def test_bounds_of_any_integer_dtype_and_stride_are_the_same_bounds(impl: str) -> None:
    lengths = [3, 0, 5, 2]
    x, entropies = normals(10), normals(10, seed=1)
    expected = score(x, entropies, lengths, impl)
    assert torch.equal(
        score(x, entropies, lengths, impl, dtype=torch.int32).score_T, expected.score_T
    )
    device = device_of(impl)
    # Every other entry; those between them are in range, so that reading them by mistake harms
    # nothing but the result.
    strided = torch.tensor([0, 1, 3, 3, 3, 4, 8, 8, 10], device=device)[::2]
    assert strided.tolist() == bounds_of(lengths)
    x_T, entropy_T = torch.tensor(x, device=device), torch.tensor(entropies, device=device)
    scanned = discounted_reverse_scan(x_T, strided, gamma=0.5, impl=impl)
    assert torch.equal(scanned.cpu(), scan(x, lengths, 0.5, impl))
    assert torch.equal(
        branching_score(x_T, 0 * x_T, entropy_T, strided, impl=impl).score_T.cpu(), expected.score_T
    )
    apart = torch.stack([x_T, entropy_T], dim=1)
    cu_seqlens = torch.tensor(bounds_of(lengths), device=device)
    columns = branching_score(apart[:, 0], 0 * apart[:, 0], apart[:, 1], cu_seqlens, impl=impl)
    assert torch.equal(columns.score_T.cpu(), expected.score_T)


def plain_points(
    scores: list[float],
    candidates: list[bool],
    bounds: list[int],
    num: int,
    spacing: int,
    mask: list[bool],
    allowed: list[bool],
) -> list[list[int]]:
    points = []
    for begin, end in pairwise(bounds):
        chosen: list[int] = []
        for _ in range(num):
            best = None
            for i in range(begin, end):
                is_near = any(
                    abs(sum(mask[: i + 1]) - sum(mask[: c + 1])) < spacing for c in chosen
                )
                if (
                    candidates[i]
                    and allowed[i]
                    and not is_near
                    and i not in chosen
                    and (best is None or scores[i] > scores[best])
                ):
                    best = i
            if best is None:
                break
            chosen.append(best)
        points.append(chosen + [-1] * (num - len(chosen)))
    return points


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_points_are_those_of_the_greedy_loop(data: st.DataObject) -> None:
    """Few scores, so that there are ties; with and without a mask or an allowance."""
    lengths = data.draw(st.lists(st.integers(0, 9), max_size=4))
    num = sum(lengths)
    flags = st.lists(st.booleans(), min_size=num, max_size=num)
    scores = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0, -1.0]), min_size=num, max_size=num))
    mask = data.draw(st.none() | flags)
    allowed = data.draw(st.none() | flags)
    flagged = data.draw(flags)
    candidates = [c and (mask is None or mask[i]) for i, c in enumerate(flagged)]
    num_points, spacing = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 5))
    given_ = BranchingScore(
        torch.tensor(scores), torch.ones(num), torch.tensor(candidates, dtype=torch.bool)
    )
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    points = branch_points(
        given_,
        torch.tensor(bounds_of(lengths), dtype=dtype),
        num_points=num_points,
        spacing=spacing,
        mask_T=None if mask is None else torch.tensor(mask, dtype=torch.bool),
        allowed_T=None if allowed is None else torch.tensor(allowed, dtype=torch.bool),
    )
    assert points.dtype == torch.int64 and points.shape == (len(lengths), num_points)
    everything = [True] * num
    expected = plain_points(
        scores,
        candidates,
        bounds_of(lengths),
        num_points,
        spacing,
        mask or everything,
        allowed or everything,
    )
    assert points.tolist() == expected
