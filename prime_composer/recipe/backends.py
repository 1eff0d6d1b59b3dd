"""Name what runs the models of a recipe, and what every other file has to know about it."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator

from prime_composer.recipe.carried import not_carried
from prime_composer.tables import named_module, nearest

WAIT = not_carried("prime-rl has its own rules for servers that are away")
TIMEOUT = not_carried("prime-rl has its own time limits for answers")


class Backend(NamedTuple):
    """What runs a model."""

    # it is reached at the table's `url`, and the model runs there already. Otherwise it loads the
    # model from files that this machine has.
    serves: bool
    within_positions: bool  # it refuses a context longer than the model has positions
    libraries: tuple[str, ...] = ()  # what it imports beside transformers
    # makes a sampler or scorer, where it is from outside the package
    opens: Callable[..., Any] | None = None
    any_thread: bool = True  # it answers other threads than the one that opened it, one at a time
    # it multiplies transformers' hidden states with the head, and uses its cache
    by_head: bool = False
    packs: bool = False  # on a CPU it has kernels of its own, which pack some weights for good


BUILT_IN = {
    "vllm": Backend(
        serves=False, within_positions=True, libraries=("vllm",), any_thread=False, packs=True
    ),
    "transformers": Backend(serves=False, within_positions=True, by_head=True),
    "server": Backend(serves=True, within_positions=False, libraries=("httpx",)),
}
"""The package's own backends, by the name that a recipe gives."""

FLAGS = {
    "serves": "is reached at the `url` of its table",
    "within_positions": "refuses a context longer than the model has positions",
}
"""What a backend from outside says about itself, as attributes of its class or function."""

METHODS = {"Sampler": ("generate", "update_weights"), "Scorer": ("score",)}
"""What the classes of a role have."""


def backend_of(name: str) -> Backend:
    """Return what a recipe names: one of ``BUILT_IN``, or ``"module:class_or_function"``."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    form = "name one of your own as 'my_package.my_module:MyBackend'"
    if ":" not in name:
        near = nearest(name, BUILT_IN)
        hint = f"did you mean {near}? " if near else ""
        choices = ", ".join(BUILT_IN)
        raise ValueError(f"unknown backend {name[:100]!r}; {hint}the choices are {choices}; {form}")
    what = f"backend {name!r}"
    module, attribute = named_module(name, what, form)
    opens = getattr(module, attribute, None)
    if not callable(opens):
        raise ValueError(f"{what}: {attribute!r} is no class or function of {module.__name__!r}")
    for flag, meaning in FLAGS.items():
        if not isinstance(getattr(opens, flag, None), bool):
            raise ValueError(
                f"{what} does not say whether it {meaning}: set {attribute}.{flag} to True or False"
            )
    return Backend(opens.serves, opens.within_positions, opens=opens, any_thread=opens.serves)


def _checked(name: str, role: str) -> str:
    opens = backend_of(name).opens
    if isinstance(opens, type):
        for method in METHODS[role]:
            if not hasattr(opens, method):
                raise ValueError(
                    f"backend {name!r} is no {role.lower()}: {opens.__name__} has no method "
                    f"{method} (prime_composer.backends.protocols.{role})"
                )
    return name


SamplerName = Annotated[str, AfterValidator(partial(_checked, role="Sampler"))]
"""The name of what samples."""

ScorerName = Annotated[str, AfterValidator(partial(_checked, role="Scorer"))]
"""The name of what scores."""
