"""The recipe's [data] as a prime-rl environment; see prime_composer/upstream/environment.py."""

from typing import Any

from prime_composer.upstream.environment import load_environment as load_environment

__all__ = ["ProblemTaskset"]  # noqa: F822 made when asked for


def __getattr__(name: str) -> Any:
    """``ProblemTaskset`` needs verifiers' second API, which prime-rl v0.6 has not."""
    if name != "ProblemTaskset":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from prime_composer.upstream.environment import make_taskset

    globals()["ProblemTaskset"] = made = make_taskset()
    return made
