"""The marks of keys that an export to prime-rl does not carry."""

from prime_composer.recipe.carried import keys_not_carried
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import Recipe
from tests.recipe.marks import ONLY_REFUSED, marks


def test_marks_have_a_reason_and_are_of_keys() -> None:
    """``test_export.py`` exports each key, and sees what its mark says."""
    found = marks(Recipe)
    assert len(found) > 100 and found.keys() >= ONLY_REFUSED
    assert all(mark.why for mark in found.values() if mark is not None)
    assert found["rollout.backend"] is not None
    assert found["rollout.backend"].harmless == ("vllm", "server")


def test_keys_not_carried_are_those_that_lose_something() -> None:
    """As the recipe writes them; neither defaults nor harmless values."""
    raw = {
        "student": {"model": "s"},
        "teachers": {"math": {"url": "http://m", "model": "t", "dtype": "bfloat16"}},
        "loss": {"type": "topk_reverse_kl", "k": 4},
        "environments": {"sums": {"size": 30, "chat_template": True}},
        "rollout": {"backend": "vllm"},
        "trainer": {"steps": 3, "seed": 1},
        "prime_rl": {"wandb": {"project": "x"}},
    }
    assert dict(keys_not_carried(parse_recipe(raw))) == {
        "teachers.math.dtype": "the teacher's server is yours to start",
        "trainer.seed": "prime-rl orders prompts by seeds of its own; only its vLLM takes this one",
    }
