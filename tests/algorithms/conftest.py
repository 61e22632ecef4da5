"""The fixtures of the training tests, for algorithms whose samples are scored and trained."""

from __future__ import annotations

from tests.training.conftest import alone, make_trainer, random_samples

__all__ = ["alone", "make_trainer", "random_samples"]
