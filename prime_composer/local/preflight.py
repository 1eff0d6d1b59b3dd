"""Check before the first step that the parts of a recipe fit together.

Every failure is a ``PreflightError`` of one or two sentences that ends with the remedy. Two
vocabularies of the same size with different tokens raise no error anywhere else.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch

from prime_composer.backends.protocols import Limits, SamplingParams, Scorer
from prime_composer.backends.transformers import try_saving, window_of
from prime_composer.contract import Scores, given
from prime_composer.environments.tasks import Task
from prime_composer.local.engine import Engine
from prime_composer.local.opening import tokenizer_of
from prime_composer.local.tokenized_problems import TokenizedProblems
from prime_composer.local.weight_sync import (
    PROBE_TOKENS,
    check_batches,
    check_loaded_weights,
    check_weight_sync,
)
from prime_composer.local.weight_sync import TOLERANCES as TOLERANCES
from prime_composer.losses import LossConfig
from prime_composer.problems.config import Problem
from prime_composer.problems.loading import ProblemSet
from prime_composer.recipe.routing import REFERENCE, Routing, TeacherId
from prime_composer.recipe.schema import Recipe, RolloutConfig
from prime_composer.recipe.teacher import TeacherPromptConfig
from prime_composer.step.overflow import Rule
from prime_composer.teachers.compatibility import (
    LimitedServer,
    PreflightError,
    check_ids,
    check_served_tokenizer,
    check_tokenizers,
    check_vocabularies,
    check_whole_kl,
)
from prime_composer.teachers.own_prompt import OwnPromptScorer, TeacherPrompts, behind
from prime_composer.teachers.own_tokenizer import OwnTokenizerScorer
from prime_composer.teachers.policy import PolicyTeacher
from prime_composer.teachers.tape.scorer import live_of
from prime_composer.teachers.watch import KnownRequest, starts_of

WEIGHT_SYNC = "weight sync"  # Name of the check that sends perturbed weights to the sampler

NO_LIMITS = Limits()

COMPARED_PROMPTS = 8  # Problems on which a chat model is compared under plain prompts and its own

FIRST_TOKENS = 4  # Tokens of an answer that its prompt says most about

PromptOf = Callable[[Problem], Sequence[int]]  # Returns a problem's prompt as somebody reads it

State = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """What a check found. One check may have several warnings beside its own result."""

    name: str
    state: State  # its result, or "warning" for what is legal but worth knowing
    text: str = ""  # what is wrong or worth knowing, or why it was skipped
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Preflight:
    """What each check found, in their order, and what each teacher was asked, with its scores."""

    findings: list[Finding] = field(default_factory=list)
    probes: dict[TeacherId, KnownRequest] = field(default_factory=dict)

    @property
    def warnings(self) -> list[str]:
        """What is legal but worth knowing."""
        return [finding.text for finding in self.findings if finding.state == "warning"]

    @property
    def sampler_trainer_difference(self) -> float:
        """Largest difference of a token's log-prob around weight syncs, in nats."""
        return next(one for one in self.findings if one.name == WEIGHT_SYNC).numbers["nats"]


def preflight(engine: Engine, recipe: Recipe, status: Callable[[str], None]) -> Preflight:
    """Run every check, the cheap ones first. An error names which teacher it is about."""
    result = Preflight()
    for name, check in Checks(engine, recipe, result.probes).by_name().items():
        result.findings += check(name)
    for warning in result.warnings:
        status(f"warning: {warning}")
    status(
        "preflight passed: after a weight sync, sampler and trainer differ by "
        f"{result.sampler_trainer_difference:.1e} nat per token"
    )
    return result


def examine(engine: Engine, recipe: Recipe, sends_weights: bool) -> Preflight:
    """Run every check as ``preflight`` does, also after one that failed, which is a finding then.

    Without ``sends_weights`` no perturbed ones are sent: all users of a server would get them.
    """
    result = Preflight()
    checks = Checks(engine, recipe, result.probes, sends_weights)
    for name, check in checks.by_name().items():
        try:
            result.findings += check(name)
        except (ValueError, RuntimeError, OSError) as error:
            result.findings.append(Finding(name, "failed", one_line(error)))
    return result


def one_line(error: BaseException) -> str:
    """Return an error's message without line breaks."""
    return " ".join(str(error).split())


def passed(name: str, warnings: Iterable[str] = (), **numbers: float) -> list[Finding]:
    """Return the findings of a check that did not fail."""
    own = Finding(name, "ok", numbers=numbers)
    return [own, *(Finding(name, "warning", text) for text in warnings)]


@dataclass(frozen=True)
class Checks:
    """Every check of a recipe's open models. Each returns its findings, or raises an error."""

    engine: Engine
    recipe: Recipe
    probes: dict[TeacherId, KnownRequest]
    sends_weights: bool = True

    def by_name(self) -> dict[str, Callable[[str], list[Finding]]]:
        """Return every check by its name, with which it is called, the cheap ones first."""
        return {
            "objective": self._objective,
            "context": self._context,
            **self.vocabularies(),
            "checkpoint": self._checkpoint,
            "sampling": self._sampling,
            "rows of a batch": self._rows,
            WEIGHT_SYNC: self._weight_sync,
            **{
                f"[{teacher.table}] scores": partial(self._scores, teacher, scorer)
                for teacher, scorer in self._scorers.items()
            },
        }

    def vocabularies(self) -> dict[str, Callable[[str], list[Finding]]]:
        """Return the checks of each teacher's tokenizer, vocabulary and context."""
        return {
            f"[{teacher.table}] tokenizer, vocabulary, context": partial(
                self._vocabulary, teacher, scorer
            )
            for teacher, scorer in self._scorers.items()
        }

    @property
    def _scorers(self) -> Mapping[TeacherId, Scorer]:
        return {} if self.engine.teachers is None else self.engine.teachers.scorers

    @property
    def _problems(self) -> Sequence[Problem]:
        return self.engine.problems.problem_set.practice

    @property
    def _evaluated(self) -> Sequence[Problem]:
        return self.engine.problems.problem_set.held_out[: self.recipe.eval.largest]

    def _prompts(self) -> list[list[int]]:
        return [self.engine.problems.prompt(problem) for problem in self._problems]

    def _scored_by(self, teacher: TeacherId) -> list[Problem]:
        return Routing.of_recipe(self.recipe).route(self._problems)[teacher]

    def _objective(self, name: str) -> list[Finding]:
        check_objective(self.recipe.loss, self.recipe.rollout)
        return passed(name)

    def _context(self, name: str) -> list[Finding]:
        engine = self.engine
        rollout = self.recipe.rollout.within(engine.context)
        if engine.policy_teacher is not None and engine.policy_overflow == "error":
            positions = window_of(engine.model.config) or engine.context
            scored = [*filter(engine.problems.problem_set.is_scored, self._evaluated)]
            policy = engine.policy_teacher
            check_hinted_prompts(policy, self._problems, scored, rollout, positions)
        check_prompts(
            *(engine.problems.prompt, self._problems, self._evaluated),
            self.recipe.rollout,
            sampler=engine.sampler.limits,
        )
        return passed(name, engine.problems.look(self.recipe.rollout.trains_on_data))

    def _vocabulary(self, teacher: TeacherId, scorer: Scorer, name: str) -> list[Finding]:
        engine, recipe, tokenized = self.engine, self.recipe, self.engine.problems
        with naming(teacher, among=self._scorers):
            routing = Routing.of_recipe(recipe)
            rule = routing.teachers[teacher].on_overflow
            if isinstance(scorer, OwnTokenizerScorer):
                problems, longest = self._scored_by(teacher), recipe.rollout.max_tokens
                return passed(name, scorer.check(problems, longest, rule))
            limits = binding(scorer.limits, rule)
            asked = routing.route(self._evaluated)[teacher]
            own = prompts_of(scorer, tokenized)
            check_lengths(
                *(tokenized, self._scored_by(teacher), asked, recipe.rollout, limits, teacher), own
            )
            warnings = self._tokenizer_warnings(teacher, scorer)
            warnings += check_vocabularies(
                engine.vocab_size,
                scorer.limits,
                len(tokenized.tokenizer),
                recipe.loss.asked_of_teacher[0],
            )
            if recipe.eval.kl_size and recipe.eval.kl_support == "full":
                check_whole_kl(engine.vocab_size, scorer)
        return passed(name, warnings)

    def _tokenizer_warnings(self, teacher: TeacherId, scorer: Scorer) -> list[str]:
        tokenizer, warnings = self.engine.problems.tokenizer, []
        live = live_of(scorer)
        if live is None:  # the tape is for this tokenizer, or was refused
            return []
        teacher_tokenizer = tokenizer_of(self.engine.teacher_specs[teacher])
        if teacher_tokenizer is not None:
            check_tokenizers(tokenizer, teacher_tokenizer)
        was_asked = check_served_tokenizer(tokenizer, live)
        if teacher_tokenizer is None and not was_asked:
            not_compared = (
                "The teacher's tokenizer could not be loaded, so its token ids were not "
                "compared with the student's"
            )
            remedy = f"set {teacher.table}.model to its directory or hub id"
            if self.recipe.rollout.teacher_samples and teacher != REFERENCE:
                raise PreflightError(
                    f"{not_compared}, and rollout.other_source = 'teacher' trains on them; "
                    f"{remedy}, or start its server with its tokenizer."
                )
            warnings.append(f"{not_compared}; {remedy}.")
        return warnings

    def _plain_prompts(self, teacher: TeacherId, live: Scorer) -> list[str]:
        """Return a warning where a chat model may be sent plain prompts, and nobody has said so.

        It has the teacher's mean -log q of the student's answers, as sent and under its template.
        """
        config, tokenized = Routing.of_recipe(self.recipe).teachers[teacher], self.engine.problems
        if config.prompt is not None or config.tokenizer == "own":
            return []
        plain = [
            problem
            for problem in self._scored_by(teacher)
            if not isinstance(problem, Task)
            and not tokenized.problem_set.config_of(problem).chat_template
        ][:COMPARED_PROMPTS]
        tokenizer = tokenizer_of(self.engine.teacher_specs[teacher]) if plain else None
        if getattr(tokenizer, "chat_template", None) is None:
            return []
        own = TeacherPrompts(
            *(tokenized.problem_set, tokenizer, tokenized.prompt, teacher.table),
            TeacherPromptConfig(chat_template=True),
        )
        params = SamplingParams(max_tokens=min(PROBE_TOKENS, self.recipe.rollout.max_tokens))
        room = (live.limits.max_model_len or self.engine.context) - 1 - params.max_tokens
        asked = [one for one in plain if max(len(own.of(one)), len(tokenized.prompt(one))) <= room]
        if not asked:  # longer ones are cut or dropped in the run (`on_overflow`)
            return []
        rollouts = self.engine.sampler.generate([*map(tokenized.prompt, asked)], params, seed=0)
        sent, chat = (
            mean_nats(scorer.score(rollouts, 0)) for scorer in (live, OwnPromptScorer(live, own))
        )
        return [
            f"The {teacher.display}'s tokenizer has a chat template, and it is sent plain prompts: "
            f"its mean -log q of the student's first {FIRST_TOKENS} tokens is {sent[0]:.2f} nat, "
            f"of later ones {sent[1]:.2f}; under its template {chat[0]:.2f} and {chat[1]:.2f}. For "
            f"a chat model set {teacher.table}.prompt.chat_template = true, or false for a base "
            "model."
        ]

    def _checkpoint(self, name: str) -> list[Finding]:
        try_saving(self.engine.stored, self.engine.problems.tokenizer)
        return passed(name)

    def _sampling(self, name: str) -> list[Finding]:
        return passed(name, sampling_warnings(self.recipe.rollout))

    def _rows(self, name: str) -> list[Finding]:
        check_batches(self.engine, self.recipe.rollout, self._prompts())
        return passed(name)

    def _weight_sync(self, name: str) -> list[Finding]:
        check = check_weight_sync if self.sends_weights else check_loaded_weights
        engine, dtype = self.engine, self.recipe.trainer.dtype
        difference = check(engine.sampler, engine.model, self._prompts(), dtype)
        if self.sends_weights:
            return passed(name, nats=difference)
        why = (
            "the loaded weights agree; new ones were not sent, since others may use the server: "
            "the run checks that before its first step"
        )
        return [Finding(name, "skipped", why, {"nats": difference})]

    def _scores(self, teacher: TeacherId, scorer: Scorer, name: str) -> list[Finding]:
        engine, max_tokens = self.engine, self.recipe.rollout.max_tokens
        live = given(engine.teachers).watched.get(teacher)
        if live is None:
            return [Finding(name, "skipped", "its tape alone answers")]
        params = SamplingParams(max_tokens=min(PROBE_TOKENS, max_tokens))
        warnings = []
        with naming(teacher, among=self._scorers):
            if isinstance(live, LimitedServer) and not isinstance(scorer, OwnTokenizerScorer):
                size, by_student = engine.loss.asked_of_teacher
                live.check_room(max_tokens, size, by_student, engine.reads_hidden_states)
            for problem in self._scored_by(teacher)[:1]:
                prompt = engine.problems.prompt(problem)
                own = prompts_of(scorer, engine.problems)(problem)
                if not isinstance(scorer, OwnTokenizerScorer):
                    # A longer one is cut or dropped in the run (`on_overflow`).
                    most = (live.limits.max_model_len or engine.context) - 1 - params.max_tokens
                    prompt, own = prompt[: max(1, most)], own[: max(1, most)]
                (rollout,) = engine.sampler.generate([prompt], params, seed=0)
                if not isinstance(scorer, OwnTokenizerScorer):
                    rollout = behind(rollout, own)
                asked = scorer if isinstance(scorer, OwnTokenizerScorer) else live
                (scores,) = asked.score(
                    [rollout], self.recipe.loss.support_size, hidden=engine.reads_hidden_states
                )
                check_ids(scores, engine.vocab_size)
                known = KnownRequest(rollout, scores, sign=starts_of(live))
                if isinstance(scorer, OwnTokenizerScorer):
                    known = scorer.known_request(rollout)
                self.probes[teacher] = known
                warnings = self._plain_prompts(teacher, live)
        return passed(name, warnings)


def mean_nats(scores: Sequence[Scores]) -> tuple[float, float]:
    """Return the mean -log q of the first tokens of some completions, and of their others."""
    first, others = (
        torch.cat([one.ref_logprobs[part] for one in scores])
        for part in (slice(FIRST_TOKENS), slice(FIRST_TOKENS, None))
    )
    return -float(first.mean()), -float(others.mean()) if len(others) else 0.0


def prompts_of(scorer: Scorer, tokenized: TokenizedProblems) -> PromptOf:
    """Return what a teacher with the student's tokens reads of a problem."""
    return scorer.prompts.of if isinstance(scorer, OwnPromptScorer) else tokenized.prompt


@contextmanager
def naming(teacher: TeacherId, among: Mapping[TeacherId, object]) -> Iterator[None]:
    """Put the teacher's table in front of an error where the recipe has several teachers."""
    try:
        yield
    except PreflightError as error:
        if len(among) == 1:
            raise
        raise PreflightError(f"[{teacher.table}]: {error}") from None


def check_routing(routing: Routing, problems: ProblemSet) -> None:
    """Refuse a row of the data that names a teacher which the recipe does not have."""
    for problem in [*problems.practice, *problems.held_out]:
        routing.of(problem)


def check_objective(config: LossConfig, rollout: RolloutConfig) -> None:
    """Refuse cross-entropy on the student's own samples: its expected gradient is 0."""
    for section, (loss, _) in config.needs_by_section().items():
        if loss.on_given_text and rollout.student_fraction == 1:
            raise PreflightError(
                f"[{section}] type = {loss.type!r} on the student's own samples has an expected "
                "gradient of 0, since nothing tells a good sample from a bad one; set "
                "rollout.student_fraction = 0 to train on the data's solutions, or with "
                "rollout.other_source = 'teacher' on the teacher's answers."
            )


def check_hinted_prompts(
    policy: PolicyTeacher,
    problems: Sequence[Problem],
    held_out: Sequence[Problem],
    config: RolloutConfig,
    positions: int,
) -> None:
    """Check that the longest prompt with its hint and a full response fit the context."""
    max_tokens, limit = config.max_tokens, config.context()
    if policy.config.hint == "sibling":  # a rollout's text, which may take all of max_tokens
        hinted = max(len(policy.prompt(problem, "")) for problem in problems) + max_tokens
    else:
        hinted = max(len(policy.best_prompt(problem)) for problem in problems)
    attempt = max_tokens if "{attempt}" in policy.config.text else 0
    best = max((len(policy.best_prompt(problem)) for problem in held_out), default=0)
    for kind, prompt, needed, parts in (
        ("prompt", hinted, hinted + attempt + max_tokens, "attempt and response"),
        ("held-out prompt", best, best + max_tokens, "a response"),
    ):
        lengths = (
            f"The longest {kind} with its hint has {prompt} tokens, with {parts} up to {needed}"
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
    """Return a teacher's limits that rollouts have to keep: a longer one may be cut or dropped."""
    return limits if rule == "error" else replace(limits, max_model_len=None)


def check_lengths(
    tokenized: TokenizedProblems,
    problems: Sequence[Problem],
    held_out: Sequence[Problem],
    config: RolloutConfig,
    limits: Limits,
    teacher: TeacherId,
    prompt_of: PromptOf,
) -> None:
    """Check that prompts and completions, or the data's solutions, fit a teacher's context.

    ``prompt_of`` returns what it reads of a problem.
    """
    limit = limits.max_model_len
    if problems and config.trains_on_data and limit is not None:
        longest = max(
            len(prompt_of(problem)) + len(tokenized.solution(problem).completion_ids)
            for problem in problems
        )
        if longest >= limit:
            raise PreflightError(
                f"The longest solution of the data has {longest} tokens with its prompt, and the "
                f"{teacher.display} takes {limit - 1}; raise rollout.max_model_len (a server's "
                f"--max-model-len) to {longest + 1}, set rollout.student_fraction = 1, or leave "
                "such problems out of the data."
            )
    if problems or held_out:
        check_prompts(prompt_of, problems, held_out, config, scorer=limits)


def check_prompts(
    prompt_of: PromptOf,
    problems: Sequence[Problem],
    held_out: Sequence[Problem],
    config: RolloutConfig,
    sampler: Limits = NO_LIMITS,
    scorer: Limits = NO_LIMITS,
) -> None:
    """Check prompts to train on, and those of evaluations, as ``check_context`` does."""
    for kind, asked in (("prompt", problems), ("held-out prompt", held_out)):
        if asked or not (problems or held_out):
            prompts = [prompt_of(problem) for problem in asked]
            check_context(prompts, config.max_tokens, sampler, scorer, config.max_model_len, kind)


def check_context(
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampler: Limits = NO_LIMITS,
    scorer: Limits = NO_LIMITS,
    raisable: int | None = 0,
    kind: str = "prompt",
) -> None:
    """Check that the longest prompt and a completion fit the contexts of sampler and scorer."""
    if not prompts:
        raise PreflightError("There is no prompt to sample from; check [data].")
    if min(len(ids) for ids in prompts) == 0:
        raise PreflightError(
            f"One of the {kind}s has no tokens; check the data and the prompt template in [data]."
        )
    longest = max(len(ids) for ids in prompts)
    needed = longest + max_tokens
    for name, limit, reserved in (
        ("student's sampler", sampler.max_model_len, 0),
        ("teacher's scorer", scorer.max_model_len, 1),
    ):
        if limit is not None and needed > limit - reserved:
            remedy = (
                f"raise rollout.max_model_len (a server's --max-model-len) to {needed + reserved}, "
                "or lower rollout.max_tokens."
            )
            if raisable is None or limit < raisable:
                remedy = (
                    "that is the model's window, or a server's --max-model-len: lower "
                    "rollout.max_tokens, or shorten the prompts ([data] prompt_chars)."
                )
            raise PreflightError(
                f"The longest {kind} has {longest} tokens, with {max_tokens} new ones that is "
                f"{needed}, and the {name} takes {limit - reserved}; {remedy}"
            )


def sampling_warnings(config: RolloutConfig) -> list[str]:
    """Return what a temperature or a nucleus means for the losses."""
    warnings = []
    if config.temperature != 1:
        warnings.append(
            f"rollout.temperature is {config.temperature}: importance ratios and trust regions "
            "compare both policies at it, and student and teacher are compared at temperature 1."
        )
    if config.top_p < 1:
        warnings.append(
            f"rollout.top_p is {config.top_p}: mu is renormalized over the nucleus, so the ratio "
            "p/mu is below 1 inside it, and tokens outside are never sampled."
        )
    return warnings
