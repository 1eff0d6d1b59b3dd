"""A recipe with [[stages]] as runs of prime-rl, one after the other."""

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest

from prime_composer.cli.commands import main
from prime_composer.recipe.schema import RecipeError
from prime_composer.recipe.stages import parse_stages
from prime_composer.upstream.export.stages import export_stages
from tests.command import toml
from tests.upstream.export_recipes import tables

OPD = {"loss": {"type": "topk_reverse_kl", "k": 16}, "steps": 7}
RL = {"loss": {"type": "default"}, "steps": 5, "lr": 1e-7}
UNTIL = {"metric": "eval/accuracy", "plateau": 2}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def staged(**changes: Any) -> dict[str, Any]:
    raw = tables() | {"eval": {"every": 2}, "stages": [OPD, RL, {**OPD, "steps": 3}]}
    raw = copy.deepcopy(raw | changes)
    del raw["loss"], raw["trainer"]["steps"]
    return raw


def export(*words: str, raw: dict[str, Any] | None = None) -> int:
    Path("r.toml").write_text(toml(raw or staged()))
    return main(["export", "r.toml", *words])


def read(number: int) -> dict[str, Any]:
    return tomllib.loads(Path(f"out/stage_{number}.toml").read_text())


@pytest.mark.parametrize("version", ["v0.6", "v0.7", "v0.8"])
def test_each_stage_takes_the_model_that_the_one_before_it_writes(
    version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In weights/step_N, with N = max_steps: WeightCheckpointManager at the end of train.py."""
    assert export("--dialect", version, "--output", "out") == 0
    first, second, third = map(read, (1, 2, 3))
    assert [one["max_steps"] for one in (first, second, third)] == [7, 5, 3]
    assert [one["output_dir"] for one in (first, second, third)] == [
        f"outputs/r/stage_{number}" for number in (1, 2, 3)
    ]
    assert [one["model"]["name"] for one in (first, second, third)] == [
        "a/student",
        "outputs/r/stage_1/weights/step_7",
        "outputs/r/stage_2/weights/step_5",
    ]
    assert (first["trainer"]["optim"]["lr"], second["trainer"]["optim"]["lr"]) == (1e-3, 1e-7)
    assert "weight_broadcast" not in first
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in lines[-3:]] == [
        f"PRIME_COMPOSER=1 rl @ out/stage_{number}.toml" for number in (1, 2, 3)
    ]


def test_newer_versions_broadcast_by_files_and_need_the_rest_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights of the last step are in broadcasts/step_N: FileSystemWeightBroadcast at head."""
    model = tmp_path / "a model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json", "x.safetensors"):
        (model / name).write_text("{}")
    raw = staged(student={"model": str(model)}, output_dir="runs/x")
    assert export("--dialect", "head", "--output", "out", raw=raw) == 0
    assert [read(number).get("weight_broadcast") for number in (1, 2, 3)] == [
        {"type": "filesystem"}, {"type": "filesystem"}, None,
    ]  # fmt: skip
    names = [read(number)["model"]["name"] for number in (2, 3)]
    assert names == ["runs/x/stage_1/broadcasts/step_7", "runs/x/stage_2/broadcasts/step_5"]
    assert (read(2)["output_dir"], read(2)["run"]["name"]) == ("runs/x", "stage_2")
    copies = f"cp '{model}/config.json' '{model}/tokenizer.json' "
    assert [line.strip() for line in capsys.readouterr().out.splitlines()[-5:]] == [
        "PRIME_COMPOSER=1 rl @ out/stage_1.toml", f"{copies}{names[0]}",
        "PRIME_COMPOSER=1 rl @ out/stage_2.toml", f"{copies}{names[1]}",
        "PRIME_COMPOSER=1 rl @ out/stage_3.toml",
    ]  # fmt: skip


def test_early_end_is_left_out_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    raw = staged(stages=[{**OPD, "until": UNTIL}, RL])
    assert export("--dialect", "v0.8", "--output", "out", raw=raw) == 0
    assert "trainer.until.plateau: prime-rl trains all" in Path("out/stage_1.toml").read_text()
    assert "until" not in Path("out/stage_2.toml").read_text()
    assert "trainer.until.metric (prime-rl trains all" in capsys.readouterr().err


def test_files_are_not_replaced_and_have_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert export("--dialect", "head") == 2
    assert "--output: a recipe with [[stages]]" in capsys.readouterr().err
    Path("out").mkdir()
    Path("out/stage_2.toml").write_text("mine")
    assert export("--dialect", "head", "--output", "out") == 2
    assert "out/stage_2.toml: exists" in capsys.readouterr().err
    assert [path.name for path in Path("out").iterdir()] == ["stage_2.toml"]


def test_other_broadcast_of_the_recipe_is_refused() -> None:
    recipes = parse_stages(staged(prime_rl={"weight_broadcast": {"type": "nccl"}}))
    files = [Path("a"), Path("b"), Path("c")]
    with pytest.raises(RecipeError, match=r'prime_rl.weight_broadcast.*"filesystem".*leave'):
        export_stages(recipes, "head", {}, None, "r", files)
