"""Run one island of a recipe with [diloco], all of them on this machine, or their lighthouse."""

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import IO

from prime_composer.cli.machine import shared_by
from prime_composer.cli.program import program
from prime_composer.cli.runs import plan_local, run_local
from prime_composer.cli.study import Process, signum_of, stop
from prime_composer.local.checkpoint import list_checkpoints
from prime_composer.local.islands.island import Island
from prime_composer.local.islands.join import open_lighthouse
from prime_composer.local.requirements import check_requirements
from prime_composer.local.run_dir import RunRequest, choose_run_dir
from prime_composer.recipe.diloco import DilocoConfig
from prime_composer.recipe.loading import load_recipe
from prime_composer.recipe.schema import Recipe, RecipeError


def islands_of(recipe: Recipe, path: str | Path) -> DilocoConfig:
    """Return the ``[diloco]`` of a recipe."""
    if recipe.diloco is None:
        raise RecipeError(
            f"{path} has no islands: add a table [diloco] with replicas = 2, or --set "
            "diloco.replicas=2"
        )
    return recipe.diloco


def serve_lighthouse(config: str, overrides: Sequence[str], host: str, port: int) -> int:
    """Run the lighthouse of a recipe until a signal ends it."""
    recipe = load_recipe(config, overrides)
    diloco = islands_of(recipe, config)
    words = ["--config", config, *(word for item in overrides for word in ("--set", item))]
    with open_lighthouse(recipe, host, port) as listening:
        url = listening.replace("0.0.0.0", "ADDRESS_OF_THIS_MACHINE")
        print(
            f"lighthouse of {diloco.replicas} islands: {url}\n"
            f"an outer step needs {diloco.fewest} of them, and waits {diloco.wait:g} s for one "
            f"that is alive. On each machine, with I from 0:\n"
            f"    {program()} rl {shlex.join(words)} --island I --lighthouse {url}",
            flush=True,
        )
        signal.pause()
    return 0


def run_islands(
    request: RunRequest,
    island: int | None,
    lighthouse: str | None,
    islands: int | None,
    dry_run: bool,
) -> int:
    """Run one island of a recipe, or all of them."""
    replicas = islands_of(request.recipe, request.recipe_path).replicas
    index = island or 0
    if islands not in (None, replicas) or not 0 <= index < replicas:
        raise RecipeError(
            f"the recipe has diloco.replicas = {replicas}: give --islands {replicas}, or --island "
            f"with one of 0 to {replicas - 1}, or another number by --set diloco.replicas=N"
        )
    folder = request.output_dir or str(Path("outputs") / request.recipe_path.stem)
    request = replace(request, output_dir=folder, island=index)
    if dry_run:
        print(f"{replicas} islands, each a run like this one in a folder of its own:")
        return plan_local(request)
    if lighthouse is not None:
        words = shlex.join(["--island", str(index), "--lighthouse", lighthouse])
        return run_island(replace(request, command=f"{request.command} {words}"), lighthouse)
    options = shlex.split(request.command.removeprefix(program())) + ["--output-dir", folder]
    options += ["--resume"] * request.resume + ["--overwrite"] * request.overwrite
    options += [] if request.step is None else ["--step", str(request.step)]
    status = 1
    try:
        with open_lighthouse(request.recipe, "127.0.0.1", 0) as url:
            status = run_here([*options, "--lighthouse", url], replicas)
        return status
    finally:
        if status:
            all_of_them = replace(request, command=f"{request.command} --islands {replicas}")
            print(f"all islands: {all_of_them.how_to_continue(Path(folder, request.folder))}")


def run_island(request: RunRequest, lighthouse: str) -> int:
    """Meet the other islands, and run this one as ``run_local`` runs a recipe."""
    check_requirements(request.recipe)
    run_dir = choose_run_dir(request)
    starts = [0]
    if run_dir.checkpoint is not None:
        saved = [checkpoint.step for checkpoint in list_checkpoints(run_dir.path)]
        starts = saved if request.step is None else [request.step]
    with Island(
        request.recipe, request.island or 0, lighthouse, partial(print, flush=True)
    ) as island:
        step = island.join(starts)
        if step is not None and run_dir.checkpoint is not None:
            request = replace(request, step=step)
        return run_local(request, island)


def run_here(words: Sequence[str], replicas: int) -> int:
    """Run every island on this machine by a command's words, and show what they print.

    Where one ends with an error the others are stopped, as by Ctrl-C. Returns the first exit status
    that is not 0; 128 + n after signal n.
    """
    islands, signum = list[Process](), int(signal.SIGTERM)
    with ExitStack() as printers:
        try:
            for index in range(replicas):
                island = subprocess.Popen(
                    [sys.executable, "-m", "prime_composer.cli", *words, "--island", str(index)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=shared_by(replicas),
                    start_new_session=True,
                )
                islands.append(island)
                printer = Thread(target=_print_lines, args=(f"island {index}", island.stdout))
                printer.start()
                printers.callback(printer.join)
            statuses = [island.poll() for island in islands]
            while None in statuses and not any(statuses):
                time.sleep(0.1)
                statuses = [island.poll() for island in islands]
        except BaseException as error:
            signum = signum_of(error)
            raise
        finally:
            stop([island for island in islands if island.poll() is None], signum)
    failed = [(one, island.returncode) for one, island in enumerate(islands) if island.returncode]
    for one, status in failed:
        how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
        print(f"island {one} ended {how}", flush=True)
    return next((status if status > 0 else 128 - status for status in statuses if status), 0)


def _print_lines(name: str, output: IO[bytes]) -> None:
    with output:
        for line in output:
            print(f"{name} | {line.decode(errors='replace').rstrip()}", flush=True)
