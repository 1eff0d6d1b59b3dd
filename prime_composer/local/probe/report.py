"""What ``prime-rl probe`` measures: plain records, whose fields are the keys of ``--json``.

None is a value that was not measured. ``unmeasured`` says why, by the name of the measurement.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from prime_composer.backends.answers import InvalidAnswer
from prime_composer.local.preflight import Finding, one_line

SupportSize = int | Literal["full", "states"]
"""What a teacher is asked for: K ids, the whole vocabulary, or hidden states instead of it."""

NO_ROLLOUT = "there is no rollout for it"

T = TypeVar("T")


class NotMeasured(ValueError):
    """A measurement does not apply, or its answer cannot be had; the message says why."""


@dataclass
class Attempts:
    """Measurements that may fail, each on its own."""

    # reasons of those that failed or do not apply, by name
    unmeasured: dict[str, str] = field(default_factory=dict)
    # messages of answers that no model can have given
    wrong_answers: list[str] = field(default_factory=list)

    def attempt(self, name: str, measure: Callable[[], T]) -> T | None:
        """Return what ``measure`` returns; None, with the reason kept, where it fails."""
        try:
            return measure()
        except (ValueError, RuntimeError, OSError) as error:
            self.unmeasured[name] = one_line(error)
            if isinstance(error, InvalidAnswer):
                self.wrong_answers.append(one_line(error))
            return None


@dataclass(frozen=True)
class TokenizerFacts:
    """A model's tokenizer, read from files or asked of its server.

    ``vocabulary_hash`` is of every token with its id, and ``split_hash`` of the ids of the
    preflight's three texts, which merges and normalizers decide. A tokenizer without a chat
    template has no ``template_hash``. ``special_ids`` has added tokens too.
    """

    from_files: bool
    split_hash: str
    special_ids: Mapping[str, int]
    vocabulary_hash: str | None = None
    template_hash: str | None = None
    eos: str | None = None


@dataclass(frozen=True)
class ModelFacts:
    """A model and what answers for it.

    Attributes:
        model: directory, hub id or served name.
        backend: what runs the model.
        dtype: by the recipe.
        url: the server's, without a password; None of a model in this process.
        context: longest sequence in tokens.
        vocabulary: entries of the output head.
        largest_k: largest K that scoring accepts, or that it accepted of the table's.
        largest_k_exact: False where a larger K may be accepted too.
        logprob_mode: "processed" where sampled log-probs are those after temperature and top-p.
        tokenizer: None where it cannot be read nor asked.
    """

    model: str
    backend: str
    dtype: str
    url: str | None = None
    context: int | None = None
    vocabulary: int | None = None
    largest_k: int | None = None
    largest_k_exact: bool = True
    logprob_mode: str | None = None
    tokenizer: TokenizerFacts | None = None


@dataclass(frozen=True)
class Agreement:
    """Absolute difference between two computations of some tokens' log-probs, in nats."""

    largest: float
    mean: float
    tokens: int


@dataclass(frozen=True)
class SpecialToken:
    """A special token in the rollouts, or the last token of a finished one.

    It is the next token at ``occurrences`` positions, of which ``endings`` end a finished rollout.
    The probabilities are each model's mean there. An id that is not known is None.
    """

    token: str
    student_id: int
    teacher_id: int | None
    occurrences: int
    endings: int
    student_probability: float
    teacher_probability: float


@dataclass(frozen=True)
class Throughput:
    """Speed of scoring in one column: a number K, "full" for the whole vocabulary, or "states".

    The tokens are those of the rollouts, without prompts. The seconds are for the teacher's share
    of a step. A refused column has the teacher's reason.
    """

    column: str
    tokens_per_second: float | None = None
    seconds_per_step: float | None = None
    refused: str | None = None


@dataclass(frozen=True)
class HiddenByK:
    """What a support of the teacher's K most probable ids hides.

    ``reverse_kl`` is L(K), the mean over the support and a tail bucket, in nats per token. It never
    falls with K (log-sum inequality). ``hidden`` is 1 - L(K) / L(largest K).
    """

    k: int
    mass_outside: float
    reverse_kl: float
    hidden: float


@dataclass(frozen=True)
class SupportFacts:
    """What a top K of this teacher hides, on rollouts of the student."""

    positions: int  # rollout tokens
    largest_k: int  # the largest K measured
    entropy: float  # the teacher's mean entropy in nats, a lower bound unless K is the vocabulary
    by_k: Sequence[HiddenByK]  # one entry for each smaller column, and for ``largest_k``
    recommended_k: int  # the smallest K that hides at most 5 % of the KL at ``largest_k``


@dataclass(frozen=True)
class PluginReport:
    """What a teacher's server says of its scoring plugin.

    Without a plugin there is no ``version``, and every score comes in JSON. ``head`` has rows,
    columns, dtypes and the hash of the output head, where the plugin can read it.
    """

    version: int | None
    vllm: str | None
    kinds: Sequence[str]
    head: Mapping[str, Any] | None


@dataclass(frozen=True)
class TokenizerPairFacts:
    """What one pass of a teacher with a tokenizer of its own says of the student's rollouts.

    Attributes:
        positions: tokens of the rollouts.
        aligned: share of them that begin where one of the teacher's does.
        teacher_tokens: the teacher's tokens per token of the student.
        closed_mass: the teacher's mass, at such positions, on tokens whose first student token is
            certain.
        open_tokens: its tokens of which that is not so.
        often_open: those with most mass, as text.
        k: ids of a support.
        support_mass: the teacher's mass on the K ids.
        best_mass: that on the K ids with most mass, resolved or not.
        noncanonical: share of tokens that the student's tokenizer itself would not write.
        unscored: share of tokens without a score.
        off_path: share of tokens at which other tokenizations of the text before may have more than
            5 % of the mass.
        student_prompt: the end of a prompt as the student reads it.
        teacher_prompt: as the teacher does.
    """

    positions: int
    aligned: float
    teacher_tokens: float
    closed_mass: float
    open_tokens: int
    often_open: Sequence[str]
    k: int
    support_mass: float
    best_mass: float
    noncanonical: float
    unscored: float
    off_path: float
    student_prompt: str
    teacher_prompt: str


@dataclass(frozen=True)
class TeacherReport:
    """One teacher.

    Attributes:
        facts: model, backend and limits.
        same_tokenizer: whether its tokens and ids are the student's.
        same_prompts: whether its own tokenizer and template write the same prompts.
        head_bfloat16: whether its log-probs show logits rounded to bfloat16.
        agreement: its server's numbers against a float32 forward pass of the checkpoint.
        special_tokens: those in the rollouts.
        share: share of the step's rollouts that it scores.
        throughput: one entry per column.
        plugin: its server's scoring plugin; None for a teacher that is no server.
        support: what a top K hides.
        tokenizers: what it says of the student's tokens; None with the student's tokenizer.
        wrong_answers: answers that no model can have given.
        unmeasured: reasons by measurement.
    """

    facts: ModelFacts
    same_tokenizer: bool | None
    same_prompts: bool | None
    head_bfloat16: bool | None
    agreement: Agreement | None
    special_tokens: Sequence[SpecialToken]
    share: float
    throughput: Sequence[Throughput]
    plugin: PluginReport | None
    support: SupportFacts | None
    tokenizers: TokenizerPairFacts | None
    wrong_answers: Sequence[str]
    unmeasured: Mapping[str, str]


@dataclass(frozen=True)
class StudentReport:
    """The student.

    Attributes:
        facts: model, backend and limits.
        agreement: the sampler's log-probs of the rollouts against the trainer's.
        rollouts: rollouts that the step sampled.
        tokens_per_rollout: their mean length, without the prompt.
        truncated: share of them that used up ``rollout.max_tokens``.
        tokens_per_second: of sampling.
        unmeasured: reasons by measurement.
    """

    facts: ModelFacts
    agreement: Agreement | None
    rollouts: int
    tokens_per_rollout: float | None
    truncated: float | None
    tokens_per_second: float | None
    unmeasured: Mapping[str, str]


@dataclass(frozen=True)
class StepForecast:
    """One step of the recipe, as it was measured.

    ``column`` is what the step asks the teachers for, None without a teacher. The seconds of
    training are those of forward and backward, without the optimizer. ``run_seconds`` are those of
    all steps, without evaluations.
    """

    rollouts: int
    tokens: int | None
    column: str | None
    sample_seconds: float | None
    score_seconds: float | None
    train_seconds: float | None
    run_seconds: float | None


@dataclass(frozen=True)
class ProbeReport:
    """Everything that ``prime-rl probe`` found.

    Attributes:
        findings: the preflight's in order, then those about the parts of a step.
        recommendations: what to change, one sentence each.
        step: one step; None where the models could not be opened.
        student: likewise.
        teachers: by table of the recipe.
    """

    findings: Sequence[Finding]
    recommendations: Sequence[str] = ()
    step: StepForecast | None = None
    student: StudentReport | None = None
    teachers: Mapping[str, TeacherReport] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(finding.state != "failed" for finding in self.findings)

    @property
    def warnings(self) -> list[str]:
        """What is legal but worth knowing."""
        return [finding.text for finding in self.findings if finding.state == "warning"]
