"""A teacher with a tokenizer of its own, in front of any scorer."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prime_composer.backends.protocols import Rollout, SamplingParams
from prime_composer.contract import Scores
from prime_composer.cross_tokenizer.finish import NEVER
from prime_composer.cross_tokenizer.pair import TokenizerPair
from prime_composer.cross_tokenizer.plan import plan_of
from prime_composer.local.tracker import read_metrics
from prime_composer.problems.config import Problem
from prime_composer.problems.loading import load_problem_set
from prime_composer.recipe.loading import parse_recipe
from prime_composer.step.batch import Sample, with_scores
from prime_composer.teachers import own_tokenizer
from prime_composer.teachers.compatibility import PreflightError
from prime_composer.teachers.own_tokenizer import OwnTokenizerScorer
from prime_composer.teachers.tokenizer_pair import aligned_share, lead_of, make_pair
from tests.command import numbers
from tests.local.helpers import Silent, run
from tests.teachers.own import STUDENT, TEACHER, own_recipe, rollout_of, scorer_of, wrapped


def first_row(scorer: OwnTokenizerScorer, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = scorer.scorer.model(torch.tensor([prompt])).logits[0, -1]  # type: ignore[attr-defined]
    return logits.double().softmax(-1)


@pytest.mark.parametrize("shift", [0, 3])
def test_first_byte_is_the_marginal_of_the_teachers_row(shift: int) -> None:
    # A student of single bytes; where the text begins, one row has it all.
    scorer, student = scorer_of([], shift)
    rollout = rollout_of(student, "ab ", "abcab c")
    (scores,) = scorer.score([rollout], 8)
    prompt = scorer.prompts(rollout.token_ids[: rollout.start].tolist())
    row = first_row(scorer, list(prompt))
    marginal = torch.zeros(len(student), dtype=torch.float64)
    for token, content in enumerate(scorer.pair.teacher.of_id):
        if content and content[0] < 128:
            marginal[scorer.pair.student.of_id.index(content[:1])] += row[token]
    own = math.log(float(marginal[rollout.token_ids[rollout.start]]))
    assert float(scores.ref_logprobs[0]) == pytest.approx(own, abs=1e-5)
    for token, q, known in zip(
        scores.token_ids[0], scores.teacher_logprobs[0], scores.all_known[0], strict=True
    ):
        content = scorer.pair.student.of_id[int(token)]
        if known and content and content[0] < 128:
            assert float(q) == pytest.approx(math.log(float(marginal[token])), abs=1e-5)
    assert scores.start == rollout.start and len(scores) == 8
    # What ends the text is the teacher's own end.
    ended = first_row(scorer, [*prompt, *scorer.pair.teacher.encode("abcab c")])
    end = math.log(float(ended[scorer.pair.teacher_ends[0]]))
    assert float(scores.ref_logprobs[-1]) == pytest.approx(end, abs=1e-4)


def test_aligned_positions_need_only_the_top_of_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, student = scorer_of(STUDENT)
    rollout = rollout_of(student, "ab", " cab bc")
    (whole,) = scorer.score([rollout], 4)
    monkeypatch.setattr(own_tokenizer, "WHOLE_UP_TO", 0)
    monkeypatch.setattr(own_tokenizer, "READ", 240)
    (top,) = scorer.score([rollout], 4)
    assert top.scored is not None and whole.scored is not None and whole.scored.all()
    near = top.scored & (top.ref_logprobs > NEVER)
    assert near.sum() >= 2
    # What is left out of a row is its least probable ids: a few percent of its mass.
    assert float((top.ref_logprobs - whole.ref_logprobs)[near].abs().max()) < 0.05


def test_a_row_that_leaves_out_too_much_has_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, student = scorer_of([])
    monkeypatch.setattr(own_tokenizer, "WHOLE_UP_TO", 0)
    monkeypatch.setattr(own_tokenizer, "READ", 2)
    rollout = rollout_of(student, "ab", "abcabc")
    (scores,) = scorer.score([rollout], 4)
    # "b" begins inside of the teacher's "abc", and almost nothing of that row was read.
    assert scores.scored is not None and not scores.scored[1] and scores.scored[0]
    sample = with_scores(Sample(rollout, Problem("", "")), scores)
    assert sample is not None and sample.scores is not None and sample.scores.scored is None
    assert sample.rollout.trained.tolist() == scores.scored.tolist()
    assert torch.equal(sample.scores.ref_logprobs, scores.ref_logprobs)


def test_share_that_begins_together_is_counted_by_hand() -> None:
    """The teacher writes "abcab c" as abc|ab| |c: 4 of a student's 7 bytes, and none is left."""
    teacher, student = wrapped(TEACHER), wrapped([])
    pair = make_pair(teacher, student, [teacher.eos_token_id], [], "teacher")
    assert aligned_share(pair, ["abcab c"]) == pytest.approx(4 / 7)
    assert aligned_share(pair, ["abcab c", "c"]) == pytest.approx(5 / 8)


def test_whole_rows_are_read_in_process_of_a_bad_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair that does not align: all ids of a large vocabulary's rows, one rollout at a time."""
    scorer, student = scorer_of([])
    rollouts = [rollout_of(student, "ab", text) for text in ("abcabc", " cab bc")]
    whole = scorer.score(rollouts, 4)
    monkeypatch.setattr(own_tokenizer, "WHOLE_UP_TO", 0)
    monkeypatch.setattr(own_tokenizer, "READ", 2)
    few = scorer.score(rollouts, 4)
    scorer, _ = scorer_of([], aligned=0.5)
    for one, left_out, found in zip(whole, few, scorer.score(rollouts, 4), strict=True):
        assert left_out.scored is not None and not left_out.scored.all()
        assert found.scored is not None and found.scored.all()
        torch.testing.assert_close(found.ref_logprobs, one.ref_logprobs)
        assert torch.equal(found.token_ids, one.token_ids)


def test_with_scores_begins_at_the_first_scored_token() -> None:
    rollout = Rollout(torch.arange(6), torch.arange(6) >= 2, torch.full((6,), torch.nan), "stop", 0)

    def scored(*which: bool) -> Any:
        support = torch.zeros(4, 0, dtype=torch.long), torch.zeros(4, 0)
        own = torch.tensor([-1.0, -2.0, -3.0, -4.0])
        scores = Scores(own, *support, start=2, scored=torch.tensor(which))
        return with_scores(Sample(rollout, Problem("", "")), scores)

    sample = scored(False, True, False, True)
    assert sample.rollout.start == 3 and sample.scores.start == 3
    assert sample.scores.ref_logprobs.tolist() == [-2.0, -3.0, -4.0]
    assert sample.rollout.trained.tolist() == [True, False, True]
    assert scored(False, False, False, False) is None


def test_the_teachers_answers_are_encoded_for_the_student(tmp_path: Path) -> None:
    from prime_composer.teachers.transformers import TransformersScorer

    live, student = scorer_of(STUDENT)
    live.scorer.model.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    stored = TransformersScorer(tmp_path)
    scorer = OwnTokenizerScorer(stored, live.pair, live.prompts, len(student))
    sampler, inner = scorer.sampler, stored.sampler
    assert sampler is not None and inner is not None
    prompts = [student.encode("ab c"), student.encode("c")]
    params = SamplingParams(max_tokens=6)
    own = inner.generate([scorer.prompts(ids) for ids in prompts], params, seed=4)
    for rollout, written in zip(sampler.generate(prompts, params, seed=4), own, strict=True):
        content = scorer.pair.teacher.bytes_of(written.completion_ids)
        text = content.decode(errors="ignore")
        ended = [student.eos_token_id] * (written.finish_reason == "stop" or not text)
        assert rollout.completion_ids == (student.encode(text) + ended)[:6]
        assert rollout.token_ids[: rollout.start].tolist() == prompts[rollout.prompt_index]
        assert rollout.inference_logprobs.isnan().all()


def test_metrics_are_means_over_tokens_since_they_were_taken() -> None:
    """A token without a score has no part in them, but in its own share.

    Most of the second rollout come after a special one, so nobody scores them.
    """
    scorer, student = scorer_of(STUDENT)
    start = student.encode("ab")
    ids = [*student.encode("abc"), student.eos_token_id, *student.encode(" cab bc" * 3)]
    cut = Rollout.not_sampled(torch.tensor([*start, *ids]), len(start), "length")
    rollouts = [rollout_of(student, "ab", " cab bc"), cut]
    each = []
    for rollout in rollouts:
        (scores,) = scorer.score([rollout], 4)
        scored = len(scores) if scores.scored is None else int(scores.scored.sum())
        each.append((scored, len(scores), scorer.take_metrics()))
    scorer.score(rollouts, 4)
    both = scorer.take_metrics()
    assert each[1][0] < each[1][1] / 2
    weights = [n for n, _, _ in each], [n for _, n, _ in each]
    for name, counts in {
        "xtok/aligned": weights[0],
        "xtok/support_size": weights[0],
        "xtok/unresolved_mass": weights[0],
        "xtok/teacher_tokens": weights[1],
    }.items():
        mean = sum(n * one[name] for n, (_, _, one) in zip(counts, each, strict=True)) / sum(counts)
        assert both[name] == pytest.approx(mean), name
    unscored = sum(n - scored for scored, n, _ in each) / sum(weights[1])
    assert both["xtok/unscored"] == pytest.approx(unscored)
    assert scorer.take_metrics() == {}


def test_equal_and_unusable_tokenizers_are_refused() -> None:
    same = wrapped(STUDENT)
    end = same.eos_token_id
    with pytest.raises(PreflightError, match="leave it out"):
        make_pair(same, wrapped(STUDENT), [end], [], "teacher")
    with pytest.raises(PreflightError, match=r"\[teachers.x\] .*eos_token_id in its generation"):
        make_pair(wrapped(TEACHER), same, [], [], "teachers.x")
    with pytest.raises(PreflightError, match=r"\[teachers.x\] .*student.*set eos_token"):
        make_pair(wrapped(TEACHER), wrapped(STUDENT, None), [261], [], "teachers.x")
    with pytest.raises(PreflightError, match=r"\[teachers.x\] tokenizer.*tokenizer.json"):
        make_pair(SimpleNamespace(get_vocab=lambda: {"a": 0}), same, [end], [], "teachers.x")


def test_equal_vocabularies_with_other_merges_are_compared() -> None:
    # Both split the probes alike, and "abc" differently. "shared" refuses what it sees.
    left, right = ([("a", "b"), ("b", "c"), *last] for last in ([("ab", "c")], [("a", "bc")]))
    teacher, student = wrapped(left), wrapped([right[1], right[0], right[2]])
    assert teacher.get_vocab().keys() == student.get_vocab().keys()
    same = wrapped([left[0], left[1], ("a", "bc")])
    assert same.get_vocab() == teacher.get_vocab() and same.encode("abc") != teacher.encode("abc")
    pair = make_pair(teacher, same, [teacher.eos_token_id], ["abc"], "teacher")
    plan = plan_of(pair, same.encode("abc"))
    assert [pair.teacher.of_id[i] for i in plan.teacher_ids] == [b"abc"]


@pytest.mark.parametrize("between, lead", [("", b""), (" ", b" "), ("<think>", b"")])
def test_template_says_whether_a_space_leads(between: str, lead: bytes) -> None:
    tokenizer = wrapped(STUDENT)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% else %}"
        + between
        + "{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    data = {"source": "generated", "size": 60, "chat_template": True}
    recipe = parse_recipe(
        {
            "student": {"model": "s"},
            "teacher": {"model": "t"},
            "loss": {"type": "sampled_reverse_kl"},
            "data": data,
            "trainer": {"steps": 1, "batch_size": 2},
        }
    )
    problems = load_problem_set(recipe.problem_sources)
    assert lead_of(tokenizer, problems, "teacher") == lead
    recipe = recipe.model_copy(
        update={"data": recipe.data.model_copy(update={"chat_template": False})}
    )
    assert lead_of(tokenizer, load_problem_set(recipe.problem_sources), "teacher") == b""


def test_run_distils_from_another_tokenizer_and_resumes(
    tiny_recipe: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not under another pair: with the data's texts or a tokenizer's file each number changes."""
    raw = own_recipe(tiny_recipe, trainer__steps=4)
    outcome = run(raw, tmp_path / "whole")
    before, *_, after = outcome.evaluations.values()
    assert after["eval/reverse_kl"] < before["eval/reverse_kl"]
    record = read_metrics(tmp_path / "whole")[1]
    assert 0 < record["xtok/aligned"] < 1 and record["xtok/unscored"] < 1
    assert record["xtok/teacher_tokens"] < 1  # whole numbers, where the student has digits
    run(raw, tmp_path / "cut", Silent(interrupt_at=3))
    with monkeypatch.context() as patch:
        patch.setattr(TokenizerPair, "_counted", lambda *_: dict.fromkeys(range(40, 90), 1.0))
        with pytest.raises(PreflightError, match=r"\[teacher\] tokenizer = .own.*other tokenizers"):
            run(raw, tmp_path / "cut", resume=True)
    run(raw, tmp_path / "cut", resume=True)
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
