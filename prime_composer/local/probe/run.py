"""Measure student, teachers and one step before a recipe is run. Writes nothing, trains nothing.

One step runs as a run's does, up to its backward pass. Its clock gives the forecast, and student
and teachers are measured on its rollouts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from prime_composer.backends.cpu_guard import all_cores
from prime_composer.backends.protocols import Limits
from prime_composer.backends.transformers import window_of
from prime_composer.contract import Scores, given
from prime_composer.local.collect import Collector
from prime_composer.local.engine import Engine
from prime_composer.local.opening import open_engine, tokenizer_of
from prime_composer.local.preflight import (
    CheckResult,
    Checks,
    State,
    check_routing,
    one_line,
    run_checks,
)
from prime_composer.local.probe.report import (
    NO_ROLLOUT,
    ModelFacts,
    NotMeasured,
    ProbeReport,
    StepForecast,
    StudentReport,
    SupportSize,
    TeacherReport,
)
from prime_composer.local.probe.teacher import Target, probe_teacher, recommendations
from prime_composer.local.watch_metrics import tokens_of_no_use
from prime_composer.losses import LossConfig, setup_loss_fn
from prime_composer.losses.shared.modifiers import with_token_ids
from prime_composer.problems.loading import ProblemSet
from prime_composer.recipe.routing import Routing
from prime_composer.recipe.schema import (
    Recipe,
    TrainerConfig,
)
from prime_composer.recipe.urls import public_url
from prime_composer.samplers.registry import BackendSpec
from prime_composer.step.batch import Batch, Sample
from prime_composer.step.gradients import accumulate_gradients
from prime_composer.step.mismatch import Mismatch, SamplerCheck
from prime_composer.teachers.own_tokenizer import OwnTokenizerScorer
from prime_composer.teachers.policy import PolicyTeacher

SECONDS_PER_COLUMN = 2.0  # Time for the speed at one K of one teacher

ROLLOUTS = 32  # Most rollouts that a model is measured on

IMPROBABLE = 0.1  # Teacher's share of the student's probability of the ends of its answers

OPENING = "opening the models"


def probe(
    recipe: Recipe,
    problems: ProblemSet,
    paths: Mapping[str, Path],
    status: Callable[[str], None],
    seconds: float = SECONDS_PER_COLUMN,
) -> ProbeReport:
    """Open a recipe's models, run the preflight's checks, and measure. A failure is a result."""
    routing = Routing.of_recipe(recipe)
    if (refused := next(refusals(recipe, routing), None)) is not None:
        return ProbeReport([CheckResult(OPENING, "failed", refused)])
    recipe = without_tapes(recipe)
    try:
        check_routing(routing, problems)
        engine = open_engine(recipe, problems, paths, status)
    except (ValueError, RuntimeError, OSError) as error:
        return ProbeReport([CheckResult(OPENING, "failed", one_line(error))])
    with engine, all_cores(engine.model):
        return probe_engine(engine, recipe, status, seconds)


def refusals(recipe: Recipe, routing: Routing) -> Iterator[str]:
    """Yield what of a recipe cannot be probed."""
    for teacher, table in routing.teachers.items():
        if table.tape_only:
            yield (
                f"[{teacher.table}] tape_only = true opens no teacher, and a probe measures it: "
                f"add --set {teacher.table}.tape_only=false"
            )
    student = recipe.student
    sent = {
        "student.quantize": student.quantize is not None,
        "student.lora.start": student.lora is not None and student.lora.start is not None,
    }
    for key, is_sent in sent.items():
        if is_sent and recipe.rollout.url is not None:
            yield (
                f"{key} would send changed weights to the server of [rollout], which everybody who "
                "uses it would get; probe with another rollout.backend, or start the run"
            )


def without_tapes(recipe: Recipe) -> Recipe:
    """Return the recipe with teachers whose answers are not kept."""
    unkept = {"tape": None}
    tables = {name: getattr(recipe, name) for name in ("teacher", "reference")}
    changes: dict[str, Any] = {
        name: table.model_copy(update=unkept) for name, table in tables.items() if table is not None
    }
    changes["teachers"] = {
        name: teacher.model_copy(update=unkept) for name, teacher in recipe.teachers.items()
    }
    return recipe.model_copy(update=changes)


def probe_engine(
    engine: Engine,
    recipe: Recipe,
    status: Callable[[str], None],
    seconds: float,
) -> ProbeReport:
    """Run the checks and measure open models; see ``probe``. Their weights stay as they are."""
    status("running the preflight's checks")
    checks = Checks(engine, recipe, sends_weights=recipe.rollout.url is None)
    findings = run_checks(checks.by_name(), goes_on=True)
    status("running a step up to its backward pass")
    step = FirstStep()
    step.run(Collector(engine, recipe))
    findings.append(step.finding("sampling", "sample"))
    loss = recipe.loss
    own: SupportSize = "states" if loss.reads_hidden_states else loss.asked_of_teacher[0]
    teachers, advice = {}, []
    for target in targets_of(engine, step.samples, step.fitted):
        table = target.table
        status(f"measuring {table}")
        teachers[table] = teacher = probe_teacher(
            target,
            engine.model,
            engine.problems,
            own,
            step.tokens,
            recipe.trainer.micro_batch_tokens,
            seconds,
        )
        findings.append(scoring_finding(table, teacher, own))
        advice += [f"[{table}] {text}" for text in recommendations(own, teacher)]
    findings.append(step.finding("training", "train"))
    warnings = tokens_of_no_use(step.metrics).values()
    findings += [CheckResult("a step's metrics", "warning", text) for text in warnings]
    forecast = step.forecast(recipe.trainer, str(own) if teachers else None)
    advice += advice_on_ends(loss, step.metrics)
    student = student_report(engine, given(engine.student_spec), step)
    return ProbeReport(findings, advice, forecast, student, teachers)


@dataclass
class FirstStep:
    """A step of the recipe, as a run does it, without the optimizer; ``error`` is what ended it."""

    samples: Sequence[Sample] = ()
    fitted: Sequence[Sample] = ()
    laps: Mapping[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)  # what a run would log of it
    error: Exception | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the rollouts, without prompts."""
        return Batch(self.samples).tokens

    def run(self, collector: Collector) -> None:
        """Run the first step of a recipe. Its gradients are dropped."""
        self.laps, self.metrics = collector.clock.laps, collector.metrics
        try:
            self._run(collector)
        except (ValueError, RuntimeError, OSError) as error:
            self.error = error
        finally:
            collector.engine.model.zero_grad(set_to_none=True)

    def _run(self, collector: Collector) -> None:
        engine = collector.engine
        loss = setup_loss_fn(with_token_ids(engine.loss, engine.problems.tokenizer))
        graded = collector.grade(collector.sample(collector.problems(1), 1))
        self.samples = self.fitted = graded
        batch = collector.score(graded, 1)
        self.fitted = batch.samples
        if not batch.samples:
            raise NotMeasured("no rollout has a hint that fits into the teacher's window")
        recipe, check = collector.recipe, SamplerCheck.of_recipe(collector.recipe)
        mismatch = None if check is None else Mismatch(check)
        with collector.clock.phase("train"):
            self.metrics |= accumulate_gradients(
                engine.model, loss, batch, recipe.trainer, 1, mismatch
            )
            self.metrics |= {} if mismatch is None else mismatch.result(1)
            if torch.cuda.is_available():
                torch.cuda.synchronize()

    def finding(self, part: str, lap: str) -> CheckResult:
        """Return whether a part of the step could be measured, whose last lap is given."""
        name, seconds = f"a step's {part}", self.laps.get(f"time/{lap}")
        if seconds is not None:
            return CheckResult(name, "ok")
        if lap == "train" and not self.samples:
            return CheckResult(name, "skipped", "no rollout was sampled")
        state: State = "skipped" if isinstance(self.error, NotMeasured) else "failed"
        return CheckResult(name, state, one_line(given(self.error)))

    def forecast(self, config: TrainerConfig, column: str | None) -> StepForecast:
        """Return the seconds of each part. ``column`` is what the teachers are asked for."""
        laps = self.laps
        return StepForecast(
            rollouts=config.batch_size,
            tokens=self.tokens if self.samples else None,
            column=column,
            sample_seconds=laps.get("time/sample"),
            score_seconds=None if column is None else laps.get("time/score"),
            train_seconds=laps.get("time/train"),
            run_seconds=config.steps * laps["time/step"] if "time/train" in laps else None,
            metrics=self.metrics,
        )


def scoring_finding(table: str, teacher: TeacherReport, own: SupportSize) -> CheckResult:
    """Return whether a teacher scored at the recipe's K, and gave no wrong answer."""
    name = f"[{table}] a step's scoring"
    if teacher.wrong_answers:
        return CheckResult(name, "failed", teacher.wrong_answers[0])
    for entry in teacher.throughput:
        if entry.column == str(own) and entry.refused is not None:
            return CheckResult(name, "failed", entry.refused)
    return (
        CheckResult(name, "ok") if teacher.throughput else CheckResult(name, "skipped", NO_ROLLOUT)
    )


def targets_of(engine: Engine, samples: Sequence[Sample], fitted: Sequence[Sample]) -> list[Target]:
    """Return every teacher with rollouts to score; none where the loss reads none."""
    if engine.policy_teacher is not None:
        return [policy_target(engine, engine.policy_teacher, samples)]
    targets = []
    for teacher, scorer in engine.teachers.scorers.items() if engine.teachers else ():
        spec, readers = engine.teacher_specs[teacher], given(engine.teachers).routing.readers
        limits, read = scorer.limits, fitted
        if isinstance(scorer, OwnTokenizerScorer):
            limits = replace(scorer.scorer.limits, max_logprobs=limits.max_logprobs)
            # It reads whole answers, and ``fitted`` has the tokens without a score masked.
            read = [sample for sample in engine.fit(samples) if sample is not None]
        own = [sample for sample in read if teacher in readers(sample.problem)]
        targets.append(
            Target(
                table=teacher.table,
                facts=model_facts(spec, limits),
                scorer=scorer,
                # A teacher that the step has no rollout for can read those of the others.
                samples=(own or read)[:ROLLOUTS],
                share=len(own) / max(len(read), 1),
                load_tokenizer=partial(tokenizer_of, spec),
            )
        )
    return targets


@dataclass(frozen=True, eq=False)
class PolicyTarget(Target):
    """The policy as its own teacher."""

    policy: PolicyTeacher
    prompts: Mapping[Sample, Sequence[int]]  # with the hint of each rollout that has one

    def score(self, samples: Sequence[Sample], column: SupportSize) -> list[Scores]:
        rollouts, prompts = [one.rollout for one in samples], [self.prompts[one] for one in samples]
        hidden = column == "states"
        return self.policy.score(
            rollouts, prompts, 0 if column == "states" else column, hidden=hidden
        )


def policy_target(engine: Engine, policy: PolicyTeacher, samples: Sequence[Sample]) -> Target:
    """Return the policy as its own teacher, with the rollouts that have a hint."""
    hints = zip(samples, policy.hints(samples), strict=True)
    hinted = {one: policy.prompt_of(one, hint) for one, hint in hints if hint is not None}
    return PolicyTarget(
        table="teacher",
        facts=ModelFacts(
            f"the policy, hint {policy.config.hint!r}",
            "transformers",
            "float32",
            context=window_of(engine.model.config),
            vocabulary=engine.vocab_size,
            largest_k=engine.vocab_size,
        ),
        scorer=None,
        samples=[*hinted][:ROLLOUTS],
        share=len(hinted) / max(len(samples), 1),
        load_tokenizer=lambda: engine.problems.tokenizer,
        policy=policy,
        prompts=hinted,
    )


def model_facts(spec: BackendSpec, limits: Limits) -> ModelFacts:
    """Return what the recipe and the backend say about a model."""
    return ModelFacts(
        model=str(spec.model),
        backend=spec.backend,
        dtype=spec.dtype,
        url=None if spec.table.url is None else public_url(spec.table.url),
        context=limits.max_model_len,
        vocabulary=limits.vocab_size,
        largest_k=limits.max_logprobs,
    )


def student_report(engine: Engine, spec: BackendSpec, step: FirstStep) -> StudentReport:
    """Return the student's own part of the table."""
    facts = replace(
        model_facts(spec, engine.sampler.limits), vocabulary=engine.vocab_size, largest_k=None
    )
    seconds = step.laps.get("time/sample")
    return StudentReport(facts, None if seconds is None else step.tokens / seconds)


def advice_on_ends(loss: LossConfig, metrics: Mapping[str, float]) -> Iterator[str]:
    """Yield a word where the teacher would not end the student's answers as it does.

    Source: https://arxiv.org/abs/2603.25562.
    """
    teacher, student = metrics.get("rollout/end_teacher"), metrics.get("rollout/end_student")
    if teacher is None or student is None or loss.stops or loss.special_tokens:
        return
    if teacher < IMPROBABLE * student:
        yield (
            f"The teacher gives the tokens that end the student's answers a probability of "
            f"{teacher:.2g}, and the student {student:.2g}: name the ends of both models in "
            "[loss.stops], leave them out with [loss.special_tokens], or align the templates."
        )
