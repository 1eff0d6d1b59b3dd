"""Export a recipe with ``[[stages]]``: a file for each, and the commands that run them in order.

A stage begins with the weights that prime-rl wrote for the one before it. Up to v0.8 these are a
whole model in the run's ``weights/step_N``. Newer ones write weights alone, as the broadcast to the
sampler by the file system does, so that the model's config and tokenizer have to be copied there.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_composer.problems.loading import ProblemSet
from prime_composer.recipe.schema import Recipe, RecipeError
from prime_composer.recipe.stages import folder_of, left_by_the_stage_before
from prime_composer.upstream.export.exporter import Export, export_recipe
from prime_composer.upstream.export.refusals import RUN_LOCALLY
from prime_composer.upstream.export.toml import write_text

BROADCAST = {"type": "filesystem"}
"""prime-rl's [weight_broadcast] that writes the weights of every step, the last one's too."""


def write_stages(
    recipes: Sequence[Recipe],
    dialect: str,
    models: Mapping[str, Any],
    problems: ProblemSet | None,
    source: Path,
    output: str | None,
    force: bool = False,
) -> int:
    """Write the files of a recipe's stages into a folder, and print how they run. Return 0."""
    if output is None:
        raise RecipeError(
            "--output: a recipe with [[stages]] becomes a file for each; name the folder for them"
        )
    files = [Path(output) / f"{folder_of(number)}.toml" for number in range(1, len(recipes) + 1)]
    if not force and (taken := [str(file) for file in files if file.exists()]):
        raise RecipeError(
            f"{', '.join(taken)}: exists and was left as it is; name another --output, or add "
            "--force"
        )
    exports, commands = export_stages(recipes, dialect, models, problems, source.stem, files)
    Path(output).mkdir(parents=True, exist_ok=True)
    for file, export in zip(files, exports, strict=True):
        export.warn()
        write_text(file, export.text(), replace=force)
        print(f"wrote {file}")
    print("run them in this order, each after the one before it has ended:")
    for command in commands:
        print(f"    {command}")
    return 0


def export_stages(
    recipes: Sequence[Recipe],
    dialect: str,
    models: Mapping[str, Any],
    problems: ProblemSet | None,
    name: str,
    files: Sequence[Path],
) -> tuple[list[Export], list[str]]:
    """Return the export of each stage, and the commands that run them.

    ``name`` is that of the run directory in ``outputs/``, and ``files`` are those of the exports.
    """
    if recipes[0].student.lora is not None:
        raise RecipeError(
            "[[stages]] and [student.lora]: a run of prime-rl begins with a new adapter, and not "
            f"with the one of the stage before it. Leave lora out, {RUN_LOCALLY}"
        )
    exports: list[Export] = []
    commands: list[str] = []
    begins_with: Path | None = None
    for number, (recipe, file) in enumerate(zip(recipes, files, strict=True), 1):
        run_dir = Path(recipe.output_dir or Path("outputs") / name / folder_of(number))
        changes: dict[str, Any] = {"output_dir": str(run_dir)}
        if begins_with is not None:
            changes |= left_by_the_stage_before(recipe.student, begins_with)
            # The model is not there yet, and has the context of the one that it comes from.
            changes["rollout"] = recipe.rollout.within(exports[0].table["seq_len"])
        export = export_recipe(recipe.model_copy(update=changes), dialect, models, problems)
        commands.append(f"PRIME_COMPOSER=1 rl @ {shlex.quote(str(file))}")
        if number < len(recipes):
            step = f"step_{recipe.trainer.steps}"
            begins_with = run_dir / (export.version.weights or "broadcasts") / step
            if export.version.weights is None:
                _broadcast_by_files(export, number)
                commands.append(_copy_of_the_rest(_first_model(export, exports), begins_with))
        exports.append(export)
    return exports, commands


def _first_model(export: Export, earlier: Sequence[Export]) -> str:
    """Return the model that the first stage begins with."""
    return str((*earlier, export)[0].table["model"]["name"])


def _broadcast_by_files(export: Export, number: int) -> None:
    """Let a stage write the weights that the next one begins with."""
    own = export.table.setdefault("weight_broadcast", dict(BROADCAST))
    if own.get("type") != BROADCAST["type"]:
        raise RecipeError(
            f"prime_rl.weight_broadcast: the stage after stage {number} begins with the weights "
            f'that type = "filesystem" writes; leave the table out'
        )


def _copy_of_the_rest(model: str, folder: Path) -> str:
    """Return the command that adds config and tokenizer to the weights of a broadcast."""
    name, target = shlex.quote(model), shlex.quote(str(folder))
    patterns = ("*.json", "*.jinja", "*.txt", "*.model")
    if Path(model).is_dir():
        files = sorted(
            path for one in patterns for path in Path(model).glob(one) if ".index." not in path.name
        )
        return f"cp {shlex.join(map(str, files))} {target}"
    included = " ".join(f"--include '{one}'" for one in patterns)
    return f"hf download {name} {included} --exclude '*.index.json' --local-dir {target}"
