"""Studies: what a study file may contain, how runs are kept and compared, the shipped files."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_composer.backends.cpu_guard import THREADS_VARIABLE
from prime_composer.cli import figures
from prime_composer.cli import study as study_module
from prime_composer.cli.commands import main
from prime_composer.cli.quantities import QUANTITIES
from prime_composer.cli.study_file import SAME, load_study
from prime_composer.cli.study_report import as_markdown, over_seeds
from prime_composer.local.recipe_file import RECIPE_FILE
from prime_composer.local.tracker import METRICS_FILE
from prime_composer.recipe.schema import RecipeError
from tests.command import prime_rl, toml
from tests.islands.rig import tables
from tests.local.helpers import tiny_models, weights

ROOT = Path(__file__).parents[2]
STUDIES = sorted((ROOT / "recipes" / "studies").glob("*.toml"))
assert STUDIES
VARIANTS = {"sampled": ['loss={type = "sampled_reverse_kl"}'], "tail": ["loss.k=4"]}


Raw = Callable[..., dict[str, Any]]
WriteStudy = Callable[..., Path]
OF_FINISHED = pytest.mark.xdist_group("finished study")  # One process runs it once


class Ended(subprocess.Popen[bytes]):
    """A process that has ended."""

    def __init__(self, status: int) -> None:
        self.returncode = status

    def poll(self) -> int:
        return self.returncode


def run_here(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Run a study's command lines within this process, without their figures: seconds each."""

    def call(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Ended:
        assert list(command[:3]) == [sys.executable, "-m", "prime_composer.cli"]
        with log.open("a") as file, redirect_stdout(file), redirect_stderr(file):
            return Ended(main(command[3:]))

    monkeypatch.setattr(study_module, "call", call)
    monkeypatch.setattr(figures, "draw_report", lambda runs, output: None)
    monkeypatch.chdir(folder)


@pytest.fixture
def in_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_here(monkeypatch, tmp_path)


def write_study(folder: Path, base: dict[str, Any], changes: dict[str, Any]) -> Path:
    (folder / "base.toml").write_text(toml(base))
    study = {"base": "base.toml", "seeds": [0, 1], "variants": VARIANTS} | changes
    path = folder / "compared.toml"
    path.write_text(toml(study))
    return path


@pytest.fixture
def study_file(tiny_recipe: Raw, tmp_path: Path) -> WriteStudy:
    return lambda **changes: write_study(tmp_path, tiny_recipe(), changes)


@pytest.fixture(scope="module")
def finished(tiny_recipe: Raw, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the study of ``study_file``; return the directory that has its outputs/."""
    folder = tmp_path_factory.mktemp("finished")
    path = write_study(folder, tiny_recipe(), {})
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_here(monkeypatch, folder)
        assert main(["study", str(path)]) == 0
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path, in_one_process: None) -> Path:
    """A copy of the finished study's directory, where the commands of this process look."""
    shutil.copytree(finished / "outputs", tmp_path / "outputs")
    return tmp_path / "outputs" / "compared"


def refusal(path: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        load_study(path)
    return str(caught.value)


def without_times(results: dict[str, Any]) -> dict[str, Any]:
    for result in results["variants"].values():
        for series in (result["over_seeds"], *result["seeds"].values()):
            del series["step_seconds"]
    return results


def result_of(
    *seeds: Sequence[tuple[int, float]], teacher: float | None = None, **series: Any
) -> dict[str, Any]:
    """Return a variant of results.json whose seeds measured this reverse KL, and other series."""
    over: dict[str, Any] = {name: list(over_seeds(series.get(name, []))) for name in QUANTITIES}
    over["reverse_kl"] = list(over_seeds(seeds))
    return {
        "seeds": {str(seed): {} for seed in range(len(seeds))},
        "unfinished_seeds": [] if seeds else [0, 1],
        "teacher_scores": {} if teacher is None else {"accuracy": teacher},
        "over_seeds": over,
    }


def records_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_shipped_studies_are_valid_and_name_their_command(path: Path) -> None:
    study, runs = load_study(path)
    assert len(runs) == len(study.items_of) * len(study.seeds)
    assert f"prime-rl study {path.relative_to(ROOT)}" in path.read_text().split("\nbase = ")[0]


def test_overrides_come_before_a_variants_own_and_set_after(study_file: WriteStudy) -> None:
    _, runs = load_study(study_file(overrides=["trainer.lr=5e-4", "loss.k=6"]))
    names = ["sampled-seed0", "tail-seed0", "sampled-seed1", "tail-seed1"]
    assert [run.name for run in runs] == names
    last = runs[3].recipe
    assert (last.loss.k, last.trainer.lr, last.trainer.seed) == (4, 5e-4, 1)
    assert runs[0].recipe.loss.type == "sampled_reverse_kl"
    # --set changes every variant after its own items.
    _, runs = load_study(study_file(), changes=["loss.k=7", "trainer.lr=5e-4"])
    assert {run.recipe.trainer.lr for run in runs} == {5e-4}
    assert [run.recipe.loss.k for run in runs if run.variant == "tail"] == [7, 7]
    with pytest.raises(RecipeError, match="trainer.seed=3: the seeds of a study belong"):
        load_study(study_file(), changes=["trainer.seed=3"])


SAME_NAMES = {"a": {"b": [], "b-c": []}, "d": {"c-d": [], "d": []}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"variants": {"tail": [], "r": ["loss.normalisation=renorm"]}},
         ("compared.toml: variants.r: ", "loss.normalisation; did you mean normalization?")),
        ({"variants": {"tail": [], "r": ["loss.k"]}}, ("variants.r",)),
        ({"variant": {}}, ("unknown key variant; did you mean variants?",)),
        ({"seeds": [1, 1]}, ("seeds: the same seed twice",)),
        ({"seeds": []}, ("seeds", "at least 1")),
        ({"variants": {"tail": []}}, ("at least two variants", "[variants] or [grid.*]: 1")),
        ({"grid": {"k": {"4": [], "8": []}}}, ("[variants] and [grid.*]: keep one",)),
        ({"variants": {}, "grid": SAME_NAMES}, ("two variants have the same name",)),
        ({"variants": {}, "grid": {"k": {"4": [], "-8": []}}}, ("'-8' names a directory",)),
        ({"variants": {"tail": [], "'../up'": []}}, ("'../up' names a directory",)),
        ({"overrides": ["trainer.seed=3"]}, ("trainer.seed=3", "belong in `seeds`")),
        ({"base": "elsewhere.toml"}, ("elsewhere.toml: no such recipe",)),
        *(({"variants": {**VARIANTS, "more": [item]}},
           (f"variants.more: {item.partition('=')[0]} differs", "variants.sampled"))
          for item in ("trainer.batch_size=12", "trainer.steps=5", "student.prepare.seed=9",
                       "data.size=70")),
    ],
)  # fmt: skip
def test_wrong_study_files_are_refused_with_a_remedy(
    study_file: WriteStudy, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    message = refusal(study_file(**changes))
    assert [word for word in words if word not in message] == []
    assert "no such study" in refusal(Path("absent.toml"))


def test_a_grid_has_a_variant_for_each_combination(study_file: WriteStudy) -> None:
    """Items apply in the order of the axes, so a later axis may change an earlier one's table."""
    grid = {
        "loss": {"reverse": ['loss={type = "topk_reverse_kl", k = 3}'], "own": []},
        "k": {"4": ["loss.k=4"], "5": ["loss.k=5"]},
    }
    study, runs = load_study(study_file(variants={}, grid=grid, seeds=[0]))
    assert [run.name for run in runs] == [
        "reverse-4-seed0",
        "reverse-5-seed0",
        "own-4-seed0",
        "own-5-seed0",
    ]
    assert [run.recipe.loss.k for run in runs] == [4, 5, 4, 5]
    assert study.combinations["reverse", "5"] == (*grid["loss"]["reverse"], "loss.k=5")


def test_variants_may_have_other_teachers_and_keep_other_bits() -> None:
    """The data is the same, and so is the student but for the rounding that it keeps."""
    free = ["environments.a.teacher", "environments.a.teacher.math", "data.teacher", "trainer.lr"]
    free += ["student.quantize", "student.quantize.bits"]
    same = ["environments", "environments.a.teacher_key", "environments.a.size", "student"]
    same += ["student.model", "student.prepare.quantize.bits"]
    assert [key for key in (*free, *same) if SAME.fullmatch(key)] == same


@OF_FINISHED
def test_a_study_compares_runs_and_keeps_the_finished_ones(
    folder: Path, study_file: WriteStudy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second call finishes what was stopped, and changes neither the kept runs nor the result."""
    assert (folder / "study.png").read_bytes().startswith(b"\x89PNG")
    table = (folder / "table.md").read_text()
    assert "| sampled | 2 | " in table and "| tail | 2 | " in table
    results = without_times(json.loads((folder / "results.json").read_text()))
    for variant in VARIANTS:
        result = results["variants"][variant]
        assert result["unfinished_seeds"] == []
        ends = []
        for seed in ("0", "1"):
            records = records_of(folder / f"{variant}-seed{seed}")
            assert result["seeds"][seed]["reverse_kl"] == [
                [r["step"], r["eval/reverse_kl"]] for r in records if "eval/reverse_kl" in r
            ]
            ends.append(records[-1]["eval/reverse_kl"])
        assert ends[0] != ends[1]
        assert result["over_seeds"]["reverse_kl"][-1] == {
            "step": 4,
            "mean": pytest.approx(sum(ends) / 2),
            "min": min(ends),
            "max": max(ends),
        }
        assert [point["step"] for point in result["over_seeds"]["top1pct"]] == [1, 2, 3, 4]

    # One run is stopped after its checkpoint of step 2, another one before its first checkpoint.
    early = folder / "sampled-seed1"
    stop_after_two(folder / "tail-seed1", tmp_path)
    (early / "checkpoints").rename(tmp_path / "gone too")
    (early / "metrics.jsonl").unlink()

    def modified() -> list[int]:
        names = ("sampled-seed0", "tail-seed0")
        return [(folder / name / "metrics.jsonl").stat().st_mtime_ns for name in names]

    before = modified()
    assert main(["study", str(study_file())]) == 0
    printed = capsys.readouterr().out
    assert printed.count("(kept)") == 2 and (folder / "table.md").read_text() in printed
    assert "resuming after step 2" in (folder / "tail-seed1.log").read_text()
    assert modified() == before
    assert without_times(json.loads((folder / "results.json").read_text())) == results

    assert main(["study", str(study_file(overrides=["trainer.lr=5e-4"]))]) == 2
    assert "with other values of trainer.lr; nothing was touched" in capsys.readouterr().err


def test_study_without_held_out_problems_is_finished(
    study_file: WriteStudy,
    tiny_recipe: Raw,
    tmp_path: Path,
    in_one_process: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It compares what steps measure; a run that lacks its last step is continued."""
    folders = tiny_models(tiny_recipe())
    models = {name: {"model": str(folder)} for name, folder in folders.items()}
    tiny, base = study_file(seeds=[0]), tiny_recipe(data__use="train", **models)
    del base["eval"]
    (tmp_path / "base.toml").write_text(toml(base))
    assert main(["study", str(tiny)]) == 0
    printed = capsys.readouterr().out
    assert "[1/2] sampled-seed0: finished; it evaluates nothing" in printed
    assert "| sampled | 1 | " in printed and "accuracy" not in printed
    assert main(["study", str(tiny)]) == 0
    assert capsys.readouterr().out.count("(kept)") == 2
    metrics = tmp_path / "outputs" / "compared" / "tail-seed0" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    assert main(["study", str(tiny), "--dry-run"]) == 0
    assert "1 of 2 runs are left" in capsys.readouterr().out


def test_run_that_ended_by_its_plateau_is_finished(
    study_file: WriteStudy, in_one_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The share of cut answers stays 1 from step 0 on, so that each run of 4 steps has 2."""
    until = 'trainer.until={metric = "eval/truncated", plateau = 1}'
    path = study_file(seeds=[0], overrides=["student.prepare.sft_steps=1", until])
    assert main(["study", str(path)]) == 0
    capsys.readouterr()
    assert records_of(Path("outputs/compared/tail-seed0"))[-1]["step"] == 2
    assert main(["study", str(path), "--dry-run"]) == 0
    assert "0 of 2 runs are left" in capsys.readouterr().out


def stop_after_two(run: Path, tmp_path: Path) -> None:
    """Leave a finished run as one that was stopped after its checkpoint of step 2."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:4]))
    (run / "checkpoints" / "step_000004").rename(tmp_path / "gone")


@OF_FINISHED
def test_dry_run_says_what_is_left_and_writes_nothing(
    folder: Path, study_file: WriteStudy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a study with a finished run, one that was stopped after step 2, and two new ones.

    What would stop is named in the preflight's own words, and --overwrite deletes nothing before
    it has read them.
    """
    for name in ("sampled-seed1", "tail-seed1"):
        shutil.rmtree(folder / name)
    stop_after_two(folder / "tail-seed0", tmp_path)

    def contents() -> dict[str, bytes]:
        files = [file for file in folder.rglob("*") if file.is_file()]
        return {str(file): file.read_bytes() for file in files}

    before, path = contents(), study_file(seeds=[0, 1])
    capsys.readouterr()
    assert main(["study", str(path), "--dry-run"]) == 0
    # A step of the tiny recipe has 6 rollouts: 2 steps are left of one run, 4 of two others.
    assert capsys.readouterr().out.splitlines() == [
        "study: 2 variants, 2 seeds, in outputs/compared",
        "sampled-seed0: finished, kept",
        "tail-seed0: continues after step 2",
        "sampled-seed1: runs",
        "tail-seed1: runs",
        "3 of 4 runs are left, at most 60 rollouts",
        "dry run: nothing was run, nothing was written",
    ]
    assert main(["study", str(path), "--dry-run", "--overwrite"]) == 0
    printed = capsys.readouterr().out
    assert "sampled-seed0: is deleted, and runs again" in printed
    assert "tail-seed1: runs\n4 of 4 runs are left, at most 96 rollouts" in printed
    path = study_file(overrides=["rollout.max_tokens=120"], seeds=[0])
    for words in (["--overwrite", "--dry-run"], ["--overwrite"]):
        assert main(["study", str(path), *words]) == 2
        message = capsys.readouterr().err
        assert "prime-rl study: sampled-seed0: " in message and "max_model_len" in message
    assert contents() == before


@OF_FINISHED
def test_overwrite_deletes_the_runs_of_the_study_alone(
    folder: Path, study_file: WriteStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another recipe's runs are replaced, and a directory that is no run is refused before that."""
    shutil.rmtree(folder / "tail-seed1")
    first = (folder / "tail-seed0" / "metrics.jsonl").read_text()
    (folder / "notes.txt").write_text("mine")
    two_seeds = study_file(overrides=["trainer.lr=5e-4"], seeds=[0, 1])
    (folder / "tail-seed1").mkdir()
    (folder / "tail-seed1" / "thesis.txt").write_text("mine")
    assert main(["study", str(two_seeds), "--overwrite"]) == 2
    assert "holds no recipe.json, so it is no run; nothing was touched" in capsys.readouterr().err
    assert (folder / "tail-seed0" / "metrics.jsonl").read_text() == first
    changed = study_file(overrides=["trainer.lr=5e-4"], seeds=[0])
    assert main(["study", str(changed), "--overwrite"]) == 0
    assert "(kept)" not in capsys.readouterr().out
    kept = json.loads((folder / "tail-seed0" / "recipe.json").read_text())
    assert kept["trainer"]["lr"] == 5e-4 and (folder / "notes.txt").read_text() == "mine"
    assert (folder / "tail-seed0" / "metrics.jsonl").read_text() != first
    assert (folder / "tail-seed1" / "thesis.txt").read_text() == "mine"
    log = (folder / "tail-seed0.log").read_text()
    assert log.count("run directory: ") == 2  # at the start and at the end of one run


def test_a_run_that_cannot_start_stops_the_study(
    study_file: WriteStudy,
    in_one_process: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message ends with the last line of the run's log."""
    path = study_file(overrides=['data={source = "jsonl", path = "absent.jsonl"}'])
    assert main(["study", str(path), "--output-dir", str(tmp_path / "runs")]) == 2
    message = capsys.readouterr().err
    assert "sampled-seed0 ended with status 2" in message
    assert "absent.jsonl" in message and "Traceback" not in message


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        ((), 130, "the same command continues this study"),
        (("--overwrite",), 130, "the same command, without --overwrite, continues this study"),
        ((), 1, "failed: sampled-seed0, tail-seed0"),
    ],
)
def test_a_stopped_or_diverged_study_compares_the_rest(
    words: tuple[str, ...],
    status: int,
    text: str,
    study_file: WriteStudy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its exit status is that of its runs."""
    environments = []

    def call(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Ended:
        environments.append(environment)
        return Ended(status)

    monkeypatch.setattr(study_module, "call", call)
    monkeypatch.setenv(THREADS_VARIABLE, "5")  # of the whole command
    folder = tmp_path / "runs"
    command = ["study", str(study_file(seeds=[0])), "--output-dir", str(folder), *words]
    assert main([*command, "--jobs", "2"]) == status
    assert {one[THREADS_VARIABLE] for one in environments} == {"2"}
    printed = capsys.readouterr()
    assert text in printed.out + printed.err
    assert "| tail | 0 of 1 |\n" in (folder / "table.md").read_text()


def test_table_has_mean_range_and_the_start_of_each_teacher() -> None:
    """Seconds are a mean over all steps, and the signal's share that of the thirds of a run."""
    both = [(0, 0.25), (4, 0.5)], [(0, 0.25), (4, 0.75)]
    share = [(step, value) for step, value in enumerate((0.1, 0.3, 0.9, 0.9, 0.5, 0.7))]
    more = {"step_seconds": [[(1, 0.5), (2, 0.25)], [(1, 0.75), (2, 0.5)]], "top1pct": [share]}
    a = result_of(*both, teacher=0.875, accuracy=both, **more)
    b = result_of(both[0], both[0], teacher=0.5, accuracy=both)
    table = as_markdown({"variants": {"a": a, "b": result_of(), "a-2": a, "c": b}})
    assert table.splitlines()[2:] == [
        "| a | 2 | 62.5% (50.0% to 75.0%) | 0.625 (0.500 to 0.750) | 20.0% → 60.0% | 0.50 |",
        "| b | 0 of 2 | – | – | – | – |",
        "| a-2 | 2 | 62.5% (50.0% to 75.0%) | 0.625 (0.500 to 0.750) | 20.0% → 60.0% | 0.50 |",
        "| c | 2 | 62.5% (50.0% to 75.0%) | 0.500 | – | – |",
        "",
        "Before training, a and those like it: accuracy 25.0% (the teacher 87.5%), "
        "reverse KL 0.250.",
        "",
        "Before training, c and those like it: accuracy 25.0% (the teacher 50.0%), "
        "reverse KL 0.250.",
    ]


def test_environments_have_columns_of_their_own(
    study_file: WriteStudy,
    tiny_recipe: Raw,
    tmp_path: Path,
    in_one_process: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, base = study_file(seeds=[0]), tiny_recipe()
    base["environments"] = {name: base["data"] for name in ("long", "short")}
    del base["data"]
    (tmp_path / "base.toml").write_text(toml(base))
    start = {"step": 0, "eval/accuracy": 0.125, "eval/accuracy/long": 0.25, "eval/reverse_kl": 2.0}
    start |= {"eval/accuracy/short": 0.0, "teacher/accuracy/long": 0.875}
    end = start | {"step": 4, "eval/accuracy": 0.5, "eval/accuracy/long": 0.75}
    for run in load_study(path)[1]:
        run.run_dir.mkdir(parents=True)
        (run.run_dir / RECIPE_FILE).write_text(json.dumps(run.tables))
        lines = (json.dumps(record) + "\n" for record in (start, end))
        (run.run_dir / METRICS_FILE).write_text("".join(lines))
    assert main(["study", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "| accuracy | reverse KL, nats/token | long | short |\n" in printed
    assert "| tail | 1 | 50.0% | 2.000 | 75.0% | 0.0% |\n" in printed
    assert "long 25.0% (the teacher 87.5%), short 0.0% (the teacher –)." in printed


@pytest.mark.slow
def test_study_compares_islands(tmp_path: Path) -> None:
    """Two islands have the rollouts of one process. A second start keeps both."""
    pytest.importorskip("torchft")
    raw = tables(trainer__steps=4, trainer__batch_size=4)
    tiny_models(raw)
    (tmp_path / "base.toml").write_text(toml({k: v for k, v in raw.items() if k != "diloco"}))
    study = {
        "base": "base.toml", "seeds": [0], "same_budget": False,
        "variants": {"one": ["trainer.batch_size=8"],
                     "two": ["diloco={replicas = 2, every = 2, wait = 60.0}"]},
    }  # fmt: skip
    (tmp_path / "s.toml").write_text(toml(study))
    dry = prime_rl("study", "s.toml", "--dry-run", cwd=tmp_path)
    assert "at most 64 rollouts" in dry.stdout, dry.stdout + dry.stderr
    done = prime_rl("study", "s.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "outputs" / "s" / "results.json").read_text())["variants"]
    for variant in ("one", "two"):
        series = results[variant]["seeds"]["0"]["reverse_kl"]
        assert [step for step, _ in series] == [0, 4]
    assert prime_rl("study", "s.toml", cwd=tmp_path).stdout.count("(kept)") == 2
    log = (tmp_path / "outputs" / "s" / "two-seed0.log").read_text()
    assert "island 0 | step 4/4" in log and "island 1 | student: " in log
    ours, theirs = (weights(tmp_path / "outputs/s/two-seed0" / f"island_{i}") for i in (0, 1))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
