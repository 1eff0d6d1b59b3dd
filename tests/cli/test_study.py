"""Studies: what a study file may say, that its runs are compared and kept, and the two that are shipped."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from prime_composer.cli import study as study_module
from prime_composer.cli.commands import main
from prime_composer.cli.study import as_table, load_study, over_seeds, thirds
from prime_composer.recipe.schema import RecipeError
from tests.command import toml

ROOT = Path(__file__).parents[2]
STUDIES = sorted((ROOT / "recipes" / "studies").glob("*.toml"))
Raw = Callable[..., dict[str, Any]]

VARIANTS = {"sampled": ['loss={type = "sampled_reverse_kl"}'], "tail": ["loss.k=4"]}


@pytest.fixture
def in_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs as calls of the same command line within this process: seconds less for each."""

    def call(command: Sequence[str], log: Path) -> int:
        assert list(command[:3]) == [sys.executable, "-m", "prime_composer.cli.commands"]
        with log.open("a") as file, redirect_stdout(file), redirect_stderr(file):
            return main(command[3:])

    monkeypatch.setattr(study_module, "call", call)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def study_file(tiny_recipe: Raw, tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: Any) -> Path:
        (tmp_path / "base.toml").write_text(toml(tiny_recipe()))
        path = tmp_path / "compared.toml"
        path.write_text(
            toml({"base": "base.toml", "seeds": [0, 1], "variants": VARIANTS} | changes)
        )
        return path

    return write


def refusal(path: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        load_study(path)
    return str(caught.value)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_shipped_study_and_the_recipe_of_each_variant_is_valid_and_its_header_names_its_command(
    path: Path,
) -> None:
    study, runs = load_study(path)
    assert len(runs) == len(study.variants) * len(study.seeds)
    assert f"prime-rl study {path.relative_to(ROOT)}" in path.read_text().split("\nbase = ")[0]


def test_there_are_studies() -> None:
    assert {"losses", "flat_teacher"} <= {path.stem for path in STUDIES}


def test_a_run_is_the_base_with_the_overrides_of_all_then_its_own_then_its_seed(
    study_file: Callable[..., Path],
) -> None:
    _, runs = load_study(study_file(overrides=["trainer.lr=5e-4", "loss.k=6"]))
    assert [run.name for run in runs] == [
        "sampled-seed0",
        "tail-seed0",
        "sampled-seed1",
        "tail-seed1",
    ]
    assert (
        runs[3].recipe.loss.k == 4
        and runs[3].recipe.trainer.lr == 5e-4
        and runs[3].recipe.trainer.seed == 1
    )
    assert runs[0].recipe.loss.type == "sampled_reverse_kl"


def test_a_bad_variant_is_named_with_its_key(study_file: Callable[..., Path]) -> None:
    message = refusal(study_file(variants={**VARIANTS, "renorm": ["loss.normalisation=renorm"]}))
    assert "compared.toml: variants.renorm: " in message
    assert "unknown key loss.normalisation; did you mean normalization?" in message
    assert "variants.renorm" in refusal(study_file(variants={**VARIANTS, "renorm": ["loss.k"]}))


def test_wrong_study_files_are_refused_with_the_key_and_the_remedy(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    assert "unknown key variant; did you mean variants?" in refusal(study_file(variant={}))
    assert "seeds: the same seed twice" in refusal(study_file(seeds=[1, 1]))
    assert "seeds: Tuple should have at least 1 item" in refusal(study_file(seeds=[]))
    assert "variants: Dictionary should have at least 2 items" in refusal(
        study_file(variants={"tail": []})
    )
    with_sign = study_file(variants={**VARIANTS, "UP": []})
    with_sign.write_text(with_sign.read_text().replace("UP", "'../up'"))
    assert "'../up' names a directory" in refusal(with_sign)
    assert "trainer.seed=3: the seeds of a study stand in `seeds`" in refusal(
        study_file(overrides=["trainer.seed=3"])
    )
    assert "base.toml" not in refusal(tmp_path / "absent.toml") and "no such study" in refusal(
        tmp_path / "absent.toml"
    )
    assert "elsewhere.toml: no such recipe" in refusal(study_file(base="elsewhere.toml"))


@pytest.mark.parametrize(
    "item", ["trainer.batch_size=12", "trainer.steps=5", "student.prepare.seed=9", "data.size=70"]
)
def test_variants_that_start_elsewhere_or_spend_more_are_refused(
    study_file: Callable[..., Path], item: str
) -> None:
    message = refusal(study_file(variants={**VARIANTS, "more": [item]}))
    assert (
        f"variants.more: {re.match(r'(student|data|[a-z._]+)', item).group()} differs from that of variants.sampled"
        in message
    )


def test_a_study_compares_its_runs_keeps_the_finished_ones_and_takes_up_the_others(
    study_file: Callable[..., Path],
    tmp_path: Path,
    in_one_process: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["study", str(study_file())]) == 0
    folder = tmp_path / "outputs" / "compared"
    assert (folder / "study.png").read_bytes().startswith(b"\x89PNG")
    table = (folder / "table.md").read_text()
    assert (
        table in capsys.readouterr().out
        and "| sampled | 2 | " in table
        and "| tail | 2 | " in table
    )
    results = json.loads((folder / "results.json").read_text())
    for variant in VARIANTS:
        found = results["variants"][variant]
        assert found["unfinished_seeds"] == []
        ends = []
        for seed in ("0", "1"):
            records = [
                json.loads(line)
                for line in (folder / f"{variant}-seed{seed}" / "metrics.jsonl")
                .read_text()
                .splitlines()
            ]
            assert found["seeds"][seed]["reverse_kl"] == [
                [r["step"], r["eval/reverse_kl"]] for r in records if "eval/reverse_kl" in r
            ]
            ends.append(records[-1]["eval/reverse_kl"])
        last = found["over_seeds"]["reverse_kl"][-1]
        assert last == {
            "step": 4,
            "mean": pytest.approx(sum(ends) / 2),
            "min": min(ends),
            "max": max(ends),
        }
        assert [point["step"] for point in found["over_seeds"]["top1pct"]] == [1, 2, 3, 4]

    # One run is stopped after its checkpoint of step 2, another one before any: both are finished, the rest is kept.
    half, early = folder / "tail-seed1", folder / "sampled-seed1"
    whole = (half / "metrics.jsonl").read_text()
    (half / "metrics.jsonl").write_text("".join(line + "\n" for line in whole.splitlines()[:4]))
    (half / "checkpoints" / "step_000004").rename(tmp_path / "gone")
    (early / "checkpoints").rename(tmp_path / "gone too")
    (early / "metrics.jsonl").unlink()
    kept = {
        name: (folder / name / "metrics.jsonl").stat().st_mtime_ns
        for name in ("sampled-seed0", "tail-seed0")
    }
    assert main(["study", str(study_file())]) == 0
    assert capsys.readouterr().out.count("(kept)") == 2
    assert "resuming after step 2" in (folder / "tail-seed1.log").read_text()
    assert {name: (folder / name / "metrics.jsonl").stat().st_mtime_ns for name in kept} == kept
    assert json.loads((folder / "results.json").read_text()) == results

    assert main(["study", str(study_file(overrides=["trainer.lr=5e-4"]))]) == 2
    assert "holds a run with another [trainer]; nothing was touched" in capsys.readouterr().err


def test_a_run_that_cannot_start_stops_the_study_with_its_last_words(
    study_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = study_file(overrides=['data={source = "jsonl", path = "absent.jsonl"}'])
    assert main(["study", str(path), "--output-dir", str(tmp_path / "here")]) == 2
    said = capsys.readouterr().err
    assert (
        "sampled-seed0 ended with status 2" in said
        and "absent.jsonl" in said
        and "Traceback" not in said
    )


@pytest.mark.parametrize(
    ("ended", "status", "said"),
    [(130, 130, "goes on where"), (1, 1, "failed: sampled-seed0, tail-seed0")],
)
def test_a_study_that_is_stopped_or_whose_runs_diverge_compares_what_there_is(
    ended: int,
    status: int,
    said: str,
    study_file: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(study_module, "call", lambda command, log: ended)
    assert (
        main(["study", str(study_file(seeds=[0])), "--output-dir", str(tmp_path / "here")])
        == status
    )
    shown = capsys.readouterr()
    assert said in shown.out + shown.err
    assert "| tail | 0 of 1 | – | – | – |" in (tmp_path / "here" / "table.md").read_text()


def test_the_table_has_mean_and_range_and_leaves_out_what_is_missing() -> None:
    seeds = [[(0, 0.25), (4, 0.5)], [(0, 0.25), (4, 0.75)]]
    empty = {"accuracy": [], "reverse_kl": [], "top1pct": []}
    results = {
        "variants": {
            "a": {
                "seeds": {"0": {}, "1": {}},
                "unfinished_seeds": [],
                "teacher_accuracy": 0.875,
                "over_seeds": empty
                | {"accuracy": list(over_seeds(seeds)), "reverse_kl": list(over_seeds(seeds))},
            },
            "b": {
                "seeds": {},
                "unfinished_seeds": [0, 1],
                "teacher_accuracy": None,
                "over_seeds": empty,
            },
        }
    }
    assert as_table(results).splitlines()[2:] == [
        "| a | 2 | 62.5% (50.0% to 75.0%) | 0.625 (0.500 to 0.750) | – |",
        "| b | 0 of 2 | – | – | – |",
        "",
        "Before training: accuracy 25.0% (the teacher 87.5%), reverse KL 0.250.",
    ]
    assert thirds([{"mean": value} for value in (0.1, 0.3, 0.9, 0.9, 0.5, 0.7)]) == "20.0% → 60.0%"
