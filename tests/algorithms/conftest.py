"""The samples and the trainer of the tests of training."""

from tests.training.conftest import alone, make_trainer, random_samples

__all__ = ["alone", "make_trainer", "random_samples"]
