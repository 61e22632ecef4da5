"""Some code reads every option: none is documented and then ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
from option_reads import unread_options

ROOT = Path(__file__).resolve().parents[2] / "flowtrain"


def package_sources() -> dict[str, str]:
    """The files of flowtrain by path; of the config only what answers questions about it."""
    sources = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in ROOT.rglob("*.py")
        if not path.is_relative_to(ROOT / "config")
    }
    accessors = (ROOT / "config" / "__init__.py").read_text(encoding="utf-8")
    return {**sources, "config/__init__.py": accessors.replace("self.", "config.")}


def test_every_option_is_read() -> None:
    assert unread_options(package_sources()) == []


def test_an_option_that_only_its_namesake_keeps_alive_is_found() -> None:
    """`train.warmup_steps` was once documented and read by nobody; `rft.warmup_steps` was read."""
    sources = {
        path: text if path.startswith("rft/") else text.replace(".warmup_steps", ".lr")
        for path, text in package_sources().items()
    }
    assert unread_options(sources) == ["train.warmup_steps"]


def is_read(option: str, source: str) -> bool:
    return option not in unread_options({"toy.py": source})


@pytest.mark.parametrize(
    "source",
    [
        "config.train.lr",
        "self._config.train.lr",
        "def f(components): return components.config.train.lr",
        "def f(config):\n    t = config.train\n    return lambda: t.lr",
        "def f(config):\n    run, t = config.run, config.train\n    return t.lr",
        "from flowtrain.config import Train\ndef f(options: Train): return options.lr",
        "from flowtrain.config.train import Train as Options\n"
        "class A:\n    options: Options\n    def f(self): return self.options.lr",
        "class A:\n    def f(self): return self._t.lr\n"
        "    def g(self, config): self._t = config.train",
        "config.train.model_dump()",
        "for name, value in config.train: print(name, value)",
        "def f(config): return [getattr(config.train, name) for name in ('lr', 'beta1')]",
    ],
)
def test_reads_that_are_found(source: str) -> None:
    assert is_read("train.lr", source)


def test_reads_of_named_tables_are_found() -> None:
    for table in ("config.engines['judge']", "config.engines.get(name)"):
        assert is_read("engines.model", f"def f(config, name):\n    e = {table}\n    e.model")


@pytest.mark.parametrize(
    "source",
    [
        "config.rft.lr",
        "train.lr",
        "def f(config):\n    t = config.rft\n    return t.lr",
        "def f(config):\n    t = config.train\ndef g(t): return t.lr",
        "print('config.train.lr')",
        "f(config.train)",
    ],
)
def test_other_mentions_are_no_reads(source: str) -> None:
    assert not is_read("train.lr", source)
