"""Recipes: one TOML file that says what is distilled into what, how, and on which data.

``load_recipe`` reads a file, applies ``KEY=VALUE`` overrides and validates everything before anything heavy is imported.
Settings that only prime-rl understands live in ``[prime_rl]``; the one-machine engine passes them by.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from prime_composer.losses import LossUnion
from prime_composer.problems.config import PROBLEMS, DataConfig, Problem
from prime_composer.recipe.prepare import PrepareConfig


class RecipeError(ValueError):
    """A recipe that cannot run: the message names the file, the key and the remedy."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelConfig(Section):
    """Where a model comes from: ``model`` names an existing one, or ``[*.prepare]`` builds a small one on the spot."""

    model: str | None = None
    """Directory in Hugging Face format, or a hub id where there is a network."""

    prepare: PrepareConfig | None = None
    """Build a small model here, once, and cache it."""

    @model_validator(mode="after")
    def _one_origin(self) -> "ModelConfig":
        origins = [
            name for name in ("model", "prepare", "policy") if getattr(self, name, None) is not None
        ]
        if len(origins) != 1:
            choices = (
                "`model` and the table `prepare`"
                if not hasattr(self, "policy")
                else "`model`, `prepare` and `policy`"
            )
            raise ValueError(
                f"give exactly one of {choices}"
                + (f", not {' and '.join(origins)}" if origins else "")
            )
        return self


S = TypeVar("S", bound=Section)


class StudentConfig(ModelConfig):
    """The model that is trained."""


HINT_TEMPLATES = {
    "reference": "{question}\nA correct solution: {hint}\nSolve it again.",
    "sibling": "{question}\nA correct solution: {hint}\nSolve it again.",
    "feedback": "{question}\nAn earlier attempt: {attempt}\nIts verdict: {hint}\nSolve it again.",
}
"""What the told policy reads in the place of the question, by the kind of hint."""


class PolicyTeacherConfig(Section):
    """Self-distillation: the teacher is the policy itself, and its prompt carries a hint that the student never sees.

    A rollout for which there is no hint (no correct sibling) trains nothing.
    """

    hint: Literal["reference", "sibling", "feedback"] = "reference"
    """``reference``: the data's solution (OPSD, SDFT). ``sibling``: the first correct rollout of the same group other
    than itself (SDPO). ``feedback``: the verifier's verdict on the rollout, with the right answer (SDPO)."""

    template: str | None = None
    """The question as the teacher reads it: ``{question}``, ``{hint}`` and, if wanted, ``{attempt}``, the rollout's own
    text. Unset: a plain English one for each kind of hint."""

    update: Literal["live", "ema", "sync"] = "ema"
    """Whose weights: the current policy's, their moving average, or a copy renewed every ``sync_every`` steps."""

    ema_rate: float = Field(0.05, gt=0, le=1)
    """``ema``: teacher <- (1 - rate) teacher + rate policy after each step (SDPO 0.05; OPSD 0.001)."""

    sync_every: int = Field(10, ge=1)
    """``sync``: steps between two copies."""

    @model_validator(mode="after")
    def _template_reads_the_hint(self) -> "PolicyTeacherConfig":
        for name in ("{question}", "{hint}"):
            if name not in self.text:
                raise ValueError(f"template must contain {name}")
        return self

    @property
    def text(self) -> str:
        return HINT_TEMPLATES[self.hint] if self.template is None else self.template


class TeacherConfig(ModelConfig):
    """The model that scores the student's tokens: a model of its own, or the policy itself, told more."""

    policy: PolicyTeacherConfig | None = None
    """The teacher is the student itself, told more; needs no `model` and no `prepare`."""

    backend: Literal["vllm", "transformers", "server"] | None = None
    """What runs the teacher; unset: the rollout's backend."""

    url: str | None = None
    """Base URL of a running vLLM server; implies backend 'server'."""

    api_key_var: str = "VLLM_API_KEY"
    """Environment variable with the API key of the server at `url`, where it asks for one."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Unset: the trainer's dtype."""

    gpu_memory_utilization: float = Field(0.3, gt=0, le=1)
    """Share of the GPU for the teacher's engine."""

    @model_validator(mode="after")
    def _server_has_url(self) -> "TeacherConfig":
        if self.backend == "server" and self.url is None:
            raise ValueError(
                "backend = 'server' needs `url`, the base URL of a running vLLM server"
            )
        if self.url is not None and self.backend not in (None, "server"):
            raise ValueError(f"`url` goes with backend = 'server', not {self.backend!r}")
        return self


class OneOfSeveralConfig(TeacherConfig):
    """One of several teachers, under ``[teachers.NAME]``."""

    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Its share of the mixture, relative to the others', where neither [data] nor a row names a teacher."""

    @model_validator(mode="after")
    def _is_a_model(self) -> "OneOfSeveralConfig":
        if self.policy is not None:
            raise ValueError(
                "`policy` is self-distillation, which has one teacher: use [teacher.policy]"
            )
        return self


class RolloutConfig(Section):
    """How the student samples."""

    backend: Literal["vllm", "transformers", "server"] = "vllm"
    """What samples the rollouts."""

    url: str | None = None
    """Base URL of a running vLLM server of the student, for backend 'server'."""

    api_key_var: str = "VLLM_API_KEY"
    """Environment variable with the API key of the server at `url`, where it asks for one."""

    weights_dir: Path | None = None
    """For backend 'server': a directory that this process can write and the server can read; new weights travel through
    it. Unset: the system's temporary directory, for a server on this machine."""

    group_size: int = Field(1, ge=1)
    """Rollouts per prompt. RL terms need at least 2."""

    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the losses always read the T = 1 policy."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus; log mu is that of the truncated distribution."""

    max_tokens: int = Field(256, ge=1)
    """Token budget of a completion."""

    max_model_len: int = Field(2048, ge=2)
    """Context of the engines: prompt and completion."""

    student_fraction: float = Field(1.0, ge=0, le=1)
    """GKD's lambda: probability that a sequence is sampled; else the data's solution."""

    gpu_memory_utilization: float = Field(0.3, gt=0, le=1)
    """Share of the GPU for the student's engine."""

    @model_validator(mode="after")
    def _server_has_url(self) -> "RolloutConfig":
        if (self.backend == "server") != (self.url is not None):
            raise ValueError("backend = 'server' and `url` go together")
        return self


class ReplayConfig(Section):
    """Where the preference pairs of the ``[loss.replay]`` channel come from."""

    source: Literal["rollouts", "jsonl"] = "rollouts"
    """``rollouts``: a correct and a wrong rollout of the same group. ``jsonl``: a file with one object per line, with the
    strings "question", "chosen" and "rejected"."""

    path: Path | None = None
    """For ``jsonl``: the file."""

    pairs_per_step: int = Field(16, ge=1)
    """Pairs of a step: at most this many of the rollouts', or exactly this many of the file's, in rotation."""

    @model_validator(mode="after")
    def _path_belongs_to_jsonl(self) -> "ReplayConfig":
        if (self.source == "jsonl") != (self.path is not None):
            raise ValueError('source = "jsonl" and `path` go together')
        return self


class TrainerConfig(Section):
    """The optimiser and its loop."""

    steps: int = Field(ge=1)
    """Optimiser steps."""

    batch_size: int = Field(64, ge=1)
    """Rollouts per step, a multiple of rollout.group_size."""

    micro_batch_tokens: int = Field(16384, ge=1)
    """Padded tokens per forward; gradients do not depend on it."""

    lr: float = Field(2e-6, gt=0)
    """Peak learning rate of AdamW."""

    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's betas."""

    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay."""

    max_grad_norm: float = Field(1.0, gt=0)
    """Clip of the global gradient norm."""

    warmup_steps: int = Field(0, ge=0)
    """Linear warm-up."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up, down to 0."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the student's matrix products and its engine; the weights that train are float32 either way."""

    gradient_checkpointing: bool = False
    """Trade compute for memory in the student's backward."""

    seed: int = Field(0, ge=0)
    """Of prompts order, sampling and everything random."""


class EvalConfig(Section):
    """Measurement on held-out problems: greedy accuracy, and the reverse KL on rollouts sampled at T = 1."""

    every: int = Field(20, ge=0)
    """Steps between evaluations; 0: only before the first and after the last."""

    size: int = Field(200, ge=1)
    """Held-out problems for accuracy, the same ones every time."""

    kl_size: int = Field(64, ge=0)
    """Held-out problems whose rollouts measure the reverse KL; 0: none."""

    kl_support: int | Literal["full", "auto"] = "auto"
    """Ids per position of the measured KL. auto: full up to a vocabulary of 8192, else 64 and a tail."""


class WandbConfig(Section):
    """Weights & Biases, where ``pip install wandb`` was run."""

    project: str
    """Project."""

    name: str | None = None
    """Run name; unset: the run directory's name."""


class LoggingConfig(Section):
    """Metrics always go to ``metrics.jsonl`` in the run directory."""

    tensorboard: bool = True
    """Also write TensorBoard event files."""

    wandb: WandbConfig | None = None
    """Also log to Weights & Biases."""


class CheckpointConfig(Section):
    """Checkpoints: model, optimiser, loss state, step, recipe; written beside the old ones, then renamed."""

    every: int = Field(20, ge=0)
    """Steps between checkpoints; 0: only after the last step."""

    keep: int = Field(2, ge=1)
    """How many of the newest to keep."""


class Recipe(Section):
    """What is distilled into what, how, on which data."""

    student: StudentConfig
    teacher: TeacherConfig | None = None
    teachers: dict[str, OneOfSeveralConfig] = Field(default_factory=dict)
    """Several teachers by name, in the place of ``[teacher]``. Each problem's rollouts are scored by the teachers that its
    row, or its ``[data]`` or ``[environments.NAME]``, names; two or more are mixed in probability space."""

    loss: LossUnion
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    data: DataConfig | None = None
    environments: dict[str, DataConfig] = Field(default_factory=dict)
    """Several kinds of problems by name, in the place of ``[data]``, each a table like it."""

    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    trainer: TrainerConfig
    eval: EvalConfig = Field(default_factory=EvalConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    output_dir: str | None = None
    """Run directory; unset: outputs/<name of the recipe file>."""

    prime_rl: dict[str, Any] = Field(default_factory=dict)
    """Native prime-rl settings, for prime-rl alone."""

    @model_validator(mode="after")
    def _names_fit(self) -> "Recipe":
        if self.teachers and self.teacher is not None:
            raise ValueError("[teacher] and [teachers.*]: keep one of them")
        if self.data is None and not self.environments:
            raise ValueError("data is missing: add a [data] table, or several [environments.*]")
        if self.data is not None and self.environments:
            raise ValueError("[data] and [environments.*]: keep one of them")
        for section, names in (("teachers", self.teachers), ("environments", self.environments)):
            for name in names:
                if re.fullmatch(r"[A-Za-z0-9_-]+", name) is None:
                    raise ValueError(
                        f"[{section}.{name!r}]: a name is made of letters, digits, - and _"
                    )
        for name, data in self.sources.items():
            where = "data" if self.data is not None else f"environments.{name}"
            asked = [data.teacher] if isinstance(data.teacher, str) else list(data.teacher or ())
            if not self.teachers and (asked or data.teacher_key is not None):
                raise ValueError(
                    f"{where}.teacher{'' if asked else '_key'} chooses among [teachers.*], and there are none"
                )
            for teacher in asked:
                if teacher not in self.teachers:
                    raise ValueError(
                        f"{where}.teacher names {teacher!r}; [teachers] has {', '.join(self.teachers)}"
                    )
        for role, model in {"student": self.student, **self.scored_by}.items():
            for name in (model.prepare and model.prepare.environments) or ():
                if name not in self.environments:
                    known = ", ".join(self.environments) or "none"
                    raise ValueError(
                        f"{role}: prepare.environments names {name!r}; [environments] has {known}"
                    )
        return self

    @property
    def sources(self) -> dict[str, DataConfig]:
        """The environments by name; a single ``[data]`` is called "problems"."""
        return self.environments or {PROBLEMS: self.data}

    def data_of(self, problem: Problem) -> DataConfig:
        """How a problem is asked and checked."""
        return self.sources[problem.environment]

    @property
    def scored_by(self) -> dict[str, TeacherConfig]:
        """The teachers that are models of their own, by role: "teacher", or "teachers.NAME"; none for a policy teacher."""
        if self.teacher is not None:
            return {} if self.teacher.policy is not None else {"teacher": self.teacher}
        return {f"teachers.{name}": teacher for name, teacher in self.teachers.items()}

    def mixture(self, problem: Problem) -> dict[str, float]:
        """Who scores this problem's rollouts: shares by role, which add up to 1.

        Raises:
            RecipeError: the data names a teacher that the recipe does not have.
        """
        if problem.teacher is None or not self.teachers:
            return self.mixture_of(problem.environment)
        if problem.teacher not in self.teachers:
            raise RecipeError(
                f"the problem {problem.question[:60]!r} names the teacher {problem.teacher!r}; [teachers] has "
                f"{', '.join(self.teachers)}"
            )
        return {f"teachers.{problem.teacher}": 1.0}

    def mixture_of(self, environment: str) -> dict[str, float]:
        """Who scores the rollouts of an environment, where no row says otherwise."""
        if not self.teachers:
            return dict.fromkeys(self.scored_by, 1.0)
        asked = self.sources[environment].teacher
        if asked is None:
            asked = {name: teacher.weight for name, teacher in self.teachers.items()}
        weights: Mapping[str, float] = {asked: 1.0} if isinstance(asked, str) else asked
        return {
            f"teachers.{name}": weight / sum(weights.values()) for name, weight in weights.items()
        }

    @model_validator(mode="after")
    def _fits_together(self) -> "Recipe":
        if self.loss.channel == "replay":
            raise ValueError(
                f"[loss] type = {self.loss.type!r} reads preference pairs: make it the replay channel of a compose loss, "
                "[loss.replay] weight and [loss.replay.loss]"
            )
        for section, (name, needs) in self.loss.needs_by_section().items():
            self._can_feed(f"[{section}] type = {name!r}", needs)
        if self.rollout.student_fraction < 1 and self.loss.reads_sampler:
            raise ValueError(
                f"[loss] type = {self.loss.type!r} reads the sampler's probabilities, and the data's solutions have none: "
                "with rollout.student_fraction below 1 use a loss on a support, such as generalized_jsd (self_distillation "
                "with max_ratio = 'off'), or sft; in a sum, for every channel"
            )
        if self.trainer.batch_size % self.rollout.group_size:
            raise ValueError(
                f"trainer.batch_size = {self.trainer.batch_size} is not a multiple of "
                f"rollout.group_size = {self.rollout.group_size}"
            )
        if self.rollout.max_tokens >= self.rollout.max_model_len:
            raise ValueError(
                f"rollout.max_tokens = {self.rollout.max_tokens} leaves no room for a prompt in "
                f"rollout.max_model_len = {self.rollout.max_model_len}"
            )
        return self

    def _can_feed(self, who: str, needs: frozenset[str]) -> None:
        """Refuse a loss, or a channel of one, whose inputs this recipe cannot bring."""
        for need in sorted(needs & {"ref_logprobs", "support"}):
            if self.teacher is None and not self.teachers:
                raise ValueError(
                    f"{who} needs {need}: add a [teacher] table, or several [teachers.*]"
                )
        if "advantages" in needs and self.rollout.group_size < 2:
            raise ValueError(
                f"{who} needs advantages, which compare the rollouts of a group: set rollout.group_size to 2 or more"
            )
        if "replay" in needs and self.replay.source == "rollouts" and self.rollout.group_size < 2:
            raise ValueError(
                f"{who} pairs the rollouts of a group: set rollout.group_size to 2 or more"
            )
        policy = None if self.teacher is None else self.teacher.policy
        if policy is not None and policy.hint == "sibling" and self.rollout.group_size < 2:
            raise ValueError(
                "teacher.policy.hint = 'sibling' compares a group: set rollout.group_size to 2 or more"
            )
        if policy is not None and policy.hint == "sibling" and "advantages" in needs:
            raise ValueError(
                f"{who} needs the advantages of whole groups, and teacher.policy.hint = 'sibling' leaves the only correct "
                "rollout of a group out, so that its wrong ones alone would train: set hint to 'reference' or 'feedback'"
            )


def spoken(role: str) -> str:
    """A role as a person says it: "student", "teacher", "teacher NAME"."""
    return role.replace("teachers.", "teacher ")
