"""The recipe's [data] as a prime-rl environment; see prime_composer/upstream/environment.py."""

from typing import Any

from prime_composer.upstream.environment import CLASSES, make_classes
from prime_composer.upstream.environment import load_environment as load_environment

__all__ = ["ProblemTaskset"]  # noqa: F822 made when asked for


def __getattr__(name: str) -> Any:
    """The taskset's classes need verifiers' second API, which prime-rl v0.6 has not. pickle asks for them by name, in
    processes that have never seen the taskset."""
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals().update(make_classes())
    return globals()[name]
