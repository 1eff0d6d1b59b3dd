"""Parse the ``prime-rl`` command line: its commands and their options.

Each command imports what it needs when it runs, so that ``--help`` does not wait for torch.
"""

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from prime_composer.cli.machine import choose_engine, set_environment
from prime_composer.cli.program import Program, first_sentence, program, version

if TYPE_CHECKING:
    from prime_composer.problems.loading import ProblemSet
    from prime_composer.recipe.schema import Recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and print a user's mistake as one message without a traceback.

    ``PYTHONDEVMODE=1`` keeps the traceback, for whoever suspects a bug. The exit status is 0; 1
    where a run failed; 2 for a wrong command, recipe or set-up; 128 + n after signal n, so 130
    after Ctrl-C.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.version:
        print(version())
        return 0
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    from prime_composer.cli.output import forgiving_output

    with forgiving_output():
        try:
            return args.run(args)
        except KeyboardInterrupt as error:
            print("\nstopped", file=sys.stderr)
            return 128 + getattr(error, "signum", signal.SIGINT)
        except Exception as error:
            message = explain_mistake(error)
            if message is None or sys.flags.dev_mode:
                raise
            print(parser.as_called(f"{program()} {args.command}: {message}"), file=sys.stderr)
            return 2


def explain_mistake(error: Exception) -> str | None:
    """Return the message of an error that a user can cause; None for one that we did."""
    from prime_composer.backends.errors import os_error
    from prime_composer.extras import pip_install
    from prime_composer.local.disk import describe_error

    if (refused := os_error(error)) is not None:
        return describe_error(refused)
    if isinstance(error, ImportError) and "pip install" not in str(error):
        return f"{error}. This command needs: {pip_install('local')}"
    return str(error) if isinstance(error, ValueError | ImportError) else None


def build_parser() -> Program:
    """Declare every command and its options."""
    parser = Program(
        prog=program(), description="Distill language models: recipes for prime_composer."
    )
    parser.tasks = {
        task: {name: command.help for name, command in own.items()} for task, own in TASKS.items()
    }
    parser.add_argument("--version", action="store_true", help="show the version")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", parser_class=argparse.ArgumentParser
    )
    for name, command in (one for own in TASKS.values() for one in own.items()):
        own = commands.add_parser(name, help=first_sentence(command.help), description=command.help)
        own.set_defaults(run=command.run)
        for flags, how in command.options.items():
            own.add_argument(*flags.split(), **how)
    return parser


def _rl(args: argparse.Namespace) -> int:
    from prime_composer.local.signals import ending_at_once, stopping_at_once

    if args.step is not None and not args.resume:
        raise ValueError("--step names the checkpoint to continue from: it goes with --resume")
    if args.overwrite and args.resume:
        raise ValueError("--resume continues a run and --overwrite deletes it; give one of them")
    of_islands = asks_for_islands(args.island, args.lighthouse, args.islands)
    engine, reason = choose_engine(args.engine)
    print(f"engine: {engine} ({reason})")
    if engine == "prime-rl":
        if args.overwrite or args.step is not None or of_islands:
            raise ValueError("--overwrite, --step and islands belong to --engine local")
        return _rl_upstream(args)
    set_environment()
    if of_islands:
        with ending_at_once():
            from prime_composer.cli.islands import rl_islands

        with stopping_at_once():
            return rl_islands(args, repeated(args))
    with ending_at_once():
        from prime_composer.cli.runs import plan_local, run_local
        from prime_composer.local.run_dir import RunRequest
        from prime_composer.recipe.loading import load_recipe

    with stopping_at_once():
        recipe = load_recipe(args.config, args.overrides)
        how = {"resume": args.resume, "step": args.step, "overwrite": args.overwrite}
        request = RunRequest(recipe, Path(args.config), args.output_dir or recipe.output_dir, **how)
        return plan_local(request) if args.dry_run else run_local(request, repeated(args))


def asks_for_islands(island: int | None, lighthouse: str | None, islands: int | None) -> bool:
    """Return whether a command asks for islands."""
    if islands is not None and (island is not None or lighthouse is not None):
        raise ValueError("--islands runs all of them here; --island and --lighthouse run one")
    if (island is None) != (lighthouse is None):
        raise ValueError("--island and --lighthouse go together; --islands N runs all of them here")
    if lighthouse is not None:
        from prime_composer.recipe.urls import checked_url

        checked_url(lighthouse)
    return island is not None or islands is not None


def _lighthouse(args: argparse.Namespace) -> int:
    from prime_composer.local.signals import ending_at_once, stopping_at_once

    set_environment()
    with ending_at_once():
        from prime_composer.cli.islands import serve_lighthouse

    with stopping_at_once():
        return serve_lighthouse(args.config, args.overrides, args.host, args.port)


def repeated(args: argparse.Namespace) -> str:
    """Return the command line of ``rl`` that names this run again: all but what it does there."""
    words = ["--config", args.config]
    words += [] if args.engine == "auto" else ["--engine", args.engine]
    for item in args.overrides:
        words += ["--set", item]
    return f"{program()} rl {shlex.join(words)}"


def _rl_upstream(args: argparse.Namespace) -> int:
    set_environment()
    from prime_composer.recipe.loading import read_tables
    from prime_composer.tiny_models.cache import model_folders
    from prime_composer.upstream.launch import is_native, launch
    from prime_composer.upstream.versions.config_fields import has_prime_rl

    models: dict[str, Path] = {}
    problems = None
    # Without prime-rl, launch refuses; then there is nothing to prepare for.
    if has_prime_rl() and not is_native(read_tables(args.config, "recipe", "recipes/")):
        recipe, problems = _loaded(args)
        if problems is not None and args.dry_run:
            models = model_folders(recipe, problems)
            for table, folder in models.items():
                if not folder.is_dir():
                    print(f"would build the model of [{table}.prepare] in {folder}")
        elif problems is not None:
            models = prepare_on_screen(recipe, problems)
    return launch(
        args.config,
        args.overrides,
        args.output_dir,
        args.resume,
        models,
        dry_run=args.dry_run,
        problems=problems,
    )


def _check(args: argparse.Namespace) -> int:
    import json

    from prime_composer.recipe.loading import load_recipe
    from prime_composer.recipe.schema import RecipeError

    try:
        recipe = load_recipe(args.config, args.overrides)
        warn_of_paths(recipe)
        shown = recipe.model_dump(mode="json")
    except RecipeError:
        from prime_composer.upstream.launch import check_native

        if (shown := check_native(args.config, args.overrides)) is None:
            raise
    print(json.dumps(shown, indent=2, ensure_ascii=False))
    return 0


def _probe(args: argparse.Namespace) -> int:
    set_environment()
    from prime_composer.cli.probe import run_probe, run_probe_of_server
    from prime_composer.recipe.loading import load_recipe

    if (args.config is None) == (args.teacher is None):
        raise ValueError("give --config FILE, a recipe, or --teacher URL, a server")
    if args.teacher is not None:
        return run_probe_of_server(args.teacher, args.model, args.json)
    return run_probe(load_recipe(args.config, args.overrides), args.json)


def _teacher(args: argparse.Namespace) -> int:
    from prime_composer.cli.teacher import run_teacher

    return run_teacher(args.model, args.host, args.port, args.options)


def _doctor(args: argparse.Namespace) -> int:
    from prime_composer.upstream.versions.doctor import run_doctor

    return run_doctor(args.road, args.json, args.source, args.verbose)


def _export(args: argparse.Namespace) -> int:
    from prime_composer.recipe.urls import has_credentials, public_url
    from prime_composer.tiny_models.cache import model_folders
    from prime_composer.upstream.export import export_recipe
    from prime_composer.upstream.export.toml import write_text

    recipe, problems = _loaded(args)
    folders = {} if problems is None else model_folders(recipe, problems)
    models = {table: folder for table, folder in folders.items() if folder.is_dir()}
    warn_of_paths(recipe)
    if recipe.output_dir is None:  # that of `rl --engine prime-rl`
        recipe = recipe.model_copy(update={"output_dir": f"outputs/{Path(args.config).stem}"})
    export = export_recipe(recipe, args.dialect, models, problems)
    export.warn()
    text = export.text()
    if args.output is None:
        if has_credentials(text):
            print("*** stands for a password; --output FILE writes it, mode 0600", file=sys.stderr)
        print(public_url(text), end="")
        return 0
    try:
        write_text(Path(args.output), text, replace=args.force)
    except FileExistsError:
        raise ValueError(
            f"{args.output} exists and was left as it is; name another --output, or add --force"
        ) from None
    print(f"wrote {args.output}; run it with: PRIME_COMPOSER=1 rl @ {args.output}")
    return 0


def warn_of_paths(recipe: "Recipe") -> None:
    """Say on stderr which models are not on this machine; the recipe may be for another one."""
    from prime_composer.local.requirements import warnings_of_paths

    for warning in warnings_of_paths(recipe):
        print(warning, file=sys.stderr)


def _prepare(args: argparse.Namespace) -> int:
    set_environment()
    recipe, problems = _loaded(args)
    if problems is None:
        print("this recipe names existing models; there is nothing to prepare")
        return 0
    for table, path in prepare_on_screen(recipe, problems, args.rebuild).items():
        print(f"{table}: {path}")
    return 0


def _report(args: argparse.Namespace) -> int:
    from prime_composer.cli.figures import draw_report
    from prime_composer.cli.report import print_report
    from prime_composer.upstream.launches import missing

    for sentence in [each for run in args.runs for each in missing(Path(run))]:
        print(f"{program()} report: {sentence}", file=sys.stderr)
    output = Path(args.output) if args.output else Path(args.runs[0]) / "report.png"
    print_report(args.runs)
    draw_report(args.runs, output, args.log_kl)
    print(f"figure: {output}")
    return 0


def _tape(args: argparse.Namespace) -> int:
    from prime_composer.cli.tape import tape_check, tape_make

    if args.action == "check":
        return tape_check(args.folder, args.config, args.overrides)
    set_environment()
    return tape_make(args.folder, args.config, args.overrides)


def _completion(args: argparse.Namespace) -> int:
    from prime_composer.cli.completion import script

    print(script(build_parser(), args.shell))
    return 0


def _study(args: argparse.Namespace) -> int:
    from prime_composer.local.signals import ending_at_once, stopping_at_once

    set_environment()
    with ending_at_once():
        from prime_composer.cli.study import plan_study, run_study

    with stopping_at_once():
        path, where, changes = Path(args.config), args.output_dir, args.overrides
        if args.dry_run:
            return plan_study(path, where, changes, args.overwrite)
        return run_study(path, where, args.jobs, changes, args.overwrite)


def _loaded(args: argparse.Namespace) -> tuple["Recipe", "ProblemSet | None"]:
    """Return a command's recipe, and the problems that its small models are built from, if any."""
    from prime_composer.local.sources import problems_to_prepare
    from prime_composer.recipe.loading import load_recipe

    recipe = load_recipe(args.config, args.overrides)
    return recipe, problems_to_prepare(recipe)


def prepare_on_screen(
    recipe: "Recipe", problems: "ProblemSet", rebuild: bool = False
) -> dict[str, Path]:
    """Find or build the recipe's small models, with a progress bar; folder by table."""
    from prime_composer.cli.progress import Screen
    from prime_composer.tiny_models.cache import prepare_models

    with Screen(total=recipe.trainer.steps) as screen:
        return prepare_models(recipe, problems, rebuild, screen.preparing)


Options = Mapping[str, dict[str, Any]]  # Flags of an option -> the arguments of ``add_argument``


def flag(text: str) -> dict[str, Any]:
    """Return an option that is given or not."""
    return {"action": "store_true", "help": text}


def value(metavar: str | None, text: str | None = None, **how: Any) -> dict[str, Any]:
    """Return an option or an argument with a value."""
    return {"metavar": metavar, "help": text, **how}


RECIPE: Options = {"--config": value("FILE", "the recipe, a TOML file", required=True)}
PROBE: Options = {
    "--config": value("FILE", "the recipe, a TOML file"),
    "--teacher": value("URL", "in its place: a vLLM server, measured without a recipe"),
    "--model": value("NAME", "with --teacher: a served name; default: the first one"),
}
JSON: Options = {"--json": flag("print one JSON object, for machines")}
OVERRIDES: Options = {
    "--set": value(
        "KEY=VALUE",
        "override a key of the recipe, for example --set trainer.lr=1e-3; "
        "may be given several times",
        dest="overrides",
        action="append",
        default=[],
    )
}
DRY_RUN: Options = {
    "--dry-run": flag("check everything and print what would be done; run and write nothing")
}
RL: Options = {
    **RECIPE,
    "--engine": value(
        None,
        "local: this machine, in one process; prime-rl: its own launcher with our losses",
        choices=["auto", "local", "prime-rl"],
        default="auto",
    ),
    "--output-dir": value("DIR", "run directory; default outputs/<recipe>, numbered if taken"),
    "--resume": flag("continue from the newest checkpoint of the run directory"),
    "--step": value("N", "with --resume: continue from the checkpoint of step N instead", type=int),
    "--overwrite": flag("delete the run that is in the run directory, and start over in it"),
    "--island": value(
        "I", "of a recipe with [diloco]: run island I, from 0; goes with --lighthouse", type=int
    ),
    "--lighthouse": value(
        "URL", "with --island: what `lighthouse` printed, for example http://10.0.0.1:29510"
    ),
    "--islands": value(
        "N",
        "of a recipe with [diloco]: run a lighthouse and all N islands on this machine, to try it",
        type=int,
    ),
    **DRY_RUN,
    **OVERRIDES,
}
EXPORT: Options = {
    "config": value("FILE"),
    "--dialect": value("VERSION", "head, v0.9 or main", required=True),
    "--output": value("FILE", "where to; default: standard output"),
    "--force": flag("overwrite the file of --output"),
    **OVERRIDES,
}
PREPARE: Options = {
    "--config": value("FILE", required=True),
    "--rebuild": flag("train them again even if they are cached"),
    **OVERRIDES,
}
REPORT: Options = {
    "runs": value("RUN_DIR", nargs="+"),
    "--output": value("FILE", "the PNG; default: report.png in the (first) run directory"),
    "--log-kl": flag("draw the KL on a logarithmic axis"),
}
STUDY: Options = {
    "config": value("FILE", "the study, a TOML file"),
    "--output-dir": value("DIR", "where the runs go; what has finished there is kept"),
    "--jobs": value("N", "runs at a time (default: 1)", type=int, default=1),
    "--overwrite": flag("delete the runs of this study that are there, and start over"),
    **DRY_RUN,
    **OVERRIDES,
}
TEACHER: Options = {
    "--model": value(None, "directory or hub id", required=True),
    "--port": value(None, required=True, type=int),
    "--host": value(None, "default: 127.0.0.1, this machine", default="127.0.0.1"),
    "options": value("-- OPTION", "passed on to vLLM's own server", nargs="*"),
}
TAPE: Options = {
    "action": value(None, "what to do", choices=["make", "check"]),
    "folder": value("DIR", "check: a tape; default: those of --config", nargs="?"),
    "--config": value("FILE", "the recipe, whose teachers name their tapes"),
    **OVERRIDES,
}
DOCTOR: Options = {
    "--road": value(
        None,
        "what you want to run: a loss of rl tokens or a distillation loss in [trainer.loss], "
        "the teacher's top K, the whole vocabulary, rl environments beside distillation, or "
        "recipes as prime-rl's TOML; default: adapter",
        choices=["losses", "slot", "adapter", "full", "rl", "export"],
        default="adapter",
    ),
    **JSON,
    "-v --verbose": flag("list also what fits, name by name"),
    "--source": value("DIR", "read this checkout of prime-rl instead"),
}
LIGHTHOUSE: Options = {
    **RECIPE,
    "--host": value(
        None,
        "address to listen at, of a private network that all islands reach; default: "
        "127.0.0.1, this machine. Nothing is encrypted, and nobody is asked who they are",
        default="127.0.0.1",
    ),
    "--port": value(None, "this port and the next one; default: 29510", type=int, default=29510),
    **OVERRIDES,
}
COMPLETION: Options = {"shell": value(None, choices=["bash", "zsh"])}


class Command(NamedTuple):
    run: Callable[[argparse.Namespace], int]
    help: str
    options: Options


TASKS: dict[str, dict[str, Command]] = {
    "Before a run": {
        "check": Command(
            _check,
            "Validate a recipe, or the loss of prime-rl's own TOML. Print it with all defaults.",
            {"config": value("FILE"), **OVERRIDES},
        ),
        "probe": Command(
            _probe,
            "Measure student and teachers before a run: the preflight's checks, tokenizers, "
            "limits, speed at several K, and the K to choose. Exits with 1 where a check fails.",
            {**PROBE, **JSON, **OVERRIDES},
        ),
        "prepare": Command(
            _prepare, "Build or round the models of a recipe, or show where they are.", PREPARE
        ),
    },
    "Runs": {
        "rl": Command(_rl, "Run a recipe.", RL),
        "study": Command(
            _study, "Run variants of a recipe over several seeds, and compare them.", STUDY
        ),
        "report": Command(
            _report, "Draw one or several runs as a PNG and print their table.", REPORT
        ),
    },
    "Teachers": {
        "teacher": Command(
            _teacher,
            "Serve a teacher by vLLM with the scoring plugin: scores in binary, several times "
            "faster than its JSON.",
            TEACHER,
        ),
        "tape": Command(
            _tape,
            "Score the data's own answers onto a teacher's tape, or check one. check exits with 1 "
            "where an answer is damaged.",
            TAPE,
        ),
    },
    "Islands": {
        "lighthouse": Command(
            _lighthouse, "Bring the islands of a recipe with [diloco] together.", LIGHTHOUSE
        ),
    },
    "Inside prime-rl": {
        "doctor": Command(
            _doctor,
            "Check whether this package fits the installed prime-rl: by its sources alone, against "
            "what the package touches in them. Exits with 1 where the road does not work.",
            DOCTOR,
        ),
        "export": Command(_export, "Write a recipe as a native prime-rl TOML file.", EXPORT),
    },
    "Shell": {
        "completion": Command(
            _completion,
            "Print a completion script for bash or zsh: commands, options, recipes and folders.",
            COMPLETION,
        ),
    },
}
"""Task -> its commands, as a reader meets them."""
