"""Whole runs with a tape of their teacher."""

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_composer.cli.commands import main
from prime_composer.local.tracker import read_metrics
from prime_composer.problems.loading import load_problem_set
from prime_composer.recipe.loading import parse_recipe
from prime_composer.teachers.tape.store import FILES, TapeError, inspect
from prime_composer.teachers.transformers import TransformersScorer
from tests.command import numbers, toml
from tests.conftest import TINY_MODEL
from tests.local.helpers import collect, copy_first_half, opened, run, tiny_models, weights
from tests.teachers.own import own_recipe

Raw = Callable[..., dict[str, Any]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Count the rollouts of every call to a teacher."""
    counts: list[int] = []
    score = TransformersScorer.score

    def counted(self: Any, rollouts: Any, *args: Any, **kwargs: Any) -> Any:
        counts.append(len(rollouts))
        return score(self, rollouts, *args, **kwargs)

    monkeypatch.setattr(TransformersScorer, "score", counted)
    yield counts


def equal_weights(one: Path, other: Path) -> bool:
    ours, theirs = weights(one), weights(other)
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def without_teacher(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a recipe whose tape alone answers, and which names no model."""
    alone = copy.deepcopy(raw)
    alone["teacher"] = {"tape": raw["teacher"]["tape"], "tape_only": True, **changes}
    return alone


LOSSES = {
    "whole": {"type": "generalized_jsd", "k": "full"},
    "chosen": {"type": "topk_reverse_kl", "k": 4, "chosen_by": "student"},
}


@pytest.mark.parametrize("name", LOSSES)
def test_run_with_a_full_tape_asks_nothing(
    name: str, tiny_recipe: Raw, asked: list[int], tmp_path: Path
) -> None:
    """It ends as the run that filled the tape, and so does one that opens no teacher at all."""
    raw = tiny_recipe(loss=LOSSES[name], trainer__steps=2, teacher__tape=str(tmp_path / "tape"))
    run(raw, tmp_path / "first")
    own = len(asked)
    run(raw, tmp_path / "second")
    # The tape's known request and the watch's; a loss whose ids the student chooses asks it too.
    of_student = 2 if name == "chosen" else 0
    assert sum(count > 1 for count in asked[own:]) == of_student
    run(without_teacher(raw), tmp_path / "alone")
    for folder in ("second", "alone"):
        assert numbers(tmp_path / folder) == numbers(tmp_path / "first")
        assert equal_weights(tmp_path / folder, tmp_path / "first")
    read = [record.get("tape/read") for record in read_metrics(tmp_path / "second")]
    assert read == [None, 1.0, 1.0]
    assert inspect(tmp_path / "tape").damage == []


def test_run_with_a_tape_resumes_bit_exactly(whole: Path, tiny_recipe: Raw, tmp_path: Path) -> None:
    """Killed after its second step; half of the answers are kept. Both end as without a tape."""
    tape = tmp_path / "tape"
    raw = tiny_recipe(checkpoint={"every": 2, "keep": 2}, teacher__tape=str(tape))
    run(raw, tmp_path / "taped")
    assert numbers(tmp_path / "taped") == numbers(whole)
    assert equal_weights(tmp_path / "taped", whole)
    copy_first_half(tmp_path / "taped", tmp_path / "cut")
    files = sorted(tape.glob(FILES), key=lambda path: path.stat().st_mtime_ns)
    for file in files[len(files) // 2 :]:
        file.unlink()
    run(raw, tmp_path / "cut", resume=True)
    assert numbers(tmp_path / "cut") == numbers(whole)
    assert equal_weights(tmp_path / "cut", whole)


def test_tape_of_another_teacher_is_refused(tiny_recipe: Raw, tmp_path: Path) -> None:
    """Another teacher, or another backend's precision: at the start."""
    raw = tiny_recipe(teacher__tape=str(tmp_path / "tape"))
    opened(raw).__exit__()
    other = copy.deepcopy(raw)
    other["teacher"]["prepare"] = {**TINY_MODEL, "seed": 4}
    with pytest.raises(TapeError, match="fingerprint was"):
        opened(other)
    half = copy.deepcopy(raw)
    half["teacher"]["dtype"] = "bfloat16"
    with pytest.raises(TapeError, match="dtype was 'float32' and is 'bfloat16'"):
        opened(half)


def test_tape_make_scores_the_datas_answers(
    tiny_recipe: Raw, asked: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then a run on these answers needs no teacher, and ends as one with its teacher."""
    raw = tiny_recipe(
        rollout__student_fraction=0.0, data__size=20, teacher__tape=str(tmp_path / "tape"),
        rollout__max_model_len=192,
    )  # fmt: skip
    raw["teacher"]["prepare"]["sft_steps"] = 20
    config = tmp_path / "recipe.toml"
    config.write_text(toml(raw))
    assert main(["tape", "make", "--config", str(config)]) == 0
    practice = load_problem_set(parse_recipe(raw).sources).practice
    distinct = {(problem.question, problem.answer) for problem in practice}
    assert f"top K, K = 8: {len(distinct)} answers" in capsys.readouterr().out
    made = sum(asked)
    assert main(["tape", "make", "--config", str(config)]) == 0
    assert sum(asked) == made + 1  # the known request
    run(without_teacher(raw), tmp_path / "alone")
    assert sum(asked) == made + 1
    plain = copy.deepcopy(raw)
    del plain["teacher"]["tape"]
    run(plain, tmp_path / "plain")
    ours, theirs = (numbers(tmp_path / name) for name in ("alone", "plain"))
    assert [one["loss"] for one in ours[1:]] == pytest.approx(
        [one["loss"] for one in theirs[1:]], rel=1e-4
    )
    assert ours[0]["teacher/accuracy"] == theirs[0]["teacher/accuracy"]
    assert "eval/reverse_kl" not in ours[0] and "eval/reverse_kl" in theirs[0]


def test_run_without_teacher_reads_its_tokenizer_alone(tiny_recipe: Raw, tmp_path: Path) -> None:
    """From a folder without weights; another tokenizer is refused by the tape's header."""
    raw = own_recipe(tiny_recipe, trainer__steps=1, teacher__tape=str(tmp_path / "tape"))
    run(raw, tmp_path / "first")
    folder = tmp_path / "tokenizer"
    origin = tiny_models(raw)["teacher"]
    shutil.copytree(origin, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    alone = without_teacher(raw, tokenizer="own", model=str(folder))
    run(alone, tmp_path / "alone")
    assert numbers(tmp_path / "alone") == numbers(tmp_path / "first")
    other = tiny_models(raw)["student"]
    named = without_teacher(raw, tokenizer="own", model=str(tmp_path / "other"))
    shutil.copytree(other, tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(TapeError, match="teacher_tokenizer was"):
        run(named, tmp_path / "refused")


def test_tape_make_with_several_teachers_fills_each(tiny_recipe: Raw, tmp_path: Path) -> None:
    """Each has its own tape, of its own problems; a run reads all of them."""
    raw = tiny_recipe(
        loss={"type": "topk_reverse_kl", "k": 4}, rollout__student_fraction=0.0, data__size=20,
    )  # fmt: skip
    teacher = raw.pop("teacher")
    raw["teachers"] = {
        name: {**teacher, "tape": str(tmp_path / name)} for name in ("first", "second")
    }
    raw["teachers"]["second"]["prepare"] = {**TINY_MODEL, "seed": 3}
    config = tmp_path / "recipe.toml"
    config.write_text(toml(raw))
    assert main(["tape", "make", "--config", str(config)]) == 0
    for table in raw["teachers"].values():
        table["tape_only"] = True
        del table["prepare"]
    run(raw, tmp_path / "alone")
    last = read_metrics(tmp_path / "alone")[-1]
    assert last["first/tape/read"] == last["second/tape/read"] == 1.0


def test_tape_check_says_what_is_damaged(tiny_recipe: Raw, tmp_path: Path, capsys: Any) -> None:
    """By exit status too. A folder that is no tape is a user's mistake."""
    raw = tiny_recipe(teacher__tape=str(tmp_path / "tape"))
    with opened(raw) as engine:
        collect(engine, parse_recipe(raw), 1)
    assert main(["tape", "check", str(tmp_path / "tape")]) == 0
    assert "tokens" in capsys.readouterr().out
    file = next((tmp_path / "tape").glob(FILES))
    content = bytearray(file.read_bytes())
    content[-40] ^= 1
    file.write_bytes(content)
    assert main(["tape", "check", str(tmp_path / "tape")]) == 1
    assert "is not as written" in capsys.readouterr().err
    assert main(["tape", "check", str(tmp_path)]) == 2
    assert main(["tape", "check"]) == 2
