"""Define the tables of a recipe, and check that they fit together.

Every key has its meaning as a docstring and its mark for an export to prime-rl (``carried.py``).
Both appear in the generated reference (``reference.py``).
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt
from pydantic import (
    Field,
    PositiveInt,
    field_validator,
    model_validator,
)

from prime_composer.losses import AnyLoss, require
from prime_composer.problems.config import PROBLEMS, DataConfig
from prime_composer.recipe.carried import CARRIED, not_carried, only_refused, prime_rl
from prime_composer.recipe.environment import AnyEnvironment, EnvironmentConfig, OpenTable
from prime_composer.recipe.prepare import LARGEST_SEED, AnyPrepare, PrepareConfig
from prime_composer.recipe.urls import Url
from prime_composer.tables import Table

REMEDIES = {
    **dict.fromkeys(
        ("ref_logprobs", "support", "hidden_states", "credit"),
        "Remedy: add a [teacher] table, or several [teachers.*].",
    ),
    "by_teacher": "It tells the teacher's sequences from the student's: set rollout.other_source = "
    "'teacher', and rollout.student_fraction below 1.",
    "advantages": "It compares the rollouts of a group: set rollout.group_size to 2 or more.",
    "contrast_logprobs": "Its wrong hints are wrong rollouts of the same group: add "
    '[teacher.policy] with hint = "reference", and set rollout.group_size to 2 or more.',
    "replay": "It pairs the rollouts of a group: set rollout.group_size to 2 or more, "
    'or name a file of pairs with [replay] source = "jsonl" and path.',
}
"""What to change in a recipe that does not provide an input of its loss."""


LARGEST_BATCH = 1_000_000
"""Upper bound of what one step asks for. Far beyond any machine, and still no nonsense."""

LONGEST_CONTEXT = 100_000_000
"""Upper bound of lengths in tokens."""

MOST_STEPS = 100_000_000
"""Upper bound of steps and intervals."""


WAIT = prime_rl(not_carried("prime-rl has its own rules for servers that are away"))
TIMEOUT = prime_rl(not_carried("prime-rl has its own time limits for answers"))


class RecipeError(ValueError):
    """A recipe that cannot run: the message names the file, the key and the remedy."""


class ModelConfig(Table):
    """Where a model comes from: ``model`` names one, or ``[*.prepare]`` builds or rounds one."""

    model: str | None = Field(default=None, json_schema_extra=CARRIED)
    """Directory in Hugging Face format, or a hub id."""

    prepare: AnyPrepare | None = Field(default=None, json_schema_extra=CARRIED)
    """Build a small model on this machine, or round an existing one, once, and cache it."""

    @model_validator(mode="after")
    def _check_origin(self) -> "ModelConfig":
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


class StudentConfig(ModelConfig):
    """The model that is trained."""


HINT_TEMPLATES = {
    "reference": "{question}\nA correct solution: {hint}\nSolve it again.",
    "sibling": "{question}\nA correct solution: {hint}\nSolve it again.",
    "feedback": "{question}\nAn earlier attempt: {attempt}\nIts verdict: {hint}\nSolve it again.",
}
"""The hint-conditioned teacher's question, by the kind of hint."""


class PolicyTeacherConfig(Table):
    """Self-distillation: the teacher is the policy, and its prompt contains a hint.

    A rollout without a hint (no correct sibling) is not trained on.
    """

    hint: Literal["reference", "sibling", "feedback"] = Field(
        default="reference", json_schema_extra=CARRIED
    )
    """``reference``: the data's solution (OPSD, SDFT). ``sibling``: the first other correct rollout
    of the same group (SDPO). ``feedback``: the verifier's verdict on the rollout, with the right
    answer (SDPO)."""

    template: str | None = Field(default=None, json_schema_extra=CARRIED)
    """The question in the teacher's prompt. It contains ``{question}``, ``{hint}`` and optionally
    ``{attempt}``, the rollout's own text. Unset: a plain English one for each kind of hint."""

    wrong_hints: int = Field(
        default=4, ge=1, le=LARGEST_BATCH, json_schema_extra=prime_rl(only_refused())
    )
    """For a loss that contrasts hints (`rlcsd`): at most this many wrong rollouts of the same group
    are wrong hints for a rollout, each scored by its own."""

    update: Literal["live", "ema", "sync"] = Field(default="ema", json_schema_extra=CARRIED)
    """The teacher's weights: the current policy's, their moving average, or a copy renewed every
    ``sync_every`` steps."""

    ema_rate: float = Field(default=0.05, gt=0, le=1, json_schema_extra=prime_rl(only_refused()))
    """For ``ema``: teacher <- (1 - rate) teacher + rate policy after each step (SDPO 0.05, OPSD
    0.001)."""

    sync_every: int = Field(
        default=10, ge=1, le=MOST_STEPS, json_schema_extra=prime_rl(only_refused())
    )
    """For ``sync``: steps between two copies."""

    @model_validator(mode="after")
    def _check_template(self) -> "PolicyTeacherConfig":
        for name in ("{question}", "{hint}"):
            if name not in self.text:
                raise ValueError(f"template must contain {name}")
        return self

    @property
    def text(self) -> str:
        """The template, or the plain one of its kind of hint."""
        return HINT_TEMPLATES[self.hint] if self.template is None else self.template


class TeacherConfig(ModelConfig):
    """The model that scores the student's tokens: a model of its own, or the policy with a hint."""

    policy: PolicyTeacherConfig | None = None
    """Self-distillation: the teacher is the student itself, given a hint. Goes without `model` and
    `prepare`."""

    backend: Literal["vllm", "transformers", "server"] | None = Field(
        default=None,
        json_schema_extra=prime_rl(
            not_carried("prime-rl asks a server, which is yours to start", harmless=("server",))
        ),
    )
    """The engine that runs the teacher. Unset: the rollout's backend."""

    url: Url | None = Field(default=None, repr=False, json_schema_extra=CARRIED)
    """Base URL of a running vLLM server. Implies backend 'server'. A server in bfloat16 computes
    bfloat16 logits, so its log-probs are rounded to about 3 significant digits. For float32 logits,
    start it with `--hf-overrides '{"head_dtype": "float32"}'`."""

    api_key_var: str = Field(default="VLLM_API_KEY", json_schema_extra=CARRIED)
    """Environment variable with the API key of the server at `url`, if it needs one."""

    head: Path | None = Field(
        default=None,
        json_schema_extra=prime_rl(not_carried("inside prime-rl the server gives its own head")),
    )
    """Directory of a checkpoint whose output head is read instead of that of the server at `url`,
    for a loss with `k = "full"`. It has to be the same: a quantized or adapted model has another
    one."""

    wait: float = Field(default=600.0, ge=0, allow_inf_nan=False, json_schema_extra=WAIT)
    """Seconds to wait for the server at `url` while it is away or overloaded, for example
    restarted. Then the run ends with a checkpoint. 0: it ends at once. A server that never answered
    is waited for during 2 seconds, and as long as this where the recipe sets it or with
    `--resume`."""

    timeout: float = Field(default=600.0, gt=0, allow_inf_nan=False, json_schema_extra=TIMEOUT)
    """Seconds that one answer of the server at `url` may take. Raise it for a slow server."""

    asked_by: Literal["orchestrator", "trainer"] | None = Field(
        default=None, json_schema_extra=CARRIED
    )
    """Inside prime-rl: which of its processes asks the teacher. The trainer's answers need no room
    in prime-rl's samples. Unset: the trainer with k = "full", otherwise the orchestrator. One for
    all teachers. One machine has no such processes."""

    head_on: Literal["device", "cpu"] | None = Field(default=None, json_schema_extra=CARRIED)
    """Inside prime-rl, with k = "full": where each trainer rank keeps the teacher's output head.
    "cpu" saves V x d numbers of its device's memory, and copies them to it chunk by chunk, at least
    twice per sequence. Unset: its device. One for all teachers."""

    on_overflow: Literal["error", "score_head", "drop"] = Field(
        default="error",
        json_schema_extra=prime_rl(
            not_carried("prime-rl ends its run on a sequence that its teacher refuses", ("error",))
        ),
    )
    """What to do with a rollout that is longer than the teacher's window, with its prompt or hint:
    end the run; `score_head`: train on what fits and mask the rest; `drop`: leave the rollout out.
    `rollout/teacher_cut` and `rollout/teacher_dropped` are their shares of a step."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        json_schema_extra=prime_rl(not_carried("the teacher's server is yours to start")),
    )
    """Number format of the teacher's weights and logits. Unset: the trainer's dtype."""

    gpu_memory_utilization: float = Field(
        default=0.3,
        gt=0,
        le=1,
        json_schema_extra=prime_rl(not_carried("the teacher's server is yours to start")),
    )
    """Share of the GPU's memory for the teacher's engine."""

    @model_validator(mode="after")
    def _check_url(self) -> "TeacherConfig":
        if self.backend == "server" and self.url is None:
            raise ValueError(
                "backend = 'server' needs `url`, the base URL of a running vLLM server"
            )
        if self.url is not None and self.backend not in (None, "server"):
            raise ValueError(f"`url` goes with backend = 'server', not {self.backend!r}")
        if self.head is not None and self.url is None:
            raise ValueError("`head` is for a teacher at a `url`; another one has its own head")
        return self


class OneOfSeveralConfig(TeacherConfig):
    """One of several teachers, under ``[teachers.NAME]``."""

    weight: float = Field(default=1.0, gt=0, json_schema_extra=CARRIED)
    """Weight in the mixture, relative to the others', where neither [data] nor a row names a
    teacher."""

    @model_validator(mode="after")
    def _check_no_policy(self) -> "OneOfSeveralConfig":
        if self.policy is not None:
            raise ValueError(
                "`policy` is self-distillation, which has one teacher: use [teacher.policy]"
            )
        return self


class ReferenceConfig(TeacherConfig):
    """The model against which the teacher is extrapolated (G-OPD).

    The teacher's log-prob of a sampled token becomes lambda log q + (1 - lambda) log r.
    """

    start: bool = Field(default=False, json_schema_extra=prime_rl(only_refused()))
    """The reference is the student as it is before training, instead of `model` or `prepare`."""

    reward_scale: float = Field(default=1.25, gt=0, json_schema_extra=prime_rl(only_refused()))
    """lambda. Above 1, the student goes beyond the teacher, away from the reference (ExOPD)."""

    @model_validator(mode="after")
    def _check_origin(self) -> "ReferenceConfig":
        origins = [name for name in ("model", "prepare", "start") if getattr(self, name)]
        if len(origins) != 1:
            raise ValueError(
                "give exactly one of `model`, the table `prepare` and `start = true`"
                + (f", not {' and '.join(origins)}" if origins else "")
            )
        if self.policy is not None:
            raise ValueError("`policy` is a teacher of its own: use [teacher.policy]")
        if self.start and self.url is not None:
            raise ValueError(
                "`start = true` opens the student's weights on this machine, and `url` is a "
                "server: name the model that it serves in `model`, or leave `url` out"
            )
        if self.on_overflow != "error":
            raise ValueError(
                f"on_overflow = {self.on_overflow!r} is the teacher's key: a token is either "
                "scored by both or left out. Leave it out here"
            )
        if self.reward_scale == 1:
            raise ValueError(
                "reward_scale = 1 is the teacher itself, without the reference: leave [reference] "
                "out, or set another scale"
            )
        return self

    def resolved(self, student: StudentConfig) -> "ReferenceConfig":
        """Return the table with the student's origin in the place of ``start``."""
        if not self.start:
            return self
        origin = {"model": student.model, "prepare": student.prepare}
        return self.model_copy(update={**origin, "start": False})

    def is_model_of(self, teacher: TeacherConfig) -> bool:
        """Whether a teacher is the same model, at the same URL where both have one."""
        if (self.model, self.prepare) != (teacher.model, teacher.prepare):
            return False
        return None in (self.url, teacher.url) or self.url == teacher.url


class RolloutConfig(Table):
    """How the student samples its rollouts."""

    backend: Literal["vllm", "transformers", "server"] = Field(
        default="vllm",
        json_schema_extra=prime_rl(
            not_carried("prime-rl samples with vLLM", harmless=("vllm", "server"))
        ),
    )
    """The engine that samples the rollouts."""

    url: Url | None = Field(default=None, repr=False, json_schema_extra=CARRIED)
    """For backend 'server': base URL of a running vLLM server of the student."""

    api_key_var: str = Field(default="VLLM_API_KEY", json_schema_extra=CARRIED)
    """Environment variable with the API key of the server at `url`, if it needs one."""

    wait: float = Field(default=600.0, ge=0, allow_inf_nan=False, json_schema_extra=WAIT)
    """Seconds to wait for the server at `url` while it is away or overloaded, for example
    restarted. Then the run ends with a checkpoint. 0: it ends at once. A server that never answered
    is waited for during 2 seconds, and as long as this where the recipe sets it or with
    `--resume`."""

    timeout: float = Field(default=600.0, gt=0, allow_inf_nan=False, json_schema_extra=TIMEOUT)
    """Seconds that one answer of the server at `url` may take, in addition to the time for its
    tokens at 10 per second and completion, and 200 per second in all. Raise it for a slow
    server."""

    weights_dir: Path | None = Field(
        default=None,
        json_schema_extra=prime_rl(
            not_carried("prime-rl brings new weights to the sampler its own way")
        ),
    )
    """For backend 'server': a directory that this process writes new weights to and the server
    reads them from. Unset: the system's temporary directory, for a server on this machine."""

    group_size: int = Field(default=1, ge=1, le=LARGEST_BATCH, json_schema_extra=CARRIED)
    """Rollouts per prompt. RL terms need at least 2."""

    temperature: float = Field(default=1.0, ge=0.01, le=100, json_schema_extra=CARRIED)
    """Sampling temperature. The losses always compare the policies at T = 1."""

    top_p: float = Field(default=1.0, gt=0, le=1, json_schema_extra=CARRIED)
    """Nucleus sampling. log mu is that of the truncated distribution."""

    max_tokens: int = Field(default=256, ge=1, le=LONGEST_CONTEXT, json_schema_extra=CARRIED)
    """Token budget of a completion."""

    max_model_len: int = Field(default=2048, ge=2, le=LONGEST_CONTEXT, json_schema_extra=CARRIED)
    """Context of the engines in tokens: prompt and completion."""

    renderer: OpenTable = Field(default_factory=dict, json_schema_extra=CARRIED)
    """For environments by id: how messages and tool calls become tokens, as the library
    ``renderers`` has it, for example ``{ name = "qwen3" }``. Unset: by the tokenizer's name, which
    reads no tool calls of a model in a directory, and prime-rl refuses such a model."""

    student_fraction: float = Field(default=1.0, ge=0, le=1, json_schema_extra=CARRIED)
    """GKD's lambda: probability that the student samples a sequence. `other_source` has the
    others."""

    other_source: Literal["data", "teacher"] = Field(
        default="data", json_schema_extra=prime_rl(only_refused())
    )
    """Where the other sequences come from: the data's solutions, or answers that the teacher
    samples. Of several teachers it is the problem's, and of a mixture one that is drawn by
    weight."""

    gpu_memory_utilization: float = Field(default=0.3, gt=0, le=1, json_schema_extra=CARRIED)
    """Share of the GPU's memory for the student's engine."""

    @model_validator(mode="after")
    def _check_url(self) -> "RolloutConfig":
        if (self.backend == "server") != (self.url is not None):
            raise ValueError("backend = 'server' and `url` go together")
        return self

    @model_validator(mode="after")
    def _check_other_source(self) -> "RolloutConfig":
        if self.teacher_samples and self.student_fraction == 1:
            raise ValueError(
                "other_source = 'teacher' with student_fraction = 1: the student samples every "
                "sequence; set student_fraction below 1, or leave other_source out"
            )
        return self

    @property
    def teacher_samples(self) -> bool:
        """Whether the teacher samples the sequences that the student does not."""
        return self.other_source == "teacher"


class ReplayConfig(Table):
    """Where the preference pairs of the ``[loss.replay]`` channel come from."""

    source: Literal["rollouts", "jsonl"] = Field(
        default="rollouts", json_schema_extra=prime_rl(only_refused())
    )
    """``rollouts``: a correct and a wrong rollout of the same group. ``jsonl``: a file with one
    object per line, with the strings "question", "chosen" and "rejected"."""

    path: Path | None = Field(default=None, json_schema_extra=prime_rl(only_refused()))
    """For ``jsonl``: the file."""

    pairs_per_step: int = Field(
        default=16, ge=1, le=LARGEST_BATCH, json_schema_extra=prime_rl(only_refused())
    )
    """Pairs per step: at most this many of the rollouts', or exactly this many of the file's, in
    rotation."""

    @model_validator(mode="after")
    def _check_path(self) -> "ReplayConfig":
        if (self.source == "jsonl") != (self.path is not None):
            raise ValueError('source = "jsonl" and `path` go together')
        return self


Beta = Annotated[float, Ge(0), Lt(1)]
"""A decay rate of AdamW's averages."""


class TrainerConfig(Table):
    """The optimizer and its loop."""

    steps: int = Field(ge=1, le=MOST_STEPS, json_schema_extra=CARRIED)
    """Optimizer steps."""

    batch_size: int = Field(default=64, ge=1, le=LARGEST_BATCH, json_schema_extra=CARRIED)
    """Rollouts per step, a multiple of rollout.group_size."""

    micro_batch_tokens: int = Field(
        default=16384,
        ge=1,
        le=LONGEST_CONTEXT,
        json_schema_extra=prime_rl(
            not_carried("prime-rl packs sequences of rollout.max_model_len tokens")
        ),
    )
    """Padded tokens per forward pass. Gradients do not depend on it."""

    lr: float = Field(default=2e-6, gt=0, json_schema_extra=CARRIED)
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
        json_schema_extra=prime_rl(
            not_carried("prime-rl's trainer computes in bfloat16", harmless=("bfloat16",))
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
        json_schema_extra=prime_rl(
            not_carried("prime-rl orders prompts by seeds of its own; only its vLLM takes this one")
        ),
    )
    """Seed of the prompts' order, of sampling and of everything else that is random."""


class EvalConfig(Table):
    """Evaluation on held-out problems: greedy answers, and reverse KL on rollouts at T = 1."""

    every: int = Field(default=20, ge=0, le=MOST_STEPS, json_schema_extra=CARRIED)
    """Steps between evaluations. 0: only before the first step and after the last."""

    size: int = Field(default=200, ge=1, le=LARGEST_BATCH, json_schema_extra=CARRIED)
    """Held-out problems for accuracy, the same ones every time."""

    kl_size: int = Field(
        default=64,
        ge=0,
        le=LARGEST_BATCH,
        json_schema_extra=prime_rl(not_carried("prime-rl evaluates accuracy alone", harmless=(0,))),
    )
    """Held-out problems whose rollouts measure the reverse KL. 0: none."""

    kl_support: PositiveInt | Literal["full", "auto"] = Field(
        default="auto", json_schema_extra=prime_rl(not_carried("prime-rl evaluates accuracy alone"))
    )
    """Token ids per position of the measured KL. auto: all of them up to a vocabulary of 8192, else
    64 and a tail bucket. A served teacher without the scoring plugin is asked for the loss's k, or
    20, and a tail bucket; `eval/kl_ids` and the report say how many."""

    temperatures: tuple[Annotated[float, Ge(0.01), Le(100)], ...] = Field(
        default=(),
        json_schema_extra=prime_rl(
            not_carried("prime-rl evaluates at one temperature", harmless=((),))
        ),
    )
    """Also sample ``samples`` answers to each problem at these temperatures: the metric's score as
    ``eval/METRIC/T=0.5``, and Self-BLEU as ``eval/self_bleu/T=0.5``. Needs sacrebleu."""

    samples: int = Field(
        default=4,
        ge=2,
        le=LARGEST_BATCH,
        json_schema_extra=prime_rl(not_carried("prime-rl evaluates at one temperature")),
    )
    """Answers per problem and temperature, where there are ``temperatures``."""

    @model_validator(mode="after")
    def _check_temperatures(self) -> "EvalConfig":
        shown = [f"{temperature:g}" for temperature in self.temperatures]
        if len(set(shown)) < len(shown):
            raise ValueError(
                f"temperatures = [{', '.join(shown)}] has one twice, up to six digits: leave it out"
            )
        return self


class WandbConfig(Table):
    """Weights & Biases. Needs ``pip install wandb``."""

    project: str = Field(json_schema_extra=CARRIED)
    """Project."""

    name: str | None = Field(default=None, json_schema_extra=CARRIED)
    """Run name. Unset: the run directory's name."""


class LoggingConfig(Table):
    """Where metrics are logged, beside ``metrics.jsonl`` in the run directory."""

    tensorboard: bool = Field(
        default=True,
        json_schema_extra=prime_rl(
            not_carried("prime-rl writes no TensorBoard files", harmless=(False,))
        ),
    )
    """Also write TensorBoard event files."""

    wandb: WandbConfig | None = None
    """Also log to Weights & Biases."""


class CheckpointConfig(Table):
    """Checkpoints: model, optimizer, loss state, step. A checkpoint is renamed when complete."""

    every: int = Field(default=20, ge=0, le=MOST_STEPS, json_schema_extra=CARRIED)
    """Steps between checkpoints. 0: only after the last step."""

    keep: int = Field(default=2, ge=1, le=LARGEST_BATCH, json_schema_extra=CARRIED)
    """Number of the newest checkpoints to keep."""


class ChecksConfig(Table):
    """Checks during a run that teachers and sampler still compute what they did at its start."""

    every: int = Field(
        default=10,
        ge=0,
        le=MOST_STEPS,
        json_schema_extra=prime_rl(
            not_carried(
                "inside prime-rl a teacher is asked again every 256 requests; of the sampler "
                "prime-rl's trainer has a metric, mismatch_kl"
            )
        ),
    )
    """Steps between two questions whose answers are known. Each teacher scores the probe of the
    run's start again. With another temperature than 1, or with top_p, the sampler is compared with
    the student's weights, which otherwise happens in every step. Both are also asked before a
    checkpoint, after the last step, and when a signal ends the run. Whoever lost its
    connection is asked in that step. 0: only after a lost connection."""

    tolerance: float | None = Field(
        default=None,
        gt=0,
        json_schema_extra=prime_rl(
            not_carried("inside prime-rl it is 0.5 nat at nine of ten positions", harmless=(None,))
        ),
    )
    """Largest difference in nats between a teacher's log-probs of the probe at the run's start and
    later. Raise it where the same model is served from another machine or build. Unset: 1e-4 in
    float32, 0.05 in float16, 0.5 in bfloat16."""

    mismatch: float | None = Field(
        default=None,
        gt=0,
        json_schema_extra=prime_rl(
            not_carried("prime-rl's trainer has a metric of its own, mismatch_kl", harmless=(None,))
        ),
    )
    """Largest KL between sampler and trainer in nats per token, where a token's log-ratio counts as
    2 nats at most. Unset: 1e-6 if trainer.dtype is float32, 0.05 if it is bfloat16."""


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

    reference: ReferenceConfig | None = Field(
        default=None, json_schema_extra=prime_rl(only_refused())
    )
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
        """The environments of verifiers."""
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
    def has_teacher(self) -> bool:
        """Whether something scores the student's tokens."""
        return self.teacher is not None or bool(self.teachers)

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
    def _check_teachers_of_data(self) -> "Recipe":
        for name, data in self.sources.items():
            table = "data" if self.data is not None else f"environments.{name}"
            named = [data.teacher] if isinstance(data.teacher, str) else list(data.teacher or ())
            by_row = isinstance(data, DataConfig) and data.teacher_key is not None
            if not self.teachers and (named or by_row):
                key = "teacher" if named else "teacher_key"
                raise ValueError(f"{table}.{key} chooses among [teachers.*], and there are none")
            for teacher in named:
                if teacher not in self.teachers:
                    raise ValueError(
                        f"{table}.teacher names {teacher!r}; [teachers] has "
                        f"{', '.join(self.teachers)}"
                    )
        return self

    @model_validator(mode="after")
    def _check_environments_of_models(self) -> "Recipe":
        known = ", ".join(self.environments) or "none"
        for table, prepare in self._generated_models():
            for name in prepare.environments or ():
                if name not in self.environments:
                    raise ValueError(
                        f"{table}: prepare.environments names {name!r}; [environments] has {known}"
                    )
        return self

    @model_validator(mode="after")
    def _check_environments_by_id(self) -> "Recipe":
        by_id = self.environments_by_id
        if not by_id:
            return self
        if not self.problem_sources and not any(table.trains for table in by_id.values()):
            raise ValueError(
                "[environments]: all have use = 'eval', and none is left to train on; set it to "
                "'both' or 'train' in one"
            )
        nothing = not self.problem_sources and not any(table.evaluates for table in by_id.values())
        if nothing and "eval" in self.model_fields_set:
            raise ValueError(
                "[eval]: all [environments] have use = 'train', and none is left to evaluate; set "
                "it to 'both' in one, or leave [eval] out"
            )
        table = f"environments.{next(iter(by_id))}"
        if self.rollout.student_fraction < 1 and not self.rollout.teacher_samples:
            raise ValueError(
                "rollout.student_fraction below 1 trains on the data's solutions, and "
                f"[{table}] has an id, and no solutions: set rollout.other_source = 'teacher', or "
                "student_fraction = 1"
            )
        if self.replay.source == "jsonl" and not self.problem_sources:
            raise ValueError(
                "[replay] source = 'jsonl': its questions are asked with the prompt of a [data] "
                f"table, and [{table}] asks its own: use source = 'rollouts'"
            )
        for model, prepare in self._generated_models():
            for name in prepare.environments or ():
                if name in by_id and not by_id[name].trains:
                    raise ValueError(
                        f"{model}: prepare.environments names {name!r}, which has use = 'eval', "
                        "and models learn from what is trained on: leave it out"
                    )
            if prepare.hint_template is not None and self.teaching_environments:
                raise ValueError(
                    f"{model}: prepare.hint_template writes a hint into a problem's question, and "
                    f"[{table}] has an id, and tasks of its own: name others in "
                    "prepare.environments"
                )
        return self

    def _generated_models(self) -> Iterator[tuple[str, PrepareConfig]]:
        models: dict[str, ModelConfig | None] = {"student": self.student, "teacher": self.teacher}
        models |= {f"teachers.{name}": teacher for name, teacher in self.teachers.items()}
        for table, model in models.items():
            if model is not None and isinstance(model.prepare, PrepareConfig):
                yield table, model.prepare

    @model_validator(mode="after")
    def _check_loss(self) -> "Recipe":
        if self.loss.channel == "replay":
            raise ValueError(
                f"[loss] type = {self.loss.type!r} reads preference pairs: make it the replay "
                "channel of a compose loss, [loss.replay] weight and [loss.replay.loss]"
            )
        require(self.loss, self._provided_inputs(), REMEDIES, provider="this recipe")
        _ = self.loss.credit  # raises where two losses want different ones
        if self.rollout.student_fraction < 1 and self.loss.reads_sampler:
            others = "teacher's answers" if self.rollout.teacher_samples else "data's solutions"
            raise ValueError(
                f"[loss] type = {self.loss.type!r} reads the sampler's probabilities, and the "
                f"{others} have none: with rollout.student_fraction below 1 use a loss on a "
                "support, such as generalized_jsd (self_distillation with max_ratio = 'off'), or "
                "sft; in a sum, for every channel"
            )
        if self.loss.answer_pairs and (
            self.rollout.student_fraction != 0.5 or self.rollout.group_size % 2
        ):
            raise ValueError(
                f"[loss] type = {self.loss.type!r} compares pairs of answers to one prompt, the "
                "teacher's and the student's, and these would have unequal prompts: set "
                "rollout.student_fraction = 0.5, and an even rollout.group_size, so that each "
                "writes half of a group"
            )
        return self

    @model_validator(mode="after")
    def _check_teacher_samples(self) -> "Recipe":
        if not self.rollout.teacher_samples:
            return self
        if not self.has_teacher:
            raise ValueError(
                "rollout.other_source = 'teacher': there is none; add a [teacher] table"
            )
        if self.teacher is not None and self.teacher.policy is not None:
            raise ValueError(
                "rollout.other_source = 'teacher': [teacher.policy] is the student with a hint, "
                "which samples no answers; name a teacher of its own"
            )
        tables: dict[str, TeacherConfig | None] = {"teacher": self.teacher}
        tables |= {f"teachers.{name}": teacher for name, teacher in self.teachers.items()}
        for table, teacher in tables.items():
            if teacher is not None and teacher.on_overflow != "error":
                raise ValueError(
                    f"{table}.on_overflow = {teacher.on_overflow!r}: a teacher that samples "
                    "(rollout.other_source) needs room for every prompt with a full answer; set "
                    "it to 'error'"
                )
        return self

    def _provided_inputs(self) -> set[str]:
        """Return the inputs that a trainer can give a loss under this recipe."""
        provided = {"token_ids", "segment_ids"}
        if self.has_teacher:
            provided |= {"ref_logprobs", "support", "hidden_states", "credit"}
        if self.rollout.group_size > 1:
            provided |= {"advantages", "replay"}
            policy = None if self.teacher is None else self.teacher.policy
            if policy is not None and policy.hint == "reference":
                provided.add("contrast_logprobs")
        if self.replay.source == "jsonl":
            provided.add("replay")
        if self.rollout.teacher_samples:
            provided.add("by_teacher")
        return provided

    @model_validator(mode="after")
    def _check_reference(self) -> "Recipe":
        if self.reference is None:
            return self
        teachers: dict[str, TeacherConfig] = {
            f"teachers.{name}": teacher for name, teacher in self.teachers.items()
        }
        if self.teacher is not None and self.teacher.policy is None:
            teachers["teacher"] = self.teacher
        if not teachers:
            raise ValueError(
                "[reference] extrapolates a teacher that is a model of its own: add a [teacher] "
                "with model, prepare or url"
            )
        reference = self.reference.resolved(self.student)
        for table, teacher in teachers.items():
            if reference.is_model_of(teacher):
                raise ValueError(
                    f"[reference] is the model of [{table}], and lambda log q + (1 - lambda) log q "
                    "is log q for every lambda: name the teacher's base or a third model, set "
                    "start = true, or leave [reference] out"
                )
        readers = {
            section: (name, needs)
            for section, (name, needs) in self.loss.needs_by_section().items()
            if needs & {"ref_logprobs", "support", "hidden_states", "credit"}
        }
        for section, (name, needs) in readers.items():
            if name != "sampled_reverse_kl" or "support" in needs:
                raise ValueError(
                    f"[reference] changes the teacher's log-prob of the sampled token, which is "
                    f"then none of a distribution, and [{section}] type = {name!r} reads more than "
                    "that: use type = 'sampled_reverse_kl' without a baseline"
                )
        if not readers:
            raise ValueError("[reference] goes with a loss of type 'sampled_reverse_kl'")
        return self

    @model_validator(mode="after")
    def _check_hint(self) -> "Recipe":
        policy = None if self.teacher is None else self.teacher.policy
        if policy is None or policy.hint != "sibling":
            return self
        if self.rollout.group_size < 2:
            raise ValueError(
                "teacher.policy.hint = 'sibling' compares a group: set rollout.group_size to 2 or "
                "more"
            )
        for section, (name, needs) in self.loss.needs_by_section().items():
            if "advantages" in needs:
                raise ValueError(
                    f"[{section}] type = {name!r} needs the advantages of whole groups, and "
                    "teacher.policy.hint = 'sibling' leaves the only correct rollout of a group "
                    "out, so that its wrong ones alone would train: set hint to 'reference' or "
                    "'feedback'"
                )
        return self

    @model_validator(mode="after")
    def _check_right_and_wrong(self) -> "Recipe":
        """Refuse a graded metric where answers have to be right or wrong."""
        graded = {name: data for name, data in self.problem_sources.items() if data.graded}
        policy = None if self.teacher is None else self.teacher.policy
        reader = None
        if policy is not None and policy.hint != "reference":
            reader = f'teacher.policy.hint = "{policy.hint}"'
        elif "contrast_logprobs" in self.loss.needs:
            reader = f'[loss] type = "{self.loss.type}", with its wrong hints,'
        elif "replay" in self.loss.needs and self.replay.source == "rollouts":
            reader = 'replay.source = "rollouts"'
        if reader is not None and graded:
            name, data = next(iter(graded.items()))
            table = "data" if self.data is not None else f"environments.{name}"
            raise ValueError(
                f"{reader} needs answers that are right or wrong, and {table}.metric = "
                f'"{data.metric}" gives any value from 0 to 1: set it to "exact" or a math metric'
            )
        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> "Recipe":
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
