"""Offer the recipe's problems as an environment of prime-rl.

``prime_composer/upstream/environment.py`` has the code and the explanation.
"""

from typing import Any

from prime_composer.upstream.environment import CLASSES, make_classes

__all__ = ["ProblemTaskset"]  # noqa: F822  made on first access


def __getattr__(name: str) -> Any:
    """Make the taskset's classes on first access, as they need verifiers.

    pickle looks them up by name in processes that have never imported the taskset.
    """
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals().update(make_classes())
    return globals()[name]
