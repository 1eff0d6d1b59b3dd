"""Define ``[rollout]``: what samples the student's rollouts, and how."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from prime_composer.recipe.backends import BackendName, Served, backend_of
from prime_composer.recipe.carried import uncarried
from prime_composer.recipe.environment import OpenTable
from prime_composer.tables import LARGEST_BATCH, LONGEST_CONTEXT

USUAL_CONTEXT = 2048  # Context of a recipe that sets none and needs no more


MOST_AHEAD = 8  # Largest ``rollout.ahead``: what prime-rl allows by default

NO_ENDS = uncarried("prime-rl's renderer ends an answer where its chat template does")

End = Annotated[int, Field(ge=0)] | Annotated[str, Field(min_length=1)]
"""Type of a token that ends an answer: its id, or its text."""


class RolloutConfig(Served):
    """How the student samples its rollouts."""

    backend: BackendName = Field(
        default="vllm",
        json_schema_extra=uncarried("prime-rl samples with vLLM", harmless=("vllm", "server")),
    )
    """What samples the rollouts: `vllm`, `transformers`, `server`, or one of your own,
    `my_package.my_module:MySampler`."""

    weights_dir: Path | None = Field(
        default=None,
        json_schema_extra=uncarried("prime-rl brings new weights to the sampler its own way"),
    )
    """For backend 'server': a directory through which it gets new weights. Unset: the system's
    temporary directory."""

    group_size: int = Field(default=1, ge=1, le=LARGEST_BATCH)
    """Rollouts per prompt. RL terms need at least 2."""

    temperature: float = Field(default=1.0, ge=0.01, le=100)
    """Sampling temperature, also of importance ratios. Student and teacher are compared at 1."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling. log mu is that of the truncated distribution."""

    max_tokens: int = Field(default=256, ge=1, le=LONGEST_CONTEXT)
    """Token budget of a completion."""

    stop: tuple[End, ...] | None = Field(default=None, min_length=1, json_schema_extra=NO_ENDS)
    """Tokens that end an answer, as ids or texts of one token each. Unset: the ends of the
    student's files and chat template, and those of teachers with its tokens."""

    ahead: int = Field(default=0, ge=0, le=MOST_AHEAD)
    """Steps that a batch is sampled and scored ahead of the one that trains on it. For a student's
    server."""

    max_model_len: int | None = Field(default=None, ge=2, le=LONGEST_CONTEXT)
    """Context of the engines in tokens: prompt and completion. Unset: 2048, or more if the longest
    prompt and its completion need it, within the models' windows."""

    renderer: OpenTable = Field(default_factory=dict)
    """For environments by id: how messages and tool calls become tokens, as in the library
    ``renderers``, for example ``{ name = "qwen3" }``. Unset: by the tokenizer's name, which reads
    no tool calls of a model in a directory."""

    student_fraction: float = Field(default=1.0, ge=0, le=1)
    """GKD's lambda: probability that the student samples a sequence. `other_source` has the
    others."""

    other_source: Literal["data", "teacher"] = "data"
    """Where the other sequences come from: the data's solutions, or answers that the teacher
    samples. Of several teachers it is the problem's, and of a mixture one that is drawn by
    weight."""

    gpu_memory_utilization: float = Field(default=0.3, gt=0, le=1)
    """Share of the GPU's memory for the student's engine."""

    def refusals(self) -> Iterator[str]:
        serves = backend_of(self.backend).serves
        if serves != (self.url is not None):
            name = self.backend if serves else "server"
            yield f"backend = {name!r} and `url` go together"

    def context(self, needed: int = 0, windows: Iterable[int | None] = ()) -> int:
        """Return ``max_model_len``, or what it is where it is unset."""
        if self.max_model_len is not None:
            return self.max_model_len
        return min([max(USUAL_CONTEXT, needed), *(one for one in windows if one is not None)])

    def within(self, context: int) -> "RolloutConfig":
        return self.model_copy(update={"max_model_len": context})

    @property
    def teacher_samples(self) -> bool:
        """Whether the teacher samples the sequences that the student does not."""
        return self.other_source == "teacher"

    @property
    def trains_on_data(self) -> bool:
        """Whether some sequences are the data's own answers."""
        return self.student_fraction < 1 and not self.teacher_samples
