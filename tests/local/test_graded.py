"""Graded metrics in the one-machine engine: evaluation, rewards, refusals, and what is printed."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prime_composer.backends.protocols import Limits, Rollout, SamplingParams
from prime_composer.cli.report import print_report
from prime_composer.local.answers import KeptAnswer, read_answers, read_signatures, write_answers
from prime_composer.local.collect import grade, rollout_metrics
from prime_composer.local.evaluate import Evaluator
from prime_composer.local.tokenized_problems import TokenizedProblems
from prime_composer.local.tracker import read_metrics
from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.loading import ProblemSet
from prime_composer.problems.metrics import sentence_score, total_score
from prime_composer.problems.prompts import Ends, render_answer
from prime_composer.recipe.rollout import RolloutConfig
from prime_composer.recipe.schema import EvalConfig
from prime_composer.step.batch import Sample
from tests.local.helpers import Letters, run, tiny_models

pytest.importorskip("rouge_score", reason="rouge-score is not installed (extra: metrics)")
pytest.importorskip("sacrebleu", reason="sacrebleu is not installed (extra: metrics)")


class Words(Letters):
    """Letters, and back."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in ids if token)


class Saying:
    """A sampler that gives known answers: of each prompt its list, in turn."""

    def __init__(self, tokenized: TokenizedProblems, answers: dict[str, list[str]]):
        self.tokenized = tokenized
        self.answers = answers
        self.asked: list[SamplingParams] = []
        self.limits = Limits()

    def update_weights(self, model: Any) -> None: ...

    def close(self) -> None: ...

    def generate(self, prompts: Any, params: SamplingParams, seed: int) -> list[Rollout]:
        self.asked.append(params)
        rollouts = []
        for index, prompt in enumerate(prompts):
            question = next(q for q in self.answers if q in self.tokenized.decode(prompt))
            for text in self.answers[question][: params.n]:
                said = response(prompt, said_ids(text), index)
                log_mu = torch.full(said.token_ids.shape, -0.5)
                rollouts.append(replace(said, prompt_index=index, inference_logprobs=log_mu))
        return rollouts


def response(prompt: Sequence[int], answer: Sequence[int], prompt_index: int = 0) -> Rollout:
    token_ids = torch.tensor([*prompt, *answer])
    return Rollout.not_sampled(token_ids, len(prompt), "stop", prompt_index)


def said_ids(text: str) -> list[int]:
    """Return a text as an answer, with the end of text."""
    return render_answer(Problem("", ""), text, DataConfig(), Words(), Ends.of(Words(), set()))


SOURCES = {
    "sums": DataConfig(),
    "news": DataConfig(kind="summary", metric="rouge2"),
    "german": DataConfig(kind="translation", metric="bleu"),
}
HELD_OUT = [
    Problem("one and one", "#### 2", "sums"),
    Problem("report", "a b c", "news"),
    Problem("the cat", "die Katze sitzt auf dem Tisch", "german"),
    Problem("the dog", "der kleine Hund", "german"),
]
SAID = {
    "one and one": ["#### 2", "#### 3", "#### 2", "#### 2"],
    "report": ["a b x", "a b c", "a b x", "a b c"],
    "the cat": ["die Katze sitzt auf Tisch"] * 4,
    "the dog": ["ein grosser Hund", "der kleine Hund", "der kleine Hund", "ein Hund"],
}


def evaluator(sources: dict[str, DataConfig] = SOURCES, **settings: Any) -> Evaluator:
    """Return an evaluator whose student says what ``SAID`` has."""
    held_out = [problem for problem in HELD_OUT if problem.environment in sources]
    tokenized = TokenizedProblems(ProblemSet([], held_out, sources), Words())
    engine: Any = SimpleNamespace(
        problems=tokenized,
        sampler=Saying(tokenized, SAID),
        teachers=None,
        policy_teacher=None,
        environments=None,
    )
    made: Any = object.__new__(Evaluator)  # an Engine opens models
    recipe = SimpleNamespace(eval=EvalConfig(**settings), rollout=RolloutConfig(max_tokens=40))
    for name, value in {"engine": engine, "recipe": recipe, "answers": []}.items():
        object.__setattr__(made, name, value)
    return made


def bleu(texts: list[str], references: list[str]) -> float:
    return total_score("bleu", texts, references, [])


def test_evaluation_scores_each_problem_by_its_metric() -> None:
    """Accuracy stays that of right and wrong answers. BLEU is one number over both its texts."""
    measured = evaluator().student()
    answers = [SAID["the cat"][0], SAID["the dog"][0]]
    references = [problem.answer for problem in HELD_OUT[2:]]
    assert measured == {
        "eval/accuracy": 1.0,
        "eval/rouge2": 0.5,
        "eval/bleu": bleu(answers, references),
        "eval/accuracy/sums": 1.0,
        "eval/rouge2/news": 0.5,
        "eval/bleu/german": bleu(answers, references),
        "eval/truncated": 0.0,
    }
    sentences = [sentence_score("bleu", *pair) for pair in zip(answers, references, strict=True)]
    assert abs(measured["eval/bleu"] - sum(sentences) / 2) > 0.02


def test_reward_of_a_rollout_is_that_of_its_sentence() -> None:
    """Advantages are rewards minus the group's mean, with any rewards."""
    measuring = evaluator()
    tokenized = measuring.engine.problems
    prompts = [tokenized.prompt(problem) for problem in HELD_OUT]
    params = SamplingParams(n=2, max_tokens=9)
    rollouts = measuring.engine.sampler.generate(prompts, params, seed=0)
    asked = [Sample(one, HELD_OUT[one.prompt_index]) for one in rollouts]
    samples = grade(tokenized, asked)
    dog = sentence_score("bleu", "ein grosser Hund", "der kleine Hund")
    assert [sample.reward for sample in samples[:4]] == [1.0, 0.0, 0.5, 1.0]
    assert [sample.reward for sample in samples[6:]] == [dog, 1.0]
    assert samples[6].advantage == pytest.approx((dog - 1) / 2)


# Reports ------------------------------------------------------------------------------------------


def test_report_shows_a_graded_metric_and_its_signature(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scores are times 100. The signature is that of the run, whatever is installed now."""
    records = [
        {"step": 0, "eval/rouge2": 0.1234, "teacher/rouge2": 0.5, "eval/reverse_kl": 1.0},
        {"step": 4, "loss": 0.5, "tokens_per_second": 9.0, "eval/rouge2": 0.3456},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    answer = KeptAnswer("q", "a b c", "a b x", None, 0.5, "rouge2")
    for step in (0, 4):
        write_answers(tmp_path, step, [answer], {"rouge2": "rouge2|of the run"})
    assert read_answers(tmp_path) == {0: [answer], 4: [answer]}
    assert read_signatures(tmp_path) == {"rouge2": "rouge2|of the run"}
    print_report([tmp_path])
    out = capsys.readouterr().out
    words = ("ROUGE-2", "12.3 → 34.6", "50.0", "x 100: rouge2|of the run", "(ROUGE-2 50.0) a b")
    assert [text for text in words if text not in out] == []
    assert "accuracy" not in out and "wrong" not in out


def test_run_on_summaries_measures_them(tiny_recipe: Any, tmp_path: Path) -> None:
    """A whole run: rewards between 0 and 1, scores of teacher and student, and the signature."""
    data = {"size": 60, "kind": "summary", "metric": "chrf"}
    models = {name: {"model": str(path)} for name, path in tiny_models(tiny_recipe()).items()}
    raw = tiny_recipe(trainer__steps=1, data=data, rollout__max_model_len=256, **models)
    run(raw, tmp_path)
    before, after = read_metrics(tmp_path)
    assert {"eval/chrf", "teacher/chrf"} <= before.keys()
    assert {"eval/chrf", "rollout/reward"} <= after.keys()
    assert not {"eval/accuracy", "teacher/accuracy"} & before.keys()
    assert 0 < after["rollout/reward"] < 1
    assert read_signatures(tmp_path)["chrf"].startswith("chrF2|nrefs:1|")


def test_problems_that_are_not_graded_are_left_out_of_scores(tmp_path: Path) -> None:
    """Beside others they change no score, and alone there is none. Their answers are kept."""
    sources = {"sums": SOURCES["sums"], "german": DataConfig(kind="translation", metric="none")}
    some = evaluator(sources)
    assert some.student() == {
        "eval/accuracy": 1.0, "eval/accuracy/sums": 1.0, "eval/truncated": 0.0
    }  # fmt: skip
    assert [(one.text.strip(), one.correct, one.score) for one in some.answers[1:]] == [
        (SAID[question][0], None, None) for question in ("the cat", "the dog")
    ]
    alone = evaluator({"german": sources["german"]})
    assert alone.student() == {"eval/truncated": 0.0} and alone.teachers() == {}
    samples = [
        Sample(rollout, problem, reward=reward)
        for problem, reward in ((HELD_OUT[0], 1.0), (HELD_OUT[2], 0.0))
        for rollout in [response([1], said_ids(problem.answer))]
    ]
    measured = rollout_metrics(samples, ProblemSet([], [], sources))
    assert (measured["rollout/reward"], measured["rollout/reward/sums"]) == (1.0, 1.0)
    assert "rollout/reward/german" not in measured
    assert "rollout/reward" not in rollout_metrics(samples[1:], ProblemSet([], [], sources))
