"""Commands that a signal, a full disk or another process ends, and the same command again."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_composer.cli import study as study_module
from prime_composer.cli.study_file import StudyRun
from prime_composer.local.checkpoint import list_checkpoints
from prime_composer.local.run import TrainingRun
from prime_composer.local.signals import Stopped, stopping_at_once
from prime_composer.recipe.loading import parse_recipe
from tests.command import CLI, toml
from tests.conftest import TINY_RECIPE
from tests.fork_server import Fork, ForkServer
from tests.local.helpers import failing

Raw = Callable[..., dict[str, Any]]
Cli = Callable[..., subprocess.CompletedProcess[str]]

LONG = {"trainer__steps": 2000, "checkpoint__every": 0}


@pytest.fixture
def long_file(tiny_recipe: Raw, tmp_path: Path) -> Path:
    """A recipe of 2000 steps whose first checkpoint is its last."""
    path = tmp_path / "long.toml"
    path.write_text(toml(tiny_recipe(**LONG)))
    return path


def start(*words: object, cwd: Path, **how: Any) -> subprocess.Popen[str]:
    command = [sys.executable, *CLI, *map(str, words)]
    return subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str] | Fork) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def steps_logged(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_text().count("\n") - 1 if metrics.exists() else -1


@pytest.mark.parametrize(
    "signum",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_signal_leaves_a_checkpoint_and_says_how_to_go_on(
    signum: int, long_file: Path, tmp_path: Path, engine_forks: ForkServer
) -> None:
    run_dir = tmp_path / "outputs" / "long"
    process = engine_forks.start(*CLI, "rl", "--config", long_file, cwd=tmp_path)
    wait_for(lambda: steps_logged(run_dir) > 2, process)
    process.send_signal(signum)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signum, err
    line = f"    prime-rl rl --config {long_file} --output-dir outputs/long --resume"
    assert f"is saved; continue with\n{line}\n" in out
    (checkpoint,) = list_checkpoints(run_dir)
    last = (run_dir / "metrics.jsonl").read_text().splitlines()[-1]
    assert checkpoint.step == json.loads(last)["step"]
    checkpoint.verify()


def test_line_of_a_stopped_run_can_be_pasted(
    cli: Cli,
    tiny_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It repeats recipe, engine and every --set, quoted for a shell; the run then ends."""
    path = tiny_file.rename(tmp_path / "my recipe.toml")
    options = ["--set", 'loss={type = "topk_reverse_kl", k = 3}', "--set", "trainer.steps=3"]
    words = ["rl", "--config", path.name, "--engine", "local", *options]
    with monkeypatch.context() as patched:
        failing(patched, TrainingRun, "update", 2, ValueError("the teacher is gone"))
        done = cli(*words, "--output-dir", "a run")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("    prime-rl")]
    pasted = shlex.split(line)
    assert pasted == ["prime-rl", *words, "--output-dir", "a run", "--resume"]
    done = cli(*pasted[1:])
    assert done.returncode == 0, done.stderr
    assert "run directory: a run, resuming after step 1" in done.stdout
    assert steps_logged(tmp_path / "a run") == 3


@pytest.mark.slow
def test_signal_twice_ends_at_once(long_file: Path, tmp_path: Path) -> None:
    """The second one does not wait for the step, nor for its checkpoint."""
    with start("rl", "--config", long_file, cwd=tmp_path) as process:
        wait_for(lambda: steps_logged(tmp_path / "outputs" / "long") > 1, process)
        for _ in range(2):
            process.terminate()
            time.sleep(0.002)
        status = process.wait(timeout=60)
        assert status in (128 + signal.SIGTERM, -signal.SIGTERM)
        assert process.stderr is not None and "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("output_dir", "cache", "words"),
    [
        ("/dev/null/run", None, ["/dev/null/run: Not a directory"]),
        ("run", "tiny.toml", ["tiny.toml/models", "Not a directory"]),
    ],
)
def test_place_that_cannot_be_written_is_one_sentence(
    output_dir: str,
    cache: str | None,
    words: list[str],
    cli: Cli,
    tiny_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if cache is not None:
        monkeypatch.setenv("PRIME_COMPOSER_CACHE", str(tmp_path / cache))
    done = cli("rl", "--config", tiny_file, "--output-dir", output_dir)
    assert done.returncode == 2 and [word for word in words if word not in done.stderr] == []
    assert len(done.stderr) < 400 + len(str(tmp_path)) and not (tmp_path / "run").exists()


def test_options_that_exclude_each_other_are_refused(cli: Cli, tiny_file: Path) -> None:
    words = ("rl", "--config", tiny_file)
    assert "goes with --resume" in cli(*words, "--step", 3).stderr
    assert "give one of them" in cli(*words, "--resume", "--overwrite").stderr
    done = cli(*words, "--overwrite", "--engine", "prime-rl")
    assert done.returncode == 2 and "belong to --engine local" in done.stderr


def test_finished_run_survives_its_drawing_and_a_damaged_file(
    cli: Cli,
    tiny_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run is complete without a figure; its newest checkpoint is then damaged on the disk."""
    from prime_composer.cli import figures

    def broken(*args: Any) -> None:
        raise RuntimeError("no font")

    words = ("rl", "--config", tiny_file, "--output-dir", "run")
    monkeypatch.setattr(figures, "draw_report", broken)
    done = cli(*words)
    assert done.returncode == 0 and "student after" in done.stdout
    assert "could not be drawn (no font); the run is complete" in done.stderr
    assert "plot: " not in done.stdout
    weights = tmp_path / "run" / "checkpoints" / "step_000004" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    done = cli(*words, "--resume")
    assert done.returncode == 2 and "step_000004/model.safetensors is not what" in done.stderr
    assert "--resume --step 2" in done.stderr
    done = cli(*words, "--resume", "--step", 2)
    assert done.returncode == 0 and "resuming after step 2" in done.stdout
    assert "after step 2 is now run/checkpoints/step_000004.aside" in done.stdout
    assert weights.read_bytes() == content


CHILD = """
import signal, sys, time
def note(signum, frame):
    print("got", signum, flush=True)
    sys.exit(128 + signum)
signal.signal(signal.SIGTERM, note)
print("ready", flush=True)
time.sleep(60)
"""


def test_study_passes_a_signal_on_to_its_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the study gets the signal; it waits for the checkpoints of its runs and stops."""
    recipe = parse_recipe(TINY_RECIPE)
    runs = [StudyRun(name, 0, recipe, (), tmp_path, tmp_path / f"{name}-seed0") for name in "abc"]
    logs = [run.log for run in runs[:2]]
    monkeypatch.setattr(study_module, "is_finished", lambda run: False)
    child, call = [sys.executable, "-c", CHILD], study_module.call
    monkeypatch.setattr(study_module, "start", lambda run, _: call(child, run.log, os.environ))

    def terminate() -> None:
        while not all(log.exists() and "ready" in log.read_text() for log in logs):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate, daemon=True)
    thread.start()
    with stopping_at_once(), pytest.raises(Stopped) as caught:
        study_module.run_all(runs, 2, [])
    thread.join()
    assert caught.value.signum == signal.SIGTERM
    for log in logs:
        assert log.read_text() == f"ready\ngot {signal.SIGTERM:d}\n"
    assert not runs[2].log.exists()
