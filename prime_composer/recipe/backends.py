"""Name what runs the models of a recipe, and what every other file has to know about it."""

import os
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field

from prime_composer.recipe.carried import uncarried
from prime_composer.recipe.urls import Url
from prime_composer.tables import Table, named_module, nearest


class Served(Table):
    """How a running vLLM server of a model is asked."""

    model_config = ConfigDict(hide_input_in_errors=True)  # a url may have a password

    url: Url | None = Field(default=None, repr=False)
    """Base URL of a running vLLM server of the model, for backend 'server', which a teacher's
    implies."""

    api_key_var: str = "VLLM_API_KEY"
    """Environment variable with the API key of the server at `url`, if it needs one."""

    wait: float = Field(
        default=600.0,
        ge=0,
        allow_inf_nan=False,
        json_schema_extra=uncarried("prime-rl has its own rules for servers that are away"),
    )
    """Seconds to wait for the server at ``url`` while it is away or overloaded; then the run ends
    with a checkpoint. 0: it ends at once. Unset: a server that never answered gets 2 seconds,
    except with ``--resume``."""

    timeout: float = Field(
        default=600.0,
        gt=0,
        allow_inf_nan=False,
        json_schema_extra=uncarried("prime-rl has its own time limits for answers"),
    )
    """Seconds that one response of the server at ``url`` may take. Sampling may take longer, by its
    tokens at 10 per second and completion, and 200 per second in all."""

    @property
    def api_key(self) -> str | None:
        """The key that the environment has, sent as a bearer token."""
        return os.environ.get(self.api_key_var)

    @property
    def may_be_starting(self) -> bool:
        """Whether a server that has never answered is waited for in full."""
        return "wait" in self.model_fields_set


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


def _known(name: str) -> str:
    backend_of(name)
    return name


BackendName = Annotated[str, AfterValidator(_known)]
"""The name of what samples or scores."""
