"""Parse the ``prime-rl`` command line: its commands and their options.

A command names the function that runs it, which takes its options by their names. Its module is
imported then, so that ``--help`` does not wait for torch.
"""

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from prime_composer.cli.machine import set_environment
from prime_composer.cli.program import Program, first_sentence, program, version


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and print a user's mistake as one message without a traceback.

    ``PYTHONDEVMODE=1`` keeps the traceback, for whoever suspects a bug. The exit status is 0; 1
    where a run failed; 2 for a wrong command, recipe or set-up; 128 + n after signal n, so 130
    after Ctrl-C.
    """
    parser = build_parser()
    options = vars(parser.parse_args(argv))
    if options.pop("version"):
        print(version())
        return 0
    if (name := options.pop("command")) is None:
        parser.print_help(sys.stderr)
        return 2
    from prime_composer.cli.output import forgiving_output

    with forgiving_output():
        try:
            return run(COMMANDS[name], options)
        except KeyboardInterrupt as error:
            print("\nstopped", file=sys.stderr)
            return 128 + getattr(error, "signum", signal.SIGINT)
        except Exception as error:
            message = explain_mistake(error)
            if message is None or sys.flags.dev_mode:
                raise
            print(parser.as_called(f"{program()} {name}: {message}"), file=sys.stderr)
            return 2


def run(command: "Command", options: Mapping[str, Any]) -> int:
    """Import what runs a command, and run it."""
    from prime_composer.local.signals import ending_at_once, stopping_at_once

    if command.computes:
        set_environment()
    module, _, function = command.run.partition(":")
    with ending_at_once():
        call = getattr(import_module(module), function)
    with stopping_at_once():
        return int(call(**options))


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
    for name, command in COMMANDS.items():
        own = commands.add_parser(name, help=first_sentence(command.help), description=command.help)
        for flags, how in command.options.items():
            own.add_argument(*flags.split(), **how)
    commands.choices["completion"].set_defaults(parser=parser)
    return parser


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
JSON: Options = {"--json": flag("print one JSON object, for machines") | {"dest": "json_output"}}
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
    run: str  # the function that runs it, as "module:function"
    help: str
    options: Options
    computes: bool = True  # with torch, whose settings of the environment come first


TASKS: dict[str, dict[str, Command]] = {
    "Before a run": {
        "check": Command(
            "prime_composer.cli.recipes:check",
            "Validate a recipe, or the loss of prime-rl's own TOML. Print it with all defaults.",
            {"config": value("FILE"), **OVERRIDES},
            computes=False,
        ),
        "probe": Command(
            "prime_composer.cli.probe:run_probe",
            "Measure student and teachers before a run: the preflight's checks, tokenizers, "
            "limits, speed at several K, and the K to choose. Exits with 1 where a check fails.",
            {**PROBE, **JSON, **OVERRIDES},
        ),
        "prepare": Command(
            "prime_composer.cli.recipes:prepare",
            "Build or round the models of a recipe, or show where they are.",
            PREPARE,
        ),
    },
    "Runs": {
        "rl": Command("prime_composer.cli.rl:rl", "Run a recipe.", RL),
        "study": Command(
            "prime_composer.cli.study:study",
            "Run variants of a recipe over several seeds, and compare them.",
            STUDY,
        ),
        "report": Command(
            "prime_composer.cli.report:report",
            "Draw one or several runs as a PNG and print their table.",
            REPORT,
            computes=False,
        ),
    },
    "Teachers": {
        "teacher": Command(
            "prime_composer.cli.teacher:run_teacher",
            "Serve a teacher by vLLM with the scoring plugin: scores in binary, several times "
            "faster than its JSON.",
            TEACHER,
            computes=False,
        ),
        "tape": Command(
            "prime_composer.cli.tape:tape",
            "Score the data's own answers onto a teacher's tape, or check one. check exits with 1 "
            "where an answer is damaged.",
            TAPE,
        ),
    },
    "Islands": {
        "lighthouse": Command(
            "prime_composer.cli.islands:serve_lighthouse",
            "Bring the islands of a recipe with [diloco] together.",
            LIGHTHOUSE,
        ),
    },
    "Inside prime-rl": {
        "doctor": Command(
            "prime_composer.upstream.versions.doctor:run_doctor",
            "Check whether this package fits the installed prime-rl: by its sources alone, against "
            "what the package touches in them. Exits with 1 where the road does not work.",
            DOCTOR,
            computes=False,
        ),
        "export": Command(
            "prime_composer.cli.recipes:export",
            "Write a recipe as a native prime-rl TOML file.",
            EXPORT,
            computes=False,
        ),
    },
    "Shell": {
        "completion": Command(
            "prime_composer.cli.completion:completion",
            "Print a completion script for bash or zsh: commands, options, recipes and folders.",
            COMPLETION,
            computes=False,
        ),
    },
}
"""Task -> its commands, as a reader meets them."""

COMMANDS = {name: command for own in TASKS.values() for name, command in own.items()}
