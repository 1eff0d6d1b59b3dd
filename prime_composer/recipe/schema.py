"""Define the tables of a recipe, and check that they fit together.

Every key has its meaning as a docstring and its mark for an export to prime-rl (``carried.py``).
Both appear in the generated reference (``reference.py``).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt
from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from prime_composer.losses import AnyLoss, require
from prime_composer.problems.config import PROBLEMS, DataConfig
from prime_composer.recipe.carried import CARRIED, ONLY_REFUSED, not_carried
from prime_composer.recipe.diloco import DilocoConfig
from prime_composer.recipe.environment import (
    AnyEnvironment,
    EnvironmentConfig,
    OpenTable,
    check_environments_of_models,
    check_uses,
    check_without_solutions,
    comparable_metrics,
)
from prime_composer.recipe.model import ModelConfig as ModelConfig
from prime_composer.recipe.model import StudentConfig
from prime_composer.recipe.prepare import LARGEST_SEED, PrepareConfig
from prime_composer.recipe.rollout import ReplayConfig as ReplayConfig
from prime_composer.recipe.rollout import RolloutConfig, check_sizes
from prime_composer.recipe.rules import (
    check_adapter,
    check_ahead,
    check_choice_of_teachers,
    check_hint,
    check_own_prompts,
    check_own_tokenizers,
    check_reference_loss,
    check_reference_model,
    check_sampling_teachers,
    check_tapes,
)
from prime_composer.recipe.teacher import OneOfSeveralConfig, ReferenceConfig, TeacherConfig
from prime_composer.recipe.teacher import PolicyTeacherConfig as PolicyTeacherConfig
from prime_composer.recipe.watchers import (
    CheckpointConfig,
    ChecksConfig,
    EvalConfig,
    LoggingConfig,
    UntilConfig,
    check_end,
    check_until,
)
from prime_composer.tables import LARGEST_BATCH, LONGEST_CONTEXT, MOST_STEPS, Table

EVALUATED_AT_ONCE = 32
"""Answers of an evaluation that are sampled side by side. On a CPU more are hardly faster, and each
takes a key-value cache: 5.9 MB of SmolLM2-135M with a context of 128 tokens in float32."""


class RecipeError(ValueError):
    """A recipe that cannot run: the message names the file, the key and the remedy."""


Beta = Annotated[float, Ge(0), Lt(1)]  # A decay rate of AdamW's averages


class TrainerConfig(Table):
    """The optimizer and its loop."""

    steps: int = Field(ge=1, le=MOST_STEPS, json_schema_extra=CARRIED)
    """Optimizer steps."""

    until: UntilConfig | None = None
    """End earlier."""

    batch_size: int = Field(default=64, ge=1, le=LARGEST_BATCH, json_schema_extra=CARRIED)
    """Rollouts per step, a multiple of rollout.group_size."""

    micro_batch_tokens: int = Field(
        default=16384,
        ge=1,
        le=LONGEST_CONTEXT,
        json_schema_extra=not_carried("prime-rl packs sequences of rollout.max_model_len tokens"),
    )
    """Padded tokens per forward pass. Gradients do not depend on it."""

    lr: float = Field(default=1e-5, gt=0, json_schema_extra=CARRIED)
    """Peak learning rate of AdamW."""

    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.98), json_schema_extra=CARRIED)
    """AdamW's betas."""

    weight_decay: float = Field(default=0.0, ge=0, json_schema_extra=CARRIED)
    """AdamW's decoupled weight decay."""

    max_grad_norm: float = Field(default=1.0, gt=0, json_schema_extra=CARRIED)
    """Clip of the global gradient norm."""

    warmup_steps: int = Field(default=0, ge=0, le=MOST_STEPS, json_schema_extra=CARRIED)
    """Steps of linear warm-up."""

    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", json_schema_extra=CARRIED
    )
    """Learning rate after the warm-up: constant, or down to 0."""

    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        json_schema_extra=not_carried(
            "prime-rl's trainer computes in bfloat16", harmless=("bfloat16",)
        ),
    )
    """Number format of the student's matrix products and its engine. The trained weights are
    float32."""

    gradient_checkpointing: bool = Field(default=False, json_schema_extra=CARRIED)
    """Recompute activations in the student's backward pass: less memory, more compute."""

    seed: int = Field(
        default=0,
        ge=0,
        le=LARGEST_SEED,
        json_schema_extra=not_carried(
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

    reference: ReferenceConfig | None = Field(default=None, json_schema_extra=ONLY_REFUSED)
    """The model against which the teacher is extrapolated (G-OPD), for `sampled_reverse_kl`."""

    loss: AnyLoss = Field(json_schema_extra=CARRIED)
    """The objective: ``type`` and its knobs."""

    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """How the student samples its rollouts."""

    data: DataConfig | None = None
    """The problems, their prompts, and how answers are graded."""

    environments: dict[str, AnyEnvironment] = Field(default_factory=dict)
    """Several kinds of problems by name, instead of ``[data]``. Each is a table like it, or names
    an environment of verifiers by its ``id``."""

    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    """Where preference pairs come from."""

    trainer: TrainerConfig
    """The optimizer and its loop."""

    diloco: DilocoConfig | None = Field(default=None, json_schema_extra=ONLY_REFUSED)
    """Several machines with a slow link between them, each with a whole run of its own."""

    eval: EvalConfig = Field(default_factory=EvalConfig)
    """Evaluation on held-out problems."""

    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    """Where metrics are logged."""

    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Checkpoints."""

    checks: ChecksConfig = Field(default_factory=ChecksConfig)
    """Checks during a run."""

    output_dir: str | None = Field(default=None, json_schema_extra=CARRIED)
    """Run directory. Unset: outputs/<name of the recipe file>."""

    prime_rl: OpenTable = Field(default_factory=dict, json_schema_extra=CARRIED)
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
            for _, prepare in self._generated_models()
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
    def has_teacher(self) -> bool:
        """Whether something scores the student's tokens."""
        return self.teacher is not None or bool(self.teachers)

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

    @model_validator(mode="after")
    def _check_alternatives(self) -> "Recipe":
        if self.teachers and self.teacher is not None:
            raise ValueError("[teacher] and [teachers.*]: keep one of them")
        if self.data is None and not self.environments:
            raise ValueError("data is missing: add a [data] table, or several [environments.*]")
        if self.data is not None and self.environments:
            raise ValueError("[data] and [environments.*]: keep one of them")
        return self

    @model_validator(mode="after")
    def _check_names(self) -> "Recipe":
        for section, names in (("teachers", self.teachers), ("environments", self.environments)):
            for name in names:
                if re.fullmatch(r"[A-Za-z0-9_-]+", name) is None:
                    raise ValueError(
                        f"[{section}.{name!r}]: a name is made of letters, digits, - and _"
                    )
        return self

    @model_validator(mode="after")
    def _check_sources(self) -> "Recipe":
        tables = {self._table_of(name): source for name, source in self.sources.items()}
        check_choice_of_teachers(tables, self.teachers)
        check_uses(tables, "eval" in self.model_fields_set)
        if by_id := self.environments_by_id:
            check_without_solutions(
                next(iter(by_id)),
                trains_on_data=self.rollout.student_fraction < 1
                and not self.rollout.teacher_samples,
                asks_pairs=self.replay.source == "jsonl" and not self.problem_sources,
            )
        check_environments_of_models(
            self._generated_models(), self.environments, self.teaching_environments
        )
        return self

    def _generated_models(self) -> Iterator[tuple[str, PrepareConfig]]:
        for table, model in self.model_tables.items():
            if isinstance(model.prepare, PrepareConfig):
                yield table, model.prepare

    def _table_of(self, source: str) -> str:
        return "data" if self.data is not None else f"environments.{source}"

    @model_validator(mode="after")
    def _check_loss(self) -> "Recipe":
        if self.loss.channel == "replay":
            raise ValueError(
                f"[loss] type = {self.loss.type!r} reads preference pairs: make it the replay "
                "channel of a compose loss, [loss.replay] weight and [loss.replay.loss]"
            )
        require(self.loss, self.provided_inputs, "recipe")
        self._check_balance()
        if self.rollout.student_fraction < 1 and self.loss.reads_sampler:
            others = "teacher's answers" if self.rollout.teacher_samples else "data's solutions"
            raise ValueError(
                f"[loss] type = {self.loss.type!r} reads the sampler's probabilities, and the "
                f"{others} have none: with rollout.student_fraction below 1 use a loss on a "
                "support, such as generalized_jsd (self_distillation with max_ratio = 'off'), or "
                "sft; in a sum, for every channel"
            )
        return self

    def _check_balance(self) -> None:
        """Refuse a balance that is not of the whole loss, or that names what does not train."""
        for section, (_, needs) in self.loss.needs_by_section().items():
            if "balance" in needs and section != "loss":
                raise ValueError(
                    f"[{section}.balance]: a step has one balance for all of its losses: move it "
                    "to [loss.balance]"
                )
        balance = self.loss.balance
        if balance is None:
            return
        trained = [name for name, source in self.sources.items() if source.trains]
        if others := sorted(balance.weights.keys() - set(trained)):
            raise ValueError(
                f"loss.balance.weights names {', '.join(others)}, and the environments that train "
                f"are {', '.join(trained)}: name one of these"
            )
        if len(trained) == 1 and balance.by != "sequence":
            raise ValueError(
                f"loss.balance.by = {balance.by!r} changes nothing with a single environment: add "
                "a second [environments.*], or set by = 'sequence'"
            )

    @property
    def provided_inputs(self) -> set[str]:
        """The inputs that the one-machine engine gives a loss under this recipe."""
        provided = {"token_ids", "segment_ids", "balance", "stops"}
        if self.has_teacher:
            provided |= {"ref_logprobs", "support", "hidden_states"}
        if self.rollout.group_size > 1:
            provided |= {"advantages", "replay"}
        if self.replay.source == "jsonl":
            provided.add("replay")
        return provided

    def _mixes(self, source: DataConfig | EnvironmentConfig) -> bool:
        """Return whether several teachers may score one rollout of an environment."""
        if isinstance(source.teacher, Mapping):
            return len(source.teacher) > 1
        return source.teacher is None and len(self.teachers) > 1

    @model_validator(mode="after")
    def _check_teachers(self) -> "Recipe":
        check_adapter(self.student, self.teacher_tables, self.reference, self.checkpoint.merge)
        if self.rollout.teacher_samples:
            check_sampling_teachers(self.teacher_tables)
        check_own_tokenizers(
            self.teacher_tables,
            self.loss,
            mixed=any(self._mixes(source) for source in self.sources.values()),
            has_reference=self.reference is not None,
            kl_support=self.eval.kl_support,
        )
        reference = {} if self.reference is None else {"reference": self.reference}
        tables = {**self.teacher_tables, **reference}
        by_table = {self._table_of(name): source for name, source in self.sources.items()}
        check_own_prompts(tables, by_table)
        check_tapes(tables)
        check_ahead(self.rollout.ahead, self.rollout.backend, tables)
        check_end(self.checks.collapse, self.loss, has_reference=self.reference is not None)
        if self.reference is None:
            return self
        check_reference_model(self.reference, self.student, self.teacher_tables)
        check_reference_loss(self.loss)
        return self

    @model_validator(mode="after")
    def _check_teacher_and_rollout(self) -> "Recipe":
        if self.policy_teacher is not None:
            check_hint(self.policy_teacher, self.rollout.group_size, self.loss)
        check_sizes(self.rollout, self.trainer.batch_size)
        steps, has_kl = self.trainer.steps, self.asks_teacher and self.policy_teacher is None
        measured = comparable_metrics(self.sources, self.eval, has_kl)
        check_until(self.trainer.until, self.eval, steps, measured)
        return self

    @model_validator(mode="after")
    def _check_islands(self) -> "Recipe":
        if self.diloco is None:
            return self
        taped = [*self.teacher_tables.values(), *filter(None, [self.reference])]
        policy = self.policy_teacher
        self.diloco.refuse(
            moving_teacher=policy is not None and policy.update != "live",
            quantize=self.student.quantize is not None,
            replay=self.loss.reads_pairs,
            until=self.trainer.until is not None,
            ahead=self.rollout.ahead > 0,
            lora=self.student.lora is not None,
            tape=any(one.tape is not None and not one.tape_only for one in taped),
            keep=self.checkpoint.keep == 1,
        )
        self.diloco.check_steps("trainer.steps", self.trainer.steps)
        self.diloco.check_steps("eval.every", self.eval.every)
        self.diloco.check_steps("checkpoint.every", self.checkpoint.every)
        return self

    @property
    def _reader_of_rewards(self) -> str | None:
        """The setting by which a run trains on rewards; None where it does not."""
        policy = self.policy_teacher
        if policy is not None and policy.hint != "reference":
            return f'teacher.policy.hint = "{policy.hint}"'
        if "advantages" in self.loss.needs:
            return f'[loss] type = "{self.loss.type}"'
        if self.loss.reads_pairs and self.replay.source == "rollouts":
            return 'replay.source = "rollouts"'
        return None

    @model_validator(mode="after")
    def _check_right_and_wrong(self) -> "Recipe":
        """Refuse a graded metric where answers have to be right or wrong."""
        graded = {
            name: data for name, data in self.problem_sources.items() if data.graded and data.trains
        }
        policy, reader = self.policy_teacher, None
        if policy is not None and policy.hint != "reference":
            reader = f'teacher.policy.hint = "{policy.hint}"'
        elif self.loss.reads_pairs and self.replay.source == "rollouts":
            reader = 'replay.source = "rollouts"'
        if reader is not None and graded:
            name, data = next(iter(graded.items()))
            raise ValueError(
                f"{reader} needs answers that are right or wrong, and {self._table_of(name)}"
                f'.metric = "{data.metric}" gives any value from 0 to 1: set it to "exact" or a '
                "math metric"
            )
        return self

    @model_validator(mode="after")
    def _check_graded_at_all(self) -> "Recipe":
        """Refuse what reads rewards where answers are not graded."""
        policy, reader = self.policy_teacher, self._reader_of_rewards
        if policy is not None:
            reader = f'teacher.policy.hint = "{policy.hint}"'
        ungraded = [
            name for name, data in self.problem_sources.items() if data.trains and not data.scored
        ]
        if reader is not None and ungraded:
            raise ValueError(
                f"{reader} needs answers or their rewards, and {self._table_of(ungraded[0])}"
                '.metric = "none" grades nothing: choose another metric, such as "contains"'
            )
        return self
