"""Check before the first step that the parts of a recipe fit together.

Every failure is a ``PreflightError`` of one or two sentences that ends with the remedy. What is
legal but worth knowing is returned as a warning. Three of these mistakes raise no error anywhere
else: two vocabularies of the same size with different tokens, an engine that keeps an old head
where embeddings are tied, and an engine that reuses key-value entries of old weights.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from prime_composer.backends.hf_model import (
    ModelUnavailable,
    hidden_states,
    lm_head_weight,
    load_tokenizer,
    sequence_logprobs,
)
from prime_composer.backends.mixture import gives_any_ids
from prime_composer.backends.protocols import (
    Limits,
    Rollout,
    Sampler,
    SamplingParams,
    Scorer,
    TeacherScores,
)
from prime_composer.backends.self_teacher import PolicyTeacher
from prime_composer.lm_head import selected_logprobs
from prime_composer.local.engine import BackendSpec, Engine, alien_id
from prime_composer.local.overflow import Rule
from prime_composer.local.tokenized_problems import TokenizedProblems
from prime_composer.problems.config import Problem
from prime_composer.problems.loading import ProblemSet
from prime_composer.recipe.routing import REFERENCE, Routing, TeacherId
from prime_composer.recipe.schema import Recipe, RolloutConfig
from prime_composer.scoring.shared_vocabulary import LOG_FLOOR, MOST_PADDING

PROBES = (
    "Natalia sold 48/2 = 24 clips in May.\nShe has $1,234.50 left.\n#### 72",
    "  def f(x):\n\treturn {'a': [x, -1e-5]}  # ok",
    "Größe, naïve, 東京, Привет, 👍🏽",
)
"""Numbers, white space and byte-level characters: where tokenizers of one family differ."""

SAMPLED_IDS = 256
"""Ids of the vocabulary that a teacher's server is asked to write as text."""

TOLERANCES = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.5}
"""Largest difference in nats between the engine's and the trainer's log-prob of one token, by
dtype. Of a sampler in half precision it is the mean over the tokens of a completion.

float32 engines agree to 5e-6 in practice. Rounding weights and activations to bfloat16 moves a
log-prob by 0.06 to 0.09 at random, and more for an improbable token. The stale weights that the
check plants on purpose move it by several nats.
"""

PROBE_TOKENS = 8
PROBE_PROMPT_TOKENS = 144
"""Longer than the largest block of vLLM's prefix cache (128 tokens on a CPU): a stale block is
reused."""


WEIGHT_SYNC = "weight sync"
"""Name of the check that sends perturbed weights to the sampler."""

NO_LIMITS = Limits()


class PreflightError(ValueError):
    """The recipe's parts do not fit together. The message names the remedy."""


@dataclass(frozen=True, eq=False)
class Probe:
    """A short rollout, and a teacher's scores of it.

    Attributes:
        rollout: what was scored.
        scores: the teacher's.
    """

    rollout: Rollout
    scores: TeacherScores


@dataclass
class Preflight:
    """Result of the checks.

    Attributes:
        warnings: what is legal but worth knowing.
        sampler_trainer_difference: largest difference between the sampler's and the trainer's
            log-prob of a token, before and after weight syncs, in nats.
        probes: what each teacher was asked, and its answer. A teacher without problems has none.
    """

    warnings: list[str] = field(default_factory=list)
    sampler_trainer_difference: float = 0.0
    probes: dict[TeacherId, Probe] = field(default_factory=dict)


def preflight(engine: Engine, recipe: Recipe, status: Callable[[str], None]) -> Preflight:
    """Run every check, the cheap ones first.

    The weights of student and sampler are the same afterwards as before.

    Args:
        engine: the open models.
        recipe: the recipe that they were opened from.
        status: callback for warnings and the result.

    Raises:
        PreflightError: a check failed. Of several teachers the message names the one that it is
            about.
    """
    result = Preflight()
    for check in preflight_checks(engine, recipe, result).values():
        check()
    for warning in result.warnings:
        status(f"warning: {warning}")
    status(
        "preflight passed: after a weight sync, sampler and trainer differ by "
        f"{result.sampler_trainer_difference:.1e} nat per token"
    )
    return result


def preflight_checks(
    engine: Engine, recipe: Recipe, result: Preflight
) -> dict[str, Callable[[], None]]:
    """Return every check by name, the cheap ones first. ``prime-rl probe`` runs them one by one.

    Args:
        engine: the open models.
        recipe: the recipe that they were opened from.
        result: receives the warnings, the difference that ``WEIGHT_SYNC`` measures, and the
            probes.

    Returns:
        Functions that raise a ``PreflightError`` where the check fails.
    """
    tokenized, problems = engine.problems, engine.problems.problem_set.practice
    max_tokens = recipe.rollout.max_tokens
    scorers = {} if engine.teachers is None else engine.teachers.scorers
    routing = Routing.of_recipe(recipe)
    scored_problems = {} if engine.teachers is None else route(routing, problems)

    def prompts() -> list[list[int]]:
        return [tokenized.prompt(problem) for problem in problems]

    def context() -> None:
        if engine.policy_teacher is not None and engine.policy_overflow == "error":
            config: Any = engine.model.config
            positions = config.get_text_config().max_position_embeddings
            check_hinted_prompts(engine.policy_teacher, problems, recipe.rollout, positions)
        check_context(prompts(), max_tokens, engine.sampler.limits)

    def vocabulary(teacher: TeacherId, scorer: Scorer) -> None:
        with naming(teacher, among=scorers):
            limits = binding(scorer.limits, routing.teachers[teacher].on_overflow)
            check_lengths(tokenized, scored_problems[teacher], recipe.rollout, limits, teacher)
            teacher_tokenizer = tokenizer_of(engine.teacher_specs[teacher])
            if teacher_tokenizer is not None:
                result.warnings += check_tokenizers(tokenized.tokenizer, teacher_tokenizer)
            was_asked = check_served_tokenizer(tokenized.tokenizer, scorer)
            if teacher_tokenizer is None and not was_asked:
                not_compared = (
                    "The teacher's tokenizer could not be loaded, so its token ids were not "
                    "compared with the student's"
                )
                remedy = f"set {teacher.table}.model to its directory or hub id"
                if recipe.rollout.teacher_samples and teacher != REFERENCE:
                    raise PreflightError(
                        f"{not_compared}, and rollout.other_source = 'teacher' trains on them; "
                        f"{remedy}, or start its server with its tokenizer."
                    )
                result.warnings.append(f"{not_compared}; {remedy}.")
            result.warnings += check_vocabularies(
                engine.vocab_size,
                scorer.limits,
                len(tokenized.tokenizer),
                recipe.loss.asked_of_teacher[0],
            )
            if recipe.eval.kl_size and recipe.eval.kl_support == "full":
                check_whole_kl(engine.vocab_size, scorer)

    def sampling() -> None:
        result.warnings += sampling_warnings(recipe.rollout)

    def weight_sync() -> None:
        result.sampler_trainer_difference = check_weight_sync(
            engine.sampler, engine.model, prompts(), recipe.trainer.dtype
        )

    def scores(teacher: TeacherId, scorer: Scorer) -> None:
        # Within the run's own budget, which check_context has compared with the teachers' contexts.
        probe = SamplingParams(max_tokens=min(PROBE_TOKENS, max_tokens))
        with naming(teacher, among=scorers):
            if isinstance(scorer, LimitedServer):
                size, by_student = engine.loss.asked_of_teacher
                scorer.check_room(max_tokens, size, by_student, engine.reads_hidden_states)
            for problem in scored_problems[teacher][:1]:
                (rollout,) = engine.sampler.generate([tokenized.prompt(problem)], probe, seed=0)
                (scores,) = scorer.score(
                    [rollout], recipe.loss.support_size, hidden=engine.reads_hidden_states
                )
                check_ids(scores, engine.vocab_size)
                result.probes[teacher] = Probe(rollout, scores)

    return {
        "objective": partial(check_objective, recipe),
        "context": context,
        **{
            f"[{teacher.table}] tokenizer, vocabulary, context": partial(
                vocabulary, teacher, scorer
            )
            for teacher, scorer in scorers.items()
        },
        "sampling": sampling,
        WEIGHT_SYNC: weight_sync,
        **{
            f"[{teacher.table}] scores": partial(scores, teacher, scorer)
            for teacher, scorer in scorers.items()
        },
    }


def route(routing: Routing, problems: Sequence[Problem]) -> dict[TeacherId, list[Problem]]:
    """Return the problems whose rollouts each teacher scores."""
    readers = [(problem, routing.readers(problem)) for problem in problems]
    return {
        teacher: [problem for problem, scored_by in readers if teacher in scored_by]
        for teacher in routing.teachers
    }


@contextmanager
def naming(teacher: TeacherId, among: Mapping[TeacherId, object]) -> Iterator[None]:
    """Put the teacher's table in front of an error where the recipe has several teachers."""
    try:
        yield
    except PreflightError as error:
        if len(among) == 1:
            raise
        raise PreflightError(f"[{teacher.table}]: {error}") from None


def check_routing(recipe: Recipe, problems: ProblemSet) -> None:
    """Refuse a row of the data that names a teacher which the recipe does not have.

    Raises:
        RecipeError: it does.
    """
    routing = Routing.of_recipe(recipe)
    for problem in [*problems.practice, *problems.held_out]:
        routing.of(problem)


def check_objective(recipe: Recipe) -> None:
    """Refuse cross-entropy on the student's own samples: its expected gradient is 0.

    Raises:
        PreflightError: a loss of the recipe is ``sft``, and all sequences are sampled.
    """
    for section, (loss, _) in recipe.loss.needs_by_section().items():
        if loss == "sft" and recipe.rollout.student_fraction == 1:
            raise PreflightError(
                f"[{section}] type = 'sft' on the student's own samples has an expected gradient "
                "of 0, since nothing tells a good sample from a bad one; set "
                "rollout.student_fraction = 0 to train on the data's solutions, or with "
                "rollout.other_source = 'teacher' on the teacher's answers."
            )


def check_hinted_prompts(
    policy: PolicyTeacher, problems: Sequence[Problem], config: RolloutConfig, positions: int
) -> None:
    """Check that the longest prompt with its hint and a full response fit the context.

    Args:
        policy: writes the prompts.
        problems: the problems to train on.
        config: the recipe's ``[rollout]``.
        positions: longest sequence that the student can read.

    Raises:
        PreflightError: they do not.
    """
    max_tokens, limit = config.max_tokens, config.max_model_len
    if policy.config.hint == "sibling":  # a rollout's text, which may take all of max_tokens
        hinted = max(len(policy.prompt(problem, "")) for problem in problems) + max_tokens
    else:
        hinted = max(len(policy.best_prompt(problem)) for problem in problems)
    attempt = max_tokens if "{attempt}" in policy.config.text else 0
    needed = hinted + attempt + max_tokens
    lengths = (
        f"The longest prompt with its hint has {hinted} tokens, with attempt and response up to "
        f"{needed}"
    )
    if needed > limit:
        raise PreflightError(
            f"{lengths}; raise rollout.max_model_len from {limit} to {needed}, or shorten the "
            "hint's template."
        )
    if needed > positions:
        raise PreflightError(
            f"{lengths}, and the student has only {positions} positions; shorten the hint's "
            "template, or lower rollout.max_tokens."
        )


def binding(limits: Limits, rule: Rule) -> Limits:
    """Return the limits that rollouts have to keep: a longer one may be cut or dropped.

    Args:
        limits: the teacher's.
        rule: its ``on_overflow``.
    """
    return limits if rule == "error" else replace(limits, max_model_len=None)


def check_lengths(
    tokenized: TokenizedProblems,
    problems: Sequence[Problem],
    config: RolloutConfig,
    limits: Limits,
    teacher: TeacherId,
) -> None:
    """Check that prompts and completions, or the data's solutions, fit a teacher's context.

    Args:
        tokenized: writes prompts and solutions.
        problems: the problems whose rollouts the teacher scores; nothing is checked without any.
        config: the recipe's ``[rollout]``.
        limits: the teacher's.
        teacher: named in messages.

    Raises:
        PreflightError: the longest sequence does not fit.
    """
    if not problems:
        return
    limit = limits.max_model_len
    if config.student_fraction < 1 and not config.teacher_samples and limit is not None:
        longest = max(len(tokenized.solution(problem).token_ids) for problem in problems)
        if longest >= limit:
            raise PreflightError(
                f"The longest solution of the data has {longest} tokens with its prompt, and the "
                f"{teacher.display} takes {limit - 1}; raise rollout.max_model_len (a server's "
                f"--max-model-len) to {longest + 1}, set rollout.student_fraction = 1, or leave "
                "such problems out of the data."
            )
    prompts = [tokenized.prompt(problem) for problem in problems]
    check_context(prompts, config.max_tokens, scorer=limits)


def tokenizer_hash(tokenizer: Any) -> str:
    """Return a fingerprint of the vocabulary: every token with its id, added ones included."""
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{token}\0{index}\n".encode())
    return digest.hexdigest()[:12]


def check_tokenizers(student: Any, teacher: Any) -> list[str]:
    """Check that both have the same tokens with the same ids, and split the same text equally.

    Returns:
        A warning where they end a text with different tokens.

    Raises:
        PreflightError: they differ; the message names the first difference.
    """
    remedy = "choose a teacher and a student with one tokenizer"
    student_vocab, teacher_vocab = student.get_vocab(), teacher.get_vocab()
    for token in sorted({*special_tokens(student), *special_tokens(teacher)}):
        student_id, teacher_id = student_vocab.get(token), teacher_vocab.get(token)
        if student_id != teacher_id:
            raise PreflightError(
                f"The special token {token!r} has id {student_id} for the student and {teacher_id} "
                f"for the teacher (None: it has no such token); {remedy}."
            )
    student_hash, teacher_hash = tokenizer_hash(student), tokenizer_hash(teacher)
    if student_hash != teacher_hash:
        token = min({*student_vocab.items()} ^ {*teacher_vocab.items()})[0]
        raise PreflightError(
            f"Student and teacher have different vocabularies ({len(student_vocab)} tokens, hash "
            f"{student_hash}, against {len(teacher_vocab)}, {teacher_hash}; for example {token!r} "
            f"is {student_vocab.get(token)} and {teacher_vocab.get(token)}); {remedy}."
        )
    for text in PROBES:
        student_ids, teacher_ids = (
            tokenizer.encode(text, add_special_tokens=False) for tokenizer in (student, teacher)
        )
        if student_ids != teacher_ids:
            raise PreflightError(
                f"Student and teacher split {text!r} into {len(student_ids)} and "
                f"{len(teacher_ids)} tokens that differ although their vocabularies are equal "
                f"(merges or pre-tokenizer); {remedy}."
            )
    if student.eos_token_id != teacher.eos_token_id:
        return [
            f"The student ends a text with {student.eos_token!r} and the teacher with "
            f"{teacher.eos_token!r}: the teacher finds the student's ending improbable, so mask "
            "special tokens in the loss or align the EOS."
        ]
    return []


@runtime_checkable
class TokenServer(Protocol):
    """A scorer that can be asked how its server's tokenizer reads and writes."""

    def tokenize(self, text: str) -> list[int] | None:
        """Return the ids of a text without special tokens around it; None: it cannot be asked."""
        ...

    def detokenize(self, ids: list[int]) -> str | None:
        """Return the text of ids; None: it cannot be asked."""
        ...


@runtime_checkable
class LimitedServer(Protocol):
    """A scorer whose server limits the size of an answer."""

    def check_room(
        self, tokens: int, support_size: int | Literal["full"], by_student: bool, hidden: bool
    ) -> None:
        """Check that the server answers for a rollout with so many tokens of its own."""
        ...


def tokenizer_of(spec: BackendSpec) -> Any | None:
    """Return a teacher's tokenizer; None where neither it nor a server's model is here."""
    try:
        return load_tokenizer(spec.model)
    except ModelUnavailable:
        if spec.backend != "server":
            raise
        return None  # the server's name for a model that is on another machine


def check_served_tokenizer(student: Any, scorer: Scorer) -> bool:
    """Compare the student's tokenizer with the one of a teacher's server.

    Args:
        student: the student's tokenizer.
        scorer: the teacher's.

    Returns:
        Whether the server could be asked.

    Raises:
        PreflightError: they differ.
    """
    if not isinstance(scorer, TokenServer):
        return False
    was_asked = False
    remedy = "choose a teacher and a student with one tokenizer"
    for text in PROBES:
        served = scorer.tokenize(text)
        if served is None:
            break
        was_asked = True
        own = student.encode(text, add_special_tokens=False)
        if served != own:
            pairs = enumerate(zip_longest(own, served))
            position, (a, b) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
            raise PreflightError(
                f"The teacher's server reads {text!r} as other tokens than the student: token "
                f"{position} is {b}, and the student's {a} (None: the text has ended); {remedy}."
            )
    ids = sampled_ids(student)
    served_text = scorer.detokenize(ids)
    if served_text is None:
        return was_asked
    if served_text != student.decode(ids):
        different = (i for i in ids if scorer.detokenize([i]) != student.decode([i]))
        token = next(different, None)
        example = "" if token is None else f", for example {token}, {student.decode([token])!r}"
        raise PreflightError(
            f"Some ids are other tokens for the teacher's server than for the student{example}; "
            f"{remedy}."
        )
    return True


def sampled_ids(tokenizer: Any) -> list[int]:
    """Return ids from the whole vocabulary, ``SAMPLED_IDS`` at least, and all special tokens."""
    size = len(tokenizer)
    special = tokenizer.convert_tokens_to_ids(special_tokens(tokenizer))
    return sorted({*range(0, size, max(1, size // SAMPLED_IDS)), size - 1, *special})


def special_tokens(tokenizer: Any) -> list[str]:
    """Return BOS, EOS, padding and added tokens."""
    return [*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()]


def check_vocabularies(
    vocab_size: int, limits: Limits, tokens: int, support_size: int | Literal["full"]
) -> list[str]:
    """Compare head sizes with the tokenizer and each other, and K with both heads' limits.

    Args:
        vocab_size: entries of the student's head.
        limits: the teacher's.
        tokens: tokens of the tokenizer.
        support_size: K.

    Returns:
        A warning where the heads differ in padding.

    Raises:
        PreflightError: an id of one side is out of the other's range, or K is too large.
    """
    teacher_size = limits.vocab_size
    if tokens > vocab_size:
        raise PreflightError(
            f"The tokenizer has {tokens} tokens and the student's head {vocab_size} entries; "
            "resize its embeddings."
        )
    if teacher_size is not None and tokens > teacher_size:
        raise PreflightError(
            f"The tokenizer has {tokens} tokens and the teacher's head {teacher_size} entries; "
            "choose a teacher with the student's tokenizer."
        )
    smallest = vocab_size if teacher_size is None else min(vocab_size, teacher_size)
    if support_size != "full" and support_size > smallest:
        raise PreflightError(
            f"The loss asks for K = {support_size} and the vocabulary has {smallest} entries; set "
            "k to "
            'at most that, or to "full".'
        )
    warnings = []
    if teacher_size is not None and teacher_size != vocab_size:
        if support_size == "full":
            raise PreflightError(
                "A loss on a support of the whole vocabulary needs heads of one size, and the "
                f"student's has {vocab_size} entries and the teacher's {teacher_size} (padding "
                f"beyond the tokenizer's {tokens}); use a top-K loss, or pad the smaller one."
            )
        warning = (
            f"The student's head has {vocab_size} entries and the teacher's {teacher_size} for "
            f"{tokens} tokens: the rest is padding. Ids from {smallest} on belong to the tail on "
            "both sides."
        )
        if vocab_size > teacher_size:
            warning += (
                " Where the student samples one of them, the teacher's log-prob of it counts as "
                f"{LOG_FLOOR:.1f}, and the teacher reads id {teacher_size - 1} in its place."
            )
        warnings.append(warning)
    k = teacher_size if support_size == "full" else support_size
    if limits.max_logprobs is not None and k is not None and k > limits.max_logprobs:
        raise PreflightError(
            f"The loss asks for K = {k} teacher log-probs per token and the teacher answers at "
            f"most {limits.max_logprobs}; start its server with --max-logprobs {k}, or set the "
            f"loss's k to {limits.max_logprobs}."
        )
    return warnings


def check_whole_kl(vocab_size: int, scorer: Scorer) -> None:
    """Check that a KL over all ids can be measured.

    Args:
        vocab_size: entries of the student's head.
        scorer: the teacher's.

    Raises:
        PreflightError: the heads have different sizes, and the server gives no hidden states.
    """
    size = scorer.limits.vocab_size
    if size not in (None, vocab_size) and not gives_any_ids(scorer):
        raise PreflightError(
            f"eval.kl_support = 'full' with a student's head of {vocab_size} entries and a "
            f"teacher's of {size} compares hidden states, which the teacher's server gives with "
            "the scoring plugin: start it with prime-rl teacher, or set eval.kl_support to a "
            "number."
        )


def check_context(
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampler: Limits = NO_LIMITS,
    scorer: Limits = NO_LIMITS,
) -> None:
    """Check that the longest prompt and a full completion fit the contexts of sampler and scorer.

    Raises:
        PreflightError: they do not, or a prompt is empty. A teacher on vLLM reads one token less
            than its context.
    """
    if not prompts:
        raise PreflightError("There is no prompt to sample from; check [data].")
    if min(len(ids) for ids in prompts) == 0:
        raise PreflightError(
            "One of the prompts has no tokens; check the data and the prompt template in [data]."
        )
    longest = max(len(ids) for ids in prompts)
    needed = longest + max_tokens
    for name, limit, reserved in (
        ("student's sampler", sampler.max_model_len, 0),
        ("teacher's scorer", scorer.max_model_len, 1),
    ):
        if limit is not None and needed > limit - reserved:
            raise PreflightError(
                f"The longest prompt has {longest} tokens, with {max_tokens} new ones that is "
                f"{needed}, and the {name} takes {limit - reserved}; raise rollout.max_model_len "
                f"(a server's --max-model-len) to {needed + reserved}, or lower rollout.max_tokens."
            )


def sampling_warnings(config: RolloutConfig) -> list[str]:
    """Return what a temperature or a nucleus means for the losses."""
    warnings = []
    if config.temperature != 1:
        warnings.append(
            f"rollout.temperature is {config.temperature}: mu is the tempered distribution, while "
            "the loss's student and teacher log-probs are those at temperature 1."
        )
    if config.top_p < 1:
        warnings.append(
            f"rollout.top_p is {config.top_p}: mu is renormalized over the nucleus, so the ratio "
            "p/mu is below 1 inside it, and tokens outside are never sampled."
        )
    return warnings


def check_loaded_weights(
    sampler: Sampler,
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    engine_dtype: str = "float32",
) -> float:
    """Compare the sampler's and the trainer's log-probs as loaded. The sampler's weights stay.

    Arguments and errors are those of ``check_weight_sync``.

    Returns:
        The largest difference of a token's log-prob, in nats.
    """
    limit = TOLERANCES[engine_dtype]
    probe = probe_prompt(prompts, sampler.limits.max_model_len)
    as_loaded = sync_difference(sampler, model, probe, engine_dtype)
    if not as_loaded <= limit:
        raise PreflightError(
            f"Sampler and trainer disagree by {as_loaded:.2g} nat on the same tokens before any "
            f"training (at most {limit} in {engine_dtype}); make both load the same weights, and "
            "let the sampler return processed log-probs."
        )
    return as_loaded


def check_weight_sync(
    sampler: Sampler,
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    engine_dtype: str = "float32",
) -> float:
    """Compare the sampler's and the trainer's log-probs as loaded, after a sync, and after another.

    The first sync sends weights that were changed by about 20%: right after loading, an engine that
    keeps old weights would agree. The second one sends the original weights again. The prompt is
    long and the same each time, so that stale key-value entries would be reused.

    Args:
        sampler: the student's.
        model: the student; its weights are the same afterwards as before.
        prompts: prompts of the run.
        engine_dtype: the sampler's dtype, which sets the tolerance.

    Returns:
        The largest difference of a token's log-prob, in nats.

    Raises:
        PreflightError: it is above the tolerance; the message says which weights or cache are
            stale.
    """
    as_loaded = check_loaded_weights(sampler, model, prompts, engine_dtype)
    limit = TOLERANCES[engine_dtype]
    probe = probe_prompt(prompts, sampler.limits.max_model_len)
    old_head = lm_head_weight(model).detach().clone()
    with perturbed(model):
        sampler.update_weights(model)
        changed = sync_difference(sampler, model, probe, engine_dtype)
        reason = (
            None if changed <= limit else stale_part(sampler, model, probe, old_head, engine_dtype)
        )
    sampler.update_weights(model)
    if reason is not None:
        raise PreflightError(
            f"After a weight sync sampler and trainer disagree by {changed:.2g} nat (at most "
            f"{limit} in {engine_dtype}): {reason}."
        )
    restored = sync_difference(sampler, model, probe, engine_dtype)
    if not restored <= limit:
        raise PreflightError(
            f"After a second weight sync sampler and trainer disagree by {restored:.2g} nat (at "
            f"most {limit} in {engine_dtype}): update_weights works only once, so reload every "
            "weight and reset the prefix cache each time."
        )
    return max(as_loaded, changed, restored)


def check_ids(scores: TeacherScores, vocab_size: int) -> None:
    """Check that the ids of a teacher's support are the student's, or padding beyond them.

    That the scores are log-probs of distinct ids of the teacher's own head is checked where they
    are made (``backends.answers``).

    Raises:
        PreflightError: one is not.
    """
    alien = alien_id(scores, vocab_size)
    if alien is not None:
        raise PreflightError(
            f"The teacher puts id {alien} into the support and the student's head has "
            f"{vocab_size} entries, of which padding explains at most {MOST_PADDING} more; choose "
            "a teacher with the student's vocabulary."
        )


def probe_prompt(prompts: Sequence[Sequence[int]], max_model_len: int | None) -> list[int]:
    """Return tokens of the run's prompts, one prompt after the other, up to the probe's length."""
    length = PROBE_PROMPT_TOKENS
    if max_model_len is not None:
        length = min(length, max_model_len - PROBE_TOKENS - 1)
    tokens = [token for ids in prompts[:PROBE_PROMPT_TOKENS] for token in ids]
    return (tokens * (length // len(tokens) + 1))[: max(length, 1)]


def rotated(probe: list[int], vocab_size: int) -> list[int]:
    """Return a prompt of the same tokens, of which no prefix is in a cache of the probe's."""
    if len({*probe}) == 1:
        return [(probe[0] + 1) % vocab_size, *probe[1:]]
    return probe[1:] + probe[:1]


def sync_difference(
    sampler: Sampler, model: nn.Module, prompt: list[int], engine_dtype: str
) -> float:
    """Return ``distance`` between sampler's and model's log-probs of sampled tokens, in nats."""
    (rollout,) = sampler.generate([prompt], SamplingParams(max_tokens=PROBE_TOKENS), seed=0)
    (expected,) = sequence_logprobs(model, [rollout.token_ids.tolist()])
    return distance((rollout.inference_logprobs - expected)[rollout.loss_mask], engine_dtype)


def distance(differences: torch.Tensor, engine_dtype: str) -> float:
    """Return the largest absolute value in float32, and the mean in half precision.

    Half precision moves single log-probs of trained weights by 0.7 nat, and stale weights move all.
    """
    sizes = differences.abs()
    return float(sizes.max() if engine_dtype == "float32" else sizes.mean())


def stale_part(
    sampler: Sampler, model: nn.Module, probe: list[int], old_head: torch.Tensor, engine_dtype: str
) -> str:
    """Return which part of the sampler kept old values, and the remedy."""
    limit = TOLERANCES[engine_dtype]
    uncached = rotated(probe, old_head.shape[0])
    if sync_difference(sampler, model, uncached, engine_dtype) <= limit:
        return (
            "it reuses cached prefixes of the old weights, "
            "so reset its prefix cache after every sync"
        )
    (rollout,) = sampler.generate([uncached], SamplingParams(max_tokens=PROBE_TOKENS), seed=0)
    with torch.no_grad():
        ids = rollout.token_ids.to(old_head.device).unsqueeze(0)
        hidden = hidden_states(model, ids, torch.ones_like(ids))[0, :-1]
        with_old_head = selected_logprobs(hidden, old_head, ids[0, 1:, None])[:, 0].float().cpu()
    difference = (rollout.inference_logprobs[1:] - with_old_head)[rollout.loss_mask[1:]]
    if distance(difference, engine_dtype) <= limit:
        return (
            "it kept the old lm_head, which is tied to the embeddings, so send "
            "state_dict().items(), which lists lm_head.weight, and not named_parameters()"
        )
    return (
        "it kept old weights, so check that every weight reaches the engine under the name that "
        "its checkpoint uses"
    )


@contextmanager
def perturbed(model: nn.Module) -> Iterator[None]:
    """Multiply every floating-point parameter by 1 + 0.2 * noise, and restore the exact values."""
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    saved = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in parameters:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.mul_(1 + 0.2 * noise.to(parameter))
        yield
    finally:
        with torch.no_grad():
            for parameter, original in zip(parameters, saved, strict=True):
                parameter.copy_(original)
