"""What a recipe alone shows to be wrong: numbers, sizes, depth, long values, passwords."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prime_composer.recipe.loading import load_recipe, parse_recipe
from prime_composer.recipe.schema import RecipeError
from prime_composer.recipe.urls import has_credentials, public_url
from tests.recipe import helpers
from tests.recipe.helpers import refusal

SERVED: dict[str, Any] = {
    "student": {"model": "s"},
    "teacher": {"model": "t", "url": "http://me:secret@host:8001/v1"},
    "loss": {"type": "topk_reverse_kl", "k": 4},
    "data": {"source": "generated"},
    "trainer": {"steps": 3, "batch_size": 4},
}
PREPARED: dict[str, Any] = {**SERVED, "student": {"prepare": {}}, "rollout": {"max_model_len": 512}}


with_value = partial(helpers.with_value, base=PREPARED)


NUMBERS = (
    "trainer.lr trainer.weight_decay trainer.max_grad_norm rollout.temperature rollout.top_p "
    "rollout.student_fraction rollout.gpu_memory_utilization teacher.gpu_memory_utilization "
    "student.prepare.learning_rate student.prepare.matrix_learning_rate "
    "student.prepare.label_smoothing student.prepare.prune data.hold_out data.ratio "
    "loss.rl_mix.kd loss.position_weights.decay"
).split()


@pytest.mark.parametrize("value", [math.inf, math.nan], ids=str)
@pytest.mark.parametrize("key", NUMBERS)
def test_number_not_finite_is_refused(key: str, value: float) -> None:
    assert key in refusal(with_value(key, value)).replace(".constrained-float", "")


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("trainer.betas", [2.0, -1.0], "trainer.betas.0: Input should be less than 1"),
        ("eval.kl_support", 0, "eval.kl_support"),
        ("trainer.batch_size", 10**11, "less than or equal to 1000000 (got 100000000000); lower"),
        ("rollout.temperature", 1e-300, "greater than or equal to 0.01 (got 1e-300); raise it"),
        ("rollout.max_tokens", 10**12, "rollout.max_tokens"),
        ("trainer.seed", 2**63, "trainer.seed"),
        ("student.prepare.seed", 2**64, "student.prepare.seed"),
    ],
)  # fmt: skip
def test_value_absurd_is_refused(key: str, value: Any, complaint: str) -> None:
    assert complaint in refusal(with_value(key, value))


@pytest.mark.parametrize("value", [[], {}, 3])
@pytest.mark.parametrize(
    "loss",
    [
        lambda value: value,
        lambda value: {"type": value},
        lambda value: {"type": "compose", "distillation": {"a": {"weight": 1, "loss": value}}},
        lambda value: {"type": "sft", "rl_mix": {"kd": 1, "loss": value}},
    ],
)
def test_loss_of_a_wrong_type_is_one_sentence(loss: Any, value: Any) -> None:
    assert "a loss is a table with a `type`" in refusal(with_value("loss", loss(value)))


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 100_000 + "]" * 100_000,
        "x = " + "{a = " * 5000 + "1" + "}" * 5000,
        "x = " + "9" * 5000,
        "x = 0x" + "f" * 100_000,
    ],
    ids=["lists", "inline tables", "decimal", "hexadecimal"],
)
def test_recipe_too_deep_or_long_is_one_sentence(text: str, tmp_path: Path) -> None:
    """Nesting beyond all use, and numbers of thousands of digits, are refused with the file."""
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(str(path)) and len(str(caught.value)) < 1000
    key, _, value = text.partition(" = ")
    path.write_text("")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, [f"{key}={value}"])
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "raw",
    [
        with_value("student.model", "x" * 100_000, base={**SERVED, "student": {"prepare": {}}}),
        with_value("loss.type", "x" * 100_000),
        with_value("loss.type", "m" * 100_000 + ":f"),
        with_value("trainer.steps", "x" * 100_000),
        with_value("trainer." + "x" * 100_000, 1),
    ],
)
def test_value_of_100_kB_is_abridged(raw: dict[str, Any]) -> None:
    """The middle is left out, so that the choices at the end stay."""
    message = refusal(raw)
    assert raw["loss"]["type"] != "x" * 100_000 or "my_package.my_module:my_loss" in message


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("http://host:8001/v1", "http://host:8001/v1"),
        ("http://me:secret@host:8001/v1", "http://***@host:8001/v1"),
        ("https://secret@[::1]:80", "https://***@[::1]:80"),
        ("http://a:b@c:secret@host", "http://***@host"),
        ("[('http://a:secret@x', 'http://y'), 'http://b:secret@z']",
         "[('http://***@x', 'http://y'), 'http://***@z']"),
        ("mail me@host", "mail me@host"),
    ],
)  # fmt: skip
def test_public_url_masks_user_and_password(url: str, public: str) -> None:
    assert public_url(url) == public
    assert has_credentials(url) == (url != public)


def test_password_is_in_no_dump_of_the_recipe() -> None:
    """Neither recipe.json nor `check` nor a repr has the password. The attribute does."""
    raw = with_value("prime_rl.client.base_url", ["http://me:secret@x"], base=SERVED)
    recipe = parse_recipe(raw)
    assert recipe.teacher is not None and recipe.teacher.url == "http://me:secret@host:8001/v1"
    dumps = [recipe.model_dump_json(), str(recipe.model_dump()), repr(recipe.teacher)]
    assert not any("secret" in dump for dump in dumps)
    masked = json.loads(recipe.model_dump_json())
    assert masked["teacher"]["url"] == "http://***@host:8001/v1"
    assert masked["prime_rl"]["client"]["base_url"] == ["http://***@x"]


def test_masked_password_is_refused() -> None:
    """A recipe.json that is used as a recipe asks for the password that it does not have."""
    masked = json.loads(parse_recipe(SERVED).model_dump_json())
    assert "teacher.url: *** stands for a password" in refusal(masked)


@pytest.mark.parametrize(
    "url",
    [
        *("http://[::1", "host:8001", "ftp://host", "http://host:port", "http://ho st"),
        *("http://me:se'cret@host", "http://host/?key=secret", ""),
    ],
)
def test_url_of_no_server_is_refused(url: str) -> None:
    message = refusal(with_value("teacher.url", url, base=SERVED))
    assert message.startswith("r.toml: teacher.url: ") and (len(url) < 8 or url not in message)


@pytest.mark.parametrize("item", ["teacher.url.x=1", "teacher=http://me:secret@host", "trainer"])
def test_override_shows_no_password(item: str, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('teacher.url = "http://me:secret@host"\nstudent.model = "s"\n')
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, [item, "teacher.model.x=http://me:secret@host"])
    assert "secret" not in str(caught.value)


def test_missing_loss_names_the_default() -> None:
    raw = {key: value for key, value in SERVED.items() if key != "loss"}
    assert 'loss is missing; write [loss] with type = "topk_reverse_kl"' in refusal(raw)
