"""[[stages]]: the recipe of each, what is refused and how, and when a plateau ends a run."""

import copy
import math
from typing import Any

import pytest

from prime_composer.recipe.loading import apply_override, parse_recipe
from prime_composer.recipe.schema import RecipeError
from prime_composer.recipe.stages import parse_stages
from prime_composer.recipe.watchers import UntilConfig
from tests.conftest import TINY_RECIPE, changed

OPD = {"loss": {"type": "topk_reverse_kl", "k": 8}, "steps": 6}
RL = {"loss": {"type": "default", "adv_tau": 0.5}, "steps": 4, "lr": 1e-4}
UNTIL = {"metric": "eval/accuracy", "plateau": 2}


def staged(*stages: Any, **changes: Any) -> dict[str, Any]:
    """Return the tiny recipe with stages, and with ``section__key=value`` changes."""
    raw = copy.deepcopy(TINY_RECIPE)
    raw["rollout"]["group_size"] = 2
    del raw["loss"], raw["trainer"]["steps"]
    raw["stages"] = copy.deepcopy(list(stages))
    return changed(raw, **changes)


def test_each_stage_is_the_recipe_that_one_writes_by_hand() -> None:
    first, second = copy.deepcopy(TINY_RECIPE), copy.deepcopy(TINY_RECIPE)
    first["loss"], second["loss"] = OPD["loss"], RL["loss"]
    first["trainer"] |= {"steps": 6, "seed": 7, "until": UNTIL}
    second["trainer"] |= {"steps": 4, "seed": 1_000_007, "lr": 1e-4}
    for number, raw in enumerate((first, second), 1):
        raw["rollout"]["group_size"] = 2
        raw["eval"]["every"] = 1
        raw["output_dir"] = f"runs/here/stage_{number}"
    raw = staged(
        {**OPD, "until": UNTIL}, RL, trainer__seed=7, eval__every=1, output_dir="runs/here"
    )
    kept = copy.deepcopy(raw)
    assert [one.model_dump() for one in parse_stages(raw)] == [
        parse_recipe(one).model_dump() for one in (first, second)
    ]
    assert raw == kept


def test_seeds_of_stages_are_within_the_largest_one() -> None:
    seeds = [
        one.trainer.seed for one in parse_stages(staged(OPD, OPD, RL, trainer__seed=2**63 - 1))
    ]
    assert seeds == [2**63 - 1, 999_999, 1_999_999]


def test_recipe_without_stages_is_a_single_one() -> None:
    assert parse_stages(TINY_RECIPE) == [parse_recipe(TINY_RECIPE)]


def test_override_names_a_stage_from_1_on() -> None:
    raw = staged(OPD, RL)
    for item in ("stages.1.steps=50", "stages.2.loss.kl_tau=0.25", "stages.2.lr=2e-3"):
        apply_override(raw, item)
    first, second = parse_stages(raw)
    assert (first.trainer.steps, first.trainer.lr) == (50, 1e-3)
    assert (second.trainer.steps, second.trainer.lr) == (4, 2e-3)
    assert second.loss.model_dump()["kl_tau"] == 0.25


def test_override_replaces_a_loss_by_stages() -> None:
    raw = copy.deepcopy(TINY_RECIPE)
    raw["trainer"]["until"] = UNTIL
    stages = '{loss = {type = "sampled_reverse_kl"}, steps = 2}, {loss.type = "topk_forward_kl"}'
    apply_override(raw, f"stages=[{stages}]")
    apply_override(raw, "stages.2.steps=3")
    apply_override(raw, "stages.2.loss.k=2")
    assert [(one.loss.type, one.trainer.steps) for one in parse_stages(raw)] == [
        ("sampled_reverse_kl", 2),
        ("topk_forward_kl", 3),
    ]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("stages.0.steps=3", ["stages count from 1", "stages.1.KEY to stages.2.KEY"]),
        ("stages.3.steps=3", ["has 2", "stages.1.KEY to stages.2.KEY"]),
        ("stages.1=3", ["stages.1.KEY"]),
        ("stages.one.steps=3", ["stages.1.KEY"]),
        ("stages.1.steps.x=3", ["steps is a value"]),
    ],
)
def test_override_of_no_stage_is_refused(item: str, words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        apply_override(staged(OPD, RL), item)
    assert not [word for word in (item, *words) if word not in str(caught.value)], caught.value
    with pytest.raises(RecipeError, match=r"no \[\[stages]]; set trainer.steps"):
        apply_override(copy.deepcopy(TINY_RECIPE), item)


@pytest.mark.parametrize(
    ("stages", "changes", "words"),
    [
        ([OPD], {}, ["at least two", "[loss] and trainer.steps"]),
        ([OPD, 3], {}, ["[[stages]]"]),
        ([OPD, RL], {"loss": {"type": "sft"}}, ["[loss] beside [[stages]]", "leave"]),
        ([OPD, RL], {"trainer__steps": 3}, ["trainer.steps beside [[stages]]", "leave"]),
        ([OPD, RL], {"trainer__until": UNTIL}, ["trainer.until beside [[stages]]", "leave"]),
        ([OPD, {**RL, "step": 3}], {}, ["stages.2: unknown key step", "did you mean steps"]),
        ([OPD, {"loss": RL["loss"]}], {}, ["stages.2: steps is missing"]),
        ([{"steps": 3}, RL], {}, ["stages.1: loss is missing"]),
        ([OPD, {**RL, "steps": 0}], {}, ["stages.2: steps", "raise it"]),
        ([OPD, {**RL, "lr": 0}], {}, ["stages.2: lr", "raise it"]),
        (
            [OPD, {**RL, "loss": {"type": "default", "adv_taus": 1}}],
            {},
            ["stages.2: unknown key loss.adv_taus", "did you mean adv_tau"],
        ),
        ([OPD, RL], {"rollout__group_size": 1}, ["stages.2", "[stages.2.loss]", "group_size"]),
        ([OPD, RL], {"reference": {"start": True}}, ["stages.1", "[reference]"]),
        ([OPD, {**OPD, "until": UNTIL}], {"eval__every": 0}, ["stages.2.until", "set eval.every"]),
        (
            [OPD, {**OPD, "until": {**UNTIL, "metric": "eval/acuracy"}}],
            {},
            ["stages.2.until.metric = 'eval/acuracy'", "eval/accuracy, eval/reverse_kl"],
        ),
        ([{**OPD, "until": {**UNTIL, "plateau": 3}}, RL], {}, ["stages.1.steps = 6", "lower"]),
        ([{**OPD, "until": {"metric": "eval/accuracy"}}, RL], {}, ["stages.1: until.plateau"]),
        ([OPD, {**OPD, "steps": 2}], {"rollout__growth": {"start": 2, "steps": 3}},
         ["stages.2", "rollout.growth.steps = 3", "stages.2.steps = 2", "lower it"]),
        ([OPD, RL], {"rollout__growth": {"start": 2, "steps": 3}},
         ["[rollout.growth]", "[stages.2.loss]", "rewards"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_names_the_stage(
    stages: list[Any], changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_stages(staged(*stages, **changes), "r.toml")
    missing = [word for word in ("r.toml: ", *words) if word not in str(caught.value)]
    assert not missing, caught.value


def test_later_stage_that_lacks_a_teacher_is_refused() -> None:
    raw = staged(RL, OPD)
    del raw["teacher"]
    with pytest.raises(RecipeError, match=r"stages.2: \[stages.2.loss].*add a \[teacher] table"):
        parse_stages(raw)


def test_end_by_evaluations_needs_something_to_evaluate() -> None:
    raw = staged({**OPD, "until": UNTIL}, RL, data__use="train")
    del raw["eval"]
    with pytest.raises(RecipeError, match=r"stages.1.until is .*use = 'train'.*set use = 'both'"):
        parse_stages(raw)


def test_what_takes_one_run_refuses_stages() -> None:
    with pytest.raises(RecipeError, match=r"r: \[\[stages]] are several runs.*\[loss].*\[trainer]"):
        parse_recipe(staged(OPD, RL), "r")


def test_rl_without_a_teachers_scores_has_no_kl_to_end_by() -> None:
    stage = {**RL, "until": {"metric": "eval/reverse_kl", "plateau": 1}}
    with pytest.raises(RecipeError, match=r"choose one of eval/accuracy, eval/truncated$"):
        parse_stages(staged(OPD, stage))


def test_metrics_of_several_environments() -> None:
    one = {"source": "generated", "size": 60}
    environments = {"sums": one, "held": {**one, "use": "eval"}, "unseen": {**one, "use": "train"}}
    until = {"metric": "?", "plateau": 1}
    raw = staged({**OPD, "until": until}, OPD, environments=environments)
    del raw["data"]
    with pytest.raises(RecipeError) as caught:
        parse_stages(raw)
    assert str(caught.value).partition("choose one of ")[2].split(", ") == [
        "eval/accuracy", "eval/reverse_kl",
        "eval/accuracy/sums", "eval/reverse_kl/sums",
        "eval/accuracy/held", "eval/reverse_kl/held",
        "eval/forward_kl", "eval/truncated",
    ]  # fmt: skip


NAN = math.nan


@pytest.mark.parametrize(
    ("metric", "plateau", "values", "best"),
    [
        ("eval/accuracy", 2, [], None),
        ("eval/accuracy", 2, [0.1, 0.2, 0.3, 0.4], None),
        ("eval/accuracy", 2, [0.1, 0.2, 0.2], None),
        ("eval/accuracy", 2, [0.1, 0.2, 0.2, 0.2], 1),
        ("eval/accuracy", 2, [0.4, 0.1, 0.2, 0.3], 0),
        ("eval/accuracy", 1, [0.1, 0.3, 0.2], 1),
        ("eval/accuracy", 1, [0.1, 0.3, 0.2, 0.4], None),
        ("eval/accuracy", 2, [0.3, NAN, 0.2, NAN, None], None),
        ("eval/accuracy", 2, [NAN, 0.3, NAN, 0.2, None, 0.1], 1),
        ("eval/accuracy", 1, [NAN, None, NAN], None),
        ("eval/reverse_kl", 2, [0.9, 0.5, 0.4, 0.3], None),
        ("eval/reverse_kl", 2, [0.9, 0.5, 0.6, 0.5], 1),
        ("eval/reverse_kl/sums", 1, [0.5, 0.6], 0),
        ("eval/forward_kl", 1, [0.5, 0.4], None),
        ("eval/truncated", 1, [0.5, 0.6], 0),
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
