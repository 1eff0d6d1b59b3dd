"""Export a recipe for one version of prime-rl."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prime_composer.losses.shared.dialect import plain_name
from prime_composer.problems.loading import ProblemSet
from prime_composer.recipe.carried import keys_not_carried
from prime_composer.recipe.schema import Recipe, RecipeError
from prime_composer.upstream.export.instructions import head_comment
from prime_composer.upstream.export.plan import ExportPlan, unbuilt_models
from prime_composer.upstream.export.refusals import refuse_recipe, refuse_table
from prime_composer.upstream.export.tables import build_tables
from prime_composer.upstream.export.toml import as_text, merge_native
from prime_composer.upstream.versions.records import (
    OLD,
    VERSIONS,
    OldVersion,
    Version,
)


@dataclass(frozen=True)
class Export:
    """A recipe in prime-rl's terms."""

    version: Version  # the version of prime-rl
    table: dict[str, Any]  # the native TOML as nested tables
    head: list[str]  # lines of the comment at the head of the file
    # keys of the recipe that prime-rl has no setting for, with the reason
    not_carried: dict[str, str]

    def text(self) -> str:
        """Return the TOML document, with its head as comments."""
        return as_text(self.table, self.head)

    def warn(self) -> None:
        """Print to stderr which keys are not carried."""
        if self.not_carried:
            keys = ", ".join(f"{key} ({why})" for key, why in self.not_carried.items())
            print(f"not carried to prime-rl: {keys}", file=sys.stderr)


def export_recipe(
    recipe: Recipe,
    dialect: str | Version,
    models: Mapping[str, Any] | None = None,
    problems: ProblemSet | None = None,
) -> Export:
    """Translate a recipe for prime-rl's ``rl @ FILE``.

    ``[prime_rl]`` of the recipe is merged on top and wins. Its tables named after a version count
    for that version alone. ``models`` are directories of those under ``[*.prepare]``, by table.
    Problems of None are loaded if rows name teachers. A ``RecipeError`` says what the version
    cannot do. A key that the installed prime-rl lacks is its own parser's to refuse.
    """
    version = dialect if isinstance(dialect, Version) else VERSIONS.get(plain_name(dialect))
    if version is None:
        if (old := plain_name(str(dialect))) in OLD:
            raise RecipeError(f"no recipe is exported for {old}: {OldVersion(old)}")
        raise RecipeError(f"unknown dialect {dialect!r}: choose one of {', '.join(VERSIONS)}")
    refuse_recipe(recipe)
    unbuilt = unbuilt_models(recipe, models or {})
    built = dict.fromkeys(unbuilt, "not built") | dict(models or {})
    plan = ExportPlan.of(recipe, version, built, problems)
    table = build_tables(plan)
    merge_native(table, recipe.prime_rl, version.name)
    refuse_table(recipe, version, table)
    if unbuilt:
        raise RecipeError(
            f"{', '.join(f'[{name}.prepare]' for name in unbuilt)}: builds models first. Run "
            "`prime-composer prepare --config FILE`, then export again, or name existing models: "
            f"{' '.join(f'--set {name}.model=DIR' for name in unbuilt)}"
        )
    lost = dict(keys_not_carried(recipe))
    return Export(version, table, head_comment(plan, table, lost), lost)
