"""What ``prime-rl probe`` measures: plain records, whose fields are the keys of ``--json``.

None is a value that was not measured. ``unmeasured`` says why, by the name of the measurement.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from prime_composer.backends.answers import InvalidAnswer
from prime_composer.local.probe_numbers import HiddenByK

T = TypeVar("T")


class NotMeasured(ValueError):
    """A measurement does not apply, or its answer cannot be had; the message says why."""


def one_line(error: BaseException) -> str:
    """Return an error's message without line breaks."""
    return " ".join(str(error).split())


@dataclass
class Attempts:
    """Measurements that may fail, each on its own.

    Attributes:
        unmeasured: reasons of those that failed or do not apply, by name.
        failed: those of them that failed although they apply.
        wrong_answers: messages of answers that no model can have given.
    """

    unmeasured: dict[str, str] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    wrong_answers: list[str] = field(default_factory=list)

    def attempt(self, name: str, measure: Callable[[], T]) -> T | None:
        """Return what ``measure`` returns; None, with the reason kept, where it fails."""
        try:
            return measure()
        except (ValueError, RuntimeError, OSError) as error:
            self.unmeasured[name] = one_line(error)
            if not isinstance(error, NotMeasured):
                self.failed.add(name)
            if isinstance(error, InvalidAnswer):
                self.wrong_answers.append(one_line(error))
            return None


@dataclass(frozen=True)
class CheckResult:
    """One of the preflight's checks, or one of a step's parts.

    Attributes:
        name: the check's.
        passed: None where it was not run.
        message: why it failed or was not run.
    """

    name: str
    passed: bool | None
    message: str | None = None


@dataclass(frozen=True)
class TokenizerFacts:
    """A model's tokenizer.

    Attributes:
        source: where it was read: files on this machine, or the answers of a server.
        tokens: entries of the vocabulary.
        vocabulary_hash: of every token with its id.
        split_hash: of the ids of the preflight's three texts, which merges and normalizers decide.
        template_hash: of the chat template; None where there is none.
        eos: the token that ends a text.
        special_ids: special and added tokens with their ids.
    """

    source: Literal["files", "server"]
    tokens: int | None = None
    vocabulary_hash: str | None = None
    split_hash: str | None = None
    template_hash: str | None = None
    eos: str | None = None
    special_ids: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelFacts:
    """A model and what answers for it.

    Attributes:
        model: directory, hub id or served name.
        backend: what runs the model.
        url: the server's, without a password.
        dtype: by the recipe.
        context: longest sequence in tokens.
        vocabulary: entries of the output head.
        largest_k: largest K that scoring accepts.
        largest_k_exact: False where only this much was asked for.
        logprob_mode: whether sampled log-probs are those after temperature and top-p.
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
    """Distance between two computations of the same tokens' log-probs, in nats.

    Attributes:
        largest: maximum of the absolute difference.
        mean: mean of the absolute difference.
        tokens: tokens compared.
    """

    largest: float
    mean: float
    tokens: int


@dataclass(frozen=True)
class SpecialToken:
    """A special token in the rollouts, or the last token of a finished one.

    Attributes:
        token: its text.
        student_id: its id for the student.
        teacher_id: its id for the teacher; None where that is not known.
        occurrences: positions of the rollouts at which it is the next token.
        endings: those of them that end a finished rollout.
        student_probability: the student's mean probability of it there.
        teacher_probability: the teacher's.
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
    """Speed of scoring in one column of the table.

    Attributes:
        column: a number K, "full" for the whole vocabulary, or "states" for hidden states.
        tokens_per_second: rollout tokens (without prompts); None where it was refused.
        seconds_per_step: what this teacher's share of a step of the recipe takes.
        refused: the teacher's reason.
    """

    column: str
    tokens_per_second: float | None = None
    seconds_per_step: float | None = None
    refused: str | None = None


@dataclass(frozen=True)
class SupportFacts:
    """What a top K of this teacher hides, on rollouts of the student.

    Attributes:
        positions: rollout tokens.
        largest_k: the largest K measured.
        entropy: the teacher's mean entropy in nats, a lower bound unless K is the vocabulary.
        by_k: one entry for each smaller column, and for ``largest_k``.
        recommended_k: the smallest K that hides at most 5 % of the KL at ``largest_k``.
    """

    positions: int
    largest_k: int
    entropy: float
    by_k: Sequence[HiddenByK]
    recommended_k: int


@dataclass(frozen=True)
class HeadShape:
    """A server's output head, which turns its hidden states into logits.

    Attributes:
        rows: entries of the vocabulary.
        columns: size of the hidden states.
        dtype: of the weights.
        computed_in: the dtype that the server multiplies in.
        sha256: of the weights, in hexadecimal digits.
    """

    rows: int
    columns: int
    dtype: str
    computed_in: str
    sha256: str


@dataclass(frozen=True)
class PluginReport:
    """What a teacher's server answers in binary, by its scoring plugin.

    Attributes:
        version: of the plugin; None where the server has none.
        vllm: the server's version of vLLM.
        kinds: what the plugin can answer.
        head: the output head, where the plugin can read it.
        column: the recipe's K.
        tokens_per_second: at that K in binary.
        json_tokens_per_second: the same in JSON.
        falls_back: what comes in JSON, because the server has no plugin.
    """

    version: int | None
    vllm: str | None
    kinds: Sequence[str]
    head: HeadShape | None
    column: str
    tokens_per_second: float | None
    json_tokens_per_second: float | None
    falls_back: Sequence[str]


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
        share: share of the recipe's rollouts that it scores.
        throughput: one entry per column.
        plugin: its server's scoring plugin; None for a teacher that is no server.
        support: what a top K hides.
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
    wrong_answers: Sequence[str]
    unmeasured: Mapping[str, str]


@dataclass(frozen=True)
class StudentReport:
    """The student.

    Attributes:
        facts: model, backend and limits.
        agreement: the sampler's log-probs of the rollouts against the trainer's.
        rollouts: rollouts sampled for this probe.
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
    """One step of the recipe, in seconds.

    Attributes:
        rollouts: of a step.
        tokens: rollout tokens of a step, by the mean length of the probe's rollouts.
        column: the recipe's own column of the scoring; None where the loss needs no teacher.
        sample_seconds: sampling.
        score_seconds: scoring in ``column``, the teachers one after the other.
        train_seconds: forward and backward of the student, without the optimizer.
        run_seconds: the sum of the three over all steps of the recipe, without evaluations.
    """

    rollouts: int
    tokens: float | None = None
    column: str | None = None
    sample_seconds: float | None = None
    score_seconds: float | None = None
    train_seconds: float | None = None
    run_seconds: float | None = None


@dataclass(frozen=True)
class ProbeReport:
    """Everything that ``prime-rl probe`` found.

    Attributes:
        passed: whether no check failed.
        checks: the preflight's in order, then the parts of a step.
        warnings: the preflight's.
        recommendations: what to change, one sentence each.
        step: forecast of a step; None where the models could not be opened.
        student: likewise.
        teachers: by table of the recipe.
    """

    passed: bool
    checks: Sequence[CheckResult]
    warnings: Sequence[str] = ()
    recommendations: Sequence[str] = ()
    step: StepForecast | None = None
    student: StudentReport | None = None
    teachers: Mapping[str, TeacherReport] = field(default_factory=dict)
