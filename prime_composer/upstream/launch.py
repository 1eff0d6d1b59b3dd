"""Run a recipe with ``--engine prime-rl``: its own launcher, unmodified, with the adapter on."""

import copy
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_composer.extras import requirement
from prime_composer.problems.loading import ProblemSet
from prime_composer.recipe.loading import apply_override, parse_recipe, read_tables
from prime_composer.recipe.schema import RecipeError
from prime_composer.recipe.urls import public_url
from prime_composer.upstream import launches
from prime_composer.upstream.export.exporter import Export, export_recipe
from prime_composer.upstream.export.toml import as_text, merge, write_text
from prime_composer.upstream.keys import SWITCH
from prime_composer.upstream.settings import AdapterSettings, of_config, parse_loss_table
from prime_composer.upstream.versions.config_fields import (
    has_prime_rl,
    probe_version,
)
from prime_composer.upstream.versions.doctor import require_road
from prime_composer.upstream.versions.records import NEWEST_RUN, UnknownSurface
from prime_composer.upstream.versions.toml_shapes import output_dir_and_name, resume_table

NATIVE_TABLES = frozenset({"orchestrator", "inference", "deployment", "slurm"})
"""Tables that a native prime-rl TOML has and a recipe does not have."""

NOT_INSTALLED = (
    "--engine prime-rl: there is no prime-rl in this environment. Install prime-composer into "
    f"prime-rl's own: `uv pip install {requirement()}` in its checkout, then start the command "
    "from there."
)
NO_PTH = (
    "--engine prime-rl: prime_composer.pth is not active in this environment, so prime-rl's "
    f"processes would start without our hooks. Install the package (`pip install {requirement()}`)"
    "; a PYTHONPATH is not enough."
)


@dataclass(frozen=True)
class NativeRun:
    """A run of prime-rl that has not been started."""

    export: Export  # its TOML, and the version of prime-rl
    file: Path  # where the TOML is kept for the record, ``outputs/NAME.prime_rl.toml``
    switch: str  # value of ``PRIME_COMPOSER``

    def text(self, resume: bool) -> str:
        """Return the TOML document that prime-rl reads."""
        table = copy.deepcopy(self.export.table)
        if resume:
            resume_table(table)
        return as_text(table, self.export.head)

    def start(self, resume: bool) -> int:
        """Write the file, start prime-rl's launcher and return its exit status."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.file, self.text(resume))
        command = launcher(self.file)
        print(f"prime-rl ({self.export.version.name}): {' '.join(command)}", flush=True)
        return subprocess.call(command, env=launch_environment(self.switch))

    def check(self) -> tuple[subprocess.CompletedProcess[str], str]:
        """Run prime-rl's own dry run in a temporary directory; return it, and what it resolved.

        Without the user's run directory prime-rl can neither write into it nor clean it up. So the
        checkpoint of a resumed run is not checked.
        """
        with tempfile.TemporaryDirectory(prefix="prime_composer-") as folder:
            table = copy.deepcopy(self.export.table)
            merge(table, output_dir_and_name(Path(folder) / "run"))
            table.get("ckpt", {}).pop("output_dir", None)
            file = Path(folder) / self.file.name
            write_text(file, as_text(table, []))
            done = subprocess.run(
                [*launcher(file), "--dry-run"],
                env=launch_environment(self.switch),
                capture_output=True,
                text=True,
                check=False,
            )
            settings = [*Path(folder).rglob(f"{launches.FOLDER}/*/{launches.SETTINGS}")]
            return done, settings[-1].read_text("utf-8") if settings else self.switch


def launch(
    config: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    output_dir: str | None = None,
    resume: bool = False,
    models: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    problems: ProblemSet | None = None,
) -> int:
    """Start prime-rl's ``rl`` on an exported recipe, or on a native TOML as it is.

    ``models`` are directories of prepared models by table; ``problems`` None: loaded if rows name
    teachers. Returns prime-rl's exit status; of a dry run, 1 where prime-rl refuses the file.
    """
    installed = has_prime_rl()
    if installed:
        check_pth()
    elif not dry_run:
        raise RecipeError(NOT_INSTALLED)
    try:
        require_road("adapter")
        version = probe_version() if installed else NEWEST_RUN
    except UnknownSurface as error:
        raise RecipeError(f"--engine prime-rl: {error}") from error
    path = Path(config)
    raw = tables_of(path, overrides)
    if output_dir is not None:
        raw["output_dir"] = output_dir
    if is_native(raw):
        given = os.environ.get(SWITCH, "").strip()  # which may name a loss beside the file's
        switch, export = (
            given if given.startswith(("{", "@")) else "1",
            Export(version, raw, [], {}),
        )
    else:
        raw.setdefault("output_dir", f"outputs/{path.stem}")
        recipe = parse_recipe(raw, str(path))
        if not installed:
            unbuilt = (name for name, model in recipe.model_tables.items() if model.prepare)
            places = {name: f"<built by prime-composer prepare: {name}>" for name in unbuilt}
            models = places | dict(models or {})
        switch, export = "1", export_recipe(recipe, version, models, problems)
        export.warn()
    run = NativeRun(export, Path("outputs") / f"{path.stem}.prime_rl.toml", switch)
    return print_dry_run(run, resume, installed) if dry_run else run.start(resume)


def print_dry_run(run: NativeRun, resume: bool, installed: bool) -> int:
    """Print what ``NativeRun.start`` would do, and prime-rl's verdict on the file."""
    command = " ".join(launcher(run.file))
    folder = Path(sys.executable).parent
    print("dry run: nothing is started, nothing is written")
    assumed = "" if installed else " assumed, it is not installed here"
    print(f"prime-rl: {run.export.version.name}{assumed}")
    print(f"command: {command}")
    done, resolved = run.check() if installed else (None, run.switch)
    if resolved == "1":  # in a process that is started by hand it would name no loss
        resolved = f"@{run.file.resolve()}"
    print("environment, also of each process that you start by hand:")
    print(f"    export {SWITCH}={shlex.quote(public_url(resolved))}")
    print(f'    export PATH={shlex.quote(str(folder))}{os.pathsep}"$PATH"')
    print(f"file: {run.file}\n\n{public_url(run.text(resume))}")
    if done is None:
        raise RecipeError(NOT_INSTALLED)
    if done.returncode:
        print(public_url(done.stdout + done.stderr), end="", file=sys.stderr)
        print(f"prime-rl's own dry run refuses the file (exit status {done.returncode})")
        return 1
    print("prime-rl's own dry run accepts the file")
    return 0


def tables_of(config: str | os.PathLike[str], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the tables of a file, whatever it is, with overrides."""
    raw = read_tables(config, "recipe", "recipes/")
    for item in overrides:
        apply_override(raw, item)
    return raw


def is_native(raw: Mapping[str, Any]) -> bool:
    """Return whether a file is a native prime-rl TOML and not a recipe."""
    trainer = raw.get("trainer")
    has_loss = isinstance(trainer, dict) and "loss" in trainer
    return "student" not in raw and (has_loss or bool(NATIVE_TABLES & set(raw)))


def check_native(config: str | os.PathLike[str], overrides: Sequence[str]) -> Any:
    """Return the loss of a native TOML with its defaults, and what follows from it in a run.

    Its table is refused as prime-rl's launcher would refuse it. None: the file is no native TOML.
    """
    raw = tables_of(config, overrides)
    if not is_native(raw):
        return None
    settings = AdapterSettings.model_validate(of_config(raw, str(config)))
    loss = parse_loss_table(settings.loss or {})
    settings = settings.derived(loss, config=raw)
    asked_by = settings.asked_by or "orchestrator"
    return {
        "loss": {"type": loss.type, **loss.model_dump(mode="json")},
        "k": settings.k,
        "asked_by": asked_by if loss.compares_with_teacher else None,
        "needs PRIME_COMPOSER": bool(settings.k)
        or asked_by == "trainer"
        or settings.teachers_mixed,
    }


def launcher(toml: Path) -> list[str]:
    """Return the command of prime-rl's launcher."""
    return [sys.executable, "-m", "prime_rl.entrypoints.rl", "@", str(toml)]


def launch_environment(switch: str) -> dict[str, str]:
    """Return the environment that turns the adapter on in all children of the launcher.

    The launcher starts ``orchestrator``, ``torchrun`` and others by name, so this interpreter's
    folder comes first in PATH.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, SWITCH: switch, "PATH": path}


def check_pth() -> None:
    """Check that a fresh interpreter of this environment loads our hooks."""
    code = f"import sys; sys.exit(0 if {launches.HOOKED} else 3)"
    if subprocess.call([sys.executable, "-c", code], env={**os.environ, SWITCH: "1"}):
        raise RecipeError(NO_PTH)
