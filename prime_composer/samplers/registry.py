"""Table of samplers, by the ``backend`` that ``[rollout]`` names, and how a model is opened.

Add a sampler: write a class with the methods of ``backends.protocols.Sampler``, anywhere on
PYTHONPATH, and name it in a recipe as ``"my_package.my_module:MySampler"``. It is called with a
``BackendSpec`` and a function that shows a text to the user. Two attributes say what the rest has
to know (``recipe.backends.Backend``):

    class MySampler:
        serves = False  # True: it is reached at the `url` of [rollout], where the model runs
        within_positions = False  # True: it refuses a context longer than the model has positions

        def __init__(self, spec: BackendSpec, status: Callable[[str], None]): ...

A function with these attributes that returns a sampler is as good. A teacher's backend is the same
with the methods of ``Scorer``. Its ``sampler`` writes the answers that an evaluation grades.
``tests/examples/my_sampler.py`` is a complete sampler.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_composer.backends.errors import library_errors
from prime_composer.backends.protocols import Sampler
from prime_composer.recipe.backends import backend_of

Status = Callable[[str], None]  # Shows a text to the user


@dataclass(frozen=True)
class BackendSpec:
    """How to open a sampler or a scorer of one model."""

    backend: str  # what runs the model, as the recipe names it
    model: str | Path  # directory or hub id
    dtype: str  # of weights and activations
    max_model_len: int  # prompt and completion together, in tokens
    sequences: int  # that it samples or scores side by side
    gpu_memory_utilization: float  # share, for vLLM
    url: str | None  # base URL, for a server
    api_key_var: str  # environment variable with the server's API key
    wait: float  # seconds to wait for a server that is away
    starting: bool  # wait as long for one that has never answered
    timeout: float  # seconds that one answer of a server may take
    section: str  # the recipe's table of the model, in brackets
    weights_dir: Path | None = None  # for a server's new weights; None: the system's own
    head: Path | None = None  # checkpoint of a served teacher's head; None asks the server
    ends: tuple[int, ...] | None = None  # that end a text, and no others; None: the model's own

    @property
    def serves(self) -> bool:
        """Whether the model runs at a URL, and not on this machine's files."""
        return self.url is not None

    def connection(self, status: Status | None) -> dict[str, Any]:
        """Return how its server is asked. ``status`` is shown when the run waits for it."""
        return {
            "wait": self.wait,
            "starting": self.starting,
            "timeout": self.timeout,
            "status": status,
            "api_key": os.environ.get(self.api_key_var),
            "api_key_var": self.api_key_var,
        }


def _vllm(spec: BackendSpec, status: Status | None) -> Sampler:
    from prime_composer.backends.vllm import VLLMSampler

    return VLLMSampler(
        spec.model,
        dtype=spec.dtype,
        max_model_len=spec.max_model_len,
        sequences=spec.sequences,
        gpu_memory_utilization=spec.gpu_memory_utilization,
        eos_token_ids=spec.ends,
    )


def _transformers(spec: BackendSpec, status: Status | None) -> Sampler:
    from prime_composer.samplers.transformers import TransformersSampler

    return TransformersSampler(
        spec.model,
        dtype=spec.dtype,
        max_model_len=spec.max_model_len,
        eos_token_ids=spec.ends,
    )


def _server(spec: BackendSpec, status: Status | None) -> Sampler:
    from prime_composer.samplers.server import ServerSampler

    assert spec.url is not None
    return ServerSampler(
        spec.url,
        str(spec.model),
        section=spec.section,
        weights_dir=spec.weights_dir,
        eos_token_ids=spec.ends,
        **spec.connection(status),
    )


SAMPLERS = {"vllm": _vllm, "transformers": _transformers, "server": _server}
"""The package's own samplers. Each imports its libraries when it is opened."""


def open_sampler(spec: BackendSpec, status: Status | None = None) -> Sampler:
    """Open what samples rollouts of a model."""
    opens = SAMPLERS.get(spec.backend)
    with library_errors(spec.section, spec.backend, f"open {spec.model}"):
        sampler = opens(spec, status) if opens is not None else open_outside(spec, status, Sampler)
    return with_errors(sampler, spec)


def with_errors(opened: Any, spec: BackendSpec) -> Any:
    """Return a backend whose library's own errors become sentences that name the recipe's table."""
    for method in ("generate", "score", "update_weights"):
        if hasattr(opened, method) and not spec.serves:
            explains = library_errors(spec.section, spec.backend, f"{method} ({spec.model})")
            setattr(opened, method, explains(getattr(opened, method)))
    return opened


def open_outside(spec: BackendSpec, status: Status | None, role: Any) -> Any:
    """Open a sampler or scorer from outside the package."""
    opens = backend_of(spec.backend).opens
    assert opens is not None
    opened = opens(spec, status or (lambda _: None))
    if not isinstance(opened, role):
        raise ValueError(
            f"{spec.section} backend = {spec.backend!r} opened an object of the class "
            f"{type(opened).__qualname__}, which is no {role.__name__.lower()} "
            f"(prime_composer.backends.protocols.{role.__name__})"
        )
    return opened
