"""Define the tables of a recipe. ``rules.py`` has what of them does not go together.

Every key has its meaning as a docstring and its mark for an export to prime-rl (``carried.py``).
Both appear in the generated reference (``docs/reference.py``).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt
from pydantic import (
    Field,
    field_validator,
)

from prime_composer.losses import AnyLoss
from prime_composer.problems.config import PROBLEMS, DataConfig
from prime_composer.recipe.carried import uncarried
from prime_composer.recipe.diloco import DilocoConfig
from prime_composer.recipe.environment import AnyEnvironment, EnvironmentConfig, OpenTable
from prime_composer.recipe.model import ModelConfig as ModelConfig
from prime_composer.recipe.model import StudentConfig
from prime_composer.recipe.prepare import LARGEST_SEED, PrepareConfig
from prime_composer.recipe.rollout import RolloutConfig
from prime_composer.recipe.teacher import OneOfSeveralConfig, ReferenceConfig, TeacherConfig
from prime_composer.recipe.teacher import PolicyTeacherConfig as PolicyTeacherConfig
from prime_composer.recipe.watchers import (
    CheckpointConfig,
    ChecksConfig,
    EvalConfig,
    LoggingConfig,
    UntilConfig,
)
from prime_composer.tables import LARGEST_BATCH, LONGEST_CONTEXT, MOST_STEPS, Table

EVALUATED_AT_ONCE = 32
"""Answers of an evaluation that are sampled side by side. On a CPU more are hardly faster, and each
takes a key-value cache: 5.9 MB of SmolLM2-135M with a context of 128 tokens in float32."""


RULES: list[Callable[["Recipe"], Iterator[str]]] = []
"""What yields the sentences that refuse a recipe, in their order. ``rules.py`` fills it."""


class RecipeError(ValueError):
    """A recipe that cannot run: the message names the file, the key and the remedy."""


Beta = Annotated[float, Ge(0), Lt(1)]  # A decay rate of AdamW's averages


class TrainerConfig(Table):
    """The optimizer and its loop."""

    steps: int = Field(ge=1, le=MOST_STEPS)
    """Optimizer steps."""

    until: UntilConfig | None = None
    """End earlier."""

    batch_size: int = Field(default=64, ge=1, le=LARGEST_BATCH)
    """Rollouts per step, a multiple of rollout.group_size."""

    micro_batch_tokens: int = Field(
        default=16384,
        ge=1,
        le=LONGEST_CONTEXT,
        json_schema_extra=uncarried("prime-rl packs sequences of rollout.max_model_len tokens"),
    )
    """Padded tokens per forward pass. Gradients do not depend on it."""

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate of AdamW."""

    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """AdamW's betas."""

    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """Clip of the global gradient norm."""

    warmup_steps: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Steps of linear warm-up."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or down to 0."""

    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        json_schema_extra=uncarried(
            "prime-rl's trainer computes in bfloat16", harmless=("bfloat16",)
        ),
    )
    """Number format of the student's matrix products and its engine. The trained weights are
    float32."""

    gradient_checkpointing: bool = False
    """Recompute activations in the student's backward pass: less memory, more compute."""

    seed: int = Field(
        default=0,
        ge=0,
        le=LARGEST_SEED,
        json_schema_extra=uncarried(
            "prime-rl orders prompts by seeds of its own; only its vLLM takes this one"
        ),
    )
    """Seed of the prompts' order, of sampling and of everything else that is random."""


class Recipe(Table):
    """What is distilled into what, how, and on which data."""

    student: StudentConfig
    """The model that is trained."""

    teacher: TeacherConfig | None = None
    """The model that scores the student's tokens."""

    teachers: dict[str, OneOfSeveralConfig] = Field(default_factory=dict)
    """Several teachers by name, instead of ``[teacher]``. The row of a problem, or its ``[data]``
    or ``[environments.NAME]``, names those that score its rollouts. Two or more are mixed in
    probability space."""

    reference: ReferenceConfig | None = None
    """The model against which the teacher is extrapolated (G-OPD), for `sampled_reverse_kl`."""

    loss: AnyLoss
    """The objective: ``type`` and its knobs."""

    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """How the student samples its rollouts."""

    data: DataConfig | None = None
    """The problems, their prompts, and how answers are graded."""

    environments: dict[str, AnyEnvironment] = Field(default_factory=dict)
    """Several kinds of problems by name, instead of ``[data]``. Each is a table like it, or names
    an environment of verifiers by its ``id``."""

    trainer: TrainerConfig
    """The optimizer and its loop."""

    diloco: DilocoConfig | None = None
    """Several machines with a slow link between them, each with a whole run of its own."""

    eval: EvalConfig = Field(default_factory=EvalConfig)
    """Evaluation on held-out problems."""

    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    """Where metrics are logged."""

    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Checkpoints."""

    checks: ChecksConfig = Field(default_factory=ChecksConfig)
    """Checks during a run."""

    output_dir: str | None = None
    """Run directory. Unset: outputs/<name of the recipe file>."""

    prime_rl: OpenTable = Field(default_factory=dict)
    """prime-rl's own settings, merged into the export. The one-machine engine ignores them."""

    @field_validator("data", mode="before")
    @classmethod
    def _check_no_id(cls, data: Any) -> Any:
        if isinstance(data, dict) and "id" in data:
            raise ValueError("an environment by id is a table [environments.NAME], of any NAME")
        return data

    @property
    def sources(self) -> dict[str, DataConfig | EnvironmentConfig]:
        """The environments by name. A single ``[data]`` is called "problems"."""
        return dict(self.environments) if self.data is None else {PROBLEMS: self.data}

    @property
    def problem_sources(self) -> dict[str, DataConfig]:
        """The environments whose problems this package loads."""
        return {
            name: source for name, source in self.sources.items() if isinstance(source, DataConfig)
        }

    @property
    def environments_by_id(self) -> dict[str, EnvironmentConfig]:
        return {
            name: source
            for name, source in self.environments.items()
            if isinstance(source, EnvironmentConfig)
        }

    @property
    def teaching_environments(self) -> set[str]:
        """The environments by id from whose solved tasks models under ``[*.prepare]`` learn."""
        return {
            name
            for _, prepare in self.generated_models()
            for name, table in self.environments_by_id.items()
            if table.trains and name in (prepare.environments or self.environments)
        }

    @property
    def teacher_tables(self) -> dict[str, TeacherConfig]:
        tables: dict[str, TeacherConfig] = {} if self.teacher is None else {"teacher": self.teacher}
        return tables | {f"teachers.{name}": teacher for name, teacher in self.teachers.items()}

    @property
    def model_tables(self) -> dict[str, ModelConfig]:
        """The student and the teachers by table: "student", "teacher", or "teachers.NAME"."""
        return {"student": self.student, **self.teacher_tables}

    @property
    def policy_teacher(self) -> PolicyTeacherConfig | None:
        """``[teacher.policy]``, where the policy is its own teacher."""
        return None if self.teacher is None else self.teacher.policy

    @property
    def side_by_side(self) -> int:
        """How many sequences a run samples side by side: those of a step, and of an evaluation
        ``EVALUATED_AT_ONCE``.
        """
        return max(self.trainer.batch_size, min(self.eval.largest, EVALUATED_AT_ONCE))

    @property
    def asks_teacher(self) -> bool:
        """Whether a run asks its teacher: for scores, or for answers to train on."""
        return self.loss.compares_with_teacher or self.rollout.teacher_samples

    @property
    def source_tables(self) -> dict[str, DataConfig | EnvironmentConfig]:
        """The environments by table: "data", or "environments.NAME"."""
        if self.data is not None:
            return {"data": self.data}
        return {f"environments.{name}": source for name, source in self.environments.items()}

    @property
    def scorer_tables(self) -> dict[str, TeacherConfig]:
        """The teachers and the reference, by table."""
        reference = {} if self.reference is None else {"reference": self.reference}
        return {**self.teacher_tables, **reference}

    @property
    def kept_checkpoints(self) -> int:
        """How many of the newest checkpoints a run keeps."""
        return max(self.checkpoint.keep, 1 if self.diloco is None else 2)

    def generated_models(self) -> Iterator[tuple[str, PrepareConfig]]:
        for table, model in self.model_tables.items():
            if isinstance(model.prepare, PrepareConfig):
                yield table, model.prepare

    @property
    def provided_inputs(self) -> set[str]:
        """The inputs that the one-machine engine gives a loss under this recipe."""
        provided = {"token_ids", "balance", "stops"}
        if self.teacher_tables:
            provided |= {"ref_logprobs", "support", "hidden_states"}
        if self.rollout.group_size > 1:
            provided.add("advantages")
        return provided

    def mixes(self, source: DataConfig | EnvironmentConfig) -> bool:
        """Return whether several teachers may score one rollout of an environment."""
        if isinstance(source.teacher, Mapping):
            return len(source.teacher) > 1
        return source.teacher is None and len(self.teachers) > 1

    def refusals(self) -> Iterator[str]:
        for rule in RULES:
            yield from rule(self)


Rule = Callable[[Recipe], Iterator[str]]
