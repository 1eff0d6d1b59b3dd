"""A run on this machine: what is open, what happens around its steps, and how it ends."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from prime_composer.backends.cpu_guard import all_cores
from prime_composer.local.ahead import Ahead
from prime_composer.local.answers import Answerer, KeptAnswer, write_answers
from prime_composer.local.checkpoint import (
    Checkpoint,
    CheckpointNotSaved,
    check_room,
    list_checkpoints,
    save_checkpoint,
    set_newer_aside,
    tensor_bytes,
    tidy,
)
from prime_composer.local.collect import Clock, Collector, Weights
from prime_composer.local.disk import describe_error
from prime_composer.local.engine import Engine
from prime_composer.local.evaluate import Evaluator
from prime_composer.local.islands.island import Island
from prime_composer.local.opening import open_engine
from prime_composer.local.outcome import Outcome, RunStopped
from prime_composer.local.preflight import check_routing
from prime_composer.local.signals import StepAbandoned, StopRequest, finishing_the_step
from prime_composer.local.student import Student
from prime_composer.local.tracker import Tracker, past_evaluations, read_metrics
from prime_composer.local.watch import Watch, WatchFailed, open_watch
from prime_composer.local.watch_metrics import (
    CollapseCheck,
    Collapsed,
    teachers_without_success,
    tokens_of_no_use,
)
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.metrics import signatures_of
from prime_composer.recipe.routing import Routing
from prime_composer.recipe.schema import Recipe
from prime_composer.step.batch import Batch
from prime_composer.step.gradients import gradient_shares
from prime_composer.teachers.tokenizer_pair import check_pairs


@runtime_checkable
class Display(Protocol):
    """Shows a run: a progress bar, or nothing."""

    def status(self, text: str) -> None:
        """Show what the run does before its first step."""
        ...

    def start(self, metrics: dict[str, float]) -> None:
        """Show what was measured before the first step."""
        ...

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Show a finished step."""
        ...


@dataclass
class TrainingRun:
    """An open run."""

    recipe: Recipe
    run_dir: Path
    display: Display
    engine: Engine
    student: Student
    watch: Watch
    collapse: CollapseCheck
    evaluator: Evaluator
    tracker: Tracker
    stop: StopRequest
    evaluations: dict[int, dict[str, float]]  # by the step that they followed
    collector: Collector
    ahead: Ahead | None = None  # None where each batch is collected in its step
    clock: Clock = field(default_factory=Clock)  # of the step under way
    metrics: dict[str, float] = field(default_factory=dict)  # of the batch of the step under way
    abandoned: bool = False  # a signal came while the step waited for a server
    warned: set[str] = field(default_factory=set)  # of which the user was warned, each once
    island: Island | None = None  # None for a run by itself

    def steps(self) -> Iterator[int]:
        """Yield the steps that are left, until a signal or ``trainer.until`` ends the run."""
        recipe, last = self.recipe, self.recipe.trainer.steps
        while self.student.steps < last and not self.stop.requested and self.best is None:
            self.clock = Clock()
            yield self.student.steps + 1
        if recipe.trainer.until is not None and self.best is not None:
            words = recipe.trainer.until.describe(self.best, self.evaluations)
            self.display.status(
                f"step {self.student.steps}: the run ends by trainer.until: {words}"
            )

    @property
    def best(self) -> int | None:
        """The step of the evaluation by which ``trainer.until`` ends the run; None before it."""
        until = self.recipe.trainer.until
        return None if until is None else until.best(self.evaluations)

    def collect(self, step: int) -> Batch:
        """Return the batch of a step: collected now, or ahead by an earlier step's weights."""
        if self.ahead is None:
            now = Weights(self.student.steps, self.student.model)
            collected = self.collector.collect(step, now, self.clock)
        else:
            with self.clock.phase("wait"):
                collected = self.ahead.take(step)
            self.clock.add(collected.seconds)
        self.metrics = collected.metrics
        return collected.batch

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """Update the student, and return the step's metrics."""
        student, clock = self.student, self.clock
        shares: dict[str, float] = {}
        with clock.phase("train"):
            self.engine.begin_update()
        if self.is_measured(step):
            with clock.phase("checks"):
                shares = gradient_shares(student.model, student.loss, batch, student.config, step)
        with clock.phase("train"):
            metrics = self.metrics | shares | student.update(batch, step)
        # Kept by the student, so that ``leave`` logs a step whose end an error cuts off.
        student.metrics = metrics | self.collapse.add(step, metrics)
        return student.metrics

    def load_weights(self, step: int) -> None:
        """Average with other islands, and send the new weights to whoever follows the student."""
        if self.island is not None:
            if self.island.is_outer(step):
                self.stop.wait_begins()
            with self.clock.phase("islands"):
                self.island.end_step(step)
        if self.ahead is None:
            with self.clock.phase("sync"):
                self.engine.end_step(step)
        elif self.is_measured(step) or self.is_to_save(step):
            with self.clock.phase("wait"):
                self.ahead.settle()
            with self.clock.phase("sync"):
                self.ahead.serve(step)

    def end_step(self, step: int, batch: Batch, metrics: dict[str, float]) -> None:
        """Evaluate, watch, log, and save where it is due."""
        if self.island is not None and self.island.is_outer(step):
            metrics |= self.island.metrics
            if self.island.warning:
                self.display.status(f"warning: step {step}: {self.island.warning}")
            if self.student.steps != step:
                self.tracker.rewind(self.student.steps)
                with self.stop.may_interrupt():
                    self.measure_left()
                if self.student.steps > step and self.is_to_save(self.student.steps):
                    self.save()
                return
        seconds = self.clock.laps
        metrics |= seconds
        metrics["tokens_per_second"] = batch.tokens / seconds["time/step"]
        measures, saves = self.is_measured(step), self.is_to_save(step)
        with self.stop.may_interrupt():
            if measures:
                metrics |= self.measure(step)
            elif saves:
                self.watch.check(step, before_use=True)
        self.tracker.log(step, metrics)
        self.display.step(step, metrics)
        for name, warning in tokens_of_no_use(metrics).items():
            if name not in self.warned:
                self.warned.add(name)
                self.display.status(f"warning: step {step}: {warning}")
        for warning in self.collapse.warnings(metrics):
            if self.recipe.checks.collapse.action == "stop":
                raise Collapsed(f"step {step}: {warning}{self.healthy_checkpoint()}")
            self.display.status(f"warning: step {step}: {warning}")
        if saves:
            self.save()

    def healthy_checkpoint(self) -> str:
        """Return what is saved from before the student's answers were beyond a limit."""
        healthy = self.collapse.healthy or 0
        saved = [one.step for one in list_checkpoints(self.run_dir) if one.step <= healthy]
        return f" (saved before it: step {saved[-1]}, --step {saved[-1]})" if saved else ""

    @property
    def evaluates(self) -> bool:
        """Whether this run measures the student: each one but the islands after the first."""
        return self.island is None or self.island.evaluates

    def is_measured(self, step: int) -> bool:
        """Return whether a step ends with an evaluation."""
        if not self.evaluates:
            return False
        return is_due(step, self.recipe.eval.every, self.recipe.trainer.steps)

    def is_to_save(self, step: int) -> bool:
        return is_due(step, self.recipe.checkpoint.every, self.recipe.trainer.steps)

    def measure(self, step: int) -> dict[str, float]:
        """Evaluate the student, and keep its first answers for the report."""
        measured = self.evaluator.student()
        self.warn_unmeasured()
        # A teacher that was exchanged meanwhile has measured another distance.
        self.watch.check(step, before_use=True)
        self.keep(step, self.evaluator.answers)
        self.evaluations[step] = measured
        return measured

    def keep(self, step: int, answers: Sequence[KeptAnswer], of: Answerer = "answers") -> None:
        """Write answers for the report."""
        signatures = signatures_of(self.engine.problems.problem_set.sources.values())
        write_answers(self.run_dir, step, answers, signatures, of)

    def measure_at_start(self) -> None:
        """Evaluate before training, or what a run that was stopped had left to evaluate."""
        if self.student.steps == 0 and self.evaluates:
            self.display.status("measuring the teacher and the student before training")
            self.evaluations[0] = self.measure(0) | self.evaluator.teachers()
            self.warn_unmeasured()
            if self.evaluator.teacher_answers:
                self.keep(0, self.evaluator.teacher_answers, of="teacher")
            self.tracker.log(0, self.evaluations[0] | self.student.sizes())
            self.display.start(self.evaluations[0])
            for warning in teachers_without_success(self.evaluations[0]):
                self.display.status(f"warning: {warning}")
        self.measure_left()

    def measure_left(self) -> None:
        """Evaluate the last step where a run that was stopped, or other islands, took it."""
        done = self.student.steps
        if done > 0 and self.is_measured(done) and done not in self.evaluations:
            self.tracker.amend(done, self.measure(done))

    def warn_unmeasured(self) -> None:
        """Say once what an evaluation has left out, because a tape that answers alone lacks it."""
        lacking = sorted(self.evaluator.not_measured - self.warned)
        self.warned |= {*lacking}
        if lacking:
            self.display.status(
                f"warning: step {self.student.steps}: {' and '.join(lacking)} cannot be measured "
                "without a teacher, and is left out from here on wherever its tape has no scores "
                "of the rollouts; with the teacher (tape_only = false) it is"
            )

    @contextmanager
    def until_stopped(self) -> Iterator[StopRequest]:
        """Decide what a signal or an error within the block means, and save the last step."""
        try:
            with finishing_the_step(self.stop):
                yield self.stop
                if not self.is_saved():
                    with self.stop.may_interrupt():
                        self.verify()
                    self.save()
        except (ValueError, OSError, StepAbandoned) as error:
            stopped = self.leave(error)
            self.abandoned = isinstance(error, StepAbandoned)
            saved = 0 if stopped.checkpoint is None else stopped.checkpoint.step
            if not self.abandoned or (saved < self.student.steps and self.island is None):
                raise stopped from error
            if doubts := self.watch.doubts(self.student.steps):
                self.display.status(f"warning: {doubts}")

    def close(self) -> None:
        """Give up what is collected ahead. Closing twice is harmless."""
        if self.ahead is not None:
            self.ahead.stop()

    def verify(self) -> None:
        """Ask everyone before the last finished step is saved, and collect nothing ahead of it."""
        if self.ahead is not None:
            self.ahead.stop()
            self.ahead.serve(self.student.steps)
        self.watch.check(self.student.steps, before_use=True)

    def is_saved(self) -> bool:
        """Return whether there is nothing new to save. Islands save outer steps alone."""
        steps = self.student.steps
        if self.island is not None and steps != self.island.finished:
            return True
        return steps == 0 or steps in {one.step for one in list_checkpoints(self.run_dir)}

    def save(self) -> None:
        """Write a checkpoint, after the metrics that it continues."""
        self.tracker.sync()
        step, keep = self.student.steps, self.recipe.kept_checkpoints
        state = self.student.state_dict()
        state |= {"teacher": self.engine.state_dict(), "watch": self.watch.state_dict()}
        state["tokenizer_pairs"] = self.engine.tokenizer_pairs
        if self.island is not None:
            state["islands"] = self.island.outer.state_dict()
        model, tokenizer = self.engine.stored, self.engine.problems.tokenizer
        kept = kept_steps(self.watch, self.collapse, step)
        save_checkpoint(self.run_dir, step, model, tokenizer, state, keep, kept)

    def leave(self, error: Exception) -> RunStopped:
        """Save the last finished step after an error, and return the error to raise."""
        reason = describe_error(error)
        self.close()
        # A step in doubt would push the last good checkpoint out.
        unfit = isinstance(error, CheckpointNotSaved | WatchFailed)
        if not unfit and not self.is_saved():
            try:
                if self.tracker.last_step < self.student.steps:
                    self.tracker.log(self.student.steps, self.student.metrics)
                self.save()
            except (CheckpointNotSaved, OSError) as second:
                # Report the first error first.
                step, cause = self.student.steps, describe_error(second)
                reason += f"; step {step} could not be saved either: {cause}"
        last_right = error.safe_step if isinstance(error, WatchFailed) else self.student.steps
        reason = reason.rstrip(".")
        right = [one for one in list_checkpoints(self.run_dir) if one.step <= last_right]
        if not right:
            return RunStopped(reason, None)
        verified = None
        if doubts := self.watch.doubts(right[-1].step):
            reason += f"; {doubts}"
            sure = [one.step for one in right if one.step <= self.watch.safe_step]
            verified = sure[-1] if sure else None
        return RunStopped(reason, right[-1], verified)

    def outcome(self) -> Outcome:
        steps = self.student.steps
        over = steps >= self.recipe.trainer.steps or self.best is not None
        interrupted, signum = self.abandoned or not over, self.stop.signum
        return Outcome(self.run_dir, steps, interrupted, self.evaluations, signum, self.best)


@contextmanager
def open_run(
    recipe: Recipe,
    problems: ProblemSet,
    paths: Mapping[str, Path],
    run_dir: Path,
    display: Display,
    resume: Checkpoint | None = None,
    begin: Callable[[], None] | None = None,
    island: Island | None = None,
) -> Iterator[TrainingRun]:
    """Open a run's models, check all that can be checked before a step, and measure the start."""
    check_routing(Routing.of_recipe(recipe), problems)
    stop = StopRequest()

    def status(text: str) -> None:
        display.status(text)
        stop.wait_begins()

    for name, count in problems.left_out.items():
        status(f"{name}: {count} rows of the data are left out (clean)")
    student_dir = None if resume is None else resume.path
    with open_engine(recipe, problems, paths, status, student_dir) as engine:
        student = Student(recipe, engine)
        stored = {} if resume is None else resume.load()
        if resume is not None:
            student.load_state_dict(stored, resume.step)
            engine.load_state_dict(stored["teacher"])
            check_pairs(stored.get("tokenizer_pairs", {}), engine.tokenizer_pairs)
        resumed = None if resume is None else resume.step
        check_room(
            run_dir,
            checkpoint_bytes(engine),
            checkpoints_at_once(recipe, student.steps),
            resumed,
        )
        watch = open_watch(engine, recipe, status)
        if resume is not None:
            watch.load_state_dict(stored["watch"])
        if doubts := watch.doubts(student.steps):
            status(
                f"warning: {doubts}; the run continues from them. The last verified step is "
                f"{watch.safe_step} (--resume --step)"
            )
        if island is not None:
            island.meet(student, engine, watch, stored.get("islands"))
        if begin is not None:
            begin()
        for path in () if resumed is None else set_newer_aside(run_dir, resumed):
            status(
                f"warning: a checkpoint after step {resumed} is now {path}; no run deletes it: "
                "delete it when you do not need it"
            )
        evaluator = Evaluator(engine, recipe)
        with Tracker(run_dir, recipe.logging, resumed, status) as tracker, all_cores(engine.model):
            logged = read_metrics(run_dir)
            evaluations = past_evaluations(logged)
            collapse = CollapseCheck.of_records(recipe.checks.collapse, logged)
            if resumed is not None:
                tidy(run_dir, recipe.kept_checkpoints, kept_steps(watch, collapse, resumed))
            place = None if island is None else island.place
            collector, ahead = Collector(engine, recipe, island=place, watch=watch), None
            if (ahead_by := recipe.rollout.ahead) > 0:
                sampled_by = engine.model, engine.sampler
                last = recipe.trainer.steps
                ahead = Ahead(ahead_by, last, *sampled_by, collector.collect, stop)
            run = TrainingRun(
                *(recipe, run_dir, display, engine, student, watch, collapse, evaluator, tracker),
                *(stop, evaluations, collector, ahead),
                island=island,
            )
            with closing(run):
                run.measure_at_start()
                yield run


def kept_steps(watch: Watch, collapse: CollapseCheck, step: int) -> list[int]:
    """Return the steps up to each of which the newest checkpoint is kept beside the newest ones."""
    return [one for one in (watch.verified(step), collapse.healthy) if one is not None]


def checkpoint_bytes(engine: Engine) -> int:
    """Return the size of a checkpoint, with AdamW's two moments and a moving teacher."""
    moments = [parameter for parameter in engine.model.parameters() if parameter.requires_grad]
    return (
        tensor_bytes(engine.stored.state_dict())
        + 2 * tensor_bytes(moments)
        + tensor_bytes({} if engine.latent is None else engine.latent.state_dict())
        + tensor_bytes(engine.state_dict())
    )


def checkpoints_at_once(recipe: Recipe, done: int) -> int:
    """Return how many checkpoints are on the disk at most, while one is written."""
    every, last = recipe.checkpoint.every, recipe.trainer.steps
    written = sum(is_due(step, every, last) for step in range(done + 1, last + 1))
    return min(recipe.kept_checkpoints + 1, written + (done > 0))


def is_due(step: int, every: int, last: int) -> bool:
    """Return whether a step ends with what comes after the last and every ``every``; 0 is never."""
    return step == last or (every > 0 and step % every == 0)
