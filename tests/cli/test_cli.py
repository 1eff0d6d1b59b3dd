"""The command line, in processes of its own: what a user types, reads and finds on disk."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from prime_composer.cli.machine import choose_engine
from prime_composer.local.run_dir import HeldRunDir, InUse, RunRequest, claim_run_dir
from prime_composer.recipe.loading import parse_recipe
from tests.command import toml
from tests.fork_server import ForkServer

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "gsm8k_opd.toml"
LOCAL_MODELS = ("--set", "student.model=S", "--set", "teacher.model=T")
Raw = Callable[..., dict[str, Any]]
Cli = Callable[..., subprocess.CompletedProcess[str]]


def files_under(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_check_prints_the_resolved_recipe(cli: Cli) -> None:
    done = cli("check", RECIPE, "--set", "trainer.lr=1e-4")
    assert done.returncode == 0
    resolved = json.loads(done.stdout)
    assert resolved["trainer"]["lr"] == 1e-4
    assert resolved["trainer"]["max_grad_norm"] == 1.0
    assert resolved["loss"]["type"] == "topk_reverse_kl"


NATIVE = """[trainer.loss]
type = "custom"
import_path = "prime_composer.upstream.loss_fn"
[trainer.loss.kwargs]
type = "topk_reverse_kl"
k = 8
"""


@pytest.mark.parametrize(
    "change,words",
    [
        ("trainer.loss.kwargs.K=3", "did you mean 'k'"),
        ("trainer.loss.import_path=prime_composer.loss_fn", "prime_composer.upstream.loss_fn"),
    ],
)
def test_check_reads_a_native_toml(cli: Cli, tmp_path: Path, change: str, words: str) -> None:
    """The five lines of prime-rl's own TOML, without prime-rl."""
    (tmp_path / "native.toml").write_text(NATIVE)
    done = cli("check", tmp_path / "native.toml")
    shown = json.loads(done.stdout)
    assert shown["loss"]["normalization"] == "tail" and shown["k"] == 8
    assert shown["needs PRIME_COMPOSER"] and shown["asked_by"] == "orchestrator"
    done = cli("check", tmp_path / "native.toml", "--set", change)
    assert done.returncode == 2 and words in done.stderr


def test_report_names_a_launch_without_us(cli: Cli, tmp_path: Path) -> None:
    """Of a run inside prime-rl whose trainer left no mark and has trained."""
    (tmp_path / "prime_composer" / "launch_1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_3").mkdir(parents=True)
    done = cli("report", tmp_path)
    assert "launch_1" in done.stderr and "without this package" in done.stderr


def test_check_imports_nothing_heavy_beside_torch(torch_forks: ForkServer) -> None:
    heavy = ("vllm", "transformers", "httpx", "rich", "matplotlib", "datasets", "tensorboard")
    code = f"import sys; from prime_composer.cli import main; main(['check', {str(RECIPE)!r}])"
    code += f"; print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    done = torch_forks.run("-c", code)
    assert done.returncode == 0 and done.stderr.strip() == "[]"


def test_a_wrong_recipe_is_one_message_with_status_2(cli: Cli, tmp_path: Path) -> None:
    done = cli("check", RECIPE, "--set", "trainer.step=3")
    assert done.returncode == 2
    assert "unknown key trainer.step; did you mean steps?" in done.stderr
    assert "Traceback" not in done.stderr
    assert cli("check", tmp_path / "absent.toml").returncode == 2


def test_a_run_ends_with_a_table_a_plot_and_its_directory(
    tiny_file: Path, tmp_path: Path, cli: Cli
) -> None:
    """A report draws it beside another one, and refuses what is no run."""
    done = cli("rl", "--config", tiny_file, "--engine", "local")
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "outputs" / "tiny"
    texts = ("student before", "student after", "reverse KL", "outputs/tiny", "preflight passed")
    assert [text for text in texts if text not in done.stdout] == []
    assert (run_dir / "report.png").read_bytes().startswith(b"\x89PNG")
    assert {"metrics.jsonl", "recipe.json", "checkpoints"} <= files_under(run_dir)
    shutil.copytree(run_dir, "run1")
    done = cli("report", "outputs/tiny", "run1", "--output", "both.png")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "topk_reverse_kl" in line]
    assert ["tiny" in rows[0], "run1" in rows[1]] == [True, True] and "→" in rows[0]
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    done = cli("report", tmp_path / "nowhere")
    assert done.returncode == 2 and "is it a run directory?" in done.stderr


def test_rl_that_cannot_run_is_refused_before_preparing(
    cli: Cli, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for small models to be trained, only to read that vLLM is missing."""
    from prime_composer.cli import runs
    from prime_composer.local import requirements

    prepared: list[Any] = []
    monkeypatch.setattr(runs, "prepare_models", lambda *args, **kw: prepared.append(args) or {})
    monkeypatch.setattr(requirements, "find_spec", lambda name: None if name == "vllm" else name)
    change = "rollout.backend='vllm'"
    done = cli("rl", "--config", tiny_file, "--engine", "local", "--set", change)
    assert done.returncode == 2 and not prepared
    assert "this recipe needs vllm: pip install" in done.stderr and "[local]'" in done.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=["run", "dry"])
def test_a_directory_that_is_not_empty_is_left_alone(
    options: tuple[str, ...], cli: Cli, tiny_file: Path, tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.txt").write_text("mine")
    done = cli("rl", "--config", tiny_file, "--output-dir", taken, *options)
    assert done.returncode == 2
    assert "exists and is not empty" in done.stderr and "--resume" in done.stderr
    assert files_under(taken) == {"thesis.txt"}


def test_resume_needs_a_checkpoint_and_the_same_recipe(
    cli: Cli, tiny_file: Path, tmp_path: Path
) -> None:
    """A dry run says where it would continue, and that another run gets a name of its own."""
    words = ("rl", "--config", tiny_file)
    for dry in ((), ("--dry-run",)):
        done = cli(*words, "--resume", *dry)
        assert done.returncode == 2 and "no run of tiny under outputs/" in done.stderr
    assert cli(*words, "--set", "trainer.steps=3").returncode == 0
    before = files_under(tmp_path)
    done = cli(*words, "--resume", "--set", "trainer.lr=5e-4")
    assert done.returncode == 2
    assert "trainer.lr" in done.stderr and "trainer.steps" in done.stderr
    done = cli(*words, "--set", "trainer.steps=3", "--dry-run", "--resume")
    assert "run directory: outputs/tiny, resuming after step 3" in done.stdout, done.stderr
    assert "run directory: outputs/tiny-2\n" in cli(*words, "--dry-run").stdout
    assert files_under(tmp_path) == before


def test_a_failed_preflight_leaves_no_run_directory(
    cli: Cli, tiny_recipe: Raw, tmp_path: Path
) -> None:
    path = tmp_path / "long_answers.toml"
    path.write_text(toml(tiny_recipe(rollout__max_tokens=120)))
    done = cli("rl", "--config", path)
    assert done.returncode == 2
    assert "max_model_len" in done.stderr and "Traceback" not in done.stderr
    assert not list((tmp_path / "outputs").iterdir())


def test_dry_run_prints_the_plan_and_writes_nothing(
    cli: Cli, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the run directory nor a small model is made, and the directory is named."""
    monkeypatch.setenv("PRIME_COMPOSER_CACHE", str(tmp_path / "cache"))
    done = cli("rl", "--config", tiny_file, "--engine", "local", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "run directory: outputs/tiny\n" in done.stdout
    assert "topk_reverse_kl" in done.stdout
    assert "nothing was run, nothing was written" in done.stdout
    assert files_under(tmp_path) == {"tiny.toml"}


def test_export_writes_a_new_file_and_names_the_dialects(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "out.toml"
    words = ("export", RECIPE, *LOCAL_MODELS, "--output", path, "--dialect")
    done = cli(*words, "v1")
    assert done.returncode == 2 and "head, v0.9, main" in done.stderr and not path.exists()
    assert cli(*words, "head").returncode == 0
    native = tomllib.loads(path.read_text())
    assert native["trainer"]["loss"]["import_path"] == "prime_composer.upstream.loss_fn"
    assert native["trainer"]["loss"]["kwargs"]["type"] == "topk_reverse_kl"
    done = cli(*words, "v0.9")
    assert done.returncode == 2 and "--force" in done.stderr
    assert tomllib.loads(path.read_text()) == native
    assert cli(*words, "v0.9", "--force").returncode == 0
    assert tomllib.loads(path.read_text())["orchestrator"]["algo"]["type"] == "opd"
    # As `rl --engine prime-rl` names it.
    assert native["output_dir"] == "outputs" and native["run"]["name"] == Path(RECIPE).stem


def test_prime_rl_engine_without_prime_rl_is_refused(cli: Cli) -> None:
    done = cli("rl", "--config", RECIPE, "--engine", "prime-rl")
    assert done.returncode == 2 and "there is no prime-rl in this environment" in done.stderr


def test_a_missing_extra_is_one_message_with_the_pip_line(
    tiny_file: Path, tmp_path: Path, torch_forks: ForkServer
) -> None:
    code = "import sys; sys.modules['rich'] = None; from prime_composer.cli import main; "
    code += "sys.exit(main(sys.argv[1:]))"
    done = torch_forks.run("-c", code, "rl", "--config", tiny_file, cwd=tmp_path)
    assert done.returncode == 2
    assert f"pip install -e '{ROOT}[local]'" in done.stderr and "Traceback" not in done.stderr


def test_prepare_says_where_the_models_are(cli: Cli, tiny_file: Path) -> None:
    done = cli("prepare", "--config", tiny_file)
    assert done.returncode == 0, done.stderr
    paths = dict(
        line.split(": ")
        for line in done.stdout.splitlines()
        if line.startswith(("teacher: /", "student: /"))
    )
    assert set(paths) == {"teacher", "student"}
    assert all((Path(path) / "config.json").exists() for path in paths.values())


def test_auto_engine_needs_prime_rl_and_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_composer.cli.machine.find_spec", lambda name: None)
    assert choose_engine("auto") == ("local", "prime-rl is not installed here")
    monkeypatch.setattr("prime_composer.cli.machine.find_spec", lambda name: object())
    monkeypatch.setattr("prime_composer.cli.machine.has_nvidia_gpu", lambda: False)
    assert choose_engine("auto")[0] == "local"
    monkeypatch.setattr("prime_composer.cli.machine.has_nvidia_gpu", lambda: True)
    assert choose_engine("auto")[0] == "prime-rl"
    assert choose_engine("local") == ("local", "as asked")


def test_runs_that_start_at_once_get_separate_directories(
    tiny_recipe: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight threads claim at the same moment: eight directories, or one where one was named."""
    monkeypatch.chdir(tmp_path)
    recipe = parse_recipe(tiny_recipe())
    at_once = Barrier(8)

    def claim(explicit: str | None) -> HeldRunDir | None:
        at_once.wait()
        try:
            return claim_run_dir(RunRequest(recipe, Path("r.toml"), explicit))
        except InUse as error:
            assert f"process {os.getpid()} on " in str(error)
            return None

    with ThreadPoolExecutor(8) as pool:
        run_dirs = {claimed.path for claimed in list(pool.map(claim, [None] * 8)) if claimed}
        assert run_dirs == {Path("outputs/r"), *(Path(f"outputs/r-{n}") for n in range(2, 9))}
        claims = [claimed for claimed in pool.map(claim, ["named"] * 8) if claimed]
        assert [claimed.path for claimed in claims] == [Path("named")]


ISLANDS = ("--set", "diloco={replicas = 2, every = 1}")
LIGHTHOUSE = ("--lighthouse", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (ISLANDS, "--islands 2 starts all of them on this machine, and --island I --lighthouse"),
        ((*ISLANDS, "--island", "0"), "--island and --lighthouse go together"),
        ((*ISLANDS, "--islands", "2", "--island", "0"), "--islands runs all of them here"),
        ((*ISLANDS, "--islands", "3"), "give --islands 2"),
        ((*ISLANDS, "--island", "2", *LIGHTHOUSE), "--island with one of 0 to 1"),
        ((*ISLANDS, "--island", "0", "--lighthouse", "10.0.0.1"), "http://HOST:PORT"),
        ((*ISLANDS, "--engine", "prime-rl", "--islands", "2"), "islands belong to --engine local"),
        (("--islands", "2"), "add a table [diloco] with replicas = 2"),
        ((*ISLANDS, "--islands", "2"), "diloco]"),
    ],
)
def test_options_of_islands_that_do_not_fit_are_refused(
    words: tuple[str, ...], message: str, tiny_file: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As is an environment without torchft, with what to install."""
    monkeypatch.setitem(sys.modules, "torchft", None)
    done = cli("rl", "--config", tiny_file, "--engine", "local", *words)
    assert done.returncode == 2 and message in done.stdout + done.stderr


def test_islands_of_which_one_fails_are_all_stopped(
    tiny_file: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed one is named with its exit status, and the line that continues all of them."""
    pytest.importorskip("torchft")
    island = tmp_path / "island.sh"
    island.write_text('#!/bin/sh\ncase "$*" in *"--island 1"*) exit 3;; *) exec sleep 60;; esac\n')
    island.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(island))
    words = ("--islands", "2", "--output-dir", tmp_path / "out")
    (tmp_path / "out" / "island_0" / "checkpoints" / "step_000002").mkdir(parents=True)
    done = cli("rl", "--config", tiny_file, "--engine", "local", *ISLANDS, *words)
    assert done.returncode == 3
    assert "island 1 ended with exit status 3" in done.stdout
    assert "island 0 ended by signal 15" in done.stdout
    _, _, command = done.stdout.partition("all islands: step 2 is saved; continue with\n")
    assert command.endswith(f"--islands 2 --output-dir {tmp_path / 'out'} --resume\n")


def test_island_without_a_lighthouse_says_how_to_start_one(
    tiny_file: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchft")
    monkeypatch.setattr("prime_composer.local.islands.join.FIRST_SECONDS", 0.5)
    words = ("--island", "0", "--lighthouse", "http://user:word@127.0.0.1:1")
    done = cli("rl", "--config", tiny_file, "--engine", "local", *ISLANDS, *words)
    assert done.returncode == 2 and "http://***@127.0.0.1:1: no lighthouse" in done.stderr
    assert "lighthouse --config" in done.stderr
