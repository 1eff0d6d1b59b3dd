"""Table of scorers, by the ``backend`` that a teacher's table names.

``samplers.registry`` says how to add one from outside the package.
"""

from prime_composer.backends.errors import library_errors
from prime_composer.backends.model_files import cache_root
from prime_composer.backends.protocols import Scorer
from prime_composer.recipe.teacher import TeacherConfig
from prime_composer.samplers.registry import BackendSpec, Status, open_outside, with_errors


def _vllm(spec: BackendSpec, status: Status | None) -> Scorer:
    from prime_composer.teachers.vllm import VLLMScorer

    return VLLMScorer(
        spec.model,
        dtype=spec.dtype,
        max_model_len=spec.max_model_len,
        sequences=spec.sequences,
        max_logprobs="full",
        gpu_memory_utilization=spec.table.gpu_memory_utilization,
        eos_token_ids=spec.ends,
    )


def _transformers(spec: BackendSpec, status: Status | None) -> Scorer:
    from prime_composer.teachers.transformers import TransformersScorer

    return TransformersScorer(
        spec.model,
        dtype=spec.dtype,
        max_model_len=spec.max_model_len,
        eos_token_ids=spec.ends,
    )


def _server(spec: BackendSpec, status: Status | None) -> Scorer:
    from prime_composer.teachers.server import ServerScorer

    assert isinstance(spec.table, TeacherConfig)
    return ServerScorer(
        spec.table,
        str(spec.model),
        section=spec.section,
        heads=cache_root() / "heads",
        eos_token_ids=spec.ends,
        starting=spec.resumes,
        status=status,
    )


SCORERS = {"vllm": _vllm, "transformers": _transformers, "server": _server}
"""The package's own scorers. Each imports its libraries when it is opened."""


def open_scorer(spec: BackendSpec, status: Status | None = None) -> Scorer:
    """Open a teacher's scorer, for any K up to the vocabulary. A server has a K of its own."""
    opens = SCORERS.get(spec.backend)
    with library_errors(spec.section, spec.backend, f"open {spec.model}"):
        scorer = opens(spec, status) if opens is not None else open_outside(spec, status, Scorer)
    if not spec.serves:
        with_errors(scorer.sampler, spec)
    return with_errors(scorer, spec)
