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

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_composer.backends.errors import library_errors
from prime_composer.backends.protocols import Sampler
from prime_composer.recipe.backends import backend_of
from prime_composer.recipe.rollout import RolloutConfig
from prime_composer.recipe.teacher import TeacherConfig

Status = Callable[[str], None]  # Shows a text to the user


@dataclass(frozen=True)
class BackendSpec:
    """How to open a sampler or a scorer of one model: its table, and what the run has decided."""

    table: RolloutConfig | TeacherConfig
    section: str  # the table's name, in brackets
    backend: str  # what runs the model, as a recipe names it
    model: str | Path  # directory or hub id
    dtype: str  # of weights and activations
    max_model_len: int  # prompt and completion together, in tokens
    sequences: int  # that it samples or scores side by side
    ends: tuple[int, ...] | None = None  # that end a text, and no others; None: the model's own
    resumes: bool = False  # the run does, and a server may have been restarted with it

    @property
    def serves(self) -> bool:
        """Whether the model runs at a URL, and not on this machine's files."""
        return self.table.url is not None


def _vllm(spec: BackendSpec, status: Status | None) -> Sampler:
    from prime_composer.backends.vllm import VLLMSampler

    return VLLMSampler(
        spec.model,
        dtype=spec.dtype,
        max_model_len=spec.max_model_len,
        sequences=spec.sequences,
        gpu_memory_utilization=spec.table.gpu_memory_utilization,
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

    assert isinstance(spec.table, RolloutConfig)
    return ServerSampler(
        spec.table,
        str(spec.model),
        section=spec.section,
        weights_dir=spec.table.weights_dir,
        eos_token_ids=spec.ends,
        starting=spec.resumes,
        status=status,
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
