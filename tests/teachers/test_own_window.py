"""A teacher with a tokenizer of its own within a run: its window, its server, and its watch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from prime_composer.backends.protocols import Rollout, SamplingParams
from prime_composer.contract import Scores, given
from prime_composer.local.collect import Collector
from prime_composer.local.engine import Engine
from prime_composer.local.watch import open_watch
from prime_composer.recipe.routing import TeacherId
from prime_composer.teachers.compatibility import PreflightError
from prime_composer.teachers.own_tokenizer import OwnTokenizerScorer
from prime_composer.teachers.watch import largest_difference
from tests.local.helpers import Narrow, open_run
from tests.teachers.own import STUDENT, own_recipe, rollout_of, scorer_of

Raw = Callable[..., dict[str, Any]]
THE = TeacherId()


def own_scorer(engine: Engine) -> OwnTokenizerScorer:
    assert engine.teachers is not None
    scorer = engine.teachers.scorers[THE]
    assert isinstance(scorer, OwnTokenizerScorer)
    return scorer


class Noisy:
    """A scorer in half precision: each call has other noise, by up to ``size`` nats."""

    gives_any_ids = True
    sampler = None

    def __init__(self, scorer: Any, size: float):
        self.scorer, self.size, self.limits = scorer, size, scorer.limits
        self.random = torch.Generator().manual_seed(0)

    def score(self, rollouts: Any, size: Any, **options: Any) -> list[Scores]:
        return [
            Scores(self._moved(one.ref_logprobs), one.token_ids, self._moved(one.teacher_logprobs))
            for one in self.scorer.score(rollouts, size, **options)
        ]

    def _moved(self, logprobs: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(logprobs.shape, generator=self.random)
        return logprobs + self.size * (2 * noise - 1)

    def close(self) -> None:
        self.scorer.close()


def test_watch_compares_the_teachers_own_rows(tiny_recipe: Raw) -> None:
    # Noise moves ids across the limit of what is resolved, and whole log-probs with them.
    recipe, engine = open_run(own_recipe(tiny_recipe, checks__every=1, checks__tolerance=0.5))
    with engine:
        scorer = own_scorer(engine)
        scorer.scorer = Noisy(scorer.scorer, 0.2)
        watch = open_watch(engine, recipe, lambda _: None)
        prompts = [engine.problems.prompt(p) for p in engine.problems.problem_set.practice[:8]]
        rollouts = engine.sampler.generate(prompts, SamplingParams(max_tokens=8), seed=0)
        once, again = (scorer.score(rollouts, 8) for _ in range(2))
        assert max(map(largest_difference, once, again)) > 0.5
        for step in range(1, 9):
            watch.check(step)
        assert watch.safe_step == 8
        scorer.scorer.size = 5.0
        with pytest.raises(ValueError, match="other numbers than then"):
            watch.check(9)


def test_room_ends_with_the_last_token_whose_text_fits() -> None:
    scorer, student = scorer_of(STUDENT)
    rollout, inner = rollout_of(student, "ab", " abcab zyx 77abc cab"), scorer.scorer
    for window in range(3, 18):
        scorer.scorer = Narrow(inner, window)  # type: ignore[assignment]
        check_room(scorer, rollout, window)


def check_room(scorer: OwnTokenizerScorer, rollout: Rollout, window: int) -> None:
    # By trying every length: prompt, text and end have to be shorter than the window.
    ids, start = rollout.token_ids.tolist(), rollout.start
    prompt = len(scorer.prompts(ids[:start]))
    fits = [
        end
        for end in range(start + 1, len(ids) + 1)
        if prompt + len(scorer.pair.teacher.encode(written(scorer, ids[start:end]))) + 1 < window
    ]
    room = given(scorer.room(rollout))
    assert room in [start, *fits] and (room == start) == (not fits)
    if room > start:
        text = written(scorer, ids[start:room])
        assert room == len(ids) or prompt + len(scorer.pair.teacher.encode(text)) + 3 >= window
        (scores,) = scorer.score([cut(rollout, room)], 4)
        assert len(scores) == room - start
    if room < len(ids):
        with pytest.raises(ValueError, match=r'\[teacher\].* on_overflow = "score_head"'):
            scorer.score([rollout], 4)


def written(scorer: OwnTokenizerScorer, ids: list[int]) -> str:
    return scorer.pair.student.bytes_of(ids).decode()


def cut(rollout: Rollout, end: int) -> Rollout:
    return Rollout.not_sampled(rollout.token_ids[:end], rollout.start, "length")


def test_step_scores_what_the_teacher_can_read(tiny_recipe: Raw) -> None:
    raw = own_recipe(tiny_recipe)
    raw["teacher"]["on_overflow"] = "score_head"
    recipe, engine = open_run(raw)
    with engine:
        scorer = own_scorer(engine)
        collector = Collector(engine, recipe)
        samples = collector.grade(collector.sample(collector.problems(1), 1))
        readings = scorer.readings([sample.rollout for sample in samples])
        lengths = [len(reading.token_ids) for reading in readings]
        scorer.scorer = Narrow(scorer.scorer, max(lengths))  # type: ignore[assignment]
        batch = collector.score(samples, 1)
        too_long = sum(length == max(lengths) for length in lengths)
        assert 0 < too_long < len(samples)
        assert collector.metrics["rollout/teacher_cut"] == too_long / len(samples)
        assert collector.metrics["rollout/teacher_dropped"] == 0
        assert 0 < len(batch.samples) <= len(samples)


def warnings_of(raw: dict[str, Any]) -> list[str]:
    recipe, engine = open_run(raw)
    with engine:
        problems = engine.problems.problem_set.practice
        return own_scorer(engine).check(problems, recipe.rollout.max_tokens, "error")


def test_unusual_text_that_may_not_fit_is_a_warning(tiny_recipe: Raw) -> None:
    raw = own_recipe(tiny_recipe)
    raw["rollout"]["max_tokens"] = 40  # 40 words fit by the data's texts, 40 of the longest do not
    (warning,) = warnings_of(raw)
    assert 'on_overflow = "score_head" in [teacher]' in warning and "worst case" in warning


def test_answers_too_long_for_the_window_name_both_remedies(tiny_recipe: Raw) -> None:
    raw = own_recipe(tiny_recipe)
    raw["rollout"]["max_tokens"] = 110
    with pytest.raises(PreflightError, match=r'lower rollout.max_tokens, or set on_overflow = "sc'):
        warnings_of(raw)
