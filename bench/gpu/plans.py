"""The plans of `bench.gpu`: which stages run, in which order, and which of them at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """Minutes on a GPU, and what they are spent on."""

    seconds: int
    groups: tuple[tuple[str, ...], ...]
    """Stages in the order of what they tell. Those of a group run at once: they test whether
    something runs, and time nothing."""


STAGES: dict[str, tuple[str, int]] = {
    "environment": ("kernels", 20),
    "quickstart": ("runs", 150),
    "resume": ("runs", 150),
    "gpu_tests": ("kernels", 150),
    "profile": ("training", 30),
    "steps": ("training", 130),
    "attention": ("kernels", 65),
    "layers": ("kernels", 25),
    "head_chunks": ("kernels", 25),
    "load": ("runs", 50),
    "kernel_tests": ("kernels", 50),
    "collectives": ("ranks", 50),
    "rivals": ("kernels", 75),
    "memory": ("training", 60),
    "checkpoint": ("ranks", 25),
    "experts": ("training", 25),
    "hybrid": ("training", 25),
    "delta": ("kernels", 15),
    "vllm_planner": ("vllm", 150),
    "vllm_random": ("vllm", 90),
    "vllm_pause": ("vllm", 220),
}
"""The module of `bench.gpu` that has each stage, as a function of its name, and the most seconds
that the stage may take."""

PLANS = {
    "first": Plan(
        480,
        (
            ("environment",),
            ("quickstart", "resume", "gpu_tests"),
            ("profile",),
            ("steps",),
            ("attention",),
            ("layers",),
            ("head_chunks",),
            ("load",),
        ),
    ),
    "second": Plan(
        240,
        (
            ("environment",),
            ("kernel_tests", "collectives"),
            ("rivals",),
            ("memory",),
            ("checkpoint",),
            ("experts",),
            ("hybrid",),
            ("delta",),
        ),
    ),
    "vllm": Plan(480, (("environment",), ("vllm_planner",), ("vllm_random",), ("vllm_pause",))),
}
