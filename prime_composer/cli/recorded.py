"""Read what runs left in their directories: metrics, and the recipe that is kept with them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_composer.cli.quantities import MISSING, kl_title, scores_in
from prime_composer.local.recipe_file import RECIPE_FILE
from prime_composer.local.tracker import is_evaluated, read_metrics


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A finished or running run."""

    folder: Path
    records: Sequence[dict[str, Any]]  # of metrics.jsonl, in order
    recipe: Mapping[str, Any]  # its tables; none where the file cannot be read

    @classmethod
    def read(cls, folder: str | Path) -> "RecordedRun":
        """Read a run directory; without metrics it is none."""
        records = read_metrics(folder)
        try:
            recipe = json.loads((Path(folder) / RECIPE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            recipe = {}
        return cls(Path(folder), records, recipe if isinstance(recipe, dict) else {})

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def loss(self) -> str:
        """The type of the loss."""
        loss = self.table("loss").get("type")
        return loss if isinstance(loss, str) else MISSING

    @property
    def environments(self) -> dict[str, str]:
        """The environments with their titles."""
        tables = self.table("environments").items()
        return environment_titles({k: table for k, table in tables if isinstance(table, dict)})

    @property
    def evaluated(self) -> list[dict[str, Any]]:
        """The records with an evaluation."""
        return [record for record in self.records if is_evaluated(record)]

    @property
    def ends(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The first and the last evaluation; empty where there is none."""
        return (self.evaluated[0], self.evaluated[-1]) if self.evaluated else ({}, {})

    @property
    def scores(self) -> list[str]:
        return scores_in(self.records)

    @property
    def kl_title(self) -> str:
        return kl_title(*self.records)

    def series(self, *names: str) -> tuple[list[int], list[float]]:
        """Return the steps at which a metric of one of these names was measured, and its values."""
        points = [(one["step"], one[name]) for one in self.records for name in names if name in one]
        return [step for step, _ in points], [value for _, value in points]

    def table(self, name: str) -> Mapping[str, Any]:
        table = self.recipe.get(name)
        return table if isinstance(table, dict) else {}


def environment_titles(environments: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the names of a recipe's environments for people, which say what trains nothing."""
    return {
        name: f"{name} (not trained on)" if table.get("use") == "eval" else name
        for name, table in environments.items()
    }
