"""Run variants of one recipe over several seeds, from the same start and rollout budget.

A study file (``study_file``) names the base recipe, the overrides of each variant, and the seeds.
Every run is a process of its own (``prime-rl rl``) in ``<study>/<variant>-seed<N>``. Finished runs
are kept, so the same command continues a stopped study. ``study_report`` compares the runs.
"""

import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from prime_composer.cli.study_file import Run, is_finished, load_study
from prime_composer.cli.study_report import in_short, write_report
from prime_composer.local.run_dir.checkpoint import list_checkpoints
from prime_composer.local.signals import Stopped
from prime_composer.recipe.schema import RecipeError

Process: TypeAlias = "subprocess.Popen[bytes]"


def run_study(
    path: Path, output_dir: str | None = None, jobs: int = 1, changes: Sequence[str] = ()
) -> int:
    """Run what is missing of a study, draw the comparison and print its table.

    A run that diverges is named at the end, and the others continue. A wrong set-up stops the
    study. Ctrl-C, SIGTERM and SIGHUP stop it after the current step, and compare the finished runs.
    The exit status is 0, 1 if a run failed, or 128 + n after signal n.
    """
    study, runs = load_study(path, output_dir, changes)
    folder = runs[0].run_dir.parent
    print(
        f"study: {len(study.items_of)} variants, {len(study.seeds)} seeds, in {folder}", flush=True
    )
    failed: list[str] = []
    stopped_by = 0
    try:
        run_all(runs, jobs, failed)
    except KeyboardInterrupt as error:
        stopped_by = signum_of(error)
    write_report(study, runs)
    if failed:
        names = ", ".join(failed)
        print(f"prime-rl study: failed: {names}; the table leaves them out", file=sys.stderr)
    if stopped_by:
        print("stopped; the same command continues this study")
        return 128 + stopped_by
    return 1 if failed else 0


def run_all(runs: Sequence[Run], jobs: int, failed: list[str]) -> None:
    """Run what is not finished, ``jobs`` at a time, and print each result.

    ``failed`` gets the names of the runs that diverged. A signal is raised once the runs have
    written their checkpoints.
    """
    waiting = deque((f"[{index}/{len(runs)}] {run.name}", run) for index, run in enumerate(runs, 1))
    active: list[tuple[str, Run, Process]] = []
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                label, run = waiting.popleft()
                if is_finished(run):
                    print(f"{label}: {in_short(run)} (kept)", flush=True)
                    continue
                print(f"{label}: running; progress in {run.log}", flush=True)
                active.append((label, run, start(run)))
            for ended in [one for one in active if one[2].poll() is not None]:
                active.remove(ended)
                label, run, process = ended
                done = succeeded(run, process.returncode)
                result = in_short(run) if done else f"failed, see {run.log}"
                print(f"{label}: {result}", flush=True)
                failed += [] if done else [run.name]
            if active:
                time.sleep(0.1)
    except BaseException as error:
        stop([process for _, _, process in active], signum_of(error))
        raise


def start(run: Run) -> Process:
    """Start or resume one run in a process of its own; its output goes to a log beside its
    directory."""
    command = [sys.executable, "-m", "prime_composer.cli", "rl", "--config", str(run.base)]
    command += ["--engine", "local", "--output-dir", str(run.run_dir)]
    for item in run.overrides:
        command += ["--set", item]
    if list_checkpoints(run.run_dir):
        command.append("--resume")
    run.run_dir.parent.mkdir(parents=True, exist_ok=True)
    return call(command, run.log)


def call(command: Sequence[str], log: Path) -> Process:
    """Start a process out of the terminal's reach, whose output is appended to ``log``."""
    with log.open("a", encoding="utf-8") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def succeeded(run: Run, status: int) -> bool:
    """Return whether a run finished, by its exit status; False if it diverged.

    Raises:
        RecipeError: the run could not start; the message ends with the last line of its log.
        KeyboardInterrupt: a signal ended it.
    """
    if status > 128:
        raise Stopped(status - 128)
    if status not in (0, 1):
        last = run.log.read_text(encoding="utf-8").strip().splitlines()[-1:]
        raise RecipeError(
            f"{run.name} ended with status {status}: {' '.join(last)} (all of it: {run.log})"
        )
    return status == 0


def stop(processes: Sequence[Process], signum: int) -> None:
    """Send a signal to the processes and wait for them.

    The first signal makes a run leave a checkpoint. Each further one that comes here is passed on,
    and the second one ends a run.
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
