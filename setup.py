"""Builds the C++ extension; everything else about the package is in pyproject.toml."""

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

ParallelCompile().install()  # a file per core

# No -march=native: the code picks AVX2 or AVX-512 when it runs. GCC 12 warns falsely within its own
# AVX-512 headers.
FLAGS = ["-O3", "-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized", "-pthread"]

setup(
    ext_modules=[
        Pybind11Extension(
            "flowtrain._delta",
            sorted(str(path) for path in Path("csrc").glob("*.cpp")),
            depends=sorted(str(path) for path in Path("csrc").glob("*.h")),
            cxx_std=17,
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
        )
    ]
)
