"""What ``prime-rl probe`` measures: plain records, whose fields are the keys of ``--json``.

None is a value that was not measured. ``unmeasured`` says why, by the name of the measurement.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from prime_composer.backends.answers import InvalidAnswer
from prime_composer.local.preflight import CheckResult, one_line

SupportSize = int | Literal["full", "states"]  # K ids, the whole vocabulary, or hidden states

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
class ModelFacts:
    """A model and what answers for it."""

    model: str  # directory, hub id or served name
    backend: str
    dtype: str | None  # by the recipe, or else by the plugin
    url: str | None = None  # without a password; None of a model in this process
    context: int | None = None  # longest sequence in tokens
    vocabulary: int | None = None  # entries of the output head
    largest_k: int | None = None  # that scoring accepts, or that it accepted of the table's


@dataclass(frozen=True)
class Throughput:
    """Speed of scoring in one column: a number K, "full" for the whole vocabulary, or "states".

    The tokens are without prompts. The seconds are for the teacher's share of a step.
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
    """What a teacher's server says of its scoring plugin."""

    version: int | None
    vllm: str | None
    runner: str | None  # of vLLM's model runners
    kinds: Sequence[str]
    head: Mapping[str, Any] | None


@dataclass(frozen=True)
class TeacherReport:
    """A teacher of a recipe, or a server that is measured without one."""

    facts: ModelFacts
    head_bfloat16: bool | None  # its log-probs show logits rounded to bfloat16
    plugin: PluginReport | None  # None for a teacher that is no server
    throughput: Sequence[Throughput]  # by column
    wrong_answers: Sequence[str]  # that no model can have given
    unmeasured: Mapping[str, str]  # reasons by measurement
    # of a recipe's
    same_prompts: bool | None = None  # its own template writes the same prompts
    share: float | None = None  # of the step's rollouts that it scores
    support: SupportFacts | None = None  # what a top K hides
    # of a server without a recipe
    head_dtype: str | None = None  # of the logits, as the plugin says
    max_logprobs: int | None = None  # largest K in JSON; the plugin has no limit
    sampled_logprob: float | None = None  # mean of some tokens, in nats, where it sampled them
    scored_logprob: float | None = None  # and where it scored them


@dataclass(frozen=True)
class StudentReport:
    facts: ModelFacts
    tokens_per_second: float | None  # of sampling


@dataclass(frozen=True)
class StepForecast:
    """One step of the recipe, as it was measured.

    The seconds of training are without the optimizer. ``run_seconds`` are without evaluations.
    """

    rollouts: int
    tokens: int | None
    column: str | None
    sample_seconds: float | None
    score_seconds: float | None
    train_seconds: float | None
    run_seconds: float | None
    metrics: Mapping[str, float]  # of the step, as far as it came, by their names in metrics.jsonl


@dataclass(frozen=True)
class ProbeReport:
    """Everything that ``prime-rl probe`` found."""

    findings: Sequence[CheckResult]  # the preflight's in order, then those about a step
    recommendations: Sequence[str] = ()
    # None where the models could not be opened, or without a recipe
    step: StepForecast | None = None
    student: StudentReport | None = None
    # by table of the recipe
    teachers: Mapping[str, TeacherReport] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(finding.state != "failed" for finding in self.findings)

    @property
    def warnings(self) -> list[str]:
        """What is legal but worth knowing."""
        return [finding.text for finding in self.findings if finding.state == "warning"]
