"""Table of losses, by the ``type`` that a recipe names.

This file imports no loss. Each one of the package registers itself, and one from outside is named
``"my_package.my_module:my_loss"``, whose module is imported when the name is first used.
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_type_hints

from prime_composer.contract import LossOutputs
from prime_composer.removed import REMOVED
from prime_composer.tables import named_module, nearest

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., LossOutputs])

LOSS_FNS: dict[type[Any], Callable[..., LossOutputs]] = {}
"""Loss function by config class: ``fn(inputs, config)``, or ``fn(inputs, config, state)``."""

LOSS_TYPES: dict[str, type[Any]] = {}
"""Config class by the ``type`` that a recipe names."""


def register(config: type[Any]) -> Callable[[F], F]:
    """Return the decorator that enters a loss function under the ``type`` of its config class."""

    def add(fn: F) -> F:
        name = config.model_fields["type"].default
        if name in LOSS_TYPES:
            owner = LOSS_FNS[LOSS_TYPES[name]]
            raise ValueError(
                f"{config.__module__}.{config.__qualname__}: type = {name!r} is taken by "
                f"{owner.__module__}.{owner.__qualname__}. Choose another one."
            )
        LOSS_FNS[config] = fn
        LOSS_TYPES[name] = config
        return fn

    return add


def lookup(name: str, base: type[C]) -> type[C]:
    """Return the config class of a ``type``. A loss from outside is imported at first use."""
    if name not in LOSS_TYPES:
        if instead := REMOVED.get(f"loss.type={name}"):
            raise ValueError(f"loss type {name!r} was removed: {instead}")
        if ":" not in name:
            near = nearest(name, LOSS_TYPES)
            hint = f"did you mean {near}? " if near else ""
            raise ValueError(f"unknown loss type {name!r}; {hint}{choices()}")
        _register_from_outside(name, base)
    return LOSS_TYPES[name]


def choices() -> str:
    """Return the sentence that lists the types."""
    return (
        f"The choices are: {', '.join(LOSS_TYPES)}. "
        "A loss of your own is named as 'my_package.my_module:my_loss'."
    )


def _register_from_outside(name: str, base: type[Any]) -> None:
    """Import ``"module:function"``, and register the function under its second annotation."""
    module, function_name = named_module(
        name,
        f"loss type {name!r}",
        "name a loss of your own as 'my_package.my_module:my_loss'",
    )
    if name in LOSS_TYPES:  # the module used the decorator
        return
    fn: Any = getattr(module, function_name, None)
    try:
        second = list(inspect.signature(fn).parameters)[1]
        config = get_type_hints(fn)[second]
        field = config.model_fields["type"]
        if issubclass(config, base) and (field.annotation, field.default) == (Literal[name], name):
            register(config)(fn)
            return
        why = f"it has the config {config.__qualname__} of type = {field.default!r}"
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    raise ValueError(
        f"loss type {name!r}: {fn!r} is no loss ({why}). "
        f"Write def {function_name}(inputs: LossInputs, config: MyLossConfig) -> LossOutputs, with "
        "a config of its own: a subclass of prime_composer.losses.LossConfig that has type: "
        f"Literal[{name!r}] = {name!r}."
    )
