"""A backend's library that fails in a way of its own: one sentence, and its error as the cause."""

from typing import Any

import pytest

from prime_composer.backends.errors import BackendFailed
from prime_composer.backends.protocols import Limits
from prime_composer.recipe.rollout import RolloutConfig
from prime_composer.samplers import registry
from prime_composer.samplers.registry import BackendSpec, open_sampler
from prime_composer.teachers import registry as scorers

ERRORS = [AttributeError("no attribute 'past'"), TypeError()]


def spec(backend: str, table: str) -> BackendSpec:
    return BackendSpec(RolloutConfig(), table, backend, "the/model", "float32", 8, 1)


class Fails:
    """A sampler and scorer whose library fails when it computes."""

    limits, gives_any_ids = Limits(), True

    def __init__(self, error: Exception):
        self.error = error

    def generate(self, *_: object, **__: object) -> Any:
        raise self.error

    score = update_weights = generate

    @property
    def sampler(self) -> "Fails":
        return self

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_library_error_of_opening_names_the_table(error, monkeypatch):
    def fail(*_: object) -> Any:
        raise error

    monkeypatch.setitem(registry.SAMPLERS, "vllm", fail)
    monkeypatch.setitem(scorers.SCORERS, "transformers", fail)
    for opens, of in (
        (open_sampler, spec("vllm", "[rollout]")),
        (scorers.open_scorer, spec("transformers", "[teachers.a]")),
    ):
        with pytest.raises(BackendFailed) as caught:
            opens(of)
        text = str(caught.value)
        assert text.startswith(of.section) and of.backend in text and "the/model" in text
        assert type(error).__name__ in text and caught.value.__cause__ is error


@pytest.mark.parametrize("method", ["generate", "score", "update_weights"])
def test_library_error_of_computing_names_the_table(method, monkeypatch):
    error = AttributeError("no attribute 'past'")
    monkeypatch.setitem(scorers.SCORERS, "vllm", lambda *_: Fails(error))
    scorer = scorers.open_scorer(spec("vllm", "[teacher]"))
    with pytest.raises(BackendFailed, match=r"^\[teacher\] vllm .*no attribute 'past'") as caught:
        getattr(scorer, method)([])
    assert caught.value.__cause__ is error
    with pytest.raises(BackendFailed):
        scorer.sampler.generate([])


@pytest.mark.parametrize("error", [ValueError("x"), MemoryError()])
def test_error_with_words_of_its_own_is_left_alone(error, monkeypatch):
    monkeypatch.setitem(registry.SAMPLERS, "vllm", lambda *_: Fails(error))
    with pytest.raises(type(error)) as caught:
        open_sampler(spec("vllm", "[rollout]")).generate([], None, 0)
    assert caught.value is error
