"""Stages on real vLLM: runs that sample with it, and the pause of a live one for new weights."""

from __future__ import annotations

import importlib.util
from functools import partial

from bench.gpu.cases import Cases, Needs, Row
from bench.gpu.runs import ANY_REWARD, HALF, QUICKSTART, SHORT, SPARSE, program_rows, train

_VLLM = (*QUICKSTART, "--rollout.engine", "vllm", "--weights.verify_every", "1")


def vllm_planner(cases: Cases) -> None:
    """The planner of the quickstart, whose heads of 16 vLLM does not have on a CPU: a tiny one."""
    size = ("--tiny.num_heads", "3", *SHORT, *ANY_REWARD, "--train.num_steps", "2")
    if not cases.is_small:
        size = ("--model.path", "quickstart", "--model.dtype", "bfloat16", "--eval.num_tasks", "100")
        size = (*size, "--train.num_steps", "40")
    cases.run("planner", partial(_run, cases, "planner", *_VLLM, *size), limit_s=600)


def vllm_random(cases: Cases) -> None:
    """A random model of half a billion parameters, two steps; vLLM sleeps while it trains."""
    size = ("--tiny.num_heads", "3")
    if not cases.is_small:
        size = (*HALF, *SPARSE, "--vllm.sleep", "true")
    options = (*_VLLM, *size, *SHORT, *ANY_REWARD, "--train.num_steps", "2")
    cases.run("random", partial(_run, cases, "random", *options), limit_s=600)


def vllm_pause(cases: Cases) -> None:
    """The pause for new weights by model, then sleep and wake; the largest models are not reloaded
    from a file beside it.
    """
    shapes = {"tiny": ()} if cases.is_small else {"0.5b": (), "1.5b": _LARGE, "7b": _LARGE}
    for shape, options in shapes.items():
        path = cases.folder.with_name(f"pause-{shape}.json")
        command = ("-m", "bench.weights", "--shape", shape, "--repeats", "3", *options)
        if cases.device == "cuda":
            command = (*command, "--sleep")
        cases.run(shape, partial(_rows, path, *command), limit_s=150)


_LARGE = ("--no-reload",)


def _run(cases: Cases, name: str, *options: str) -> list[Row]:
    _check()
    return train(cases, name, *options)


def _rows(path, *command: str) -> list[Row]:
    _check()
    return program_rows(path, *command)


def _check() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise Needs("vllm")
