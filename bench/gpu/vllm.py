"""Stages on real vLLM: runs that sample with it, and the pause of a live one for new weights."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

from bench.gpu.cases import Cases, Needs, Row
from bench.gpu.runs import ANY_REWARD, HALF, QUICKSTART, SHORT, SPARSE, TINY, program_rows, train

_SMALL = (*TINY, "--tiny.num_heads", "3")
_VLLM = (*QUICKSTART, "--rollout.engine", "vllm", "--weights.verify_every", "1")


def vllm_planner(cases: Cases) -> None:
    """The planner of the quickstart, trained with live updates; a random one on a CPU, where vLLM
    has no heads of 16.
    """
    options = [*_VLLM, "--train.num_steps", "40", "--eval.num_tasks", "100"]
    options += ["--model.path", "quickstart", "--model.dtype", "bfloat16"]
    if cases.is_small:
        options = [*_VLLM, *_SMALL, *SHORT, *ANY_REWARD, "--train.num_steps", "2"]
    cases.run("planner", partial(_run, cases, "planner", *options), limit_s=600)


def vllm_random(cases: Cases) -> None:
    """A random model of half a billion parameters, two steps; vLLM sleeps while it trains."""
    size = _SMALL if cases.is_small else (*HALF, "--vllm.sleep", "true")
    options = (*_VLLM, *size, *SHORT, *SPARSE, *ANY_REWARD, "--train.num_steps", "2")
    cases.run("random", partial(_run, cases, "random", *options), limit_s=600)


def vllm_pause(cases: Cases) -> None:
    """The pause for new weights by model, then sleep and wake; the largest models are not reloaded
    from a file beside it.
    """
    for shape in ("tiny",) if cases.is_small else ("0.5b", "1.5b", "7b"):
        command = ["-m", "bench.weights", "--shape", shape, "--repeats", "3"]
        command += ["--no-reload"] * (shape != "0.5b") + ["--sleep"] * (cases.device == "cuda")
        path = cases.folder.with_name(f"pause-{shape}.json")
        cases.run(shape, partial(_rows, path, *command), limit_s=150)


def _run(cases: Cases, name: str, *options: str) -> list[Row]:
    _check()
    return train(cases, name, *options)


def _rows(path: Path, *command: str) -> list[Row]:
    _check()
    return program_rows(path, *command)


def _check() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise Needs("vllm")
