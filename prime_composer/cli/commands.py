"""The ``prime-rl`` command: rl, check, export, prepare, report, study. Parses first, imports after."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns 0; 1 when a run failed; 2 for a wrong command, recipe or set-up; 130 after Ctrl-C."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except ValueError as error:
        print(f"prime-rl {args.command}: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        # A backend that is missing names its own pip line; the rest of the engine has one.
        hint = (
            ""
            if "pip install" in str(error)
            else ". This command needs: pip install 'prime-composer[local]'"
        )
        print(f"prime-rl {args.command}: {error}{hint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prime-rl", description="Distil language models: recipes for prime_composer."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    def recipe_options(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[],
            help="override a key of the recipe, for example --set trainer.lr=1e-3; may be given several times",
        )  # fmt: skip

    rl = command("rl", _rl, "Run a recipe.")
    rl.add_argument("--config", required=True, metavar="FILE", help="the recipe, a TOML file")
    rl.add_argument(
        "--engine", choices=["auto", "local", "prime-rl"], default="auto",
        help="local: this machine, in one process; prime-rl: prime-rl's own launcher with our losses",
    )  # fmt: skip
    rl.add_argument(
        "--output-dir",
        metavar="DIR",
        help="run directory; default outputs/<recipe>, numbered if taken",
    )
    rl.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest checkpoint of the run directory",
    )
    recipe_options(rl)

    check = command("check", _check, "Validate a recipe and print it with every default filled in.")
    check.add_argument("config", metavar="FILE")
    recipe_options(check)

    export = command("export", _export, "Write a recipe as a native prime-rl TOML file.")
    export.add_argument("config", metavar="FILE")
    export.add_argument(
        "--dialect", required=True, metavar="VERSION", help="v0.6, v0.7, v0.8 or head"
    )
    export.add_argument("--output", metavar="FILE", help="where to; default: standard output")
    recipe_options(export)

    prepare = command(
        "prepare",
        _prepare,
        "Build the small models that a recipe asks for, or show where they are.",
    )
    prepare.add_argument("--config", required=True, metavar="FILE")
    prepare.add_argument(
        "--rebuild", action="store_true", help="train them again even if they are cached"
    )
    recipe_options(prepare)

    report = command("report", _report, "Draw one or several runs as a PNG and print their table.")
    report.add_argument("runs", metavar="RUN_DIR", nargs="+")
    report.add_argument(
        "--output", metavar="FILE", help="the PNG; default: report.png in the (first) run directory"
    )

    study = command(
        "study", _study, "Run several variants of a recipe over several seeds, and compare them."
    )
    study.add_argument("config", metavar="FILE", help="the study, a TOML file")
    study.add_argument(
        "--output-dir", metavar="DIR", help="where the runs go; what has finished there is kept"
    )
    return parser


def _rl(args: argparse.Namespace) -> int:
    engine, reason = choose_engine(args.engine)
    print(f"engine: {engine} ({reason})")
    if engine == "prime-rl":
        from prime_composer.recipe.loading import read_tables
        from prime_composer.upstream.launch import is_native, launch
        from prime_composer.upstream.versions import has_prime_rl

        # Without prime-rl, launch says so; then there is nothing to prepare for.
        models = (
            _prepared(args)
            if has_prime_rl() and not is_native(read_tables(args.config, "recipe", "recipes/"))
            else {}
        )
        return launch(args.config, args.overrides, args.output_dir, args.resume, models)
    set_environment()
    from prime_composer.cli.runs import run_local
    from prime_composer.recipe.loading import load_recipe

    recipe = load_recipe(args.config, args.overrides)
    return run_local(recipe, Path(args.config), args.output_dir, args.resume)


def _check(args: argparse.Namespace) -> int:
    from prime_composer.recipe.loading import load_recipe

    print(load_recipe(args.config, args.overrides).model_dump_json(indent=2))
    return 0


def _export(args: argparse.Namespace) -> int:
    from prime_composer.recipe.loading import load_recipe
    from prime_composer.tiny_models.cache import cached_path
    from prime_composer.upstream.export import export_recipe

    recipe = load_recipe(args.config, args.overrides)
    roles = {"student": recipe.student, **recipe.scored_by}
    asked = {role: model.prepare for role, model in roles.items() if model.prepare is not None}
    found = {role: cached_path(config, recipe.sources) for role, config in asked.items()}
    text = export_recipe(
        recipe, args.dialect, {role: path for role, path in found.items() if path is not None}
    )
    if args.output is None:
        print(text, end="")
        return 0
    try:
        with open(args.output, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(
            f"{args.output} exists and was left as it is; name another --output, or remove it"
        ) from None
    print(f"wrote {args.output}; run it with: PRIME_COMPOSER=1 rl @ {args.output}")
    return 0


def _prepare(args: argparse.Namespace) -> int:
    paths = _prepared(args, rebuild=args.rebuild)
    if not paths:
        print("this recipe names existing models; there is nothing to prepare")
    for role, path in paths.items():
        print(f"{role}: {path}")
    return 0


def _prepared(args: argparse.Namespace, rebuild: bool = False) -> dict[str, Path]:
    set_environment()
    from prime_composer.cli.runs import prepare_models
    from prime_composer.recipe.loading import load_recipe

    return prepare_models(load_recipe(args.config, args.overrides), rebuild=rebuild)


def _report(args: argparse.Namespace) -> int:
    from prime_composer.cli.report import draw_report, print_report

    output = Path(args.output) if args.output else Path(args.runs[0]) / "report.png"
    print_report(args.runs)
    draw_report(args.runs, output)
    print(f"figure: {output}")
    return 0


def _study(args: argparse.Namespace) -> int:
    from prime_composer.cli.study import run_study

    return run_study(Path(args.config), args.output_dir)


def choose_engine(asked: str) -> tuple[str, str]:
    """The engine to use, and why."""
    if asked != "auto":
        return asked, "as asked"
    from importlib.util import find_spec

    if find_spec("prime_rl") is None:
        return "local", "prime-rl is not installed here"
    if not has_nvidia_gpu():
        return (
            "local",
            "prime-rl is installed, but this machine has no NVIDIA GPU, which its trainer needs",
        )
    return "prime-rl", "prime-rl is installed and there is a GPU; --engine local for one process"


def has_nvidia_gpu() -> bool:
    """Whether the driver is there; asking torch would import it."""
    return Path("/proc/driver/nvidia/version").exists()


def set_environment() -> None:
    """What has to be in the environment before torch is imported; what the user has set stays.

    On a CPU, torch and vLLM keep to one OpenMP thread: two engines and a trainer in one process share the cores, and with
    several spinning threads each, generation was seen to slow down up to twelvefold. torch's warning about NUMA binding,
    one per engine, says nothing to the reader of a progress bar.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not has_nvidia_gpu():
        os.environ.setdefault("OMP_NUM_THREADS", "1")


if __name__ == "__main__":
    sys.exit(main())
