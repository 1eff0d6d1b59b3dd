"""Every key of a recipe has a mark for the export to prime-rl."""

from prime_composer.problems.config import DataConfig
from prime_composer.recipe.carried import DATA, Mark, keys_set, mark_of, models_in
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import Recipe
from tests.recipe.marks import marks

ONLY_REFUSED = {
    "rollout.other_source",
    "teacher.policy.ema_rate", "teacher.policy.sync_every",
    "replay.source", "replay.path", "replay.pairs_per_step", "reference", "diloco",
}  # fmt: skip


def test_marks_cover_every_key() -> None:
    """Every field has a mark, or is a table whose fields have one."""

    def visit(table):
        for name, field in table.model_fields.items():
            if mark_of(table, name) is None:
                children = models_in(field.annotation)
                assert children, f"{table.__name__}.{name} has no mark"
                for child in children:
                    visit(child)

    visit(Recipe)
    assert set(DATA) == set(DataConfig.model_fields)


def test_marks_are_those_of_the_export() -> None:
    """A key that does not reach prime-rl has a reason, or is read by a refused setting alone.

    ``test_export.py`` exports each key, and sees what its mark says.
    """
    by_kind = marks(Recipe)
    assert all(mark.why for mark in by_kind.values() if mark.export == "not carried")
    assert {k for k, mark in by_kind.items() if mark.export == "only refused"} == ONLY_REFUSED
    assert by_kind["rollout.backend"].harmless == ("vllm", "server")


def test_keys_set_yields_what_the_recipe_sets() -> None:
    """Set keys appear as written, with their marks; defaults do not appear."""
    recipe = parse_recipe(
        {
            "student": {"model": "s"},
            "teachers": {"math": {"url": "http://m", "model": "t", "dtype": "bfloat16"}},
            "loss": {"type": "topk_reverse_kl", "k": 4},
            "environments": {"sums": {"size": 30}},
            "trainer": {"steps": 3},
            "prime_rl": {"wandb": {"project": "x"}},
        }
    )
    keys = {key.key: key for key in keys_set(recipe)}
    assert list(keys) == [
        "student.model",
        "teachers.math.model",
        "teachers.math.url",
        "teachers.math.dtype",
        "loss",
        "environments.sums.size",
        "trainer.steps",
        "prime_rl",
    ]
    dtype = keys["teachers.math.dtype"]
    assert dtype.value == "bfloat16"
    assert dtype.mark == Mark("not carried", "the teacher's server is yours to start")
    assert keys["environments.sums.size"].mark == mark_of(DataConfig, "size")
