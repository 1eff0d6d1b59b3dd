"""Whole runs with a tape of their teacher."""

import copy
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_composer.cli.commands import main
from prime_composer.local.dry_run import dry_run
from prime_composer.local.probe.run import probe
from prime_composer.local.tracker import read_metrics
from prime_composer.problems.loading import load_problem_set
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import RecipeError
from prime_composer.teachers.tape.store import FILES, TapeError, inspect
from prime_composer.teachers.transformers import TransformersScorer
from prime_composer.tiny_models.cache import prepare_configs
from tests.command import numbers, toml
from tests.conftest import TINY_MODEL
from tests.local.helpers import Silent, copy_first_half, run, tiny_models, weights
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
    "top K": {"type": "topk_reverse_kl", "k": 8},
    "sampled": {"type": "sampled_reverse_kl"},
    "whole": {"type": "generalized_jsd", "k": "full"},
    "chosen": {"type": "topk_reverse_kl", "k": 4, "chosen_by": "student"},
}


@pytest.mark.parametrize("name", LOSSES)
def test_run_with_a_full_tape_asks_nothing(
    name: str, tiny_recipe: Raw, asked: list[int], tmp_path: Path
) -> None:
    """Both runs end as one without a tape would, and so does one that opens no teacher at all."""
    raw = tiny_recipe(loss=LOSSES[name])
    run(raw, tmp_path / "plain")
    raw["teacher"]["tape"] = str(tmp_path / "tape")
    run(raw, tmp_path / "first")
    own = len(asked)
    run(raw, tmp_path / "second")
    # The tape's known request and the watch's; a loss whose ids the student chooses asks it too.
    of_student = 4 if name == "chosen" else 0
    assert sum(count > 1 for count in asked[own:]) == of_student
    run(without_teacher(raw), tmp_path / "alone")
    for folder in ("first", "second", "alone"):
        assert numbers(tmp_path / folder) == numbers(tmp_path / "plain")
        assert equal_weights(tmp_path / folder, tmp_path / "plain")
    read = [record.get("tape/read") for record in read_metrics(tmp_path / "second")]
    assert read == [None, 1.0, 1.0, 1.0, 1.0]
    assert inspect(tmp_path / "tape").damage == []


def test_run_with_a_tape_resumes_bit_exactly(tiny_recipe: Raw, tmp_path: Path) -> None:
    """Killed after its third step, whose answers were kept, or with half of them."""
    raw = tiny_recipe(checkpoint={"every": 2, "keep": 2})
    run(raw, tmp_path / "plain")
    whole = tmp_path / "tape"
    raw["teacher"]["tape"] = str(whole)
    run(raw, tmp_path / "whole")
    assert equal_weights(tmp_path / "whole", tmp_path / "plain")
    copy_first_half(tmp_path / "whole", tmp_path / "cut")
    files = sorted(whole.glob(FILES), key=lambda path: path.stat().st_mtime_ns)
    for share in (1.0, 0.8, 0.5):
        for file in {*whole.glob(FILES)} - {*files[: int(share * len(files))]}:
            file.unlink()
        again = tmp_path / f"again {share}"
        shutil.copytree(tmp_path / "cut", again)
        run(raw, again, resume=True)
        assert numbers(again) == numbers(tmp_path / "plain")
        assert equal_weights(again, tmp_path / "plain")


def test_run_of_another_recipe_is_refused(tiny_recipe: Raw, tmp_path: Path) -> None:
    """Another teacher, another backend's precision, another student's tokenizer: at the start."""
    raw = tiny_recipe(teacher__tape=str(tmp_path / "tape"), trainer__steps=1)
    run(raw, tmp_path / "first")
    other = copy.deepcopy(raw)
    other["teacher"]["prepare"] = {**TINY_MODEL, "seed": 4}
    with pytest.raises(TapeError, match="fingerprint was"):
        run(other, tmp_path / "teacher")
    half = copy.deepcopy(raw)
    half["teacher"]["dtype"] = "bfloat16"
    with pytest.raises(TapeError, match="dtype was 'float32' and is 'bfloat16'"):
        run(half, tmp_path / "half")
    tokens = copy.deepcopy(raw)
    for table in ("teacher", "student"):
        tokens[table]["prepare"]["vocab_size"] = 310
    with pytest.raises(TapeError, match="student_tokenizer was"):
        run(without_teacher(tokens), tmp_path / "tokens")
    named = without_teacher(raw, prepare={**TINY_MODEL, "seed": 4})
    with pytest.raises(TapeError, match="model was"):
        run(named, tmp_path / "named")


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


def test_run_without_teacher_says_once_what_it_lacks(tiny_recipe: Raw, tmp_path: Path) -> None:
    """The KL of the trained student, whose rollouts are new ones, and not of the first evaluation.

    The start's are on the tape, as a run of one step with the teacher has left them.
    """
    raw = tiny_recipe(
        rollout__student_fraction=0.0, data__size=20, teacher__tape=str(tmp_path / "tape"),
        trainer__steps=2,
    )  # fmt: skip
    raw["eval"]["every"] = 1
    run(raw, tmp_path / "first")
    other = without_teacher(raw)
    other["trainer"]["lr"] = 20 * raw["trainer"]["lr"]
    display = Silent()
    run(other, tmp_path / "alone", display)
    measured = ["eval/reverse_kl" in one for one in numbers(tmp_path / "alone")]
    assert measured == [True, False, False]
    (warning,) = (text for text in display.texts if "cannot be measured" in text)
    assert "warning: step 1: the KL" in warning and "tape_only = false" in warning


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


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"teacher": {"policy": {}, "tape": "t"}, "loss": {"type": "self_distillation"}},
         "`tape` keeps the answers of a fixed teacher"),
        ({"teacher__tape_only": True}, "`tape_only` lets a tape answer: name its folder"),
        ({"teacher": {"tape": "t", "tape_only": True, "tokenizer": "own"}}, "not its tokenizer"),
        ({"reference": {"start": True, "tape": "t"}, "teacher__tape": "t",
          "loss": {"type": "sampled_reverse_kl"}}, "have the same tape"),
        (
            {"teacher": {"tape": "t"}},
            "exactly one of `model`, `prepare`, `policy` and `base = true`",
        ),
        ({"teacher__tape": "t", "teacher__tape_gb": 0}, "tape_gb"),
    ],
)  # fmt: skip
def test_recipe_with_an_impossible_tape_is_refused(
    changes: Any, named: str, tiny_recipe: Raw
) -> None:
    """By its key, with the remedy."""
    with pytest.raises(RecipeError, match=named):
        parse_recipe(tiny_recipe(**changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, r"\[teacher\] it names no `tape`"),
        ({"teacher__tape": "t", "teacher__tape_only": True}, "tape_only = true opens no teacher"),
        ({"teacher__tape": "t", "loss__chosen_by": "student"}, "the ids depend on the student's"),
        ({"teacher__tape": "t", "loss": {"type": "sft"}}, "no teacher scores anything"),
        ({"teacher__tape": "t"}, r"student_fraction = 1, .*never reads.*Set student_fraction"),
        ({"teacher__tape": "t", "rollout__student_fraction": 0.5,
          "rollout__other_source": "teacher"}, 'other_source = "teacher".*or let a run'),
    ],
)  # fmt: skip
def test_tape_make_refuses_what_it_cannot_score(
    changes: Any, named: str, tiny_recipe: Raw, tmp_path: Path, capsys: Any
) -> None:
    """In one sentence, before a model is opened."""
    if changes.get("loss"):
        changes = {**changes, "rollout__student_fraction": 0.0}
    config = tmp_path / "recipe.toml"
    config.write_text(toml(tiny_recipe(**changes)))
    assert main(["tape", "make", "--config", str(config)]) == 2
    assert re.search(named, capsys.readouterr().err)


def test_tape_check_says_what_is_damaged(tiny_recipe: Raw, tmp_path: Path, capsys: Any) -> None:
    """By exit status too. A folder that is no tape is a user's mistake."""
    run(tiny_recipe(teacher__tape=str(tmp_path / "tape"), trainer__steps=1), tmp_path / "run")
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


def test_plan_and_probe_know_a_tape(tiny_recipe: Raw, tmp_path: Path) -> None:
    """A dry run opens no teacher where the tape alone answers, and a probe has none to measure."""
    raw = tiny_recipe(teacher__tape=str(tmp_path / "tape"))
    recipe, alone = parse_recipe(raw), parse_recipe(without_teacher(raw))
    problems = load_problem_set(recipe.sources)
    tiny_models(raw)
    assert set(prepare_configs(alone)) == {"student"}
    assert f"teacher: the tape {tmp_path / 'tape'} keeps its answers" in dry_run(recipe, problems)
    assert any("alone answers" in line for line in dry_run(alone, problems))
    (finding,) = probe(alone, problems, {}, lambda text: None).findings
    assert finding.state == "failed" and "--set teacher.tape_only=false" in finding.text
