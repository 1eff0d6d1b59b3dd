"""The command line: what a person types, sees and gets back, in processes of their own."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_composer.cli.commands import choose_engine
from prime_composer.cli.runs import claim_run_dir
from tests.command import interrupt_after, prime_rl, toml

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "gsm8k_opd.toml"
Raw = Callable[..., dict[str, Any]]


@pytest.fixture
def tiny_file(tiny_recipe: Raw, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(toml(tiny_recipe()))
    return path


def test_check_prints_the_resolved_recipe_with_defaults_and_overrides() -> None:
    done = prime_rl("check", RECIPE, "--set", "trainer.lr=1e-4")
    assert done.returncode == 0
    resolved = json.loads(done.stdout)
    assert resolved["trainer"]["lr"] == 1e-4
    assert resolved["trainer"]["max_grad_norm"] == 1.0
    assert resolved["loss"]["type"] == "topk_reverse_kl"


def test_a_wrong_recipe_ends_with_status_2_and_one_message_without_a_traceback(
    tmp_path: Path,
) -> None:
    done = prime_rl("check", RECIPE, "--set", "trainer.step=3")
    assert done.returncode == 2
    assert "unknown key trainer.step; did you mean steps?" in done.stderr
    assert "Traceback" not in done.stderr
    assert prime_rl("check", tmp_path / "absent.toml").returncode == 2


def test_a_run_ends_with_a_table_a_plot_and_its_directory(tiny_file: Path, tmp_path: Path) -> None:
    done = prime_rl("rl", "--config", tiny_file, "--engine", "local", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "outputs" / "tiny"
    for text in (
        "student before",
        "student after",
        "reverse KL",
        "outputs/tiny",
        "preflight passed",
    ):
        assert text in done.stdout
    assert (run_dir / "report.png").read_bytes().startswith(b"\x89PNG")
    assert {"metrics.jsonl", "recipe.json", "checkpoints"} <= {
        path.name for path in run_dir.iterdir()
    }


def test_a_second_run_gets_a_directory_of_its_own_and_says_so(
    tiny_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "outputs" / "tiny").mkdir(parents=True)
    done = prime_rl("rl", "--config", tiny_file, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "run directory: outputs/tiny-2" in done.stdout
    assert not list((tmp_path / "outputs" / "tiny").iterdir())


def test_a_directory_that_was_asked_for_and_holds_something_is_left_alone(
    tiny_file: Path, tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.txt").write_text("mine")
    done = prime_rl("rl", "--config", tiny_file, "--output-dir", taken, cwd=tmp_path)
    assert done.returncode == 2
    assert "exists and is not empty" in done.stderr and "--resume" in done.stderr
    assert [path.name for path in taken.iterdir()] == ["thesis.txt"]


def test_resuming_needs_a_checkpoint_and_the_same_recipe(tiny_file: Path, tmp_path: Path) -> None:
    done = prime_rl("rl", "--config", tiny_file, "--resume", cwd=tmp_path)
    assert done.returncode == 2 and "no run of tiny under outputs/" in done.stderr
    assert (
        prime_rl("rl", "--config", tiny_file, "--set", "trainer.steps=2", cwd=tmp_path).returncode
        == 0
    )
    done = prime_rl(
        "rl", "--config", tiny_file, "--resume", "--set", "trainer.lr=5e-4", cwd=tmp_path
    )
    assert done.returncode == 2
    assert "trainer.lr" in done.stderr and "trainer.steps" in done.stderr


def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on(tiny_recipe: Raw, tmp_path: Path) -> None:
    path = tmp_path / "long.toml"
    path.write_text(toml(tiny_recipe(trainer__steps=2000, checkpoint__every=0)))
    metrics = tmp_path / "outputs" / "long" / "metrics.jsonl"
    done = interrupt_after(3, ["rl", "--config", path], tmp_path, metrics)
    assert done.returncode == 130, done.stderr
    assert "continue with --resume --output-dir outputs/long" in done.stdout
    (checkpoint,) = (tmp_path / "outputs" / "long" / "checkpoints").iterdir()
    last = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert checkpoint.name == f"step_{last:06d}"


def test_a_preflight_failure_leaves_no_run_directory_behind(
    tiny_recipe: Raw, tmp_path: Path
) -> None:
    path = tmp_path / "long_answers.toml"
    path.write_text(toml(tiny_recipe(rollout__max_tokens=120)))
    done = prime_rl("rl", "--config", path, cwd=tmp_path)
    assert done.returncode == 2
    assert "max_model_len" in done.stderr and "Traceback" not in done.stderr
    assert not list((tmp_path / "outputs").iterdir())


def test_report_draws_several_runs_and_refuses_what_is_no_run(
    tiny_file: Path, tmp_path: Path
) -> None:
    for seed in (0, 1):
        words = (
            "rl",
            "--config",
            tiny_file,
            "--set",
            f"trainer.seed={seed}",
            "--output-dir",
            f"run{seed}",
        )
        assert prime_rl(*words, cwd=tmp_path).returncode == 0
    done = prime_rl("report", "run0", "run1", "--output", "both.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "topk_reverse_kl" in line]
    assert ["run0" in rows[0], "run1" in rows[1]] == [True, True] and "→" in rows[0]
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    done = prime_rl("report", tmp_path / "nowhere")
    assert done.returncode == 2 and "is it a run directory?" in done.stderr


def test_export_writes_a_native_file_once_and_names_the_known_dialects(tmp_path: Path) -> None:
    path = tmp_path / "out.toml"
    words = (
        "export",
        RECIPE,
        "--set",
        "student.model=S",
        "--set",
        "teacher.model=T",
        "--output",
        path,
        "--dialect",
    )
    done = prime_rl(*words, "v1")
    assert done.returncode == 2 and "v0.6, v0.7, v0.8, head" in done.stderr and not path.exists()
    assert prime_rl(*words, "head").returncode == 0
    native = tomllib.loads(path.read_text())
    assert native["trainer"]["loss"]["import_path"] == "prime_composer.upstream.loss_fn"
    assert native["trainer"]["loss"]["kwargs"]["type"] == "topk_reverse_kl"
    done = prime_rl(*words, "v0.6")
    assert done.returncode == 2 and "exists and was left as it is" in done.stderr
    assert tomllib.loads(path.read_text()) == native


def test_the_prime_rl_engine_without_prime_rl_says_what_to_install() -> None:
    done = prime_rl("rl", "--config", RECIPE, "--engine", "prime-rl")
    assert done.returncode == 2 and "there is no prime-rl in this environment" in done.stderr


@pytest.mark.parametrize("missing", ["rich", "vllm"])
def test_a_missing_extra_is_one_message_with_the_pip_line(
    missing: str, tiny_recipe: Raw, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(toml(tiny_recipe(rollout__backend="vllm")))
    code = f"import sys; sys.modules[{missing!r}] = None; import prime_composer.cli.commands as c; sys.exit(c.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "rl", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "pip install 'prime-composer[local]'" in done.stderr and "Traceback" not in done.stderr


def test_prepare_says_where_the_models_are(tiny_file: Path, tmp_path: Path) -> None:
    done = prime_rl("prepare", "--config", tiny_file, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    paths = dict(
        line.split(": ")
        for line in done.stdout.splitlines()
        if line.startswith(("teacher: /", "student: /"))
    )
    assert set(paths) == {"teacher", "student"}
    assert all((Path(path) / "config.json").exists() for path in paths.values())


def test_auto_takes_the_local_engine_where_prime_rl_or_a_gpu_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_engine("auto") == ("local", "prime-rl is not installed here")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("prime_composer.cli.commands.has_nvidia_gpu", lambda: False)
    assert choose_engine("auto")[0] == "local"
    monkeypatch.setattr("prime_composer.cli.commands.has_nvidia_gpu", lambda: True)
    assert choose_engine("auto")[0] == "prime-rl"
    assert choose_engine("local") == ("local", "as asked")


def test_two_runs_that_start_at_once_never_share_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    claimed = [claim_run_dir(Path("r.toml"), None) for _ in range(3)]
    assert claimed == [Path("outputs/r"), Path("outputs/r-2"), Path("outputs/r-3")]


def test_the_environment_that_the_user_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from prime_composer.cli.commands import set_environment

    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    set_environment()
    assert os.environ["OMP_NUM_THREADS"] == "7"
