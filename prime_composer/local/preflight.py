"""Check before the first step that the parts of a recipe fit together.

Every failure is a ``PreflightError`` of one or two sentences that ends with the remedy. Two
vocabularies of the same size with different tokens raise no error anywhere else.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from prime_composer.backends.hf_model import cap_attention
from prime_composer.backends.protocols import Limits, SamplingParams, Scorer
from prime_composer.backends.transformers import try_saving, window_of
from prime_composer.contract import Scores, given
from prime_composer.environments.tasks import Task
from prime_composer.local.context import (
    PromptOf,
    check_fits,
    hinted_lengths,
    prompt_lengths,
)
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
from prime_composer.teachers.client import OWN_TOKENS
from prime_composer.teachers.compatibility import (
    GeneratingServer,
    LimitedServer,
    PreflightError,
    check_ids,
    check_own_scores,
    check_served_tokenizer,
    check_tokenizers,
    check_vocabularies,
    check_whole_kl,
)
from prime_composer.teachers.own_prompt import OwnPromptScorer, TeacherPrompts, behind
from prime_composer.teachers.own_tokenizer import OwnTokenizerScorer
from prime_composer.teachers.policy import PolicyTeacher
from prime_composer.teachers.tape.scorer import live_of
from prime_composer.teachers.watch import KnownRequest, server_starts

WEIGHT_SYNC = "weight sync"  # Name of the check that sends perturbed weights to the sampler

COMPARED_PROMPTS = 8  # Problems on which a chat model is compared under plain prompts and its own

FIRST_TOKENS = 4  # Tokens of an answer that its prompt says most about

State = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class CheckResult:
    """What a check found. One check may have several warnings beside its own result."""

    name: str
    state: State  # its result, or "warning" for what is legal but worth knowing
    text: str = ""  # what is wrong or worth knowing, or why it was skipped
    nats: float | None = None  # of the weight sync: largest difference of a token's log-prob


@dataclass
class Preflight:
    """What each check found, in their order, and what each teacher was asked, with its scores."""

    findings: list[CheckResult]
    probes: dict[TeacherId, KnownRequest]

    @property
    def warnings(self) -> list[str]:
        """What is legal but worth knowing."""
        return [finding.text for finding in self.findings if finding.state == "warning"]

    @property
    def sampler_trainer_difference(self) -> float:
        """Largest difference of a token's log-prob around weight syncs, in nats."""
        return given(next(one for one in self.findings if one.name == WEIGHT_SYNC).nats)


def preflight(engine: Engine, recipe: Recipe, status: Callable[[str], None]) -> Preflight:
    """Run every check, the cheap ones first. An error names which teacher it is about."""
    checks = Checks(engine, recipe)
    result = Preflight(run_checks(checks.by_name()), checks.probes)
    for warning in result.warnings:
        status(f"warning: {warning}")
    status(
        "preflight passed: after a weight sync, sampler and trainer differ by "
        f"{result.sampler_trainer_difference:.1e} nat per token"
    )
    return result


def run_checks(checks: Mapping[str, "Check"], goes_on: bool = False) -> list[CheckResult]:
    """Return each check's own result with its warnings; with ``goes_on`` an error is a result."""
    found: list[CheckResult] = []
    for name, check in checks.items():
        try:
            own = check()
        except (ValueError, RuntimeError, OSError) as error:
            if not goes_on:
                raise
            own = CheckResult(name, "failed", one_line(error))
        if isinstance(own, CheckResult):
            found.append(own)
        else:
            found += [CheckResult(name, "ok")]
            found += [CheckResult(name, "warning", text) for text in own or ()]
    return found


def one_line(error: BaseException) -> str:
    """Return an error's message without line breaks."""
    return " ".join(str(error).split())


Check = Callable[[], Sequence[str] | CheckResult | None]
"""Returns warnings, or a result that has more to say than "ok"; raises an error."""


@dataclass(frozen=True)
class Checks:
    """Every check of a recipe's open models."""

    engine: Engine
    recipe: Recipe
    # False: no perturbed weights are sent to a server, whose other users would get them
    sends_weights: bool = True
    # what each teacher was asked, with its scores
    probes: dict[TeacherId, KnownRequest] = field(default_factory=dict)

    def by_name(self) -> dict[str, Check]:
        """Return every check by its name, the cheap ones first."""
        engine, recipe = self.engine, self.recipe
        tokenizer, prompts = engine.problems.tokenizer, self._prompts
        return {
            "objective": lambda: check_objective(recipe.loss, recipe.rollout),
            "context": self._context,
            **self.vocabularies(),
            "checkpoint": lambda: try_saving(engine.stored, tokenizer),
            "sampling": lambda: sampling_warnings(recipe.rollout),
            "rows of a batch": lambda: check_batches(engine, recipe.rollout, prompts()),
            WEIGHT_SYNC: self._weight_sync,
            **{
                name: partial(self._scores, teacher, scorer, name)
                for teacher, scorer in self._scorers.items()
                for name in [f"[{teacher.table}] scores"]
            },
        }

    def vocabularies(self) -> dict[str, Check]:
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

    def _prompts(self) -> list[list[int]]:
        problems = self.engine.problems
        return [*map(problems.prompt, problems.problem_set.practice)]

    def _scored_by(self, teacher: TeacherId) -> list[Problem]:
        practice = self.engine.problems.problem_set.practice
        return Routing.of_recipe(self.recipe).route(practice)[teacher]

    def _context(self) -> list[str]:
        engine = self.engine
        limit, policy = engine.sampler.limits.max_model_len, engine.policy_teacher
        positions = window_of(engine.model.config) or engine.context
        warnings = cap_attention(engine.model)
        return warnings + check_texts(
            self.recipe, engine.problems, engine.context, limit, policy, positions
        )

    def _vocabulary(self, teacher: TeacherId, scorer: Scorer) -> list[str]:
        engine, recipe = self.engine, self.recipe
        with naming_teacher(teacher, among=self._scorers):
            if isinstance(scorer, OwnTokenizerScorer):
                rule = Routing.of_recipe(recipe).teachers[teacher].on_overflow
                return scorer.check(self._scored_by(teacher), recipe.rollout.max_tokens, rule)
            live, tokenizer = live_of(scorer), None
            if live is not None:  # the tape is for this tokenizer, or was refused
                tokenizer = tokenizer_of(engine.teacher_specs[teacher])
            own = scorer.prompts.of if isinstance(scorer, OwnPromptScorer) else None
            size = engine.vocab_size
            warnings = check_scorer(
                recipe, engine.problems, teacher, scorer.limits, own, size, tokenizer
            )
            if live is not None:
                warnings = self._served_tokenizer(teacher, live, tokenizer) + warnings
            if recipe.eval.kl_size and recipe.eval.kl_support == "full":
                check_whole_kl(size, scorer)
        return warnings

    def _served_tokenizer(
        self, teacher: TeacherId, live: Scorer, tokenizer: Any | None
    ) -> list[str]:
        """Ask a server for its tokenizer; warn where neither it nor the teacher's files say it."""
        was_asked = check_served_tokenizer(self.engine.problems.tokenizer, live)
        if tokenizer is not None or was_asked:
            return []
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
        return [f"{not_compared}; {remedy}."]

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

    def _weight_sync(self) -> CheckResult:
        check = check_weight_sync if self.sends_weights else check_loaded_weights
        engine, dtype = self.engine, self.recipe.trainer.dtype
        nats = check(engine.sampler, engine.model, self._prompts(), dtype)
        if self.sends_weights:
            return CheckResult(WEIGHT_SYNC, "ok", nats=nats)
        why = (
            "the loaded weights agree; new ones were not sent, since others may use the server: "
            "the run checks that before its first step"
        )
        return CheckResult(WEIGHT_SYNC, "skipped", why, nats)

    def _scores(
        self, teacher: TeacherId, scorer: Scorer, name: str
    ) -> Sequence[str] | CheckResult | None:
        """Let a teacher score one answer of the student, which the watch sends again."""
        engine, max_tokens = self.engine, self.recipe.rollout.max_tokens
        live = given(engine.teachers).watched.get(teacher)
        if live is None:
            return CheckResult(name, "skipped", "its tape alone answers")
        problems, hidden = self._scored_by(teacher), engine.loss.reads_hidden_states
        params = SamplingParams(max_tokens=min(PROBE_TOKENS, max_tokens))
        with naming_teacher(teacher, among=self._scorers):
            if isinstance(scorer, OwnTokenizerScorer):
                for problem in problems[:1]:
                    prompt = engine.problems.prompt(problem)
                    (rollout,) = engine.sampler.generate([prompt], params, seed=0)
                    (scores,) = scorer.score(
                        [rollout], self.recipe.loss.support_size, hidden=hidden
                    )
                    check_ids(scores, engine.vocab_size)
                    self.probes[teacher] = scorer.known_request(rollout)
                    return own_scores(live, scorer.prompts.of(problem))
                return None
            if isinstance(live, LimitedServer):
                live.check_room(max_tokens, *engine.loss.asked_of_teacher, hidden)
            # A longer one is cut or dropped in the run (`on_overflow`).
            most = max(1, (live.limits.max_model_len or engine.context) - 1 - params.max_tokens)
            for problem in problems[:1]:
                prompt = engine.problems.prompt(problem)
                own = scorer.prompts.of(problem) if isinstance(scorer, OwnPromptScorer) else prompt
                (rollout,) = engine.sampler.generate([prompt[:most]], params, seed=0)
                rollout = behind(rollout, own[:most])
                (scores,) = live.score([rollout], self.recipe.loss.support_size, hidden=hidden)
                check_ids(scores, engine.vocab_size)
                self.probes[teacher] = KnownRequest(rollout, scores, sign=server_starts(live))
                return own_scores(live, own) + self._plain_prompts(teacher, live)
        return None


def own_scores(live: Scorer, prompt: Sequence[int]) -> list[str]:
    """Compare what a teacher's server samples with its scores of it; return what was not."""
    if not isinstance(live, GeneratingServer):
        return []
    window = live.limits.max_model_len
    most = len(prompt) if window is None else max(1, window - 1 - OWN_TOKENS)
    found = check_own_scores(live.own_logprobs(prompt[:most]))
    return [found] if found else []


def mean_nats(scores: Sequence[Scores]) -> tuple[float, float]:
    """Return the mean -log q of the first tokens of some completions, and of their others."""
    first, others = (
        torch.cat([one.ref_logprobs[part] for one in scores])
        for part in (slice(FIRST_TOKENS), slice(FIRST_TOKENS, None))
    )
    return -float(first.mean()), -float(others.mean()) if len(others) else 0.0


@contextmanager
def naming_teacher(teacher: TeacherId, among: Collection[TeacherId]) -> Iterator[None]:
    """Put the teacher's table in front of an error where the recipe has several teachers."""
    try:
        yield
    except PreflightError as error:
        if len(among) == 1:
            raise
        raise PreflightError(f"[{teacher.table}]: {error}") from None


def check_texts(
    recipe: Recipe,
    tokenized: TokenizedProblems,
    context: int,
    limit: int | None,
    policy: PolicyTeacher | None,
    positions: int,
) -> list[str]:
    """Check that a run's prompts fit its context; return warnings about what a tokenizer makes.

    ``limit`` is the sampler's own context, and ``positions`` are those of the student.
    """
    problem_set, rollout = tokenized.problem_set, recipe.rollout
    problems, held_out = problem_set.practice, problem_set.held_out[: recipe.eval.largest]
    if policy is not None and given(recipe.teacher).on_overflow == "error":
        scored = [*filter(problem_set.is_scored, held_out)]
        hinted = hinted_lengths(policy, problems, scored, rollout.max_tokens)
        check_fits("student with a hint", min(context, positions), hinted, rollout.max_tokens)
    lengths = prompt_lengths(tokenized.prompt, problems, held_out)
    check_fits("student's sampler", limit, lengths, rollout.max_tokens)
    return tokenized.look(rollout.trains_on_data)


def check_scorer(
    recipe: Recipe,
    tokenized: TokenizedProblems,
    teacher: TeacherId,
    limits: Limits,
    own_prompt: PromptOf | None,
    vocab_size: int,
    tokenizer: Any | None,
) -> list[str]:
    """Check a teacher's context, vocabulary and, where it is known, ``tokenizer``; return warnings.

    ``vocab_size`` is that of the student's head. ``own_prompt`` returns what the teacher reads of a
    problem, where that is not the student's prompt.
    """
    routing, problem_set = Routing.of_recipe(recipe), tokenized.problem_set
    problems = routing.route(problem_set.practice)[teacher]
    held_out = routing.route(problem_set.held_out[: recipe.eval.largest])[teacher]
    rollout, prompt = recipe.rollout, own_prompt or tokenized.prompt
    # By another rule a longer rollout is cut or dropped.
    is_read = routing.teachers[teacher].on_overflow == "error"
    if is_read and (limit := limits.max_model_len) is not None:
        lengths = prompt_lengths(prompt, problems, held_out)
        check_fits("teacher's scorer", limit, lengths, rollout.max_tokens)
        if rollout.trains_on_data:
            solved = (
                len(prompt(one)) + len(tokenized.solution(one).completion_ids) for one in problems
            )
            check_fits("teacher's scorer", limit, {"solution of the data": [*solved]}, 0)
    if tokenizer is not None:
        check_tokenizers(tokenized.tokenizer, tokenizer)
    size, _ = recipe.loss.asked_of_teacher
    return check_vocabularies(vocab_size, limits, len(tokenized.tokenizer), size)


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
