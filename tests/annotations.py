"""Check types and shapes of every call, as beartype and jaxtyping read the annotations.

``install`` does what ``jaxtyping.install_import_hook`` does, with another decorator. jaxtyping's
binds the arguments of every call, and checks them before it and after it. It took two thirds of the
time of a loss here, and a fifth of that of a run.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ForwardRef, get_type_hints

import jaxtyping
from beartype import BeartypeConf, beartype

SHAPES = jaxtyping.jaxtyped("context")
"""Within the block, a name of a size has one value."""

CONF = BeartypeConf(violation_type=TypeError)
"""The package reads damaged files, and catches what Python raises for missing values."""


def install(package: str) -> None:
    """Check annotations in every module of a package that is imported from now on."""
    jaxtyping.jaxtyped = lambda typechecker: checked
    jaxtyping.install_import_hook(package, "beartype.beartype")


def checked(target: Any) -> Any:
    """Return a function that checks its annotations, or a class, whose fields are checked."""
    if inspect.isclass(target):
        if dataclasses.is_dataclass(target):
            target.__init__ = checked(target.__init__)
        return target
    hints = getattr(target, "__annotations__", {})
    if any(map(is_name, hints.values())):
        hints |= {key: resolved(hint, target) for key, hint in hints.items() if is_name(hint)}
    function: Callable[..., Any] = beartype(target, conf=CONF)
    if "jaxtyping." not in str(hints):
        return function

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        with SHAPES:
            return function(*args, **kwargs)

    return call


def is_name(hint: Any) -> bool:
    """Return whether an annotation has a name in quotes."""
    return isinstance(hint, str | ForwardRef) or any(map(is_name, getattr(hint, "__args__", ())))


def resolved(hint: Any, function: Any) -> Any:
    """Return an annotation without quotes; Any, if a name is imported for mypy alone."""
    of_one = type("OfOne", (), {"__annotations__": {"value": hint}})
    try:
        return get_type_hints(of_one, function.__globals__, include_extras=True)["value"]
    except Exception:  # whatever an annotation raises
        return Any
