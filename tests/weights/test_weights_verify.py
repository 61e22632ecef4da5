"""`python -m flowtrain.weights verify` finds and names damage."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import http_stores as hs
import numpy as np
import pytest
from http_stores import Run, add_snapshot, delta_path, flip, reseal, rewrite, weights_at

from flowtrain import _delta
from flowtrain.weights import WeightStore
from flowtrain.weights.format.files import read_delta, write_delta
from flowtrain.weights.format.tensor_shards import u16_view

pytest_plugins = ("http_stores",)


@pytest.mark.parametrize("level", [1, 2])
def test_verify_a_good_store(run: Run, tmp_path: Path, level: int) -> None:
    store = hs.fill(tmp_path / "weights", level)
    blobs = read_delta(delta_path(store, 4, 5), store.manifest(5).layout, 4, 5)
    assert {_delta.info(blob)["level"] for blob in blobs.values()} == {level}
    num_bytes = sum(path.stat().st_size for path in store.root.glob("v*/*.safetensors"))
    code, out, err = run("verify", store.root, "--all", "--threads", 2)
    assert (code, out, err) == (0, f"fine: 6 versions, 7 files, {num_bytes / 1024:.3g} KiB\n", "")
    assert run("verify", store.root)[1].startswith("fine: 1 versions, 1 files")
    assert run("verify", store.root, "--version", 4)[1].startswith("fine: 1 versions, 2 files")
    for version in (0, 1):
        shutil.rmtree(store.folder(version))
    code, out, _ = run("verify", store.root, "--all")
    assert code == 1 and "version 2 cannot be pulled" in out, "the full snapshot is gone"


def test_verify_after_garbage_was_collected(run: Run, copied: WeightStore) -> None:
    """Deltas from versions that are gone lead from nowhere; that is no damage."""
    rewrite(copied, 3, snapshot=3, snapshot_files=(add_snapshot(copied, 3),), reason="a test")
    for version in (4, 5):
        rewrite(copied, version, snapshot=3)
    assert copied.collect_garbage(keep=1) == [0, 1, 2]
    assert run("verify", copied.root, "--all")[1].startswith("fine: 3 versions")
    flip(delta_path(copied, 0, 4))
    reseal(copied, 0, 4)
    code, out, _ = run("verify", copied.root, "--all")
    assert code == 1 and "delta-00000000-r0.safetensors: the delta of 'step' is damaged" in out, (
        "but its structure is looked at"
    )


@pytest.mark.parametrize("kind", ["flipped", "truncated", "missing"])
@pytest.mark.parametrize(
    "name", ["v00000000/anchor-r0.safetensors", "v00000004/delta-00000003-r0.safetensors"]
)
def test_verify_names_a_damaged_file(run: Run, copied: WeightStore, name: str, kind: str) -> None:
    path = copied.root / name
    message = {
        "flipped": "does not have the checksum",
        "truncated": "bytes, its manifest says",
        "missing": "is missing",
    }[kind]
    if kind == "flipped":
        flip(path)
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    code, out, _ = run("verify", copied.root, "--all")
    lines = out.splitlines()
    assert code == 1 and any(re.search(rf"^damaged: .*{name} .*{message}", line) for line in lines)
    assert re.fullmatch(r"\d+ problems in 6 versions, 7 files, .* KiB", lines[-1])
    found = run("verify", copied.root, "--version", 1)[0]
    assert found == 0 if "delta" in name else 1, "version 1 needs the full snapshot alone"


def test_verify_looks_into_deltas(run: Run, copied: WeightStore) -> None:
    """Checksums that fit do not make a delta right."""
    path, version = delta_path(copied, 2, 3), copied.manifest(3)
    blobs = read_delta(path, version.layout, 2, 3)
    layer = blobs["layer.weight"]
    old = u16_view(weights_at(2)["layer.weight"]).copy()
    another, damaged = old.copy(), layer.copy()
    another[5] += 1
    damaged[-1] ^= 1

    def verify(layer: np.ndarray, base: int = 2, **more: np.ndarray) -> tuple[int, str]:
        """Verify a store with this delta of the layer, sealed well."""
        write_delta(path, blobs | {"layer.weight": layer} | more, version.layout, base, 3)
        reseal(copied, 2, 3)
        return run("verify", copied.root, "--version", 3)[:2]

    def encode(base: np.ndarray, target: np.ndarray) -> np.ndarray:
        return _delta.encode(base, target, base_digest=_delta.digest(base))

    for found, message in (
        (verify(damaged), f"version 3: {path.name}: the delta of 'layer.weight' is damaged: "),
        (
            verify(encode(old, another)),
            "version 3: its deltas from version 2 do not reproduce its digest of 'layer.weight'",
        ),
        (verify(encode(another, old)), "the delta of 'layer.weight' is damaged"),
        (
            verify(layer, extra=layer.copy()),
            "holds a delta of 'extra', a tensor that the model does not have",
        ),
        (verify(layer, base=1), "leads from version 1 to 3, not from 2 to 3"),
    ):
        assert found[0] == 1 and message in found[1], message
    verify(layer)
    assert run("verify", copied.root, "--all")[0] == 0


def test_verify_compares_digests(run: Run, copied: WeightStore) -> None:
    manifest = copied.manifest(0)
    a, b = manifest.digests["norm"]
    rewrite(copied, 0, digests=manifest.digests | {"norm": (a ^ 1, b)})
    code, out, _ = run("verify", copied.root, "--version", 0)
    assert code == 1
    assert "version 0 cannot be pulled: the full snapshot of version 0 is damaged at 'norm'" in out


def test_verify_sees_a_gap(run: Run, copied: WeightStore) -> None:
    shutil.rmtree(copied.folder(2))
    code, out, _ = run("verify", copied.root, "--all")
    assert code == 1 and "version 2 cannot be pulled: version 2 is not in" in out
    code, out, _ = run("verify", copied.root, "--version", 2)
    assert code == 1 and "version 2 is not in" in out
