"""The generated reference of every recipe key."""

from pathlib import Path

import pytest

from docs import reference
from prime_composer.losses import LOSS_TYPES
from prime_composer.recipe.schema import Recipe
from tests.recipe.marks import marks

PAGE = Path(__file__).parents[2] / "recipes" / "reference.md"


def test_reference_page_is_current() -> None:
    """recipes/reference.md is renewed with --write after a key changes."""
    assert reference.main(["--check", str(PAGE)]) == 0


def test_reference_names_every_key_and_loss() -> None:
    text = reference.reference()
    tables = {"diloco", "loss", "prepare", "quantize", "reference"}
    for kind in marks(Recipe):
        name = kind.rpartition(".")[2]
        assert name in tables or f"| `{name}` |" in text, kind
    for name, config in LOSS_TYPES.items():
        if ":" in name:
            continue
        assert f'type = "{name}"' in text
        for knob in set(config.model_fields) - {"type", "rl", "distillation"}:
            assert f"| `{knob}` |" in text or f"`[loss.{knob}]`" in text, (name, knob)


def test_reference_check_fails_until_written(tmp_path: Path) -> None:
    """--check fails on a stale page, and --write renews only the text between the markers."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{reference.BEGIN}\nold\n{reference.END}\nafter\n")
    assert reference.main(["--check", str(page)]) == 1
    assert reference.main(["--write", str(page)]) == 0
    assert reference.main(["--check", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "\nold\n" not in text
    page.write_text("no markers")
    with pytest.raises(ValueError, match="the page needs the lines"):
        reference.main(["--check", str(page)])
