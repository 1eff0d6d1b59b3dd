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
        ValueError: the ``type`` is taken, or what is decorated is no function.
    """

    def add(fn: Any) -> Any:
        name = _declared_type(config)
        _check_function(fn, f"the loss of {_full_name(config)}", "my_loss")
        if not isinstance(name, str):
            raise ValueError(f"{_full_name(config)} declares no type; {_how_to_declare('my_loss')}")
        if name in LOSS_TYPES:
            raise ValueError(f"{_full_name(fn)}: type = {name!r} is taken by {_owner(name)}.")
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
    """Import ``"module:function"`` and register the function under its config."""
    module, function_name = named_module(
        name,
        f"loss type {name!r}",
        "name a loss of your own as 'my_package.my_module:my_loss'",
    )
    if name in LOSS_TYPES:  # the module used the decorator
        return
    if not hasattr(module, function_name):
        raise ValueError(
            f"loss type {name!r}: {function_name!r} does not exist in {module.__name__!r}. "
            f"Define it there: {_signature(function_name)}"
        )
    fn = getattr(module, function_name)
    what = f"loss type {name!r}: {function_name!r} in {module.__name__!r}"
    _check_function(fn, what, function_name)
    config = _config_of(fn, name, base)
    field = config.model_fields.get("type")
    if field is None or field.annotation != Literal[name] or field.default != name:
        declared = _declared_type(config)
        owner = f", the type of {_owner(declared)}" if declared in LOSS_TYPES else ""
        raise ValueError(
            f"loss type {name!r}: the config {_full_name(config)} declares type = {declared!r}"
            f"{owner}. Each loss has a config of its own; {_how_to_declare(name)}"
        )
    register(config)(fn)


def _check_function(thing: Any, what: str, function_name: str) -> None:
    """Refuse classes and objects: prime-rl's own rl losses are objects with a method ``loss``."""
    if callable(thing) and not isinstance(thing, type):
        return
    kind = "the class" if isinstance(thing, type) else "an object of the class"
    cls = thing if isinstance(thing, type) else type(thing)
    remedy = "Write one that calls its method loss" if hasattr(thing, "loss") else "Define it there"
    raise ValueError(
        f"{what} is {kind} {cls.__qualname__}, no function. {remedy}: {_signature(function_name)}"
    )


def _config_of(fn: Callable[..., Any], name: str, base: type[Any]) -> type[Any]:
    """Return the annotation of the function's second parameter."""
    try:
        annotations = get_type_hints(fn)
        parameters = list(inspect.signature(fn).parameters)
    except Exception as error:
        raise ValueError(
            f"loss type {name!r}: the annotations of {_full_name(fn)} cannot be read "
            f"({type(error).__name__}: {error}). Import the names that they use in its module."
        ) from error
    annotation = annotations.get(parameters[1]) if len(parameters) > 1 else None
    if not (isinstance(annotation, type) and issubclass(annotation, base)):
        what = "has no annotation" if annotation is None else f"is annotated with {annotation!r}"
        raise ValueError(
            f"loss type {name!r}: the second parameter of {_full_name(fn)} {what}. Annotate it "
            "with the loss's config, a subclass of prime_composer.losses.LossConfig: "
            f"{_signature(name.partition(':')[2])}"
        )
    return annotation


def _declared_type(config: type[Any]) -> Any:
    field = config.model_fields.get("type")
    return None if field is None or field.is_required() else field.default


def _owner(name: str) -> str:
    return _full_name(LOSS_FNS[LOSS_TYPES[name]])


def _full_name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '?')}.{getattr(thing, '__qualname__', repr(thing))}"


def _signature(function_name: str) -> str:
    return f"def {function_name}(inputs: LossInputs, config: MyLossConfig) -> LossOutputs."


def _how_to_declare(name: str) -> str:
    return f"write type: Literal[{name!r}] = {name!r} in it."
