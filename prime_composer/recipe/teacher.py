"""Define the tables of teachers and of the reference, and check that they fit the other tables."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from prime_composer.losses import LossConfig
from prime_composer.problems.config import DataConfig
from prime_composer.recipe.backends import TIMEOUT, WAIT, ScorerName, backend_of
from prime_composer.recipe.bounds import LARGEST_BATCH, MOST_STEPS
from prime_composer.recipe.carried import CARRIED, ONLY_REFUSED, not_carried
from prime_composer.recipe.environment import EnvironmentConfig
from prime_composer.recipe.model import ModelConfig, StudentConfig
from prime_composer.recipe.urls import Url
from prime_composer.tables import Table

HINT_TEMPLATES = {
    "reference": "{question}\nA correct solution: {hint}\nSolve it again.",
    "sibling": "{question}\nA correct solution: {hint}\nSolve it again.",
    "feedback": "{question}\nAn earlier attempt: {attempt}\nIts verdict: {hint}\nSolve it again.",
}
"""The hint-conditioned teacher's question, by the kind of hint."""


ON_ONE_MACHINE = not_carried("prime-rl's processes ask the teacher's server for every rollout")
"""Mark of a tape's keys."""


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

    wrong_hints: int = Field(default=4, ge=1, le=LARGEST_BATCH, json_schema_extra=ONLY_REFUSED)
    """For a loss that contrasts hints (`rlcsd`): at most this many wrong rollouts of the same group
    are wrong hints for a rollout, each scored by its own."""

    update: Literal["live", "ema", "sync", "base"] = Field(default="ema", json_schema_extra=CARRIED)
    """The teacher's weights: the current policy's, their moving average, a copy renewed every
    ``sync_every`` steps, or with `[student.lora]` the policy's without its adapter, which stay as
    they are and cost no copy."""

    ema_rate: float = Field(default=0.05, gt=0, le=1, json_schema_extra=ONLY_REFUSED)
    """For ``ema``: teacher <- (1 - rate) teacher + rate policy after each step (SDPO 0.05, OPSD
    0.001)."""

    sync_every: int = Field(default=10, ge=1, le=MOST_STEPS, json_schema_extra=ONLY_REFUSED)
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
    """The model that scores the student's tokens: a model of its own, the policy with a hint, or
    the student without its adapter."""

    policy: PolicyTeacherConfig | None = None
    """Self-distillation: the teacher is the student itself, given a hint. Goes without `model` and
    `prepare`."""

    base: bool = Field(default=False, json_schema_extra=CARRIED)
    """With `[student.lora]`: the teacher is the student with its adapter switched off. It computes
    in this process with the student's own weights, in float32, and takes no memory for others. Goes
    without `model` and `prepare`. Inside prime-rl it is a server of its own."""

    backend: ScorerName | None = Field(
        default=None,
        json_schema_extra=not_carried(
            "prime-rl asks a server, which is yours to start", harmless=("server",)
        ),
    )
    """What runs the teacher: `vllm`, `transformers`, `server`, or one of your own,
    `my_package.my_module:MyScorer`. Unset: the rollout's backend."""

    url: Url | None = Field(default=None, repr=False, json_schema_extra=CARRIED)
    """Base URL of a running vLLM server. Implies backend 'server'. A server in bfloat16 computes
    bfloat16 logits, so its log-probs are rounded to about 3 significant digits. For float32 logits,
    start it with `--hf-overrides '{"head_dtype": "float32"}'`."""

    api_key_var: str = Field(default="VLLM_API_KEY", json_schema_extra=CARRIED)
    """Environment variable with the API key of the server at `url`, if it needs one."""

    tokenizer: Literal["shared", "own"] = Field(default="shared", json_schema_extra=CARRIED)
    """"shared": the teacher has the student's tokenizer. "own": it has another one, and reads its
    own prompt and the rollout's text; its probabilities of the student's next token are computed
    from its rows. `k` then counts the ids that this resolves. Never guessed."""

    head: Path | None = Field(
        default=None,
        json_schema_extra=not_carried("inside prime-rl the server gives its own head"),
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
        json_schema_extra=not_carried(
            "prime-rl ends its run on a sequence that its teacher refuses", ("error",)
        ),
    )
    """What to do with a rollout that is longer than the teacher's window, with its prompt or hint:
    end the run; `score_head`: train on what fits and mask the rest; `drop`: leave the rollout out.
    `rollout/teacher_cut` and `rollout/teacher_dropped` are their shares of a step."""

    tape: Path | None = Field(default=None, json_schema_extra=ON_ONE_MACHINE)
    """Folder in which every answer of the teacher is kept, by what it was asked. A later run asks
    only for what is not there. Made by the first run, or by `prime-rl tape make`."""

    tape_only: bool = Field(default=False, json_schema_extra=CARRIED)
    """Open no teacher: the tape alone answers, and the run ends at the first rollout that it lacks.
    `model` and `prepare` may be left out."""

    tape_gb: float = Field(default=100.0, gt=0, json_schema_extra=ON_ONE_MACHINE)
    """Largest size of the tape in GB. Beyond it, nothing more is kept."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        json_schema_extra=not_carried("the teacher's server is yours to start"),
    )
    """Number format of the teacher's weights and logits. Unset: the trainer's dtype."""

    gpu_memory_utilization: float = Field(
        default=0.3,
        gt=0,
        le=1,
        json_schema_extra=not_carried("the teacher's server is yours to start"),
    )
    """Share of the GPU's memory for the teacher's engine."""

    @model_validator(mode="after")
    def _check_url(self) -> "TeacherConfig":
        serves = self.backend is not None and backend_of(self.backend).serves
        if serves and self.url is None:
            raise ValueError(
                f"backend = {self.backend!r} needs `url`, the base URL of a running vLLM server"
            )
        if self.url is not None and self.backend is not None and not serves:
            raise ValueError(f"`url` goes with backend = 'server', not {self.backend!r}")
        if self.head is not None and self.url is None:
            raise ValueError("`head` is for a teacher at a `url`; another one has its own head")
        if self.url is not None and self.policy is not None:
            raise ValueError(
                "`url` is a teacher of its own, and `policy` is the student with a hint: leave one "
                "of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_base(self) -> "TeacherConfig":
        given = [
            key for key in ("backend", "url", "head", "dtype") if getattr(self, key) is not None
        ]
        given += ["tokenizer"] * (self.tokenizer == "own")
        if self.base and given:
            raise ValueError(
                f"`{given[0]}` is of a model of its own, and `base = true` is the student's own "
                "weights and tokenizer, in float32 on this machine: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_tape(self) -> "TeacherConfig":
        if self.tape is not None and self.policy is not None:
            raise ValueError(
                "`tape` keeps the answers of a fixed teacher, and [teacher.policy] is the student "
                "itself, whose answers change with each step and hint: leave `tape` out"
            )
        if self.tape is None and self.tape_only:
            raise ValueError("`tape_only` lets a tape answer: name its folder in `tape`")
        if self.tape_only and self.tokenizer == "own" and self.model is None:
            raise ValueError(
                'tokenizer = "own" with `tape_only`: the tape has the teacher\'s answers, not its '
                "tokenizer; name a directory or hub id that has it in `model`"
            )
        return self

    @property
    def needs_no_model(self) -> bool:
        """Whether the table may leave the model's origin out."""
        return self.tape_only

    @property
    def own_backend(self) -> str | None:
        """The backend that the table says; None where it is the rollout's."""
        return "transformers" if self.base else self.backend

    def resolved(self, student: StudentConfig) -> "TeacherConfig":
        """Return the table with the student's origin beside ``base``."""
        if not self.base:
            return self
        return self.model_copy(update={"model": student.model, "prepare": student.prepare})

    def runs_on(self, student_backend: str) -> str:
        """Return the teacher's backend: its own, "server" where it has a URL, or the student's.

        Raises:
            ValueError: none of them says how to run it.
        """
        if self.own_backend is not None:
            return self.own_backend
        if self.url is not None:
            return "server"
        backend = backend_of(student_backend)
        if backend.serves or backend.opens is not None:
            own = "server" if backend.serves else "sampler"
            raise ValueError(
                f"rollout.backend = {student_backend!r} is the student's {own}, and the teacher "
                "has none: set url in the teacher's table, or its backend to 'vllm' or "
                "'transformers'"
            )
        return student_backend


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

    start: bool = Field(default=False, json_schema_extra=ONLY_REFUSED)
    """The reference is the student as it is before training, instead of `model` or `prepare`."""

    reward_scale: float = Field(default=1.25, gt=0, json_schema_extra=ONLY_REFUSED)
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
        if self.base:
            raise ValueError("`base` is a teacher's: the student before training is start = true")
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


def check_tapes(teachers: Mapping[str, TeacherConfig]) -> None:
    """Refuse two teachers, given by table, with one tape."""
    tables: dict[Path, str] = {}
    for table, teacher in teachers.items():
        if teacher.tape is None:
            continue
        other = tables.setdefault(teacher.tape, table)
        if other != table:
            raise ValueError(
                f"[{other}] and [{table}] have the same tape, and a tape has one teacher: name a "
                "folder for each"
            )


def check_ahead(ahead: int, sampler: str, teachers: Mapping[str, TeacherConfig]) -> None:
    """Refuse batches ahead of their steps where training and sampling or scoring take turns.

    Args:
        ahead: of ``[rollout]``.
        sampler: its backend.
        teachers: by table, the reference too.
    """
    if not ahead:
        return
    key = f"rollout.ahead = {ahead}"
    if not backend_of(sampler).serves:
        raise ValueError(
            f"{key} samples while the student trains, and rollout.backend = {sampler!r} is a part "
            "of the process that trains, and takes turns with it: start a server of the student "
            "and name it in rollout.url (backend = 'server'), or leave ahead out"
        )
    for table, teacher in teachers.items():
        if teacher.policy is not None:
            raise ValueError(
                f"{key} scores while the student trains, and [{table}.policy] is the student, "
                "whose weights change meanwhile: name a teacher of its own, or leave ahead out"
            )
        if not teacher.tape_only and not backend_of(teacher.runs_on(sampler)).any_thread:
            raise ValueError(
                f"{key} scores in another thread than training, and [{table}] backend = "
                f"{teacher.backend!r} answers in this process to one thread alone: start its "
                f"server and name it in {table}.url, or set {table}.backend = 'transformers'"
            )


def check_choice_of_teachers(
    sources: Mapping[str, DataConfig | EnvironmentConfig], teachers: Mapping[str, TeacherConfig]
) -> None:
    """Refuse sources, given by table, that name teachers that there are not."""
    for table, data in sources.items():
        named = [data.teacher] if isinstance(data.teacher, str) else list(data.teacher or ())
        by_row = isinstance(data, DataConfig) and data.teacher_key is not None
        if not teachers and (named or by_row):
            key = "teacher" if named else "teacher_key"
            raise ValueError(f"{table}.{key} chooses among [teachers.*], and there are none")
        for teacher in named:
            if teacher not in teachers:
                raise ValueError(
                    f"{table}.teacher names {teacher!r}; [teachers] has {', '.join(teachers)}"
                )


def check_sampling_teachers(teachers: Mapping[str, TeacherConfig]) -> None:
    """Refuse teachers, given by table, that cannot write what the student does not."""
    if not teachers:
        raise ValueError("rollout.other_source = 'teacher': there is none; add a [teacher] table")
    for table, teacher in teachers.items():
        if teacher.policy is not None:
            raise ValueError(
                "rollout.other_source = 'teacher': [teacher.policy] is the student with a hint, "
                "which samples no answers; name a teacher of its own"
            )
        if teacher.on_overflow != "error":
            raise ValueError(
                f"{table}.on_overflow = {teacher.on_overflow!r}: a teacher that samples "
                "(rollout.other_source) needs room for every prompt with a full answer; set "
                "it to 'error'"
            )


def check_reference_model(
    reference: ReferenceConfig, student: StudentConfig, teachers: Mapping[str, TeacherConfig]
) -> None:
    """Refuse a reference without a teacher to extrapolate, or which is the same model."""
    models = {
        table: teacher.resolved(student)
        for table, teacher in teachers.items()
        if teacher.policy is None
    }
    if not models:
        raise ValueError(
            "[reference] extrapolates a teacher that is a model of its own: add a [teacher] "
            "with model, prepare or url"
        )
    if reference.start and (quantize := student.quantize) is not None:
        prepared = getattr(student.prepare, "quantize", None)
        if prepared is None or dict(prepared) != dict(quantize):
            raise ValueError(
                "[reference] start = true opens the student's weights as they are stored, and "
                "student.quantize rounds them before the first step: round them in "
                "[student.prepare] too, with the same `quantize`"
            )
    resolved = reference.resolved(student)
    for table, teacher in models.items():
        if resolved.is_model_of(teacher):
            raise ValueError(
                f"[reference] is the model of [{table}], and lambda log q + (1 - lambda) log q "
                "is log q for every lambda: name the teacher's base or a third model, set "
                "start = true, or leave [reference] out"
            )


def check_own_tokenizers(
    teachers: Mapping[str, TeacherConfig],
    loss: LossConfig,
    *,
    mixed: bool,
    has_reference: bool,
    kl_support: Any,
) -> None:
    """Refuse what a teacher with a tokenizer of its own cannot give.

    Args:
        teachers: by table.
        loss: the recipe's.
        mixed: a rollout may be scored by several teachers.
        has_reference: the recipe has a ``[reference]``.
        kl_support: of ``[eval]``.
    """
    tables = [table for table, one in teachers.items() if one.tokenizer == "own"]
    if not tables:
        return
    for table in tables:
        if teachers[table].policy is not None:
            raise ValueError(
                f'[{table}] tokenizer = "own": [{table}.policy] is the student itself; leave '
                "tokenizer out"
            )
    own = f'[{tables[0]}] tokenizer = "own"'
    size, by_student = loss.asked_of_teacher
    if size == "full" or loss.reads_hidden_states:
        raise ValueError(
            f'[loss] type = {loss.type!r}, k = "full": a whole vocabulary has ids that one pass of '
            f"the teacher does not resolve, and {own}; set k to a number"
        )
    if by_student:
        raise ValueError(
            f'[loss] type = {loss.type!r}, chosen_by = "student": with {own} the ids are chosen '
            'among those that are resolved; set chosen_by = "teacher"'
        )
    if kl_support == "full":
        raise ValueError(
            f'eval.kl_support = "full" needs every id of the vocabulary, and {own} does not '
            "resolve all; set it to a number"
        )
    if mixed:
        raise ValueError(
            f"{own}: its unresolved ids are missing from a mixture; route each environment to one "
            "teacher (data.teacher)"
        )
    if has_reference:
        raise ValueError(f"{own} does not go with [reference]; leave one of them out")


def check_hint(policy: PolicyTeacherConfig, group_size: int, loss: LossConfig) -> None:
    """Refuse a hint that a group does not have, or that leaves out what the loss needs."""
    if policy.hint != "sibling":
        return
    if group_size < 2:
        raise ValueError(
            "teacher.policy.hint = 'sibling' compares a group: set rollout.group_size to 2 or more"
        )
    for section, (part, needs) in loss.needs_by_section().items():
        if "advantages" in needs:
            raise ValueError(
                f"[{section}] type = {part.type!r} needs the advantages of whole groups, and "
                "teacher.policy.hint = 'sibling' leaves the only correct rollout of a group "
                "out, so that its wrong ones alone would train: set hint to 'reference' or "
                "'feedback'"
            )
