"""Measure one teacher on rollouts of the student: prompts, limits, speed, and a K."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from prime_composer.backends.hf_model import token_batches
from prime_composer.backends.protocols import (
    Scorer,
)
from prime_composer.contract import Scores, given
from prime_composer.divergences import entropy, reverse_kl
from prime_composer.local.probe.report import (
    NO_ROLLOUT,
    Attempts,
    HiddenByK,
    ModelFacts,
    NotMeasured,
    PluginReport,
    SupportFacts,
    SupportSize,
    TeacherReport,
    Throughput,
)
from prime_composer.local.tokenized_problems import TokenizedProblems
from prime_composer.recipe.teacher import TeacherPromptConfig
from prime_composer.step.batch import Batch, Sample, with_scores
from prime_composer.step.student_forward import student_inputs
from prime_composer.teachers.own_prompt import OwnPromptScorer, TeacherPrompts
from prime_composer.teachers.own_tokenizer import OwnTokenizerScorer
from prime_composer.teachers.server import ServerScorer

COLUMNS = (0, 1, 8, 20, 32, 64)
"""The values of K whose speed is measured, beside the recipe's own. A vLLM server gives at most 20
unless it was told otherwise."""

SLOW_JSON = 8  # From this K on, JSON is several times slower (scoring/README.md)

LARGEST_HIDDEN_SHARE = 0.05  # Share of the KL at the largest K that the recommended K may hide


@dataclass(frozen=True, eq=False)
class Target:
    """A teacher and the rollouts that it is measured on."""

    table: str  # of the recipe
    facts: ModelFacts  # what recipe and backend say; the rest is added by the probe
    scorer: Scorer | None  # None for a policy teacher
    samples: Sequence[Sample]  # rollouts of the student
    share: float  # share of the recipe's rollouts that it scores
    load_tokenizer: Callable[[], Any]  # returns its tokenizer; None where the directory has none

    def score(self, samples: Sequence[Sample], column: SupportSize) -> list[Scores]:
        """Return the teacher's answers to one column of the table of speeds."""
        rollouts, hidden = [sample.rollout for sample in samples], column == "states"
        return given(self.scorer).score(
            rollouts, 0 if column == "states" else column, hidden=hidden
        )

    @property
    def asked(self) -> Scorer | None:
        """The scorer that asks the teacher, in the teacher's tokens and with its prompts."""
        return self.scorer.scorer if isinstance(self.scorer, OwnPromptScorer) else self.scorer


def probe_teacher(
    target: Target,
    model: nn.Module,
    tokenized: TokenizedProblems,
    own: SupportSize,
    step_tokens: int,
    micro_batch_tokens: int,
    seconds: float,
) -> TeacherReport:
    """Measure a teacher on rollouts of the student, ``model``, each column for ``seconds``."""
    found = Attempts()
    columns = [*COLUMNS, own] if isinstance(own, str) else sorted({*COLUMNS, own})
    compared, support = None, None
    if not target.samples:
        found.unmeasured["scoring"] = NO_ROLLOUT
        columns = []
    throughput = [measure_column(found, target, k, seconds, step_tokens) for k in columns]
    accepted = [entry.column for entry in throughput if entry.refused is None]
    widest = max((int(k) for k in accepted if k.isdigit()), default=0)
    if accepted:
        compared = found.attempt(
            "support", lambda: both_models(target, model, widest, micro_batch_tokens)
        )
    if compared is not None:
        support = found.attempt("support", lambda: support_facts(*compared, columns))
    # Sums over tokens of a teacher with a tokenizer of its own show no rounding of its logits.
    by_sums = compared is None or isinstance(target.scorer, OwnTokenizerScorer)
    return TeacherReport(
        facts=replace(target.facts, largest_k=target.facts.largest_k or widest or None),
        same_prompts=found.attempt("prompts", lambda: equal_prompts(target, tokenized)),
        head_bfloat16=None if by_sums else is_bfloat16_like(given(compared)[1]),
        share=target.share,
        throughput=throughput,
        plugin=plugin_report(found, target.asked),
        support=support,
        wrong_answers=found.wrong_answers,
        unmeasured=found.unmeasured,
    )


def equal_prompts(target: Target, tokenized: TokenizedProblems) -> bool:
    """Return whether the teacher is sent what its own chat template writes, or without one what
    its tokenizer does."""
    tokenizer = target.load_tokenizer()
    if tokenizer is None:
        raise NotMeasured("its tokenizer is not on this machine")
    if not target.samples:
        raise NotMeasured(NO_ROLLOUT)
    if isinstance(target.scorer, OwnPromptScorer):
        raise NotMeasured("it reads prompts of its own")
    has_template = getattr(tokenizer, "chat_template", None) is not None
    chats = TeacherPromptConfig(chat_template=True if has_template else None)
    own = TeacherPrompts(tokenized.problem_set, tokenizer, tokenized.prompt, target.table, chats)
    problems = [sample.problem for sample in target.samples]
    return all(own.of(problem) == tokenized.prompt(problem) for problem in problems)


def measure_column(
    found: Attempts, target: Target, k: SupportSize, seconds: float, step_tokens: int
) -> Throughput:
    """Measure the speed at one K; a refusal is kept in ``found`` too."""
    name = f"K = {k}"
    speed = found.attempt(name, lambda: tokens_per_second(target, k, seconds))
    if speed is None:
        return Throughput(str(k), refused=found.unmeasured[name])
    return Throughput(str(k), speed, target.share * step_tokens / speed if step_tokens else None)


def tokens_per_second(target: Target, k: SupportSize, seconds: float) -> float:
    """Score 1, 2, 4, ... rollouts at K until a call takes ``seconds``, or it has all of them."""
    samples, count = target.samples, 1
    while True:
        start = time.perf_counter()
        target.score(samples[:count], k)
        elapsed = time.perf_counter() - start
        if elapsed >= seconds or count >= len(samples):
            return Batch(samples[:count]).tokens / elapsed
        count *= 2


def plugin_report(found: Attempts, scorer: Scorer | None) -> PluginReport | None:
    """Return what a teacher's server says of its plugin; None where it is no server."""
    if not isinstance(scorer, ServerScorer):
        return None
    client = found.attempt("scoring plugin", lambda: scorer.client)
    if "scoring plugin" in found.unmeasured:
        return None
    if client is None or client.facts is None:
        return PluginReport(None, None, None, [], None)

    def head() -> dict[str, Any]:
        facts = scorer.served_head().facts()
        names = ("rows", "columns", "dtype", "computed_in", "sha256")
        return {name: getattr(facts, name) for name in names}

    return PluginReport(
        version=client.version,
        vllm=client.facts.vllm,
        runner=client.facts.runner,
        kinds=client.facts.kinds,
        head=found.attempt("output head", head),
    )


@torch.no_grad()
def both_models(
    target: Target, model: nn.Module, k: int, micro_batch_tokens: int
) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n k"]]:
    """Return log p and log q of the teacher's K ids at every token of some rollouts, [n, k].

    The ids are the teacher's most probable ones, in their order.
    """
    if not k:
        raise NotMeasured("the teacher gives no log-probs beside the sampled token's")
    scores = target.score(target.samples, k)
    scored = [
        with_scores(Sample(sample.rollout, sample.problem), own)
        for sample, own in zip(target.samples, scores, strict=True)
    ]
    samples = [sample for sample in scored if sample is not None]
    if not samples:
        raise NotMeasured("the teacher has a score of no token of the rollouts")
    parts = []
    for indices in token_batches([sample.length for sample in samples], micro_batch_tokens):
        inputs = student_inputs(model, [samples[index] for index in indices])
        support = given(inputs.support).masked(inputs.loss_mask)
        parts.append((support.student_logprobs, support.teacher_logprobs))
    student, teacher = (torch.cat(columns).cpu() for columns in zip(*parts, strict=True))
    return student, teacher


def support_facts(
    student: Float[Tensor, "n k"], teacher: Float[Tensor, "n k"], columns: Sequence[SupportSize]
) -> SupportFacts:
    """Return what smaller supports hide of the measured one, and the smallest that hides little."""
    student, teacher = student.double(), teacher.double()
    largest = teacher.shape[1]
    sizes = {k for k in columns if isinstance(k, int) and 0 < k <= largest} | {largest}

    def hides_little(k: int) -> bool:
        return hidden_by_k(student, teacher, k).hidden <= LARGEST_HIDDEN_SHARE

    return SupportFacts(
        positions=len(teacher),
        largest_k=largest,
        entropy=float(entropy(teacher, normalization="tail").mean()),
        by_k=[hidden_by_k(student, teacher, k) for k in sorted(sizes)],
        # The KL never falls with K, so that bisection finds the smallest one.
        recommended_k=1 + bisect_left(range(1, largest), True, key=hides_little),
    )


def hidden_by_k(
    student: Float[Tensor, "n k_max"], teacher: Float[Tensor, "n k_max"], k: int
) -> HiddenByK:
    """Return what the teacher's top K hides of KL(p || q), the most probable ids first."""
    measured, largest = (
        float(reverse_kl(student[:, :size], teacher[:, :size], normalization="tail").mean())
        for size in (k, teacher.shape[1])
    )
    outside = 1 - teacher[:, :k].exp().sum(dim=-1)
    return HiddenByK(
        k=k,
        mass_outside=float(outside.clamp(min=0).mean()),
        reverse_kl=measured,
        hidden=max(0.0, 1 - measured / largest) if largest > 0 else 0.0,
    )


def is_bfloat16_like(teacher: Float[Tensor, "n k"]) -> bool:
    """Return whether log q, most probable first, shows logits that were rounded to bfloat16.

    Differences of log-probs are those of the logits: multiples of 2^-9 if these were rounded. A
    float16 head shows the same where its top logits are 2 and more.
    """
    # The bfloat16 numbers of 0.25 and more are multiples of the grid. A float32 log-softmax above
    # -32 rounds by less than the tolerance. The largest logits have the coarsest spacing.
    grid, tolerance = 2.0**-9, 2.0**-18
    top = teacher[:, :4].double()
    differences = top[:, :1] - top[:, 1:]
    counted = differences[(top[:, 1:] > -30) & (differences > tolerance)]
    on_grid = (counted - (counted / grid).round() * grid).abs() <= tolerance
    # Of a float32 head 0.004 of them are there by chance; a few differences prove nothing.
    return len(counted) >= 20 and float(on_grid.double().mean()) >= 0.9


def recommendations(own: SupportSize, teacher: TeacherReport) -> Iterator[str]:
    """Yield what to change in recipe or server for a teacher, one sentence each."""
    facts, plugin = teacher.facts, teacher.plugin
    if teacher.support is not None:
        yield advice_on_k(own, teacher.support)
    if teacher.same_prompts is False:
        yield (
            "its own template writes other prompts, and it is sent the student's: for a chat model "
            "set prompt.chat_template = true."
        )
    if teacher.head_bfloat16:
        remedy = 'set its dtype to "float32"'
        if facts.url is not None:
            remedy = 'start its server with --hf-overrides \'{"head_dtype": "float32"}\''
        yield f"its logits are rounded to bfloat16, up to 0.06 nat each; {remedy} for exact ones."
    slow = isinstance(own, str) or own >= SLOW_JSON
    if plugin is not None and plugin.version is None and slow:
        yield (
            f"its server has no scoring plugin and answers K = {own} in JSON, several times slower "
            f"than in binary; start it with `prime-rl teacher --model {facts.model}`."
        )


def advice_on_k(own: SupportSize, support: SupportFacts) -> str:
    """Return the recommended K, compared with the recipe's."""
    best, largest = support.recommended_k, support.largest_k
    reason = f"its tail hides at most 5 % of the reverse KL at K = {largest}"
    if not isinstance(own, int) or own == 0:
        return f"a loss on the teacher's top K needs K = {best}: {reason}."
    hidden = next((entry.hidden for entry in support.by_k if entry.k == own), None)
    if hidden is None:
        return f"it was not asked for the recipe's k = {own}; K = {best} is enough: {reason}."
    hides = f"the recipe's k = {own} hides {hidden:.0%} of the reverse KL at K = {largest}"
    if own < best:
        return f"{hides}; set the loss's k to {best}: {reason}."
    return f"{hides}; K = {best} is enough: {reason}."
