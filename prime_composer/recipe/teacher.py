"""Define the tables of teachers and of the reference."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from prime_composer.problems.config import CHAT_KEYS, DataConfig
from prime_composer.recipe.backends import BackendName, Served, backend_of
from prime_composer.recipe.carried import uncarried
from prime_composer.recipe.model import ModelConfig, StudentConfig
from prime_composer.tables import MOST_STEPS, Table

HINT_TEMPLATES = {
    "reference": "{question}\nA correct solution: {hint}\nSolve it again.",
    "sibling": "{question}\nA correct solution: {hint}\nSolve it again.",
    "feedback": "{question}\nAn earlier attempt: {attempt}\nIts verdict: {hint}\nSolve it again.",
}
"""The hint-conditioned teacher's question, by the kind of hint."""


ON_ONE_MACHINE = uncarried("prime-rl's processes ask the teacher's server for every rollout")
"""Mark of a tape's keys."""


class PolicyTeacherConfig(Table):
    """Self-distillation: the teacher is the policy, and its prompt contains a hint.

    A rollout without a hint (no correct sibling) is not trained on.
    """

    hint: Literal["reference", "sibling", "feedback"] = "reference"
    """``reference``: the data's solution (OPSD, SDFT). ``sibling``: the first other correct rollout
    of the group (SDPO). ``feedback``: the verifier's verdict on the rollout, with the right answer
    (SDPO)."""

    template: str | None = None
    """The question in the teacher's prompt, with ``{question}``, ``{hint}`` and optionally
    ``{attempt}``, the rollout's own text. Unset: plain English."""

    update: Literal["live", "ema", "sync", "base"] = "ema"
    """The teacher's weights: the current policy's, their moving average, a copy renewed every
    ``sync_every`` steps, or with ``[student.lora]`` the policy's without its adapter."""

    ema_rate: float = Field(default=0.05, gt=0, le=1)
    """For ``ema``: teacher <- (1 - rate) teacher + rate policy after each step (SDPO 0.05, OPSD
    0.001)."""

    sync_every: int = Field(default=10, ge=1, le=MOST_STEPS)
    """For ``sync``: steps between two copies."""

    def refusals(self) -> Iterator[str]:
        for name in ("{question}", "{hint}"):
            if name not in self.text:
                yield f"template must contain {name}"

    @property
    def text(self) -> str:
        """The template, or the plain one of its kind of hint."""
        return HINT_TEMPLATES[self.hint] if self.template is None else self.template


class TeacherPromptConfig(Table):
    """What a teacher reads before an answer. A key that is left out is as for the student.

    Of a rollout, the teacher reads its own prompt and then the tokens of the student's completion.
    """

    chat_template: bool | Path | None = None
    """true: the chat template of the teacher's tokenizer. false: plain text. A path: the template
    in this file. Unset: plain or the teacher's template, as the student's prompt is."""

    system: str | None = None
    """System message of each conversation that has none in its row; empty for none. Implies
    ``chat_template``."""

    prompt_template: str | None = None
    """The prompt, with ``{question}`` where the question goes. With a chat template it is the
    user's message."""

    template_args: dict[str, Any] | None = None
    """Variables of the chat template, for example ``{ enable_thinking = false }``. Implies
    ``chat_template``."""

    def of(self, data: DataConfig) -> DataConfig:
        """Return how the teacher is asked what ``data`` asks the student.

        Raises:
            ValueError: a conversation without a chat template.
        """
        own = {key: value for key, value in self if value is not None}
        if isinstance(own.get("chat_template"), Path):
            own["chat_template"] = True
        values = {key: getattr(data, key) for key in data.model_fields_set} | own
        empty = [key for key in CHAT_KEYS if key in own and not own[key]]
        if (own.keys() & set(CHAT_KEYS)) - {*empty} and own.get("chat_template") is None:
            values["chat_template"] = True
        return DataConfig.model_validate(values | dict.fromkeys(empty))


class TeacherConfig(Served, ModelConfig):
    """The model that scores the student's tokens: a model of its own, the policy with a hint, or
    the student without its adapter."""

    policy: PolicyTeacherConfig | None = None
    """Self-distillation: the teacher is the student itself, given a hint, instead of ``model`` and
    ``prepare``."""

    prompt: TeacherPromptConfig | None = None
    """What the teacher reads before an answer, where it is not the student's prompt."""

    base: bool = False
    """With ``[student.lora]``: the teacher is the student with its adapter switched off, instead of
    ``model`` and ``prepare``. Inside prime-rl it is a server of its own."""

    backend: BackendName | None = Field(
        default=None,
        json_schema_extra=uncarried(
            "prime-rl asks a server, which is yours to start", harmless=("server",)
        ),
    )
    """What runs the teacher: ``vllm``, ``transformers``, ``server``, or your own,
    ``my_package.my_module:MyScorer``. Unset: the rollout's backend."""

    tokenizer: Literal["shared", "own"] = "shared"
    """"shared": the student's. "own": another one; the teacher reads its own prompt and the
    rollout's text, and its probabilities are converted into those of the student's next token."""

    asked_by: Literal["orchestrator", "trainer"] | None = None
    """Inside prime-rl: which of its processes asks the teacher, one for all teachers. Unset: the
    trainer with k = "full", otherwise the orchestrator."""

    head_on: Literal["device", "cpu"] | None = None
    """Inside prime-rl, with k = "full": where each trainer rank keeps the teacher's output head.
    "cpu" saves V x d numbers of its device's memory, and copies them chunk by chunk. Unset: its
    device."""

    on_overflow: Literal["error", "score_head", "drop"] = Field(
        default="error",
        json_schema_extra=uncarried(
            "prime-rl ends its run on a sequence that its teacher refuses", ("error",)
        ),
    )
    """What to do with a rollout that is longer than the teacher's window: end the run;
    ``score_head``: train on what fits; ``drop``: leave the rollout out. Counted in
    ``rollout/teacher_cut`` and ``rollout/teacher_dropped``."""

    tape: Path | None = Field(default=None, json_schema_extra=ON_ONE_MACHINE)
    """Folder in which the teacher's scores are kept. A later run asks only for what is not
    there."""

    tape_only: bool = False
    """Open no teacher: the run ends at the first rollout that the tape lacks. ``model`` and
    ``prepare`` may be left out."""

    tape_gb: float = Field(default=100.0, gt=0, json_schema_extra=ON_ONE_MACHINE)
    """Largest size of the tape in GB. Beyond it nothing more is kept."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        json_schema_extra=uncarried("the teacher's server is yours to start"),
    )
    """Number format of the teacher's weights and logits. Unset: the trainer's dtype."""

    gpu_memory_utilization: float = Field(
        default=0.3,
        gt=0,
        le=1,
        json_schema_extra=uncarried("the teacher's server is yours to start"),
    )
    """Share of the GPU's memory for the teacher's engine."""

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        serves = self.backend is not None and backend_of(self.backend).serves
        if serves and self.url is None:
            yield (f"backend = {self.backend!r} needs `url`, the base URL of a running vLLM server")
        if self.url is not None and self.backend is not None and not serves:
            yield f"`url` goes with backend = 'server', not {self.backend!r}"
        if self.url is not None and self.policy is not None:
            yield (
                "`url` is a teacher of its own, and `policy` is the student with a hint: leave one "
                "of them out"
            )
        given = [key for key in ("backend", "url", "dtype") if getattr(self, key) is not None]
        given += ["tokenizer"] * (self.tokenizer == "own")
        if self.base and given:
            yield (
                f"`{given[0]}` is of a model of its own, and `base = true` is the student's own "
                "weights and tokenizer, in float32 on this machine: leave one of them out"
            )
        if self.tape is not None and self.policy is not None:
            yield (
                "`tape` keeps the answers of a fixed teacher, and [teacher.policy] is the student "
                "itself, whose answers change with each step and hint: leave `tape` out"
            )
        if self.tape is None and self.tape_only:
            yield "`tape_only` lets a tape answer: name its folder in `tape`"
        if self.tape_only and self.tokenizer == "own" and self.model is None:
            yield (
                'tokenizer = "own" with `tape_only`: the tape has the teacher\'s answers, not its '
                "tokenizer; name a directory or hub id that has it in `model`"
            )

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
        """Return the teacher's backend: its own, "server" where it has a URL, or the student's."""
        if self.own_backend is not None:
            return self.own_backend
        if self.url is not None:
            return "server"
        backend = backend_of(student_backend)
        if backend.serves or backend.opens is not None:
            own = "server" if backend.serves else "sampler"
            raise ValueError(
                f"rollout.backend = {student_backend!r} is the student's {own}, and a teacher or "
                "[reference] has none: set url in its table, or its backend to 'vllm' or "
                "'transformers'"
            )
        return student_backend


class OneOfSeveralConfig(TeacherConfig):
    """One of several teachers, under ``[teachers.NAME]``."""

    weight: float = Field(default=1.0, gt=0)
    """Weight in the mixture, relative to the others', where neither [data] nor a row names a
    teacher."""

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        if self.policy is not None:
            yield ("`policy` is self-distillation, which has one teacher: use [teacher.policy]")


class ReferenceConfig(TeacherConfig):
    """The model against which the teacher is extrapolated (G-OPD).

    The teacher's log-prob of a sampled token becomes lambda log q + (1 - lambda) log r.
    """

    start: bool = False
    """The reference is the student as it is before training, instead of `model` or `prepare`."""

    reward_scale: float = Field(default=1.25, gt=0)
    """lambda. Above 1, the student goes beyond the teacher, away from the
    reference (ExOPD)."""

    def wrong_origin(self) -> Iterator[str]:
        origins = [name for name in ("model", "prepare", "start") if getattr(self, name)]
        if len(origins) != 1:
            yield (
                "give exactly one of `model`, the table `prepare` and `start = true`"
                + (f", not {' and '.join(origins)}" if origins else "")
            )
        if self.policy is not None:
            yield "`policy` is a teacher of its own: use [teacher.policy]"
        if self.base:
            yield "`base` is a teacher's: the student before training is start = true"
        if self.start and self.url is not None:
            yield (
                "`start = true` opens the student's weights on this machine, and `url` is a "
                "server: name the model that it serves in `model`, or leave `url` out"
            )
        if self.on_overflow != "error":
            yield (
                f"on_overflow = {self.on_overflow!r} is the teacher's key: a token is either "
                "scored by both or left out. Leave it out here"
            )

    def resolved(self, student: StudentConfig) -> "ReferenceConfig":
        """Return the table with the student's origin in the place of ``start``."""
        if not self.start:
            return self
        origin = {"model": student.model, "prepare": student.prepare}
        return self.model_copy(update={**origin, "start": False})
