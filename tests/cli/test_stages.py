"""prime-rl rl of a recipe with [[stages]]: the runs that one starts by hand, whatever ends them."""

import copy
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from prime_composer.cli import report
from prime_composer.cli.commands import main
from prime_composer.local.opening import open_engine
from prime_composer.local.run import Run
from prime_composer.local.run_dir.checkpoint import list_checkpoints
from prime_composer.problems.loading import load_problem_set
from prime_composer.recipe.loading import parse_recipe
from prime_composer.tiny_models.cache import prepare_models
from tests.command import numbers, toml
from tests.conftest import TINY_RECIPE
from tests.local.helpers import run, tiny_models, weights

FIRST = {"loss": {"type": "topk_reverse_kl", "k": 8}, "steps": 4}
SECOND = {"loss": {"type": "topk_forward_kl", "k": 4}, "steps": 3, "lr": 3e-3}


def tables(**changes: Any) -> dict[str, Any]:
    """Return a recipe of two stages."""
    raw = copy.deepcopy(TINY_RECIPE)
    del raw["loss"], raw["trainer"]["steps"]
    return raw | {"stages": [FIRST, SECOND]} | changes


def rl(*words: str, raw: dict[str, Any] | None = None) -> int:
    """Run the recipe in this process and the working directory, and return the exit status."""
    Path("r.toml").write_text(toml(tables() if raw is None else raw))
    return main(["rl", "--config", "r.toml", "--engine", "local", *words])


@pytest.fixture(scope="module", autouse=True)
def without_figures() -> Iterator[None]:
    """Draw nothing: it takes longer than the training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw_report", lambda *words: None)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, without_figures: None) -> Path:
    """Return the directory of a chain that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert rl() == 0
    return folder / "outputs" / "r"


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def assert_same(one: Path, other: Path) -> None:
    """Compare what two runs logged, and their last weights and optimizers, bit for bit."""
    assert numbers(one) == numbers(other)
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    states = [
        torch.load(list_checkpoints(folder)[-1].path / "trainer.pt", weights_only=True)
        for folder in (one, other)
    ]
    torch.testing.assert_close(states[0]["optimizer"], states[1]["optimizer"], rtol=0, atol=0)


def assert_same_chain(one: Path, other: Path) -> None:
    for stage in ("stage_1", "stage_2"):
        assert_same(one / stage, other / stage)


def test_chain_is_two_runs_by_hand(whole: Path, tmp_path: Path) -> None:
    """Weights, optimizer and every number; the second stage has another order of problems."""
    first, second = copy.deepcopy(TINY_RECIPE), copy.deepcopy(TINY_RECIPE)
    first |= {"loss": FIRST["loss"]}
    run(first, tmp_path / "one")
    second |= {
        "loss": SECOND["loss"],
        "student": {"model": str(tmp_path / "one/checkpoints/step_000004")},
    }
    second["trainer"] |= {"steps": 3, "lr": 3e-3, "seed": 1_000_000}
    run(second, tmp_path / "two")
    assert_same(whole / "stage_1", tmp_path / "one")
    assert_same(whole / "stage_2", tmp_path / "two")
    kept = json.loads((whole / "stage_2" / "recipe.json").read_text())
    assert kept["student"]["model"] == "outputs/r/stage_1/checkpoints/step_000004"
    assert kept["student"]["prepare"] is None


def test_second_stage_of_a_rounded_student_begins_with_its_rounded_weights(tmp_path: Path) -> None:
    """What the first stage learned below the rounding ends with it, as its optimizer does."""
    source = tiny_models(TINY_RECIPE)["student"]
    rounded = {"model": str(source), "quantize": {"bits": 3, "group": 8}}
    assert rl(raw=tables(student=rounded)) == 0
    left = Path("outputs/r/stage_1/checkpoints/step_000004")
    by_hand = copy.deepcopy(TINY_RECIPE) | {
        "loss": SECOND["loss"],
        "student": rounded | {"model": str(left)},
    }
    by_hand["trainer"] |= {"steps": 3, "lr": 3e-3, "seed": 1_000_000}
    recipe = parse_recipe(by_hand)
    problems = load_problem_set(recipe.sources)
    saved = load_file(left / "model.safetensors")
    before = torch.load(left / "trainer.pt", weights_only=True)["latent"]
    paths = prepare_models(recipe, problems)
    with open_engine(recipe, problems, paths, lambda text: None) as engine:
        began, latent = engine.model.state_dict(), engine.latent.state_dict()
    assert all(torch.equal(saved[name], began[name]) for name in saved)
    assert all(torch.equal(latent[name], saved[f"{name}.weight"]) for name in latent)
    assert any(not torch.equal(before[name], latent[name]) for name in latent)
    run(by_hand, tmp_path / "two")
    assert_same(Path("outputs/r/stage_2"), tmp_path / "two")


def kill_at(monkeypatch: pytest.MonkeyPatch, stage: int, step: int, signum: int | None) -> None:
    """End a run after a step is logged: at once, or by a signal."""
    original = Run.end_step

    def end_step(self: Run, at: int, *args: Any) -> None:
        now = self.run_dir.name == f"stage_{stage}" and at == step
        if now and signum is None:
            raise KeyboardInterrupt  # nothing more is written
        if now:
            os.kill(os.getpid(), signum)
        original(self, at, *args)

    monkeypatch.setattr(Run, "end_step", end_step)


@pytest.mark.parametrize(
    ("stage", "signum", "named"),
    [(1, None, "1 of 2, step 2"), (2, signal.SIGTERM, "2 of 2, step 1")],
)
def test_chain_goes_on_within_a_stage(
    stage: int, signum: int | None, named: str, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is killed after step 3 of the first stage, or asked to stop in step 1 of the second."""
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, stage, 3 if stage == 1 else 1, signum)
        assert rl() == 128 + (signum or signal.SIGINT)
    assert "--output-dir outputs/r --resume\n" in "".join(capsys.readouterr())
    assert Path("outputs/r/stage_2").exists() == (stage == 2)
    assert rl("--resume") == 0
    assert f"stage {named}: " in capsys.readouterr().out
    assert_same_chain(Path("outputs/r"), whole)


@pytest.mark.parametrize("left", ["nothing", "a start"])
def test_chain_goes_on_between_stages(
    left: str, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stage 1 is over, and stage 2 is not there, or began and left no checkpoint."""
    output = Path("outputs/r")
    shutil.copytree(whole, output)
    if left == "a start":
        shutil.rmtree(output / "stage_2" / "checkpoints")
    else:
        shutil.rmtree(output / "stage_2")
    assert rl("--resume", "--dry-run") == 0
    said = capsys.readouterr().out
    assert "stage 2 of 2 is under way" in said and "stage 2 of 2, step 0: " in said
    assert rl("--resume") == 0
    assert "stage 1 of 2" not in capsys.readouterr().out
    assert_same_chain(output, whole)


def test_signal_in_the_last_step_of_a_stage_begins_no_other(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, 1, 4, signal.SIGINT)
        assert rl() == 130
    assert "stopped after step 4; step 4 of stage 1 is saved" in capsys.readouterr().out
    assert not Path("outputs/r/stage_2").exists()
    assert rl("--resume") == 0
    assert_same_chain(Path("outputs/r"), whole)


def test_chain_that_was_moved_goes_on(whole: Path) -> None:
    shutil.copytree(whole, "elsewhere")
    for step in (2, 3):
        shutil.rmtree(f"elsewhere/stage_2/checkpoints/step_00000{step}")
    (Path("elsewhere") / "stage_2" / "metrics.jsonl").unlink()
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, 2, 1, signal.SIGINT)
        assert rl("--resume", "--output-dir", "elsewhere") == 130
    shutil.move("elsewhere", "again")
    assert rl("--resume", "--output-dir", "again") == 0
    assert_same_chain(Path("again"), whole)


def test_overwrite_deletes_all_stages(whole: Path) -> None:
    output = Path("outputs/r")
    shutil.copytree(whole, output)
    raw = tables(stages=[{**FIRST, "steps": 2}, {**SECOND, "lr": 1e-3}])
    assert rl(raw=raw) == 0  # without a flag another directory
    assert rl("--output-dir", "outputs/r", raw=raw) == 2
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, 1, 1, None)
        assert rl("--output-dir", "outputs/r", "--overwrite", raw=raw) == 130
    assert not list_checkpoints(output / "stage_1") and not list_checkpoints(output / "stage_2")
    assert rl("--output-dir", "outputs/r", raw=raw) == 0
    assert_same_chain(output, Path("outputs/r-2"))


def test_end_by_a_plateau_is_remembered(capsys: pytest.CaptureFixture[str]) -> None:
    """The share of cut answers stays 1 from step 0 on, so that stage 1 is over after step 2."""
    until = {"metric": "eval/truncated", "plateau": 1}
    raw = tables(stages=[{**FIRST, "steps": 8, "until": until}, SECOND])
    raw["student"] = {"prepare": {**raw["student"]["prepare"], "sft_steps": 1}}
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, 2, 1, None)
        assert rl(raw=raw) == 130
    assert [record["eval/truncated"] for record in numbers(Path("outputs/r/stage_1"))[::2]] == [
        1,
        1,
    ]
    said = "".join(capsys.readouterr())
    assert "stage 1 is saved; continue with\n" in said and "ends by trainer.until" in said
    assert rl("--resume", raw=raw) == 0
    assert "stage 1 of 2" not in capsys.readouterr().out
    assert [one.step for one in list_checkpoints(Path("outputs/r/stage_1"))] == [2]
    model = json.loads(Path("outputs/r/stage_2/recipe.json").read_text())["student"]["model"]
    assert model == "outputs/r/stage_1/checkpoints/step_000002"


def other(**changes: Any) -> dict[str, Any]:
    return tables(stages=[{**FIRST, **changes}, SECOND])


@pytest.mark.parametrize(
    ("raw", "words", "said"),
    [
        (other(lr=1e-2), ["--resume"], "stage_1 was started with other values of trainer.lr;"),
        (other(steps=9), ["--resume"], "trainer.steps = 9 instead of 4"),
        (tables(stages=[FIRST, {**SECOND, "lr": 1}]), ["--resume"], "other values of trainer.lr"),
        (tables(stages=[FIRST, SECOND, FIRST]), ["--resume", "--step", "2"], "3 of 3 is under"),
        (tables(), [], "exists and is not empty"),
        (tables(), ["--step", "2"], "goes with --resume"),
        (tables(), ["--resume", "--step", "1"], "no checkpoint of step 1"),
    ],
)  # fmt: skip
def test_chain_that_does_not_continue_is_refused(
    raw: dict[str, Any],
    words: list[str],
    said: str,
    whole: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert rl("--output-dir", str(whole), *words, raw=raw) == 2
    assert said in capsys.readouterr().err


def test_stage_that_is_over_grows_no_longer(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run with a constant schedule does, and another stage has begun with its student."""
    shutil.copytree(whole, "here")
    for stage in ("stage_1", "stage_2"):
        kept = Path("here") / stage / "recipe.json"
        kept.write_text(kept.read_text().replace('"linear"', '"constant"'))
    raw = other(steps=9)
    raw["trainer"] = {**raw["trainer"], "schedule": "constant"}
    assert rl("--output-dir", "here", "--resume", raw=raw) == 2
    said = capsys.readouterr().err
    assert "here/stage_1 is over, and was run with other values of trainer.steps;" in said


def test_directory_of_something_else_is_refused(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, "here")
    Path("here/notes").touch()
    for words in ((), ("--resume",), ("--overwrite",)):
        assert rl("--output-dir", "here", *words) == 2
        assert "here holds other files than the stages of a run (notes)" in capsys.readouterr().err
    Path("here/notes").rename("here/stage_3")
    assert rl("--output-dir", "here", "--resume") == 2
    assert "here has stage_3, and the recipe has 2 stages" in capsys.readouterr().err


def test_stage_that_cannot_run_is_found_before_the_first_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A dry run's check, of what the student's own answers cannot teach."""
    raw = tables(stages=[FIRST, {"loss": {"type": "sft"}, "steps": 3}])
    assert rl(raw=raw) == 2
    said = capsys.readouterr().err
    assert "stage 2 of 2: " in said and "'sft'" in said
    assert not list(Path().rglob("metrics.jsonl"))
