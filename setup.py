"""What pyproject.toml cannot say: the C++ extension, the configs, the README of a package page."""

import re
import tomllib
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import find_packages, setup

ParallelCompile().install()  # a file per core

# No -march=native: the code picks AVX2 or AVX-512 when it runs. GCC 12 warns falsely within its own
# AVX-512 headers.
FLAGS = ["-O3", "-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized", "-pthread"]


def package_page() -> str:
    """Return the README with links and images that work outside the repository."""
    home = tomllib.loads(Path("pyproject.toml").read_text())["project"]["urls"]["Homepage"]
    text = re.sub(r"\]\((docs/images/)", rf"]({home}/raw/main/\1", Path("README.md").read_text())
    return re.sub(r"\]\((?!https?://|#)", f"]({home}/blob/main/", text)


setup(
    packages=[
        *find_packages(include=["flowtrain", "flowtrain.*"]),
        *("flowtrain.configs", "flowtrain.tasks.data"),
    ],
    package_dir={"flowtrain.configs": "configs"},
    long_description=package_page(),
    long_description_content_type="text/markdown",
    ext_modules=[
        Pybind11Extension(
            "flowtrain._delta",
            sorted(str(path) for path in Path("csrc").glob("*.cpp")),
            depends=sorted(str(path) for path in Path("csrc").glob("*.h")),
            cxx_std=17,
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
        )
    ],
)
