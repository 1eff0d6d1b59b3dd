"""What a recipe trains and tests on is opened in one place, which refuses by name."""

from pathlib import Path
from typing import Any

import pytest

from prime_composer.cli.commands import main
from prime_composer.local.sources import load_sources
from prime_composer.recipe import RecipeError
from prime_composer.recipe.loading import parse_recipe
from tests.command import toml

REFUSAL = "[environments.rev] id = 'reverse-text'"


def raw(**environments: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe with these environments."""
    return {
        "student": {"model": "s"},
        "teacher": {"model": "t"},
        "loss": {"type": "topk_reverse_kl", "k": 4},
        "environments": environments,
        "trainer": {"steps": 3},
    }


@pytest.mark.parametrize("words", [("rl", "--engine", "local", "--dry-run"), ("probe",)])
def test_environment_by_id_is_refused_by_name(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is not installed, before anything is written, with what to install."""
    path = tmp_path / "r.toml"
    path.write_text(toml(raw(sums={"size": 20}, rev={"id": "reverse-text"})))
    command, *more = words
    assert main([command, "--config", str(path), *more]) == 2
    message = capsys.readouterr().err
    # Without verifiers its own pip line, with it that of the environment.
    assert REFUSAL in message
    assert "[env]'" in message or "pip install reverse-text" in message
    assert list(tmp_path.iterdir()) == [path]


def test_environment_by_id_is_refused_beside_an_own_tokenizer() -> None:
    """Its messages are rendered for the student, and prime-rl keeps the messages."""
    recipe = raw(rev={"id": "reverse-text"})
    recipe["teacher"]["tokenizer"] = "own"
    with pytest.raises(RecipeError, match=r"environments.rev.*tokenizer = .own.*--engine prime-rl"):
        load_sources(parse_recipe(recipe))
