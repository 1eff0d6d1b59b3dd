"""Fixtures of the tests with faults."""

from tests.backends.conftest import models, plain_logprobs  # noqa: F401  (fixtures)
