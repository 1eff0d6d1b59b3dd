"""Offer the recipe's problems as an environment of prime-rl.

``prime_composer/upstream/environment.py`` has the code and the explanation.
"""

from typing import Any

from prime_composer.upstream.environment import CLASSES, make_classes
from prime_composer.upstream.environment import load_environment as load_environment

__all__ = ["ProblemTaskset"]  # noqa: F822  made on first access


def __getattr__(name: str) -> Any:
    """Make the taskset's classes on first access.

    They need verifiers' second API, which prime-rl v0.6 does not have. pickle looks them up by
    name in processes that have never imported the taskset.
    """
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals().update(make_classes())
    return globals()[name]
