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
    """Return the decorator that enters a loss function under the ``type`` of its config class.

    Raises:
        ValueError: the ``type`` is taken or missing, or what is decorated is no function.
    """

    def add(fn: Any) -> Any:
        name = _declared_type(config)
        if not _is_function(fn) or not isinstance(name, str):
            raise ValueError(
                f"the loss of {_full_name(config)} is {fn!r}, and its type {name!r}: "
                f"{_form('my_loss', 'my_module:my_loss')}"
            )
        if name in LOSS_TYPES:
            owner = _full_name(LOSS_FNS[LOSS_TYPES[name]])
            raise ValueError(f"{_full_name(fn)}: type = {name!r} is taken by {owner}.")
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
    config: Any = None
    wrong = f"is {fn!r}"
    if _is_function(fn):
        try:
            names, hints = list(inspect.signature(fn).parameters), get_type_hints(fn)
            config = hints.get(names[1]) if len(names) > 1 else None
            wrong = f"has a second parameter with the annotation {config!r}"
        except Exception as error:
            wrong = f"has annotations that cannot be read ({type(error).__name__}: {error})"
    is_config: bool = isinstance(config, type) and issubclass(config, base)
    if is_config:
        field = config.model_fields.get("type")
        if field is not None and field.annotation == Literal[name] and field.default == name:
            register(config)(fn)
            return
        wrong = f"has the config {_full_name(config)} of type = {_declared_type(config)!r}"
    raise ValueError(
        f"loss type {name!r}: {function_name!r} in {module.__name__!r} {wrong}. "
        f"{_form(function_name, name)}"
    )


def _is_function(thing: Any) -> bool:
    """Whether it can be called as a loss. prime-rl's own are objects with a method ``loss``."""
    return callable(thing) and not isinstance(thing, type)


def _form(function_name: str, name: str) -> str:
    return (
        f"Write def {function_name}(inputs: LossInputs, config: MyLossConfig) -> LossOutputs, with "
        "a config of its own: a subclass of prime_composer.losses.LossConfig that has type: "
        f"Literal[{name!r}] = {name!r}."
    )


def _declared_type(config: type[Any]) -> Any:
    field = config.model_fields.get("type")
    return None if field is None or field.is_required() else field.default


def _full_name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '?')}.{getattr(thing, '__qualname__', repr(thing))}"
