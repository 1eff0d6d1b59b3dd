"""What ``[student.lora]`` and ``base = true`` take."""

from typing import Any

import pytest

from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.routing import Routing, TeacherId
from prime_composer.recipe.schema import RecipeError
from prime_composer.recipe.teacher import TeacherConfig
from tests.upstream.export_recipes import tables


def with_lora(lora: Any, **changes: Any) -> dict[str, Any]:
    return tables() | {"student": {"model": "a/student", "lora": lora}} | changes


BASE = {"base": True}
SAMPLED = {"type": "sampled_reverse_kl"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rank 0": (with_lora({"rank": 0}), "student.lora.rank"),
    "rank 513": (with_lora({"rank": 513}), "student.lora.rank"),
    "alpha 0": (with_lora({"alpha": 0}), "student.lora.alpha"),
    "no target": (with_lora({"targets": []}), "student.lora.targets"),
    "a path as a target": (with_lora({"targets": ["mlp.up_proj"]}), "student.lora.targets"),
    "dropout": (with_lora({"dropout": 0.1}), "dropout"),
    "backend": (with_lora({}, teacher={**BASE, "backend": "vllm"}), "`backend` is of a model of"),
    "dtype": (with_lora({}, teacher={**BASE, "dtype": "bfloat16"}), "`dtype` is of a model of its"),
    "tokenizer": (with_lora({}, teacher={**BASE, "tokenizer": "own"}), "`tokenizer` is of a model"),
    "model": (with_lora({}, teacher={**BASE, "model": "m"}), "not model and base"),
    "base as reference": (
        with_lora({}, teacher={"model": "m"}, loss=SAMPLED, reference=BASE),
        "give exactly one of `model`, the table `prepare` and `start = true`",
    ),
    "base and start as reference": (
        with_lora({}, teacher={"model": "m"}, loss=SAMPLED, reference={**BASE, "start": True}),
        "`base` is a teacher's: the student before training is start = true",
    ),
    "one model twice": (
        with_lora({}, teacher=BASE, loss=SAMPLED, reference={"start": True}),
        r"\[reference\] is the model of \[teacher\]",
    ),
    "a policy among several": (
        with_lora({}, teacher=None, teachers={"a": {"base": True, "url": "http://a:1"}}),
        "`url` is of a model of its own",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_adapter_that_cannot_be_is_refused_by_its_key(name: str) -> None:
    raw, why = REFUSED[name]
    with pytest.raises(RecipeError, match=why):
        parse_recipe({key: table for key, table in raw.items() if table is not None})


def test_base_is_the_student_s_model_in_float32_on_this_machine() -> None:
    """Whatever runs the rollouts; with a tape, the tape is that of the student's model."""
    raw = with_lora({"targets": ["q_proj"]}, teacher={**BASE, "tape": "t"})
    raw["rollout"] = {**raw["rollout"], "backend": "server", "url": "http://a:1"}
    recipe = parse_recipe(raw)
    teacher = Routing.of_recipe(recipe).opened[TeacherId()]
    assert isinstance(teacher, TeacherConfig)
    assert (teacher.model, teacher.runs_on("server")) == ("a/student", "transformers")
    assert recipe.student.lora is not None and recipe.student.lora.targets == ("q_proj",)
