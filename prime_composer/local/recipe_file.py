"""Keep a run's recipe in its directory, and say whether another recipe continues the run."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prime_composer.local.disk import replace_text
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import RecipeError
from prime_composer.recipe.urls import MASK

RECIPE_FILE = "recipe.json"  # The resolved recipe in every run directory

UNFINISHED = "recipe.tmp"

MAY_CHANGE = re.compile(
    r"(eval|logging|checkpoint|checks|prime_rl)(\..*)?|output_dir"
    r"|(teacher|rollout|teachers\..*|diloco)\.(wait|timeout)"
    r"|(teacher|teachers\..*|reference)\.tape(_.*)?"
)
"""Keys that a resumed run may change: they do not touch the numbers that it trains on."""

PROVEN = re.compile(r"(?P<table>teacher|teachers\..+|rollout)\.(url|dtype)")
"""Keys of a model on a server that a resumed run may change, for its first answers prove that the
model is the same. A dtype there only says how far answers may be apart."""

Tables = Mapping[str, Any]  # A recipe as ``recipe.json`` has it, with every default


def write_recipe(run_dir: Path, tables: Tables) -> None:
    """Write the resolved recipe of a run."""
    replace_text(run_dir / RECIPE_FILE, json.dumps(tables, indent=2) + "\n")


def read_recipe(run_dir: Path) -> Tables:
    """Return the recipe that a run was started with, with defaults for keys that are new since."""
    path = run_dir / RECIPE_FILE
    try:
        text = path.read_text(encoding="utf-8")
        tables = json.loads(text)
        if not isinstance(tables, dict) or "trainer" not in tables:
            raise ValueError
    except FileNotFoundError:
        raise RecipeError(f"{run_dir} holds no {RECIPE_FILE}; is it a run directory?") from None
    except (ValueError, RecursionError):
        raise RecipeError(f"{path} is not a run's recipe; restore it, or start a new run") from None
    try:
        # The mask of a password is no URL; both sides of a comparison have it.
        unmasked = json.loads(text.replace(f"://{MASK}@", "://user@"))
        return parse_recipe(unmasked).model_dump(mode="json")
    except (ValueError, TypeError, AttributeError):  # of another version
        return tables


def differing_keys(before: Any, now: Any, name: str = "") -> list[str]:
    """Name the keys, from ``name`` down, whose values differ."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return [
            key
            for inner in sorted(before.keys() | now.keys())
            for key in differing_keys(
                before.get(inner), now.get(inner), f"{name}.{inner}".lstrip(".")
            )
        ]
    return [] if before == now else [name]


def changed_keys(before: Tables, now: Tables) -> list[str]:
    """Name the differing keys that a resumed run may not change."""
    return [key for key in differing_keys(before, now) if not MAY_CHANGE.fullmatch(key)]


def check_continues(run_dir: Path, now: Tables, done: int) -> str:
    """Check that a recipe continues a run after ``done`` steps, and note what differs."""
    before = read_recipe(run_dir)
    changed, notes = changed_keys(before, now), []
    if moved := [key for key in changed if _is_proven(key, before, now)]:
        changed = [key for key in changed if key not in moved]
        notes.append(
            f"{', '.join(moved)}: other values than at the run's start; the same model has to "
            "answer there"
        )
    if "trainer.steps" in changed:
        steps = before["trainer"]["steps"]
        refusal = _why_not_other_steps(steps, now["trainer"], done)
        if changed == ["trainer.steps"] and refusal:
            raise RecipeError(f"--resume: {refusal}")
        if not refusal:
            changed.remove("trainer.steps")
            notes.append(f"trainer.steps is {now['trainer']['steps']} now; it was {steps}")
    context = "rollout.max_model_len"
    if context in changed and now["rollout"]["max_model_len"] is None:
        changed.remove(context)
        length = before["rollout"]["max_model_len"]
        notes.append(f"{context} is unset now, so that the models' windows count; it was {length}")
    if changed:
        raise RecipeError(
            f"--resume: {run_dir} was started with other values of {', '.join(changed)}; "
            "give the same ones, or start a new run without --resume"
        )
    return "\n".join(notes)


def _is_proven(key: str, before: Tables, now: Tables) -> bool:
    """Return whether a changed key is one of a server's, before and now."""
    match = PROVEN.fullmatch(key)
    if match is None:
        return False
    for table in (before, now):
        for name in match["table"].split(".", 1):
            table = table[name]
        if table.get("url") is None:
            return False
    return True


def _why_not_other_steps(before: int, trainer: Tables, done: int) -> str:
    """Say what another number of steps would change in the steps that are done; "" for nothing."""
    steps, schedule = trainer["steps"], trainer["schedule"]
    if steps < done:
        return f"trainer.steps = {steps}, and {done} steps are done already"
    # The warm-up and the step after it, at the peak, do not depend on the number of steps.
    if schedule == "constant" or done <= trainer["warmup_steps"] + 1:
        return ""
    return (
        f"trainer.steps = {steps} instead of {before} would change steps that are done: "
        f"trainer.schedule = {schedule!r} spreads the learning rate over all steps. Only "
        "trainer.schedule = 'constant' can be continued for longer; start a new run"
    )
