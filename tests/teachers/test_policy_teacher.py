"""The hint-conditioned teacher: its prompts, hints, scores and weights."""

import copy
from typing import Any

import torch

from prime_composer.problems.config import DataConfig, Problem
from prime_composer.recipe.schema import PolicyTeacherConfig
from prime_composer.teachers.policy import PolicyTeacher
from tests.local.helpers import PROBLEM, SOURCES, Letters, rollout, sample


def test_braces_in_question_hint_and_attempt_are_kept(student: tuple[Any, Any]) -> None:
    config = PolicyTeacherConfig(template="{question}|{hint}|{attempt}")
    teacher = PolicyTeacher(
        config, {"problems": DataConfig(prompt_template="{question}")}, *student
    )
    prompt = teacher.prompt(
        Problem("a {hint}", "x"), hint="b {attempt} {question}", attempt="c {question}"
    )
    assert student[1].decode(prompt) == "a {hint}|b {attempt} {question}|c {question}"


def test_sibling_hint_is_the_first_other_correct_rollout(
    student: tuple[Any, Any],
) -> None:
    """A rollout is no hint for itself, and a group without another correct one has none."""
    teacher = PolicyTeacher(PolicyTeacherConfig(hint="sibling"), SOURCES, *student)
    rows = [(0, 1.0, "a"), (0, 0.0, "b"), (0, 1.0, "c"), (1, 1.0, "d"), (1, 0.0, "e")]
    hints = teacher.hints([sample(group, reward, text=text) for group, reward, text in rows])
    assert hints == ["c", "a", "a", None, "d"]


def test_feedback_hint_names_the_right_answer(student: tuple[Any, Any]) -> None:
    teacher = PolicyTeacher(PolicyTeacherConfig(hint="feedback"), SOURCES, *student)
    hints = teacher.hints([sample(0, 0.0), sample(1, 1.0)])
    assert hints == ["This is wrong; the right answer is 5.", "This is correct."]


def test_policy_teacher_scores_tokens_after_its_own_prompt(
    student: tuple[Any, Any],
) -> None:
    """The scores are those of a plain forward over the teacher's prompt and the completion."""
    model, tokenizer = student
    teacher = PolicyTeacher(PolicyTeacherConfig(update="live"), SOURCES, model, tokenizer)
    prompt = teacher.prompt(PROBLEM, PROBLEM.answer)
    one = rollout(0, (5, 6, 40, 41, 42))
    (scores,) = teacher.score([one], [prompt], 8)
    with torch.no_grad():
        logprobs = model(torch.tensor([[*prompt, 40, 41, 42]])).logits[0].log_softmax(-1)
    expected = [logprobs[len(prompt) - 1 + i, token] for i, token in enumerate((40, 41, 42))]
    torch.testing.assert_close(scores.ref_logprobs, torch.stack(expected), rtol=0, atol=2e-5)


def test_policy_teacher_support_chosen_by_the_student(student: tuple[Any, Any]) -> None:
    """The ids are the top K of the policy without the hint."""
    model, tokenizer = student
    teacher = PolicyTeacher(PolicyTeacherConfig(update="live"), SOURCES, model, tokenizer)
    one = rollout(0, (5, 6, 40, 41, 42))
    (scores,) = teacher.score([one], [teacher.prompt(PROBLEM, "9")], 8, chosen_by_student=True)
    with torch.no_grad():
        unhinted = model(one.token_ids[None]).logits[0]
    assert torch.equal(scores.token_ids.sort().values, unhinted[1:-1].topk(8).indices.sort().values)


def test_policy_teacher_follows_by_average_or_copy(student: tuple[Any, Any]) -> None:
    model, tokenizer = copy.deepcopy(student[0]), student[1]
    before = model.model.norm.weight.detach().clone()
    ema = PolicyTeacher(PolicyTeacherConfig(update="ema", ema_rate=0.25), SOURCES, model, tokenizer)
    synced = PolicyTeacher(
        PolicyTeacherConfig(update="sync", sync_every=2), SOURCES, model, tokenizer
    )
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    for teacher in (ema, synced):
        teacher.end_step(1)
    torch.testing.assert_close(ema.model.model.norm.weight, before + 0.25)
    torch.testing.assert_close(synced.model.model.norm.weight, before)
    for teacher in (ema, synced):
        teacher.end_step(2)
    torch.testing.assert_close(ema.model.model.norm.weight, before + 0.25 + 0.75 * 0.25)
    torch.testing.assert_close(synced.model.model.norm.weight, before + 1.0)


def test_policy_teacher_prompt_is_that_of_the_environment() -> None:
    sources = {name: DataConfig(prompt_template=f"{name}: {{question}}") for name in ("a", "b")}
    config = PolicyTeacherConfig(update="live", template="{question}{hint}")
    teacher = PolicyTeacher(config, sources, torch.nn.Module(), Letters())
    ids = teacher.prompt(Problem("q", "#### 1", environment="b"), "h")
    assert "".join(map(chr, ids)) == "b: qh"
