"""Measure student, teachers and the speed of a step before a recipe is run. Writes nothing.

The models are opened as a run opens them, each once. A column of the table of speeds is an entry of
``probe_teacher.COLUMNS``.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from prime_composer.backends.cpu_guard import all_cores
from prime_composer.backends.hf_model import sequence_logprobs, token_batches
from prime_composer.backends.protocols import Limits, Rollout, Scorer, TeacherScores
from prime_composer.backends.self_teacher import PolicyTeacher
from prime_composer.local.batch import Batch, Sample
from prime_composer.local.collect import (
    grade,
    pairs_of_step,
    problems_of_step,
    sample_step,
)
from prime_composer.local.engine import BackendSpec, Engine, open_engine, student_spec
from prime_composer.local.gradients import accumulate_gradients
from prime_composer.local.preflight import (
    TOLERANCES,
    WEIGHT_SYNC,
    Preflight,
    check_loaded_weights,
    check_routing,
    preflight_checks,
    route,
    tokenizer_of,
)
from prime_composer.local.probe_report import (
    Agreement,
    Attempts,
    CheckResult,
    ModelFacts,
    NotMeasured,
    ProbeReport,
    StepForecast,
    StudentReport,
    TeacherReport,
    one_line,
)
from prime_composer.local.probe_teacher import (
    COLUMNS,
    NO_ROLLOUT,
    SupportSize,
    Target,
    agreement,
    logprob_mode,
    probe_teacher,
    read_tokenizer,
)
from prime_composer.losses import setup_loss_fn
from prime_composer.losses.shared.modifiers import resolve
from prime_composer.problems.config import Problem
from prime_composer.problems.loading import ProblemSet
from prime_composer.recipe.routing import Routing, TeacherId
from prime_composer.recipe.schema import (
    OneOfSeveralConfig,
    Recipe,
    RolloutConfig,
    TeacherConfig,
)
from prime_composer.recipe.urls import public_url

SECONDS_PER_COLUMN = 2.0
"""Time for the speed at one K of one teacher."""

ROLLOUTS = 32
"""Rollouts of the recipe's first step that are sampled, unless its batch is smaller."""

FEWEST_PROBLEMS = 4
"""Problems of a teacher that has none among those of the first step."""

STEPS_OF_SHARES = 20
"""Steps whose problems say which share of the rollouts each teacher scores."""

IMPROBABLE = 0.1
"""A special token is worth a word where the teacher's probability is below this times the
student's."""

SLOW_JSON = 8
"""From this K on, JSON is several times slower than binary answers (scoring/README.md)."""

LONGEST_WAIT = 10.0
"""Seconds that one request waits for a server that is away, unless the recipe says less."""

OPENING = "opening the models"

C = TypeVar("C", RolloutConfig, TeacherConfig, OneOfSeveralConfig)


def probe(
    recipe: Recipe,
    problems: ProblemSet,
    paths: Mapping[str, Path],
    status: Callable[[str], None],
    seconds: float = SECONDS_PER_COLUMN,
) -> ProbeReport:
    """Open a recipe's models, run the preflight's checks, and measure.

    Args:
        recipe: the recipe.
        problems: its problems.
        paths: directories of its prepared models, by table ("student", "teacher", "teachers.NAME").
        status: callback for progress messages.
        seconds: time for the speed at one K of one teacher.

    Returns:
        What was found. A check that fails, and models that cannot be opened, are part of it.

    Raises:
        ImportError: a backend's library is missing; the message names the pip line.
    """
    recipe = impatient(recipe)
    try:
        check_routing(recipe, problems)
        engine = open_engine(recipe, problems, paths, status)
    except (ValueError, RuntimeError, OSError) as error:
        return ProbeReport(passed=False, checks=[CheckResult(OPENING, False, one_line(error))])
    with engine, all_cores(engine.model):
        return probe_engine(engine, recipe, status, seconds)


def impatient(recipe: Recipe) -> Recipe:
    """Return the recipe with short waits for servers: each measurement would wait anew."""

    def shortened(config: C) -> C:
        values = dict(config) | {"wait": min(config.wait, LONGEST_WAIT)}
        return config.model_construct(config.model_fields_set, **values)

    return recipe.model_copy(
        update={
            "rollout": shortened(recipe.rollout),
            "teacher": None if recipe.teacher is None else shortened(recipe.teacher),
            "teachers": {name: shortened(teacher) for name, teacher in recipe.teachers.items()},
        }
    )


def probe_engine(
    engine: Engine, recipe: Recipe, status: Callable[[str], None], seconds: float
) -> ProbeReport:
    """Run the checks and measure open models; see ``probe``. Their weights stay as they are."""
    status("running the preflight's checks")
    checks, warnings = run_checks(engine, recipe)
    status("sampling rollouts of the first step")
    found = Attempts()
    sampled = found.attempt("sampling", lambda: sample_first_step(engine, recipe))
    samples = [] if sampled is None else sampled.samples
    step_tokens = None if sampled is None else sampled.mean_tokens * recipe.trainer.batch_size
    columns = columns_of(recipe)
    teachers = {}
    for target in targets_of(engine, recipe, samples):
        status(f"measuring {target.table} at K = {', '.join(map(str, columns))}")
        teachers[target.table] = probe_teacher(
            target,
            engine.model,
            engine.problems,
            columns,
            recipe_column(recipe),
            step_tokens or 0.0,
            recipe.trainer.micro_batch_tokens,
            seconds,
        )
    status("measuring the student's forward and backward")
    train_seconds = found.attempt("training", lambda: training_seconds(engine, recipe, samples))
    student = student_report(engine, recipe, sampled, found)
    step = forecast(recipe, sampled, step_tokens, teachers, train_seconds)
    checks.append(part_check("sampling", found))
    checks += [scoring_check(table, teacher, step) for table, teacher in teachers.items()]
    checks.append(part_check("training", found))
    return ProbeReport(
        passed=all(check.passed is not False for check in checks),
        checks=checks,
        warnings=warnings,
        recommendations=recommendations(recipe, student, teachers, step),
        step=step,
        student=student,
        teachers=teachers,
    )


def part_check(name: str, found: Attempts) -> CheckResult:
    """Return whether a part of the step could be measured; not run where it does not apply."""
    passed = False if name in found.failed else None if name in found.unmeasured else True
    return CheckResult(f"a step's {name}", passed, found.unmeasured.get(name))


def scoring_check(table: str, teacher: TeacherReport, step: StepForecast) -> CheckResult:
    """Return whether a teacher scored at the recipe's K, and gave no wrong answer."""
    name = f"[{table}] a step's scoring"
    if teacher.wrong_answers:
        return CheckResult(name, False, teacher.wrong_answers[0])
    if not teacher.throughput:
        reason = teacher.unmeasured.get("scoring")
        return CheckResult(name, None if reason == NO_ROLLOUT else False, reason)
    (own,) = (entry for entry in teacher.throughput if entry.column == step.column)
    return CheckResult(name, own.refused is None, own.refused)


def run_checks(engine: Engine, recipe: Recipe) -> tuple[list[CheckResult], list[str]]:
    """Run every check of the preflight, also after one that failed.

    A student behind a server is compared as it is. The preflight of a run also sends it perturbed
    weights, which everybody who uses that server would get.

    Returns:
        The results in order, and the preflight's warnings.
    """
    found = Preflight()
    results = []
    for name, check in preflight_checks(engine, recipe, found).items():
        message = None
        passed: bool | None = True
        try:
            if name == WEIGHT_SYNC and recipe.rollout.backend == "server":
                check_loaded(engine, recipe)
                passed = None
                message = (
                    "the loaded weights agree; new ones were not sent, since others may use the "
                    "server: the run checks that before its first step"
                )
            else:
                check()
        except (ValueError, RuntimeError, OSError) as error:
            passed, message = False, one_line(error)
        results.append(CheckResult(name, passed, message))
    return results, found.warnings


def check_loaded(engine: Engine, recipe: Recipe) -> None:
    """Compare the sampler's log-probs with the trainer's, without a change of any weight."""
    prompts = [engine.problems.prompt(p) for p in engine.problems.problem_set.practice]
    check_loaded_weights(engine.sampler, engine.model, prompts, recipe.trainer.dtype)


@dataclass(frozen=True, eq=False)
class FirstStep:
    """Rollouts of the recipe's first step.

    Attributes:
        samples: the graded rollouts.
        seconds: that sampling took.
    """

    samples: Sequence[Sample]
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens of the rollouts, without prompts."""
        return Batch(self.samples).tokens

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a rollout, without its prompt."""
        return self.tokens / len(self.samples)


def sample_first_step(engine: Engine, recipe: Recipe) -> FirstStep:
    """Sample and grade rollouts, of the recipe's own problems and lengths."""
    problems = first_problems(engine, recipe)
    start = time.perf_counter()
    sampled = sample_step(engine, recipe.rollout, problems, recipe.trainer.seed, step=1)
    seconds = time.perf_counter() - start
    graded = grade(engine.problems, sampled.rollouts, sampled.problems)
    return FirstStep([*graded, *sampled.played.samples], seconds)


def first_problems(engine: Engine, recipe: Recipe) -> list[Problem]:
    """Return problems of the first step, and some of each teacher that has none among them."""
    problem_set, group_size = engine.problems.problem_set, recipe.rollout.group_size
    count = max(1, min(recipe.trainer.batch_size, ROLLOUTS) // group_size)
    problems = problems_of_step(problem_set, count, recipe.trainer.seed, step=1)
    if engine.teachers is not None:
        for scored in route(engine.teachers.routing, problem_set.practice).values():
            if not {*scored} & {*problems}:
                problems += scored[:FEWEST_PROBLEMS]
    return problems


def columns_of(recipe: Recipe) -> list[SupportSize]:
    """Return the values of K to measure: the table's own, and the recipe's."""
    own = recipe_column(recipe)
    sizes: list[SupportSize] = [*sorted({*COLUMNS, *([own] if isinstance(own, int) else [])})]
    return sizes if isinstance(own, int) else [*sizes, own]


def recipe_column(recipe: Recipe) -> SupportSize:
    """Return what a step of the recipe asks its teachers for."""
    if "hidden_states" in recipe.loss.needs:
        return "states"
    support = recipe.loss.support
    policy = recipe.teacher is not None and recipe.teacher.policy is not None
    if policy and support is not None:
        return support.k
    return recipe.loss.support_size


def targets_of(engine: Engine, recipe: Recipe, samples: Sequence[Sample]) -> list[Target]:
    """Return every teacher with the rollouts that it scores; none where the loss reads none."""
    if engine.policy_teacher is not None:
        return [policy_target(engine, engine.policy_teacher, samples)]
    if engine.teachers is None:
        return []
    shares = teacher_shares(engine, recipe, engine.teachers.routing)
    targets = []
    readers = engine.teachers.routing.readers
    for teacher, scorer in engine.teachers.scorers.items():
        spec = engine.teacher_specs[teacher]
        targets.append(
            Target(
                table=teacher.table,
                facts=facts_of(spec),
                limits=scorer.limits,
                scorer=scorer,
                score_rollouts=partial(score_rollouts, scorer),
                samples=[s for s in samples if teacher in readers(s.problem)],
                prompts=None,
                share=shares[teacher],
                load_tokenizer=partial(tokenizer_of, spec),
            )
        )
    return targets


def score_rollouts(
    scorer: Scorer,
    rollouts: Sequence[Rollout],
    k: SupportSize,
    prompts: Sequence[Sequence[int]] | None,
) -> list[TeacherScores]:
    """Return a teacher's answers to one column of the table of speeds."""
    if k == "states":
        return scorer.score(rollouts, 0, prompts, hidden=True)
    return scorer.score(rollouts, k, prompts)


def policy_target(engine: Engine, policy: PolicyTeacher, samples: Sequence[Sample]) -> Target:
    """Return the policy as its own teacher, with the rollouts that have a hint."""
    hints = policy.hints(
        [sample.rollout for sample in samples],
        [sample.text for sample in samples],
        [sample.problem for sample in samples],
        [sample.reward for sample in samples],
    )
    hinted = [(s, hint) for s, hint in zip(samples, hints, strict=True) if hint is not None]
    config: Any = engine.model.config
    vocab_size = engine.vocab_size
    return Target(
        table="teacher",
        facts=ModelFacts(f"the policy, hint {policy.config.hint!r}", "transformers", "float32"),
        limits=Limits(config.get_text_config().max_position_embeddings, vocab_size, vocab_size),
        scorer=None,
        score_rollouts=lambda rollouts, k, prompts: (
            policy.score(rollouts, prompts or [], 0, hidden=True)
            if k == "states"
            else policy.score(rollouts, prompts or [], k)
        ),
        samples=[sample for sample, _ in hinted],
        prompts=[policy.prompt(s.problem, hint, s.text.strip()) for s, hint in hinted],
        share=len(hinted) / len(samples) if samples else 0.0,
        load_tokenizer=lambda: engine.problems.tokenizer,
    )


def teacher_shares(engine: Engine, recipe: Recipe, routing: Routing) -> dict[TeacherId, float]:
    """Return which share of the rollouts of the first steps each teacher scores."""
    count = max(1, recipe.trainer.batch_size // recipe.rollout.group_size)
    problems = [
        problem
        for step in range(1, min(recipe.trainer.steps, STEPS_OF_SHARES) + 1)
        for problem in problems_of_step(
            engine.problems.problem_set, count, recipe.trainer.seed, step
        )
    ]
    scored = route(routing, problems)
    return {teacher: len(own) / len(problems) for teacher, own in scored.items()}


def facts_of(spec: BackendSpec) -> ModelFacts:
    """Return what the recipe says about a model."""
    return ModelFacts(
        model=str(spec.model),
        backend=spec.backend,
        dtype=spec.dtype,
        url=None if spec.url is None else public_url(spec.url),
    )


def student_report(
    engine: Engine, recipe: Recipe, sampled: FirstStep | None, found: Attempts
) -> StudentReport:
    """Return the student's own part of the table.

    Args:
        engine: the open models.
        recipe: the recipe.
        sampled: rollouts of the first step; None where sampling failed.
        found: what was measured before.
    """
    samples = [] if sampled is None else sampled.samples
    model = recipe.student.model or str(engine.model.name_or_path)
    limits = engine.sampler.limits
    facts = replace(
        facts_of(student_spec(recipe, model)),
        context=limits.max_model_len,
        vocabulary=engine.vocab_size,
        logprob_mode=found.attempt("log-prob mode", lambda: student_mode(engine)),
        tokenizer=read_tokenizer(engine.problems.tokenizer),
    )
    truncated = [sample.rollout.finish_reason == "length" for sample in samples]
    return StudentReport(
        facts=facts,
        agreement=found.attempt("agreement", lambda: sampler_agreement(engine, recipe, samples)),
        rollouts=len(samples),
        tokens_per_rollout=None if sampled is None else sampled.mean_tokens,
        truncated=sum(truncated) / len(samples) if samples else None,
        tokens_per_second=None if sampled is None else sampled.tokens / sampled.seconds,
        unmeasured=found.unmeasured,
    )


def student_mode(engine: Engine) -> str:
    """Return the mode of the sampler's log-probs."""
    problem = engine.problems.problem_set.practice[0]
    return logprob_mode(engine.sampler, engine.problems.prompt(problem))


def sampler_agreement(engine: Engine, recipe: Recipe, samples: Sequence[Sample]) -> Agreement:
    """Compare the sampler's log-probs of the rollouts with the trainer's.

    Raises:
        NotMeasured: the rollouts are not sampled at temperature 1 and top-p 1, or there are none.
    """
    rollout = recipe.rollout
    if rollout.temperature != 1 or rollout.top_p < 1:
        raise NotMeasured("the rollouts are not sampled at temperature 1 and top_p 1")
    rollouts = [sample.rollout for sample in samples]
    rollouts = [r for r in rollouts if r.inference_logprobs[r.loss_mask].isfinite().all()]
    if not rollouts:
        raise NotMeasured("no rollout was sampled")
    expected = sequence_logprobs(engine.model, [r.token_ids.tolist() for r in rollouts])
    return agreement(
        torch.cat([r.inference_logprobs[r.loss_mask] for r in rollouts]),
        torch.cat([row[r.loss_mask] for r, row in zip(rollouts, expected, strict=True)]),
    )


def training_seconds(engine: Engine, recipe: Recipe, samples: Sequence[Sample]) -> float:
    """Return the seconds of a step's forward and backward: one micro-batch, scaled to the step.

        seconds of the micro-batch * (rollouts of a step * mean length) / its tokens

    Tokens are those of prompts and completions. Preference pairs are timed as a step has them. No
    optimizer runs, and the gradients are dropped.

    Raises:
        NotMeasured: there is no rollout to train on.
    """
    lengths = [sample.length for sample in samples]
    if not lengths:
        raise NotMeasured("no rollout was sampled")
    batches = token_batches(lengths, recipe.trainer.micro_batch_tokens)
    largest = max(batches, key=lambda indices: sum(lengths[index] for index in indices))
    scored = engine.score([samples[index] for index in largest]).samples
    if not scored:
        raise NotMeasured("no rollout has a hint that fits into the teacher's window")
    seconds = backward_seconds(engine, recipe, Batch(scored))
    step_tokens = recipe.trainer.batch_size * sum(lengths) / len(lengths)
    seconds *= step_tokens / sum(sample.length for sample in scored)
    if "replay" in recipe.loss.needs:
        pairs = pairs_of_step(engine, recipe.replay, samples, recipe.trainer.seed, step=1)
        seconds += backward_seconds(engine, recipe, Batch([], pairs)) if pairs else 0.0
    return seconds


def backward_seconds(engine: Engine, recipe: Recipe, batch: Batch) -> float:
    """Return the seconds of one forward and backward, the second of two. Gradients are dropped."""
    loss = setup_loss_fn(resolve(recipe.loss, engine.problems.tokenizer))
    model = engine.model
    try:
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            start = time.perf_counter()
            accumulate_gradients(model, loss, batch, recipe.trainer, 0, engine.reference)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
    finally:
        model.zero_grad(set_to_none=True)
    return seconds


def forecast(
    recipe: Recipe,
    sampled: FirstStep | None,
    step_tokens: float | None,
    teachers: Mapping[str, TeacherReport],
    train_seconds: float | None,
) -> StepForecast:
    """Return the seconds of a step: measured speeds, times the step's tokens."""
    column = str(recipe_column(recipe)) if teachers else None
    seconds = [
        entry.seconds_per_step
        for teacher in teachers.values()
        for entry in teacher.throughput
        if entry.column == column
    ]
    measured = [value for value in seconds if value is not None]
    score_seconds = sum(measured) if teachers and len(measured) == len(teachers) else None
    sample_seconds = None
    if sampled is not None and step_tokens is not None:
        sample_seconds = sampled.seconds * step_tokens / sampled.tokens
    run_seconds = None
    if sample_seconds is not None and train_seconds is not None:
        if score_seconds is not None or not teachers:
            step_seconds = sample_seconds + (score_seconds or 0.0) + train_seconds
            run_seconds = recipe.trainer.steps * step_seconds
    return StepForecast(
        rollouts=recipe.trainer.batch_size,
        tokens=step_tokens,
        column=column,
        sample_seconds=sample_seconds,
        score_seconds=score_seconds,
        train_seconds=train_seconds,
        run_seconds=run_seconds,
    )


def recommendations(
    recipe: Recipe,
    student: StudentReport,
    teachers: Mapping[str, TeacherReport],
    step: StepForecast,
) -> list[str]:
    """Return what to change in recipe or servers, one sentence each."""
    advice = []
    for table, teacher in teachers.items():
        advice += [
            f"[{table}] {text}"
            for text in (
                *advice_on_k(recipe, teacher),
                *advice_on_tokens(recipe, teacher),
                *advice_on_numbers(teacher),
                *advice_on_server(recipe, teacher),
            )
        ]
    if step.score_seconds is not None and step.train_seconds is not None:
        rest = (step.sample_seconds or 0.0) + step.train_seconds
        if step.score_seconds > rest:
            advice.append(
                f"Scoring takes {step.score_seconds:.3g} s of a step, and sampling and training "
                f"{rest:.3g} s: a smaller K or a faster teacher shortens the run."
            )
    return advice


def advice_on_k(recipe: Recipe, teacher: TeacherReport) -> list[str]:
    """Return the recommended K, compared with the recipe's."""
    support = teacher.support
    if support is None:
        return []
    best, largest = support.recommended_k, support.largest_k
    reason = f"its tail hides at most 5 % of the reverse KL at K = {largest}"
    own = recipe_column(recipe)
    if not isinstance(own, int) or own == 0:
        return [f"a loss on the teacher's top K needs K = {best}: {reason}."]
    hidden = next((entry.hidden for entry in support.by_k if entry.k == own), None)
    if hidden is None:
        return [f"it was not asked for the recipe's k = {own}; K = {best} is enough: {reason}."]
    if own < best:
        return [
            f"the recipe's k = {own} hides {hidden:.0%} of the reverse KL at K = {largest}; set "
            f"the loss's k to {best}: {reason}."
        ]
    return [
        f"the recipe's k = {own} hides {hidden:.0%} of the reverse KL at K = {largest}; "
        f"K = {best} is enough: {reason}."
    ]


def advice_on_tokens(recipe: Recipe, teacher: TeacherReport) -> list[str]:
    """Return what templates and special tokens call for (https://arxiv.org/abs/2603.25562)."""
    advice = []
    mask = recipe.loss.special_tokens
    masked = set() if mask is None else {*mask.ids, *mask.strings}
    if teacher.same_prompts is False:
        advice.append(
            "its own template writes other prompts, and it reads the student's; a teacher without "
            "that template, or data with the teacher's, would suit it better."
        )
    for token in teacher.special_tokens:
        if masked & {token.student_id, token.token}:
            continue
        if token.teacher_probability < IMPROBABLE * token.student_probability:
            advice.append(
                f"it gives {token.token!r} a probability of {token.teacher_probability:.2g} where "
                f"the student gives {token.student_probability:.2g}; leave it out with "
                f"[loss.special_tokens] strings = [{token.token!r}], or align the templates."
            )
    return advice


def advice_on_numbers(teacher: TeacherReport) -> list[str]:
    """Return what a rounded head or another checkpoint calls for."""
    advice = []
    head = "bfloat16" if teacher.head_bfloat16 else teacher.facts.dtype
    if teacher.head_bfloat16:
        remedy = (
            'start its server with --hf-overrides \'{"head_dtype": "float32"}\''
            if teacher.facts.backend == "server"
            else 'set its dtype to "float32"'
        )
        advice.append(
            f"its logits are rounded to bfloat16, up to 0.06 nat each; {remedy} for exact ones."
        )
    if teacher.agreement is not None and teacher.agreement.largest > TOLERANCES[head]:
        advice.append(
            f"its log-probs differ from those of the checkpoint {teacher.facts.model} by up to "
            f"{teacher.agreement.largest:.2g} nat; start the server with that checkpoint."
        )
    return advice


def advice_on_server(recipe: Recipe, teacher: TeacherReport) -> list[str]:
    """Return what a server without the scoring plugin costs."""
    column, plugin = recipe_column(recipe), teacher.plugin
    if plugin is None or plugin.version is not None:
        return []
    if isinstance(column, int) and column < SLOW_JSON:
        return []
    return [
        f"its server has no scoring plugin and answers K = {column} in JSON, several times slower "
        f"than in binary; start it with `prime-rl teacher --model {teacher.facts.model}`."
    ]
