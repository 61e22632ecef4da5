"""The trainer of the tests of training."""

from tests.trainer.conftest import alone, make_trainer

__all__ = ["alone", "make_trainer"]
