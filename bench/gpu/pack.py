"""A folder that travels to a machine with a GPU and without a network:

    python -m bench.gpu.pack [--plan first] [--out .gpu]

In it: wheels for x86-64 and Python 3.12, or this one where that is missing, of flowtrain (its codec
compiled, with the quickstart's planner and configs), of flowkernels, and of what the plan needs and
the image lacks (`bench/gpu/image.txt`); the commit; and the caches of Triton and Inductor that an
earlier plan has brought back, from --caches. Where wheels together exceed --mb they are one archive
in parts, which may arrive one after another. On the machine, in a checkout:

    . bench/gpu/setup.sh .gpu && python3 -m bench.gpu --plan first --out results
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

from bench.gpu.plans import PLANS
from bench.measure import commit_of_checkout

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {
    "first": (),
    "second": ("liger-kernel==0.8.5", "trl==1.16.0", "nvidia-cutlass-dsl>=4.4"),
    "vllm": ("vllm==0.25.1",),
}
"""What each plan needs besides flowtrain; vLLM 0.25.1 is the release that is built for torch
2.11."""
PINS = ("torch==2.11.0", "triton==3.6.0", "transformers==5.17.0")
"""What the image has, and nothing may replace."""
_OURS = {"flowkernels", "flowtrain"}
_UNUSED = {
    # Of vLLM, for other models, GPUs and servers.
    "flashinfer-cubin", "torchcodec", "pynvvideocodec", "tilelang", "z3-solver", "cuda-tile",
    "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl",
    "nvidia-cuda-tileiras", "tokenspeed-triton", "tokenspeed-mla", "humming-kernels", "sentry-sdk",
}  # fmt: skip
_KEPT_OF_NVIDIA = ("nvidia-cutlass", "nvidia-cudnn-frontend")
"""The image has NVIDIA's libraries, but not these."""
_GLIBC = 28
"""The newest minor version of glibc 2 whose symbols the codec may use; of libstdc++ it needs that
of GCC 12."""


def main() -> None:
    args = _arguments()
    started = time.monotonic()
    wheels = args.out / "wheels"
    for name in ("wheels", "parts"):
        shutil.rmtree(args.out / name, ignore_errors=True)
    wheels.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        print(f"flowtrain and flowkernels for {_version(args.python)}", flush=True)
        build(Path(scratch), wheels, args.python)
        print(f"what plan {args.plan} needs and the image lacks", flush=True)
        lacking, present = resolve(args.plan, args.python, Path(scratch))
    # From the index, or as pip was told to find them, and never built here.
    _pip(args.python, "download", "--no-deps", "-d", str(wheels), *_target(args.python), *lacking)
    (args.out / "present.txt").write_text("\n".join(present) + "\n")
    (args.out / "commit").write_text(commit_of_checkout() + "\n")
    if args.caches:
        shutil.copy(args.caches, args.out / "caches.tar.gz")
    num_wheels = len(list(wheels.iterdir()))
    num_parts = split(wheels, args.out / "parts", args.mb << 20)
    sizes = [path.stat().st_size for path in args.out.rglob("*") if path.is_file()]
    print(
        f"{args.out}: {num_wheels} wheels, {sum(sizes) / 2**20:.1f} MiB"
        + (f" in {num_parts} parts" if num_parts else "")
        + f", made in {time.monotonic() - started:.0f} s"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.pack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--plan", choices=PLANS, default="first", help="default: %(default)s")
    add("--out", type=Path, default=ROOT / ".gpu", metavar="DIR", help="default: .gpu")
    add("--caches", type=Path, metavar="FILE", help="caches.tar.gz of an earlier plan")
    add("--mb", type=int, default=48, help="the largest part, MiB (default: %(default)s)")
    add(
        "--python",
        default=find_python(),
        help="the interpreter to build with and for (default: %(default)s)",
    )
    return parser.parse_args()


def find_python() -> str:
    """Return a Python of the image's version, as PATH or pyenv has it; else this one."""
    places = Path.home().glob(".pyenv/versions/3.12*/bin/python")
    for python in ("python3.12", *map(str, sorted(places))):
        command = [shutil.which(python) or "false", "-V"]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return python
    return sys.executable


def build(scratch: Path, wheels: Path, python: str) -> None:
    """Build our two wheels from what git has or would take, apart from the checkout.

    Raises:
        SystemExit: the codec needs a newer glibc than old machines have.
    """
    source = scratch / "source"
    listed = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "bench/", "docs/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    old = scratch / "old_glibc.o"
    here = Path(__file__).parent / "old_glibc.c"
    subprocess.run(["cc", "-O2", "-fPIC", "-c", str(here), "-o", str(old)], check=True)
    os.environ["LDFLAGS"] = f"-Wl,--wrap=pthread_once {old}"
    folders = (str(source / "kernels"), str(source))
    _pip(python, "wheel", "--no-deps", "--wheel-dir", str(wheels), *folders)
    for wheel in wheels.glob("flowtrain-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            codec = next(name for name in archive.namelist() if "/_delta." in name)
            newest = newest_glibc(archive.read(codec))
        if newest > _GLIBC:
            raise SystemExit(f"{codec} needs glibc 2.{newest}, and may need 2.{_GLIBC} at most")


def newest_glibc(library: bytes) -> int:
    """Return the newest minor version of glibc 2 whose symbols a library asks for."""
    return max(int(x) for x in re.findall(rb"\0GLIBC_2\.(\d+)", library))


def resolve(plan: str, python: str, scratch: Path) -> tuple[list[str], list[str]]:
    """Return what flowtrain and the plan need, as pip resolves it: (what the image lacks, pinned;
    what it has besides PINS, by name).
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = (*project["dependencies"], *project["optional-dependencies"]["search"])
    ours = [x for x in needed if name_of(x) not in _OURS | _UNUSED]
    image = image_packages()
    wanted = [x for x in ours if name_of(x) not in image]
    more = (*PINS, *NEEDED[plan]) if NEEDED[plan] else ()
    report = scratch / "report.json"
    options = ("--dry-run", "--ignore-installed", "--target", str(scratch / "none"))
    where = ("--report", str(report), *_target(python))
    _pip(python, "install", *options, *where, *wanted, *more)
    found = {
        name_of(item["metadata"]["name"]): item["metadata"]["version"]
        for item in json.loads(report.read_text())["install"]
    }
    lacking = [
        f"{name}=={version}"
        for name, version in sorted(found.items())
        if name not in image | _UNUSED
        and (not name.startswith("nvidia-") or name.startswith(_KEPT_OF_NVIDIA))
    ]
    present = {name_of(x) for x in ours} | found.keys()
    return lacking, sorted(present & image - set(map(name_of, PINS)))


def name_of(requirement: str) -> str:
    """Return the name of a requirement as indexes write it."""
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def image_packages() -> set[str]:
    lines = (Path(__file__).parent / "image.txt").read_text().splitlines()
    return {name for line in lines if not line.startswith("#") for name in line.split()}


def split(wheels: Path, parts: Path, most: int) -> int:
    """Put wheels that together exceed `most` bytes into one archive, cut into parts; return their
    number, 0 where none were needed.
    """
    paths = sorted(wheels.iterdir())
    if sum(path.stat().st_size for path in paths) <= most:
        return 0
    parts.mkdir()
    whole = parts / "whole.tar"
    with tarfile.open(whole, "w") as archive:
        for path in paths:
            archive.add(path, path.name)
    shutil.rmtree(wheels)
    number = 0
    with whole.open("rb") as file:
        while chunk := file.read(most):
            (parts / f"part-{number:03d}").write_bytes(chunk)
            number += 1
    whole.unlink()
    return number


def _target(python: str) -> Iterable[str]:
    """Options by which pip takes wheels for the image's machine alone."""
    for minor in range(39, 4, -1):
        yield from ("--platform", f"manylinux_2_{minor}_x86_64")
    yield from ("--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64")
    yield from ("--implementation", "cp", "--only-binary=:all:")
    yield from ("--python-version", _version(python))


def _version(python: str) -> str:
    code = "import sys; print('{}.{}'.format(*sys.version_info))"
    return subprocess.check_output([python, "-c", code], text=True).strip()


def _pip(python: str, command: str, *words: str) -> None:
    options = ("--quiet", "--disable-pip-version-check")
    subprocess.run([python, "-m", "pip", command, *options, *words], check=True)


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    main()
