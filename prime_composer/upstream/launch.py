"""``--engine prime-rl``: prime-rl's own launcher, unmodified, with the adapter on in every process it starts."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from prime_composer.recipe.loading import apply_override, load_recipe, read_tables
from prime_composer.recipe.schema import RecipeError
from prime_composer.upstream.versions import VERSIONS as DIALECTS
from prime_composer.upstream.versions import has_prime_rl, probe_version

SWITCH = "PRIME_COMPOSER"
NATIVE = frozenset({"orchestrator", "inference", "deployment", "slurm"})
"""Tables that a native prime-rl TOML has and a recipe has not."""


def launch(
    config: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    output_dir: str | None = None,
    resume: bool = False,
    models: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> int:
    """Start prime-rl's ``rl`` on a recipe, exported for the installed version, or on a native TOML, passed through.

    Args:
        config: a recipe, or a prime-rl TOML.
        overrides: ``key=value`` items; of the recipe, or of the native TOML.
        output_dir: where the run goes; None: what the file says.
        resume: continue from the newest checkpoint.
        models: directories of prepared models by role, for recipes with ``[*.prepare]``.
        dry_run: prime-rl checks everything, writes its sub-configs and stops.

    Returns:
        prime-rl's exit status.

    Raises:
        RecipeError: prime-rl is not installed, the adapter's .pth is not active here, or the file cannot be exported.
    """
    if not has_prime_rl():
        raise RecipeError(
            "--engine prime-rl: there is no prime-rl in this environment. Install prime-composer into prime-rl's own: "
            "`uv pip install prime-composer` in its checkout, then start the command from there."
        )
    check_pth()
    path = Path(config)
    dialect = probe_version().name
    raw = read_tables(path, "recipe", "recipes/")
    if is_native(raw):
        from prime_composer.upstream.export import check_slurm

        for item in overrides:
            apply_override(raw, item)
        settings, head = {}, ""
        if output_dir is not None:
            raw["output_dir"] = output_dir
        check_slurm(raw)
    else:
        from prime_composer.upstream.export import export_recipe, loss_table

        keep = [] if output_dir is None else [f"output_dir={json.dumps(output_dir)}"]
        recipe = load_recipe(path, [*overrides, *keep])
        if recipe.output_dir is None:
            recipe = load_recipe(
                path, [*overrides, f"output_dir={json.dumps(f'outputs/{path.stem}')}"]
            )
        text = export_recipe(recipe, dialect, models)
        raw, head = tomllib.loads(text), comment_at_head(text)
        settings = {"loss": loss_table(recipe, dialect)}
    if resume:
        ask_to_resume(raw, dialect)
    command, env = command_and_environment(write(raw, path, head), settings, dry_run)
    print(f"prime-rl ({dialect}): {' '.join(command)}", flush=True)
    return subprocess.call(command, env=env)


def is_native(raw: Mapping[str, Any]) -> bool:
    """Whether a file speaks prime-rl's words and not a recipe's."""
    return "student" not in raw and bool(NATIVE & set(raw))


def comment_at_head(text: str) -> str:
    """The comment that a TOML file starts with."""
    return "".join(takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))


def write(raw: Mapping[str, Any], path: Path, head: str = "") -> Path:
    """The TOML that prime-rl is given, kept in ``outputs/`` for the record, under a comment at its ``head``."""
    from prime_composer.upstream.export import to_toml

    target = Path("outputs") / f"{path.stem}.prime_rl.toml"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(head + to_toml(raw), encoding="utf-8")
    return target


def command_and_environment(
    toml: Path, settings: Mapping[str, Any], dry_run: bool = False
) -> tuple[list[str], dict[str, str]]:
    """prime-rl's launcher on ``toml``, and the environment that switches the adapter on in all its children."""
    command = [
        sys.executable,
        "-m",
        "prime_rl.entrypoints.rl",
        "@",
        str(toml),
        *(["--dry-run"] if dry_run else []),
    ]
    # The launcher starts `orchestrator`, `torchrun` and others by name: those of this environment.
    folder = str(Path(sys.executable).parent)
    named = os.environ.get(
        SWITCH, ""
    ).strip()  # a native file may leave it to the environment to name the loss
    on = json.dumps(settings) if settings else named if named.startswith("{") else "1"
    env = {**os.environ, SWITCH: on}
    env["PATH"] = os.pathsep.join([folder, env.get("PATH", "")])
    return command, env


def ask_to_resume(raw: dict[str, Any], dialect: str) -> None:
    """prime-rl's way to say: from the newest checkpoint."""
    assert dialect in DIALECTS
    if dialect == "head":
        raw.setdefault("resume", {})
    else:
        raw.setdefault("ckpt", {})["resume_step"] = -1


def check_pth() -> None:
    """Whether a fresh interpreter of this environment runs our hooks when the switch is on.

    Raises:
        RecipeError: it does not; prime-composer is importable but not installed (PYTHONPATH), so its .pth is missing.
    """
    code = "import sys; sys.exit(0 if any(hasattr(f, 'is_prime_composer') for f in sys.meta_path) else 3)"
    status = subprocess.call([sys.executable, "-c", code], env={**os.environ, SWITCH: "1"})
    if status:
        raise RecipeError(
            "--engine prime-rl: prime_composer.pth is not active in this environment, so prime-rl's processes would "
            "start without our hooks. Install the package (`pip install prime-composer`, or -e); a PYTHONPATH is not "
            "enough."
        )
