"""Peak FLOP/s of a device, by its name."""

from __future__ import annotations

import math

from flowtrain.training.devices import PEAK_TFLOPS, peak_tflops


def test_devices_are_known_by_name() -> None:
    names = {
        "NVIDIA H200": 989.0,
        "NVIDIA H100 80GB HBM3": 989.0,
        "NVIDIA H100 PCIe": 756.0,
        "NVIDIA A100-SXM4-80GB": 312.0,
        "NVIDIA GeForce RTX 4090": 165.2,
        "NVIDIA L4": 121.0,
        "NVIDIA L40S": 362.0,
        "NVIDIA A10": 125.0,
    }
    assert {name: peak_tflops(name) for name in names} == names
    assert peak_tflops("NVIDIA GeForce GTX 1080") is None and peak_tflops("Tesla A1000") is None
    assert all(math.isfinite(peak) and peak > 0 for peak in PEAK_TFLOPS.values())
