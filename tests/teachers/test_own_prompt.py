"""A teacher that reads a prompt of its own, against plain transformers in float64."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_composer.backends.hf_model import load_model, load_tokenizer
from prime_composer.backends.protocols import Rollout, SamplingParams
from prime_composer.local.engine import Engine
from prime_composer.local.preflight import preflight
from prime_composer.problems.config import DataConfig, Problem
from prime_composer.problems.loading import ProblemSet
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.teacher import TeacherPromptConfig
from prime_composer.teachers.compatibility import PreflightError
from prime_composer.teachers.own_prompt import TeacherPrompts
from prime_composer.teachers.own_tokenizer import OwnTokenizerScorer
from tests.chat_models import (
    CHATML,
    TEXT_END,
    TURN_END,
    make_tokenizer,
    opened,
    recipe_of,
    run,
    save_model,
    write_rows,
)

ROWS = [{"question": f"What is {i}?", "answer": str(i)} for i in range(20)]
SYSTEM = "Answer in one word, and think of whom you speak to."


@pytest.fixture
def pair(tmp_path: Path) -> dict[str, Any]:
    """Return a recipe of a base model without a template that learns from its chat model."""
    student = save_model(tmp_path / "base", make_tokenizer(None), [TEXT_END], 0)
    teacher = save_model(tmp_path / "chat", make_tokenizer(), [TEXT_END, TURN_END], 1)
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    recipe = recipe_of(student, teacher, data)
    recipe["data"]["chat_template"] = False
    return recipe


def reference(folder: str, messages: list[dict[str, str]], rollout: Rollout, **more: Any) -> Any:
    """Return log q of a completion's rows in float64, under the messages as the template has
    them."""
    tokenizer = load_tokenizer(folder)
    own = {"add_generation_prompt": True, "tokenize": True, "return_dict": False} | more
    prompt = list(tokenizer.apply_chat_template(messages, **own))
    completion = rollout.token_ids[rollout.start :].tolist()
    model = load_model(folder, "float32", "cpu").double()
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


OTHER = CHATML.replace("<|im_start|>", "<|im_end|>")
"""A template that is not the teacher's tokenizer's."""

ASKED = {
    "teacher": ({"chat_template": "t.jinja"}, "Question: {}\nAnswer:", OTHER),
    "student": ({"chat_template": True, "prompt_template": "{question}"}, "{}", None),
    "full": ({"system": SYSTEM}, "Question: {}\nAnswer:", None),
}
"""Who chooses the ids -> a prompt, and how it is written."""


@pytest.mark.parametrize(
    ("backend", "loss"),
    [
        *(("transformers", loss) for loss in ASKED),
        pytest.param("vllm", "full", marks=pytest.mark.vllm),
    ],
)
def test_scores_are_those_under_the_teachers_prompt(
    pair: dict[str, Any], backend: str, loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The student's completion behind the teacher's own prompt, in whatever way it is asked."""
    prompt, text, template = ASKED[loss]
    monkeypatch.chdir(tmp_path)
    Path("t.jinja").write_text(OTHER)
    pair["teacher"] |= {"prompt": prompt, "backend": backend}
    size: dict[str, Any] = {"k": "full"} if loss == "full" else {"k": 8, "chosen_by": loss}
    kind = "generalized_jsd" if loss == "full" else "topk_reverse_kl"
    pair["loss"] = {"type": kind, **size}
    with opened(pair) as engine:
        problem = engine.problems.problem_set.practice[0]
        asked = engine.problems.prompt(problem)
        params = SamplingParams(n=2, max_tokens=12)
        rollouts = engine.sampler.generate([asked], params, seed=0)
        assert engine.teachers is not None
        support, by_student = engine.loss.asked_of_teacher
        chosen = [torch.arange(8).expand(len(r.token_ids) - r.start, 8) for r in rollouts]
        found = engine.teachers.score(
            rollouts,
            [problem] * 2,
            support,
            chosen if by_student else None,
            engine.loss.reads_hidden_states,
        )
    messages = [{"role": "system", "content": SYSTEM}] * ("system" in prompt)
    messages.append({"role": "user", "content": text.format(problem.question)})
    more = {} if template is None else {"chat_template": template}
    for rollout, scores in zip(rollouts, found, strict=True):
        assert scores.start == rollout.start == len(asked)
        rows = reference(pair["teacher"]["model"], messages, rollout, **more)
        sampled = rollout.token_ids[rollout.start :]
        expected = rows.gather(1, sampled.unsqueeze(1))[:, 0]
        torch.testing.assert_close(scores.ref_logprobs.double(), expected, atol=2e-5, rtol=0)
        expected = rows.gather(1, scores.token_ids)
        torch.testing.assert_close(scores.teacher_logprobs.double(), expected, atol=2e-5, rtol=0)


def sampled(engine: Engine) -> tuple[Any, list[Rollout]]:
    """Return the first problem, and two answers of the student to it."""
    problem = engine.problems.problem_set.practice[0]
    params = SamplingParams(n=2, max_tokens=12)
    return problem, engine.sampler.generate([engine.problems.prompt(problem)], params, seed=0)


def test_teachers_with_different_prompts_keep_their_own(
    tmp_path: Path, pair: dict[str, Any]
) -> None:
    """A mixture of one model under two prompts, in either order, is that of its two rows."""
    model = pair.pop("teacher")["model"]
    tables = {
        "brief": {"model": model, "prompt": {"system": SYSTEM}, "weight": 1.0},
        "plain": {"model": model, "prompt": {"chat_template": False}, "weight": 3.0},
    }
    found = []
    for names in (["brief", "plain"], ["plain", "brief"]):
        with opened(pair | {"teachers": {name: tables[name] for name in names}}) as engine:
            problem, rollouts = sampled(engine)
            assert engine.teachers is not None
            found.append(engine.teachers.score(rollouts, [problem] * 2, 0)[0].ref_logprobs)
    text = f"Question: {problem.question}\nAnswer:"
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    chat = reference(model, messages, rollouts[0])
    plain = reference(model, messages[1:], rollouts[0], chat_template="{{ messages[0].content }}")
    ids = rollouts[0].token_ids[rollouts[0].start :].unsqueeze(1)
    expected = (0.25 * chat.exp() + 0.75 * plain.exp()).log().gather(1, ids)[:, 0]
    for one in found:
        torch.testing.assert_close(one.double(), expected, atol=2e-5, rtol=0)


def test_teachers_answer_follows_the_students_prompt(pair: dict[str, Any]) -> None:
    """What the teacher writes under its own prompt trains behind the student's."""
    pair["teacher"]["prompt"] = {"chat_template": True}
    params = SamplingParams(temperature=0.0, max_tokens=12)
    with opened(pair) as engine:
        problem = engine.problems.problem_set.practice[0]
        asked = engine.problems.prompt(problem)
        assert engine.teachers is not None
        (scorer,) = engine.teachers.scorers.values()
        assert scorer.sampler is not None
        (answer,) = scorer.sampler.generate([asked], params, seed=0)
    assert answer.token_ids[: answer.start].tolist() == asked
    messages = [{"role": "user", "content": f"Question: {problem.question}\nAnswer:"}]
    rows = reference(pair["teacher"]["model"], messages, answer)
    assert rows.argmax(-1).tolist() == answer.token_ids[answer.start :].tolist()


def test_tape_keeps_answers_by_what_was_read(tmp_path: Path, pair: dict[str, Any]) -> None:
    """Another prompt is another question; the same one is answered without the teacher."""
    pair["teacher"] |= {"prompt": {"chat_template": True}, "tape": str(tmp_path / "tape")}
    with opened(pair) as engine:
        problem, rollouts = sampled(engine)
        assert engine.teachers is not None
        for share in (0.0, 1.0):
            engine.teachers.score(rollouts, [problem] * 2, 8)
            assert engine.teachers.take_metrics() == {"tape/read": share}
    pair["teacher"] |= {"tape_only": True, "prompt": {"system": SYSTEM}}
    with opened(pair) as engine, pytest.raises(ValueError, match="lacks 2 of 2"):
        assert engine.teachers is not None
        engine.teachers.score(rollouts, [problem] * 2, 8)


def warnings(recipe: dict[str, Any]) -> list[str]:
    parsed = parse_recipe(recipe)
    with opened(recipe) as engine:
        found, said = preflight(engine, parsed, lambda _: None), []
    said = [one.text for one in found.findings if one.state == "warning"]
    return [text for text in said if "prompt.chat_template" in text]


def test_chat_model_under_plain_prompts_is_a_warning(pair: dict[str, Any]) -> None:
    """It has both -log q in it, by float64, and any word about the prompt silences it."""
    (text,) = warnings(pair)
    assert "teacher.prompt.chat_template = true" in text
    shown = [float(number) for number in re.findall(r"\d+\.\d\d", text)]
    with opened(pair) as engine:
        problems = engine.problems.problem_set.practice[:8]
        asked = [engine.problems.prompt(one) for one in problems]
        rollouts = engine.sampler.generate(asked, SamplingParams(max_tokens=8), seed=0)
    nats: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    for problem, rollout in zip(problems, rollouts, strict=True):
        messages = [{"role": "user", "content": f"Question: {problem.question}\nAnswer:"}]
        for chats, more in ((False, {"chat_template": "{{ messages[0].content }}"}), (True, {})):
            rows = reference(pair["teacher"]["model"], messages, rollout, **more)
            ids = rollout.token_ids[rollout.start :].unsqueeze(1)
            nats[chats].append(-rows.gather(1, ids)[:, 0])
    expected = [
        float(torch.cat([own[part] for own in nats[chats]]).mean())
        for chats in (False, True)
        for part in (slice(4), slice(4, None))
    ]
    assert shown == pytest.approx(expected, abs=0.006)
    pair["teacher"]["prompt"] = {"chat_template": False}
    assert warnings(pair) == []


def test_long_prompt_of_the_teacher_has_room(tmp_path: Path, pair: dict[str, Any]) -> None:
    """The context is the student's; the teacher's engine has as much more as its prompts need."""
    pair["teacher"]["prompt"] = {"system": "Be brief. " * 40}
    pair["rollout"]["max_model_len"] = 60
    with opened(pair) as engine:
        problem, rollouts = sampled(engine)
        assert engine.teachers is not None
        (teacher,) = engine.teachers.scorers
        room = engine.teachers.room(teacher, rollouts[0])
    assert engine.context == 60 and room == len(rollouts[0].token_ids)


def test_run_with_a_chat_teacher_trains(tmp_path: Path, pair: dict[str, Any]) -> None:
    """With evaluations, whose teacher reads its own prompt too."""
    pair["teacher"]["prompt"] = {"chat_template": True, "prompt_template": "{question}"}
    assert run(tmp_path, pair) == 0


def test_served_teacher_is_asked_with_its_own_prompt(pair: dict[str, Any]) -> None:
    """A server's scores are those of its model in this process, under the same prompt."""
    pytest.importorskip("fastapi", reason="vLLM's server is not installed")
    from tests.faults.server import SpoilingServer

    pair["teacher"]["prompt"] = {"system": SYSTEM}
    with opened(pair) as engine:
        problem, rollouts = sampled(engine)
        assert engine.teachers is not None
        expected = engine.teachers.score(rollouts, [problem] * 2, 8)
    with SpoilingServer(Path(pair["teacher"]["model"]), plugin=True) as server:
        pair["teacher"]["url"] = server.url
        with opened(pair) as engine:
            assert engine.teachers is not None
            found = engine.teachers.score(rollouts, [problem] * 2, 8)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        torch.testing.assert_close(one.teacher_logprobs, other.teacher_logprobs, atol=1e-4, rtol=0)


def test_teacher_with_another_tokenizer_reads_its_own_prompt(
    tmp_path: Path, pair: dict[str, Any]
) -> None:
    """Its system message is in what it reads, and the student's text follows."""
    folder = tmp_path / "other"
    tokenizer = make_tokenizer(special=["<|endoftext|>", "<|im_end|>", "<|im_start|>"])
    pair["teacher"] = {"model": save_model(folder, tokenizer, [0, 1], 1), "tokenizer": "own"}
    pair["teacher"]["prompt"] = {"system": SYSTEM, "prompt_template": "{question}"}
    pair["data"]["limit"] = 8
    with opened(pair) as engine:
        problem, rollouts = sampled(engine)
        assert engine.teachers is not None
        (scorer,) = engine.teachers.scorers.values()
        assert isinstance(scorer, OwnTokenizerScorer)
        (reading, _) = scorer.readings(rollouts)
        assert engine.teachers.score(rollouts, [problem] * 2, 4)[0].start == rollouts[0].start
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": problem.question},
    ]
    own = {"add_generation_prompt": True, "tokenize": False}
    text = tokenizer.apply_chat_template(messages, **own)
    assert tokenizer.decode(reading.token_ids[: reading.start].tolist()) == text


GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{{ '<start_of_turn>' + m.role + '\n' + m.content +"
    " '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
QWEN3 = CHATML.replace(
    "assistant\n' }}", "assistant\n' + ('' if enable_thinking else '<think>\n\n</think>\n\n') }}"
)
FORMATS = [
    (GEMMA, {"chat_template": True},
     "<start_of_turn>user\nSo?<end_of_turn>\n<start_of_turn>model\n"),
    (GEMMA, {"system": "Be kind."}, None),
    (QWEN3, {"template_args": {"enable_thinking": False}},
     "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "prompt", "text"), FORMATS)
def test_prompt_is_in_the_format_of_the_teachers_makers(
    template: str, prompt: dict[str, Any], text: str | None
) -> None:
    """As the templates of two families write it; a system message that one refuses is named."""
    tokenizer = make_tokenizer(template)
    asks = TeacherPromptConfig(prompt_template="{question}", **prompt)
    problems = ProblemSet([Problem("So?", "", "data")], [], {"data": DataConfig()})
    prompts = TeacherPrompts(problems, tokenizer, lambda _: [1], "teacher", asks)
    if text is None:
        with pytest.raises(PreflightError, match=r"\[teacher.prompt\].*System role"):
            prompts([1])
    else:
        assert tokenizer.decode(prompts([1])) == text
