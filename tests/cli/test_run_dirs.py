"""Run directories: which are free, which start over, which continue, and which are left alone."""

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_composer.local.checkpoint import DamagedCheckpoint, list_checkpoints
from prime_composer.local.recipe_file import (
    _why_not_other_steps,
)
from prime_composer.local.run_dir import (
    InUse,
    RunRequest,
    choose_run_dir,
    claim_run_dir,
)
from prime_composer.local.student import lr_factor
from prime_composer.recipe.loading import parse_recipe
from prime_composer.recipe.schema import RecipeError, TrainerConfig
from tests.local.test_checkpoint import save

Raw = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def wish(tiny_recipe: Raw) -> Callable[..., RunRequest]:
    """Return what a user asks for; ``section__key`` changes the recipe."""

    def make(output_dir: str | None = "run", changes: dict[str, Any] | None = None, **how: Any):
        return RunRequest(
            parse_recipe(tiny_recipe(**changes or {})), Path("r.toml"), output_dir, **how
        )

    return make


def begin(wish: RunRequest) -> Path:
    """Start a run that ends before its first checkpoint: it leaves what a kill would leave."""
    with claim_run_dir(wish) as claim:
        (claim.path / "metrics.jsonl").write_text('{"step": 0}\n')
        (claim.path / "tensorboard").mkdir()
        (claim.path / "tensorboard" / "events.out.tfevents.1").write_text("x")
        (claim.path / "checkpoints" / "step_000002.tmp").mkdir(parents=True)
    return claim.path


def finish(wish: RunRequest, *steps: int) -> Path:
    """Leave a run with checkpoints."""
    with claim_run_dir(wish) as claim:
        save(claim.path, *steps)
    return claim.path


def test_stopped_run_says_how_it_continues(wish: Callable[..., RunRequest]) -> None:
    """From the newest checkpoint, or an earlier one; islands from the folder of all of them."""
    request, other = wish("a run", command="C"), wish("all", island=1, command="C")
    assert request.how_to_continue(Path("a run")) == (
        "nothing is saved yet; the same command starts over"
    )
    path = finish(request, 2, 4)
    begins = "C --output-dir 'a run' --resume"
    for step, verified, words in (
        (None, None, f"step 4 is saved; continue with\n    {begins}"),
        (2, None, f"step 2 is saved; continue with\n    {begins} --step 2"),
        (4, 2, f"step 4 is saved; continue (from a verified step: --step 2) with\n    {begins}"),
    ):
        assert request.how_to_continue(path, step, verified) == words
    said = other.how_to_continue(finish(other, 2))
    assert said.endswith("C --output-dir all --resume")


def refusal(wish: RunRequest) -> str:
    """Return why a directory is refused, and check that nothing in it was touched."""

    def contents() -> dict[Path, bytes | None]:
        return {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}

    before = contents()
    with pytest.raises((RecipeError, DamagedCheckpoint)) as caught:
        claim_run_dir(wish)
    after = contents()
    ours = (".lock", ".holder")
    assert {path: after[path] for path in before if path.name not in ours} == {
        path: content for path, content in before.items() if path.name not in ours
    }
    return str(caught.value)


@pytest.mark.parametrize("output_dir", ["run", None])
@pytest.mark.parametrize("resume", [False, True])
def test_early_start_is_no_run_and_starts_over(
    resume: bool, output_dir: str | None, wish: Callable[..., RunRequest]
) -> None:
    """The command that was killed before its first checkpoint works again as it is."""
    path = begin(wish(output_dir, resume=False))
    assert choose_run_dir(wish(output_dir, resume=resume)).path == path
    claim = claim_run_dir(wish(output_dir, resume=resume))
    assert claim.path == path and claim.checkpoint is None
    with claim:
        assert "starting over" in claim.describe()
        claim.begin()
        names = {file.name for file in claim.path.iterdir()}
    assert names == {".lock", ".holder", "recipe.json"}


def test_early_start_is_kept_until_the_next_one_begins(wish: Callable[..., RunRequest]) -> None:
    """A start that fails in its checks deletes nothing."""
    path = begin(wish())
    with pytest.raises(ZeroDivisionError), claim_run_dir(wish()):
        raise ZeroDivisionError
    assert (path / "metrics.jsonl").exists() and (path / "recipe.json").exists()


def test_early_start_of_another_recipe_is_refused(wish: Callable[..., RunRequest]) -> None:
    begin(wish())
    other = {"trainer__lr": 0.5}
    assert "exists and is not empty" in refusal(wish(changes=other))
    message = refusal(wish(changes=other, resume=True))
    assert "no complete checkpoint" in message and "other values of trainer.lr" in message
    begin(wish(None))
    Path("outputs/r-2").mkdir()  # an empty one is taken, too
    with claim_run_dir(wish(None, other)) as claim:
        assert claim.path == Path("outputs/r-3")


def test_new_directory_is_removed_where_nothing_ran(wish: Callable[..., RunRequest]) -> None:
    with pytest.raises(ZeroDivisionError), claim_run_dir(wish()):
        raise ZeroDivisionError
    assert not Path("run").exists()
    Path("run").mkdir()
    with pytest.raises(ZeroDivisionError), claim_run_dir(wish()):
        raise ZeroDivisionError
    assert not list(Path("run").iterdir())


def test_run_in_use_is_refused_and_its_number_skipped(wish: Callable[..., RunRequest]) -> None:
    with claim_run_dir(wish(None)) as claim:
        assert claim.path == Path("outputs/r")
        for how in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(InUse, match=f"process {os.getpid()} on "):
                claim_run_dir(wish(None, **how))
        with claim_run_dir(wish(None)) as second:
            assert second.path == Path("outputs/r-2")


def test_overwrite_deletes_the_run_when_the_new_one_begins(wish: Callable[..., RunRequest]) -> None:
    """Files that a run does not write stay, and W&B's folder, which may wait for its upload."""
    path = finish(wish(), 2, 4)
    for name in ("report.png", "wandb_run_id.txt", "thesis.txt", "checkpoints/notes.txt"):
        (path / name).write_text("x")
    (path / "wandb").mkdir()
    assert "--overwrite" in refusal(wish())
    with claim_run_dir(wish(changes={"trainer__lr": 0.5}, overwrite=True)) as claim:
        assert "--overwrite" in claim.describe() and len(list_checkpoints(path)) == 2
        claim.begin()
    assert json.loads((path / "recipe.json").read_text())["trainer"]["lr"] == 0.5
    names = {str(file.relative_to(path)) for file in path.rglob("*")}
    assert names == {
        *(".lock", ".holder", "recipe.json"),
        *("thesis.txt", "wandb", "checkpoints", "checkpoints/notes.txt"),
    }


def test_recipe_that_is_gone_or_no_recipe_is_named(wish: Callable[..., RunRequest]) -> None:
    """Neither --resume nor --overwrite touches such a directory."""
    recipe = finish(wish(), 2) / "recipe.json"
    for damaged in (recipe.read_text()[:100], 100_000 * "[", '{"flour": 500}'):
        recipe.write_text(damaged)
        assert "run/recipe.json is not a run's recipe" in refusal(wish(resume=True))
    assert "is not a run's recipe" in refusal(wish(overwrite=True))
    recipe.unlink()
    assert "run holds no recipe.json" in refusal(wish(resume=True))
    assert "holds no recipe.json, so it is no run" in refusal(wish(overwrite=True))


def test_overwrite_clears_links_and_not_what_they_point_to(
    tmp_path: Path, wish: Callable[..., RunRequest]
) -> None:
    path = finish(wish(), 2)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "step_000009").write_text("mine")
    shutil.rmtree(path / "checkpoints" / "step_000002")
    (path / "checkpoints" / "step_000002.tmp").symlink_to(outside)
    with claim_run_dir(wish(overwrite=True)) as claim:
        claim.begin()
    assert (outside / "step_000009").read_text() == "mine"
    assert not (path / "checkpoints").exists()


def test_resume_takes_the_newest_or_the_named_step(wish: Callable[..., RunRequest]) -> None:
    finish(wish(), 2, 3)
    for step, taken in ((None, 3), (2, 2)):
        run_dir = choose_run_dir(wish(resume=True, step=step))
        assert run_dir.checkpoint is not None and run_dir.checkpoint.step == taken
        assert run_dir.describe() == f"run directory: run, resuming after step {taken}"
    assert "no checkpoint of step 4; it has 2, 3" in refusal(wish(resume=True, step=4))


@pytest.mark.parametrize(
    ("section", "allowed"),
    [
        ("teacher", {"wait": 5.0, "timeout": 900.0}),
        ("eval", {"every": 1}),
    ],
)
def test_resume_allows_what_no_number_depends_on(
    section: str, allowed: dict[str, Any], tiny_recipe: Raw, wish: Callable[..., RunRequest]
) -> None:
    finish(wish(), 2)
    table = {**tiny_recipe().get(section, {}), **allowed}
    assert choose_run_dir(wish(changes={section: table}, resume=True)).note == ""


def test_resume_compares_urls_without_their_passwords(
    tiny_recipe: Raw, wish: Callable[..., RunRequest]
) -> None:
    def with_url(url: str) -> dict[str, Any]:
        teacher = {key: value for key, value in tiny_recipe()["teacher"].items() if key != "url"}
        return {"changes": {"teacher": teacher | {"url": url}}}

    finish(wish(**with_url("http://me:secret@host:1")), 2)
    assert "secret" not in Path("run/recipe.json").read_text()
    note = choose_run_dir(wish(**with_url("http://me:new@host:1"), resume=True)).note
    assert note == ""
    note = choose_run_dir(wish(**with_url("http://me:new@other:1"), resume=True)).note
    assert note.startswith("teacher.url: other values") and "new@" not in note


def served(recipe: dict[str, Any], url: str, dtype: str | None = None) -> dict[str, Any]:
    """Return the changes that put the teacher and the sampler of a recipe on servers."""
    teacher = {"model": "m", "url": url, "dtype": dtype, "backend": "server"}
    rollout = {**recipe["rollout"], "backend": "server", "url": url}
    return {"teacher": None, "teachers": {"a": teacher}, "rollout": rollout}


def test_resume_allows_servers_to_move(tiny_recipe: Raw, wish: Callable[..., RunRequest]) -> None:
    """The first answers of a resumed run prove that the same models are there."""
    path = finish(wish(changes=served(tiny_recipe(), "http://a:1")), 2)
    moved = served(tiny_recipe(), "http://b:2", "bfloat16")
    claim = claim_run_dir(wish(changes=moved, resume=True))
    with claim:
        keys = "rollout.url, teachers.a.dtype, teachers.a.url"
        assert claim.note.startswith(f"{keys}: other values than at the run's start")
        claim.begin()
    assert json.loads((path / "recipe.json").read_text())["rollout"]["url"] == "http://b:2"
    moved["teachers"]["a"]["model"] = "another"
    message = refusal(wish(changes=moved, resume=True))
    assert "other values of teachers.a.model;" in message


def test_resume_keeps_the_dtype_of_an_own_teacher(
    tiny_recipe: Raw, wish: Callable[..., RunRequest]
) -> None:
    """Here the dtype is that of the weights, and so of the numbers that are trained on."""
    finish(wish(), 2)
    changes = {"teacher": {**tiny_recipe()["teacher"], "dtype": "bfloat16"}}
    assert "other values of teacher.dtype;" in refusal(wish(changes=changes, resume=True))


LONGER = {"trainer__schedule": "constant", "trainer__steps": 4}


def test_finished_run_with_a_constant_rate_gets_more_steps(wish: Callable[..., RunRequest]) -> None:
    finish(wish(changes=LONGER), 2, 4)
    claim = claim_run_dir(wish(changes=LONGER | {"trainer__steps": 9}, resume=True))
    with claim:
        assert claim.note == "trainer.steps is 9 now; it was 4"
        claim.begin()
    assert json.loads(Path("run/recipe.json").read_text())["trainer"]["steps"] == 9
    message = refusal(wish(changes=LONGER | {"trainer__steps": 3}, resume=True))
    assert "trainer.steps = 3, and 4 steps are done already" in message


def test_more_steps_on_a_decaying_rate_say_what_would_change(
    wish: Callable[..., RunRequest],
) -> None:
    finish(wish(), 2, 4)
    message = refusal(wish(changes={"trainer__steps": 7}, resume=True))
    assert "trainer.steps = 7 instead of 4 would change steps that are done" in message
    assert "trainer.schedule = 'linear'" in message


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_other_steps_are_refused_where_a_done_rate_would_change(
    schedule: str, tiny_recipe: Raw
) -> None:
    """The rates themselves are compared, at every number of steps up to 6."""
    for warmup, before, now, done in itertools.product(range(4), *[range(1, 7)] * 3):
        if before == now or not done <= min(before, now):
            continue
        changes = {"trainer__schedule": schedule, "trainer__warmup_steps": warmup}
        was, becomes = (
            TrainerConfig(**tiny_recipe(**changes, trainer__steps=steps)["trainer"])
            for steps in (before, now)
        )
        same = all(lr_factor(was, step) == lr_factor(becomes, step) for step in range(1, done + 1))
        tables = becomes.model_dump(mode="json")
        assert (_why_not_other_steps(before, tables, done) == "") == same
