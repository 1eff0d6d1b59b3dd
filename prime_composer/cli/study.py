"""Run variants of one recipe over several seeds, from the same start and rollout budget.

Every run is a process of its own (``prime-rl rl``) in ``<study>/<variant>-seed<N>``. Finished runs
are kept, so the same command continues a stopped study.
"""

import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from prime_composer.cli.machine import shared_by
from prime_composer.cli.program import program
from prime_composer.cli.study_file import StudyRun, is_finished, load_study
from prime_composer.cli.study_report import summary, write_report
from prime_composer.local.run_dir import RunRequest, choose_run_dir, claim_run_dir
from prime_composer.local.signals import Stopped
from prime_composer.local.sources import load_sources
from prime_composer.recipe.schema import RecipeError

Process: TypeAlias = "subprocess.Popen[bytes]"


def study(
    config: str,
    output_dir: str | None,
    jobs: int,
    overwrite: bool,
    dry_run: bool,
    overrides: Sequence[str],
) -> int:
    """Run what is missing of a study, draw and print the comparison, and return the exit status.

    A run that diverges is named at the end, and the others continue. A wrong set-up stops the
    study. A signal stops it after the current step, and compares the finished runs.
    """
    compared, runs = load_study(config, output_dir, overrides)
    sizes = f"{len(compared.items_of)} variants, {len(compared.seeds)} seeds"
    print(f"study: {sizes}, in {runs[0].run_dir.parent}", flush=True)
    if dry_run:
        return plan_study(runs, overwrite)
    if overwrite:
        delete(runs)
    failed: list[str] = []
    stopped_by = 0
    try:
        run_all(runs, jobs, failed)
    except KeyboardInterrupt as error:
        stopped_by = signum_of(error)
    write_report(compared, runs)
    if failed:
        names = ", ".join(failed)
        print(f"{program()} study: failed: {names}; the table leaves them out", file=sys.stderr)
    if stopped_by:
        without = ", without --overwrite," if overwrite else ""
        print(f"stopped; the same command{without} continues this study")
        return 128 + stopped_by
    return 1 if failed else 0


def plan_study(runs: Sequence[StudyRun], overwrite: bool) -> int:
    """Check what ``study`` would check before a model is loaded, and print what it would do."""
    left, rollouts = [], 0
    for run in runs:
        if not overwrite and is_finished(run):
            print(f"{run.name}: finished, kept")
            continue
        left.append(run)
        run_dir = choose_run_dir(wish_of(run, overwrite))
        checkpoint = run_dir.checkpoint
        steps = run.recipe.trainer.steps - (checkpoint.step if checkpoint else 0)
        rollouts += steps * run.recipe.trainer.batch_size * len(wishes_of_islands(run, overwrite))
        what = f"continues after step {checkpoint.step}" if checkpoint else "runs"
        print(f"{run.name}: {'is deleted, and runs again' if run_dir.replaces else what}")
    for warning in check_variants(left):
        print(warning)
    print(f"{len(left)} of {len(runs)} runs are left, at most {rollouts:,} rollouts")
    print("dry run: nothing was run, nothing was written")
    return 0


def wish_of(run: StudyRun, overwrite: bool) -> RunRequest:
    """Return what a run asks of its directory: to continue there, or to delete what is there."""
    exists = run.run_dir.exists()
    resume = not overwrite and run.has_begun
    return RunRequest(
        run.recipe,
        run.base,
        str(run.run_dir),
        resume=resume,
        overwrite=overwrite and exists,
        island=None if run.recipe.diloco is None else 0,
    )


def wishes_of_islands(run: StudyRun, overwrite: bool) -> list[RunRequest]:
    """Return ``wish_of`` for each island of a run; a run without islands is one."""
    request, diloco = wish_of(run, overwrite), run.recipe.diloco
    if diloco is None:
        return [request]
    return [replace(request, island=index) for index in range(diloco.replicas)]


def check_variants(runs: Sequence[StudyRun]) -> list[str]:
    """Check the first run of each variant as ``rl --dry-run`` does, and return the warnings."""
    from prime_composer.local.dry_run import dry_run

    warnings: dict[str, None] = {}
    first: dict[str, StudyRun] = {}
    for run in runs:
        first.setdefault(run.variant, run)
    for run in first.values():
        try:
            lines = dry_run(run.recipe, load_sources(run.recipe))
        except ValueError as error:
            raise RecipeError(f"{run.name}: {error}") from error
        warnings |= dict.fromkeys(line for line in lines if line.startswith("warning:"))
    return list(warnings)


def delete(runs: Sequence[StudyRun]) -> None:
    """Delete what earlier runs of the study left, once every check of all of them has passed."""
    there = [run for run in runs if run.run_dir.exists()]
    wishes = [request for run in there for request in wishes_of_islands(run, overwrite=True)]
    for request in wishes:
        choose_run_dir(request)
    check_variants(runs)
    for request in wishes:
        with claim_run_dir(request) as claim:
            claim.begin()
    for run in runs:
        run.log.unlink(missing_ok=True)


def run_all(runs: Sequence[StudyRun], jobs: int, failed: list[str]) -> None:
    """Run what is not finished, ``jobs`` at a time, and print each result."""
    waiting = deque((f"[{index}/{len(runs)}] {run.name}", run) for index, run in enumerate(runs, 1))
    active: list[tuple[str, StudyRun, Process]] = []
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                label, run = waiting.popleft()
                if is_finished(run):
                    print(f"{label}: {summary(run)} (kept)", flush=True)
                    continue
                print(f"{label}: running; progress in {run.log}", flush=True)
                active.append((label, run, start(run, jobs)))
            for ended in [one for one in active if one[2].poll() is not None]:
                active.remove(ended)
                label, run, process = ended
                done = succeeded(run, process.returncode)
                result = summary(run) if done else f"failed, see {run.log}"
                print(f"{label}: {result}", flush=True)
                failed += [] if done else [run.name]
            if active:
                time.sleep(0.1)
    except BaseException as error:
        stop([process for _, _, process in active], signum_of(error))
        raise


def start(run: StudyRun, jobs: int) -> Process:
    """Start or resume one of ``jobs`` runs, each in a process of its own, with a log beside it."""
    command = [sys.executable, "-m", "prime_composer.cli", "rl", "--config", str(run.base)]
    command += ["--engine", "local", "--output-dir", str(run.run_dir)]
    if run.recipe.diloco is not None:
        command += ["--islands", str(run.recipe.diloco.replicas)]
    for item in run.overrides:
        command += ["--set", item]
    if run.has_begun:
        command.append("--resume")
    run.run_dir.parent.mkdir(parents=True, exist_ok=True)
    return call(command, run.log, shared_by(jobs))


def call(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Process:
    """Start a process out of the terminal's reach, whose output is appended to ``log``."""
    with log.open("a", encoding="utf-8") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def succeeded(run: StudyRun, status: int) -> bool:
    """Return whether a run finished, by its exit status; False if it diverged."""
    if status > 128:
        raise Stopped(status - 128)
    if status not in (0, 1):
        lines = run.log.read_text(encoding="utf-8").splitlines()
        # The line with which the run would continue is indented, below the message.
        last = [line for line in lines if line.strip() and not line.startswith(" ")][-1:]
        raise RecipeError(
            f"{run.name} ended with status {status}: {' '.join(last)} (all of it: {run.log})"
        )
    return status == 0


def stop(processes: Sequence[Process], signum: int) -> None:
    """Send a signal to the processes and wait for them.

    Each further one that comes here is passed on, and the second one ends a run.
    """
    for process in processes:
        process.send_signal(signum)
    while True:
        try:
            for process in processes:
                process.wait()
            return
        except KeyboardInterrupt as error:
            for process in processes:
                process.send_signal(signum_of(error))


def signum_of(error: BaseException) -> int:
    """Return the number of the signal behind an exception; SIGINT where there is none."""
    return error.signum if isinstance(error, Stopped) else signal.SIGINT
