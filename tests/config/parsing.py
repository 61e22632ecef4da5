"""Command lines that give a config, and those that do not."""

from __future__ import annotations

import pytest

from flowtrain.algorithms import load_algorithm
from flowtrain.config import Config
from flowtrain.config.options import parse
from flowtrain.records import UserError


def parsed(*argv: str) -> Config:
    return parse(argv)


def filled(*argv: str) -> Config:
    """Parse, and let the algorithm fill in what is left to it."""
    return load_algorithm(parsed(*argv)).config


def complaint(*argv: str) -> str:
    """The message that the arguments cause; always one line."""
    with pytest.raises(UserError) as caught:
        filled(*argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)
