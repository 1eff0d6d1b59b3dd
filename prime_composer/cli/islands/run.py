"""Run one island of a recipe with [diloco], all of them on this machine, or their lighthouse."""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import IO

from prime_composer.cli.machine import usable_cores
from prime_composer.cli.program import program
from prime_composer.cli.runs import plan_local, run_local
from prime_composer.cli.study import signum_of, stop
from prime_composer.local.islands.island import Island
from prime_composer.local.islands.lighthouse import open_lighthouse
from prime_composer.local.islands.outer import import_torchft
from prime_composer.local.run_dir.checkpoint import list_checkpoints
from prime_composer.local.run_dir.claim import Wish, choose_run_dir
from prime_composer.local.run_dir.model_check import check_models
from prime_composer.local.run_dir.plan import require_libraries
from prime_composer.recipe.diloco import DilocoConfig
from prime_composer.recipe.loading import load_recipe
from prime_composer.recipe.routing import Routing
from prime_composer.recipe.schema import RecipeError

Process = subprocess.Popen[bytes]


def serve_lighthouse(config: str, overrides: Sequence[str], host: str, port: int) -> int:
    """Run the lighthouse of a recipe until a signal ends it."""
    diloco = _diloco_of(load_recipe(config, overrides).diloco, config)
    words = ["--config", config, *(word for item in overrides for word in ("--set", item))]
    with open_lighthouse(diloco, host, port) as listening:
        url = listening.replace("0.0.0.0", "ADDRESS_OF_THIS_MACHINE")
        print(
            f"lighthouse of {diloco.replicas} islands: {url}\n"
            f"an outer step needs {diloco.fewest} of them, and waits {diloco.wait:g} s for one "
            f"that is alive. On each machine, with I from 0:\n"
            f"    {program()} rl {shlex.join(words)} --island I --lighthouse {url}",
            flush=True,
        )
        while True:
            time.sleep(3600)


def rl_islands(args: argparse.Namespace, command: str) -> int:
    """Run one island or all of them, as the options of ``rl`` ask."""
    recipe = load_recipe(args.config, args.overrides)
    diloco = _diloco_of(recipe.diloco, args.config)
    folder = args.output_dir or recipe.output_dir or str(Path("outputs") / Path(args.config).stem)
    how = {"resume": args.resume, "step": args.step, "overwrite": args.overwrite}
    wishes = [
        Wish(recipe, Path(args.config), folder, **how, island=index)
        for index in range(diloco.replicas)
    ]
    if args.islands is None:
        if not 0 <= args.island < diloco.replicas:
            raise RecipeError(
                f"--island {args.island}: diloco.replicas = {diloco.replicas}, so name one of 0 to "
                f"{diloco.replicas - 1}"
            )
        wish = wishes[args.island]
        if args.dry_run:
            return plan_local(wish)
        words = shlex.join(["--island", str(args.island), "--lighthouse", args.lighthouse])
        return run_island(wish, diloco, args.lighthouse, f"{command} {words}")
    if args.islands != diloco.replicas:
        raise RecipeError(
            f"--islands {args.islands}: the recipe has diloco.replicas = {diloco.replicas}; give "
            f"that number, or --set diloco.replicas={args.islands}"
        )
    if args.dry_run:
        print(f"{diloco.replicas} islands, each a run like this one in a folder of its own:")
        return plan_local(wishes[0])
    for wish in wishes:
        choose_run_dir(wish)
    options = ["--output-dir", folder]
    options += [f"--{name}" for name in ("resume", "overwrite") if getattr(args, name)]
    options += [] if args.step is None else ["--step", str(args.step)]
    for item in args.overrides:
        options += ["--set", item]
    again = f"{command} --islands {args.islands} {shlex.join(['--output-dir', folder])} --resume"
    return run_here(diloco, args.config, options, again)


def _diloco_of(diloco: DilocoConfig | None, config: str) -> DilocoConfig:
    if diloco is None:
        raise RecipeError(
            f"{config} has no islands: add a table [diloco] with replicas = 2, or --set "
            "diloco.replicas=2"
        )
    return diloco


def run_island(wish: Wish, diloco: DilocoConfig, lighthouse: str, command: str) -> int:
    """Meet the other islands, and run this one as ``run_local`` runs a recipe."""
    check_models(wish.recipe)
    require_libraries(wish.recipe, Routing.of_recipe(wish.recipe))
    import_torchft()
    run_dir = choose_run_dir(wish)
    starts = [0]
    if run_dir.checkpoint is not None:
        saved = [checkpoint.step for checkpoint in list_checkpoints(run_dir.path)]
        starts = saved if wish.step is None else [wish.step]
    assert wish.island is not None
    with Island(diloco, wish.island, lighthouse, _show) as island:
        step = island.join(wish.tables, starts)
        if step is not None and run_dir.checkpoint is not None:
            wish = replace(wish, step=step)
        return run_local(wish, command, island=island)


def _show(text: str) -> None:
    print(text, flush=True)


def run_here(diloco: DilocoConfig, config: str, options: Sequence[str], again: str) -> int:
    """Run a lighthouse and every island on this machine, and show what they print.

    Where one ends with an error the others are stopped, as by Ctrl-C. Returns the first exit status
    that is not 0; 128 + n after signal n.
    """
    environment = dict(os.environ)
    environment["PRIME_COMPOSER_THREADS"] = str(max(1, usable_cores() // diloco.replicas))
    with ExitStack() as opened:
        url = opened.enter_context(open_lighthouse(diloco, "127.0.0.1", 0))
        print(f"lighthouse: {url}", flush=True)
        processes: list[Process] = []
        statuses: list[int] = []
        try:
            for index in range(diloco.replicas):
                words = ["rl", "--config", config, "--engine", "local", "--island", str(index)]
                words += ["--lighthouse", url, *options]
                process = subprocess.Popen(
                    [sys.executable, "-m", "prime_composer.cli", *words],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
                processes.append(process)
                assert process.stdout is not None
                printer = Thread(target=_print_lines, args=(f"island {index}", process.stdout))
                printer.start()
                opened.callback(printer.join)
            left = list(processes)
            while left:
                time.sleep(0.1)
                ended = [process for process in left if process.poll() is not None]
                left = [process for process in left if process not in ended]
                statuses += [process.returncode for process in ended]
                for process in (one for one in ended if one.returncode != 0):
                    status = process.returncode
                    how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
                    print(f"island {processes.index(process)} ended {how}", flush=True)
                if any(statuses) and left:
                    stop(left, 15)
        except BaseException as error:
            stop([process for process in processes if process.poll() is None], signum_of(error))
            print(f"continue all of them with\n    {again}", flush=True)
            raise
    if any(statuses):
        print(f"continue all of them with\n    {again}", flush=True)
    return next((status if status > 0 else 128 - status for status in statuses if status), 0)


def _print_lines(name: str, output: IO[bytes]) -> None:
    with output:
        for line in output:
            text = line.decode(errors="replace").rstrip()
            print(f"{name} | {text}", flush=True)
