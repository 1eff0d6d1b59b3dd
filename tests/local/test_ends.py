"""What ends a text in a run: base and chat models of one family, as people distill them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_composer.backends.hf_model import load_model
from prime_composer.backends.protocols import Rollout, SamplingParams
from prime_composer.local.preflight import PreflightError
from prime_composer.recipe.loading import parse_recipe
from prime_composer.teachers.own_tokenizer import OwnTokenizerScorer
from tests.chat_models import (
    CHATML,
    SPECIAL,
    TEXT_END,
    TURN_END,
    make_tokenizer,
    opened,
    recipe_of,
    run,
    save_model,
    write_rows,
)
from tests.local.helpers import collect

ROWS = [{"question": f"What is {i}?", "answer": str(i)} for i in range(20)]


@pytest.fixture
def pair(tmp_path: Path) -> dict[str, Any]:
    """Return a recipe of a base model that learns from its chat model, which ends turns, too."""
    student = save_model(tmp_path / "base", make_tokenizer(), [TEXT_END], 0)
    teacher = save_model(tmp_path / "chat", make_tokenizer(), [TEXT_END, TURN_END], 1)
    return recipe_of(student, teacher, write_rows(tmp_path / "rows.jsonl", ROWS))


def both_are(pair: dict[str, Any], model: str) -> None:
    pair["student"]["model"] = pair["teacher"]["model"] = model


def test_run_of_base_and_chat_ends_where_the_teacher_does(pair: dict[str, Any]) -> None:
    """No rollout goes on behind the turn's end, and the difference of the files is said once."""
    said: list[str] = []
    engine = opened(pair, said.append)
    assert engine.problems.ends.ids == (TEXT_END, TURN_END)
    rollouts = engine.sampler.generate([[40]] * 64, SamplingParams(max_tokens=64), seed=0)
    ended = [one for one in rollouts if one.finish_reason == "stop"]
    last = {int(one.token_ids[-1]) for one in ended}
    assert last == {TEXT_END, TURN_END}, "the tiny model writes both"
    for rollout in rollouts:
        assert not torch.isin(rollout.token_ids[:-1], torch.tensor([TEXT_END, TURN_END])).any()
    assert engine.teachers is not None
    scorer = next(iter(engine.teachers.scorers.values()))
    assert scorer.sampler is not None
    answers = scorer.sampler.generate([[40]] * 64, SamplingParams(max_tokens=64), seed=1)
    assert any(int(one.token_ids[-1]) == TURN_END for one in answers)
    (line,) = [text for text in said if "rollout.stop" in text]
    assert "'<|im_end|>' (2)" in line and "warning" not in line


@pytest.mark.parametrize("where", ["template", "teacher"])
def test_turn_end_is_known_from_template_or_teacher(
    tmp_path: Path, pair: dict[str, Any], where: str
) -> None:
    """Either is enough; a difference of the student's own files alone is none."""
    data: dict[str, Any] = {}
    if where == "template":
        pair["teacher"]["model"] = save_model(tmp_path / "t", make_tokenizer(), TEXT_END, 1)
    else:
        data = {"chat_template": False}
    pair["data"] |= data
    said: list[str] = []
    engine = opened(pair, said.append)
    assert engine.problems.ends.ids == (TEXT_END, TURN_END)
    assert engine.problems.ends.answer == (TURN_END if where == "template" else TEXT_END)
    pair["student"]["model"] = pair["teacher"]["model"]


def test_students_end_that_the_teacher_lacks_is_a_warning(
    tmp_path: Path, pair: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A chat model learns from a base model without the template: said by the dry run, too."""
    base = save_model(tmp_path / "b", make_tokenizer(None), TEXT_END, 1)
    pair["student"], pair["teacher"] = pair["teacher"], {"model": base}
    said: list[str] = []
    opened(pair, said.append)
    warned = [text for text in said if text.startswith("warning")]
    assert len(warned) == 1 and "[teacher]" in warned[0] and "'<|im_end|>' (2)" in warned[0]
    assert run(tmp_path, pair, "--dry-run") == 0
    assert warned[0] in capsys.readouterr().out


@pytest.mark.parametrize(("stop", "ids"), [([5], (5,)), (["<|im_end|>", "x"], None)])
def test_stop_overrides_what_files_say(
    pair: dict[str, Any], stop: list[Any], ids: tuple[int, ...] | None
) -> None:
    """Ids and texts of one token end an answer, and nothing else does."""
    pair["rollout"]["stop"] = stop
    said: list[str] = []
    engine = opened(pair, said.append)
    tokenizer = engine.problems.tokenizer
    ids = ids or (TURN_END, tokenizer.convert_tokens_to_ids("x"))
    assert engine.problems.ends.ids == ids and engine.problems.ends.answer == ids[0]
    rollouts = engine.sampler.generate([[40]] * 64, SamplingParams(max_tokens=64), seed=0)
    assert {int(one.token_ids[-1]) for one in rollouts if one.finish_reason == "stop"} <= {*ids}
    assert any(TEXT_END in one.completion_ids for one in rollouts)
    assert not any("rollout.stop" in text for text in said)


@pytest.mark.parametrize(("stop", "words"), [("Answer", "'Answer'.* one token"), (5000, "5000")])
def test_stop_that_is_no_token_is_refused_by_its_key(
    tmp_path: Path,
    pair: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    stop: int | str,
    words: str,
) -> None:
    """A text of several tokens, and an id that the tokenizer lacks."""
    pair["rollout"]["stop"] = [stop]
    assert run(tmp_path, pair, "--dry-run") == 2
    assert re.search(f"rollout.stop.*{words}", capsys.readouterr().err)


def test_teacher_of_its_own_tokenizer_ends_as_its_template_does(
    tmp_path: Path, pair: dict[str, Any]
) -> None:
    """Its files name another end: the template's ends its answers, and is the student's end."""
    template = CHATML.replace("<|im_start|>", "<s>").replace("<|im_end|>", "<eot>")
    tokenizer = make_tokenizer(template, eos="</s>", special=["<s>", "<eot>", "</s>"], plain=["xx"])
    teacher = save_model(tmp_path / "own", tokenizer, 2, 1)
    pair["teacher"] = {"model": teacher, "tokenizer": "own"}
    pair["data"]["prompt_template"] = "{question}"
    engine = opened(pair)
    assert engine.teachers is not None
    (scorer,) = engine.teachers.scorers.values()
    prompt = engine.problems.prompt(engine.problems.problem_set.practice[0])
    ended = Rollout.not_sampled(torch.tensor([*prompt, TURN_END]), len(prompt), "stop")
    (scores,) = scorer.score([ended], 4)
    ids = torch.tensor([tokenizer.apply_chat_template(
        [{"role": "user", "content": engine.problems.problem_set.practice[0].question}],
        add_generation_prompt=True, return_dict=False)])  # fmt: skip
    q = load_model(teacher)(ids).logits[0, -1].detach().double().softmax(-1)
    assert scores.ref_logprobs[0].exp() == pytest.approx(float(q[1:3].sum()), rel=1e-4)
    assert isinstance(scorer, OwnTokenizerScorer) and scorer.scorer.sampler is not None
    own = scorer.scorer.sampler.generate([[40]] * 64, SamplingParams(max_tokens=64), seed=0)
    assert {int(one.token_ids[-1]) for one in own if one.finish_reason == "stop"} == {1, 2}


def test_base_of_an_adapter_ends_as_its_student_does(pair: dict[str, Any]) -> None:
    """The student's files lack the turn's end, and are those of this teacher."""
    pytest.importorskip("peft", reason="peft is not installed (extra: lora)")
    pair["student"]["lora"] = {"rank": 2}
    pair["teacher"] = {"base": True}
    engine = opened(pair)
    assert engine.teachers is not None
    (scorer,) = engine.teachers.scorers.values()
    assert scorer.sampler is not None
    own = scorer.sampler.generate([[40]] * 64, SamplingParams(max_tokens=64), seed=0)
    last = {int(one.token_ids[-1]) for one in own if one.finish_reason == "stop"}
    assert last == {TEXT_END, TURN_END}


def test_tape_alone_ends_as_its_teacher_does(tmp_path: Path, pair: dict[str, Any]) -> None:
    """It names no model, and the teacher's end is known of the tape."""
    pair["data"]["chat_template"] = False
    pair["teacher"]["tape"] = str(tmp_path / "tape")
    first = opened(pair)
    first.__exit__()
    pair["teacher"] = {"tape": str(tmp_path / "tape"), "tape_only": True}
    second = opened(pair)
    assert second.problems.ends == first.problems.ends
    assert second.problems.ends.ids == (TEXT_END, TURN_END)


def test_run_on_the_datas_answers_trains_the_turns_end(pair: dict[str, Any]) -> None:
    """Each answer is the template's own, with the end that ends a turn."""
    pair["rollout"]["student_fraction"] = 0.0
    pair["loss"] = {"type": "sft"}
    engine = opened(pair)
    recipe = parse_recipe(pair)
    batch, _ = collect(engine, recipe, 1)
    assert len(batch.samples) == 8
    for sample in batch.samples:
        trained = engine.problems.tokenizer.decode(sample.rollout.completion_ids)
        assert trained == f"{sample.problem.answer}<|im_end|>" and sample.reward == 1


def test_datas_answer_behind_a_templates_own_reasoning_is_right(
    tmp_path: Path, pair: dict[str, Any]
) -> None:
    """The template closes the reasoning that its prompt opens, which is no part of the answer."""
    opens = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    template = opens.replace(
        "m.content", "('<think>\n</think>' if m.role == 'assistant' else '') + m.content"
    )
    model = save_model(tmp_path / "thinks", make_tokenizer(template), TEXT_END)
    both_are(pair, model)
    pair["rollout"]["student_fraction"] = 0.0
    pair["loss"] = {"type": "sft"}
    engine = opened(pair)
    recipe = parse_recipe(pair)
    (sample, *_) = collect(engine, recipe, 1)[0].samples
    trained = engine.problems.tokenizer.decode(sample.rollout.completion_ids)
    assert trained == f"</think>{sample.problem.answer}<|im_end|>" and sample.reward == 1


def test_answer_of_a_model_that_adds_its_end_plainly_is_graded(tmp_path: Path) -> None:
    """An end that is no special token is no part of the answer."""
    special, plain = [SPECIAL[0]], SPECIAL[1:]
    tokenizer = make_tokenizer(special=special, plain=plain)
    model = save_model(tmp_path / "model", tokenizer, TEXT_END)
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    engine = opened(recipe_of(model, model, rows))
    assert TURN_END in engine.problems.ends.ids
    problem = engine.problems.problem_set.practice[0]
    completion = engine.problems.solution(problem).completion_ids
    assert completion[-1] == TURN_END
    assert engine.problems.decode(completion) == problem.answer


def test_student_without_an_end_is_refused_at_the_dry_run(
    tmp_path: Path, pair: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The data's answers need an end, which neither files nor template name."""
    tokenizer = make_tokenizer(CHATML.replace("<|im_end|>", "."), eos=None, special=())
    model = save_model(tmp_path / "endless", tokenizer, None)
    both_are(pair, model)
    pair["rollout"]["student_fraction"] = 0.0
    pair["loss"] = {"type": "sft"}
    assert run(tmp_path, pair, "--dry-run") == 2
    error = capsys.readouterr().err
    assert "eos_token_id" in error and "rollout.stop" in error


def test_dry_run_refuses_a_template_that_drops_the_system_message(
    tmp_path: Path, pair: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    template = CHATML.replace("for m in messages", "for m in messages if m.role != 'system'")
    model = save_model(tmp_path / "dropping", make_tokenizer(template), TEXT_END)
    pair["student"]["model"], pair["data"]["system"] = model, "Be brief."
    assert run(tmp_path, pair, "--dry-run") == 2
    error = capsys.readouterr().err
    assert "[data] system" in error and "template" in error


@pytest.mark.parametrize(
    ("tokenizer", "rows", "words"),
    [
        ({"template": CHATML.partition("{% if add")[0]}, ROWS, "add_generation_prompt"),
        ({"metaspace": True}, [{"question": f"{i} <|im_end|>", "answer": "4"} for i in range(20)],
         "special token"),
    ],
)  # fmt: skip
def test_dry_run_warns_of_what_it_sees_in_the_rendering(
    tmp_path: Path,
    pair: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    tokenizer: dict[str, Any],
    rows: list[dict[str, Any]],
    words: str,
) -> None:
    """A template without a generation prompt, and texts that become tokens, are said."""
    model = save_model(tmp_path / "model", make_tokenizer(**tokenizer), TEXT_END)
    both_are(pair, model)
    write_rows(Path(pair["data"]["path"]), rows)
    assert run(tmp_path, pair, "--dry-run") == 0
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert any(words in line for line in warned)


def test_dry_run_template_that_asks_for_a_channel_is_no_warning(
    tmp_path: Path, pair: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """gpt-oss asks for a turn, and the model begins it with the channel that it writes to."""
    channel = "('<|im_start|>' if m.role == 'assistant' else '') + m.content"
    template = CHATML.replace("m.content", channel)
    model = save_model(tmp_path / "model", make_tokenizer(template), TEXT_END)
    both_are(pair, model)
    assert run(tmp_path, pair, "--dry-run") == 0
    assert "generation prompt" not in capsys.readouterr().out


def test_pairs_that_cannot_be_written_are_refused(tmp_path: Path, pair: dict[str, Any]) -> None:
    """A template that writes another prompt before an answer ends the preflight, with both."""
    template = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    model = save_model(tmp_path / "thinks", make_tokenizer(template), TEXT_END)
    both_are(pair, model)
    pair["rollout"]["student_fraction"] = 0.5
    engine = opened(pair)
    from prime_composer.local.preflight import preflight

    with pytest.raises((PreflightError, ValueError), match="(?s)<think>.*template"):
        preflight(engine, parse_recipe(pair), lambda text: None)
