"""[trainer.until]: what is refused and how, and when a plateau ends a run."""

import math
from typing import Any

import pytest

from prime_composer.recipe.watchers import UntilConfig
from tests.conftest import TINY_RECIPE, changed
from tests.recipe.helpers import refusal

UNTIL = {"metric": "eval/accuracy", "plateau": 2}


def until(changes: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Return the tiny recipe of 6 steps with [trainer.until] and ``section__key=value`` changes."""
    table = UNTIL | (changes or {})
    return changed(TINY_RECIPE, **{"trainer__until": table, "trainer__steps": 6} | more)


UNEVALUATED = {key: table for key, table in until(data__use="train").items() if key != "eval"}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (
            until({"metric": "eval/acuracy"}),
            ["trainer.until.metric = 'eval/acuracy'", "eval/accuracy, eval/reverse_kl"],
        ),
        (until(trainer__until={"metric": "eval/accuracy"}), ["trainer.until.plateau"]),
        (UNEVALUATED, ["trainer.until.metric", "choose one of none"]),
        (
            until(
                {"metric": "eval/reverse_kl", "plateau": 1},
                loss={"type": "default"},
                rollout__group_size=2,
            ),
            ["choose one of eval/accuracy, eval/truncated"],
        ),
    ],
)
def test_end_that_does_not_fit_is_refused(raw: dict[str, Any], words: list[str]) -> None:
    message = refusal(raw)
    assert not [word for word in words if word not in message], message


def test_metrics_of_several_environments() -> None:
    one = {"source": "generated", "size": 60}
    environments = {"sums": one, "held": {**one, "use": "eval"}, "unseen": {**one, "use": "train"}}
    wanted = {"metric": "?", "plateau": 1}
    raw = until(wanted, environments=environments)
    del raw["data"]
    assert refusal(raw).partition("choose one of ")[2].split(", ") == [
        "eval/accuracy", "eval/reverse_kl",
        "eval/accuracy/sums", "eval/reverse_kl/sums",
        "eval/accuracy/held", "eval/reverse_kl/held",
        "eval/forward_kl", "eval/truncated",
    ]  # fmt: skip


NAN = math.nan


@pytest.mark.parametrize(
    ("metric", "plateau", "values", "best"),
    [
        ("eval/accuracy", 2, [0.1, 0.2, 0.3, 0.4], None),
        ("eval/accuracy", 2, [0.1, 0.2, 0.2], None),
        ("eval/accuracy", 2, [0.1, 0.2, 0.2, 0.2], 1),
        ("eval/accuracy", 2, [0.4, 0.1, 0.2, 0.3], 0),
        ("eval/accuracy", 1, [0.1, 0.3, 0.2], 1),
        ("eval/accuracy", 1, [0.1, 0.3, 0.2, 0.4], None),
        ("eval/accuracy", 2, [0.3, NAN, 0.2, NAN, None], None),
        ("eval/accuracy", 2, [NAN, 0.3, NAN, 0.2, None, 0.1], 1),
        ("eval/reverse_kl", 2, [0.9, 0.5, 0.4, 0.3], None),
        ("eval/reverse_kl", 2, [0.9, 0.5, 0.6, 0.5], 1),
        ("eval/reverse_kl/sums", 1, [0.5, 0.6], 0),
        ("eval/accuracy/reverse_kl", 1, [0.5, 0.6], None),
    ],
)
def test_plateau(metric: str, plateau: int, values: list[float | None], best: int | None) -> None:
    """``best`` is the place of the evaluation that decides. Evaluations are 5 steps apart."""
    until = UntilConfig(metric=metric, plateau=plateau)
    evaluations = {
        5 * place: {"eval/else": 1.0} | ({} if value is None else {metric: value})
        for place, value in enumerate(values)
    }
    backwards = dict(reversed(evaluations.items()))
    expected = None if best is None else 5 * best
    assert until.best(evaluations) == until.best(backwards) == expected
