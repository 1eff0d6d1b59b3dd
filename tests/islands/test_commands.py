"""The commands of islands: what they refuse, what they would do, and one whole run of two."""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import prime_composer
from prime_composer.cli.commands import main
from prime_composer.cli.islands import run as islands
from tests.command import prime_rl, toml
from tests.islands.rig import tables
from tests.local.helpers import tiny_models, weights

Run = Callable[..., tuple[int, str]]
LIGHTHOUSE = ("--lighthouse", "http://127.0.0.1:1")


@pytest.fixture
def rl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``rl`` within this process, on two islands, and return its status and what it wrote."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str, **changes: Any) -> tuple[int, str]:
        Path("r.toml").write_text(toml(tables(**changes)))
        status = main(["rl", "--config", "r.toml", "--engine", "local", *words])
        return status, "".join(capsys.readouterr())

    return call


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--islands 2 starts all of them on this machine, and --island I --lighthouse URL one"),
        (("--island", "0"), "--island and --lighthouse go together"),
        (LIGHTHOUSE, "--island and --lighthouse go together"),
        (("--islands", "2", "--island", "0"), "--islands runs all of them here"),
        (("--islands", "3"), "--set diloco.replicas=3"),
        (("--island", "2", *LIGHTHOUSE), "name one of 0 to 1"),
        (("--island", "0", "--lighthouse", "10.0.0.1"), "http://HOST:PORT"),
        (("--engine", "prime-rl", "--islands", "2"), "islands belong to --engine local"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: tuple[str, ...], message: str, rl: Run) -> None:
    status, text = rl(*words)
    assert status == 2 and message in text, text
    assert not Path("outputs").exists()


def test_recipe_without_islands_says_how_to_have_some(
    rl: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("plain.toml").write_text(toml({k: v for k, v in tables().items() if k != "diloco"}))
    assert main(["rl", "--config", "plain.toml", "--engine", "local", "--islands", "2"]) == 2
    assert "add a table [diloco] with replicas = 2" in capsys.readouterr().err


def test_dry_run_names_the_folder_of_an_island(rl: Run) -> None:
    assert "run directory: outputs/r/island_1" in rl("--island", "1", *LIGHTHOUSE, "--dry-run")[1]
    status, text = rl("--islands", "2", "--output-dir", "here", "--dry-run")
    assert status == 0 and "2 islands" in text and "run directory: here/island_0" in text
    assert not Path("outputs").exists() and not Path("here").exists()


def test_distill_refuses_islands() -> None:
    with pytest.raises(ValueError, match="these are several runs"):
        prime_composer.distill(tables())


def test_without_torchft_a_sentence_says_what_to_install(
    rl: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    status, text = rl("--islands", "2")
    assert status == 2 and "Linux on x86_64 and Python 3.11 to 3.13" in text
    assert "diloco]" in text and not Path("outputs").exists()


def test_lighthouse_prints_the_command_of_its_islands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With every --set, and without an address that means another machine elsewhere."""
    monkeypatch.chdir(tmp_path)
    Path("r.toml").write_text(toml(tables()))
    monkeypatch.setattr(islands, "open_lighthouse", lambda *_: nullcontext("http://0.0.0.0:29510"))
    monkeypatch.setattr(islands.time, "sleep", Mock(side_effect=KeyboardInterrupt))
    words = ["lighthouse", "--config", "r.toml", "--set", "diloco.replicas=3", "--host", "0.0.0.0"]
    with suppress(KeyboardInterrupt):
        main(words)
    printed = capsys.readouterr().out
    assert "rl --config r.toml --set diloco.replicas=3 --island I --lighthouse" in printed
    assert "http://ADDRESS_OF_THIS_MACHINE:29510" in printed and "0.0.0.0" not in printed


def test_island_that_ends_with_an_error_is_named_with_the_way_on(
    rl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is stopped."""
    pytest.importorskip("torchft")
    program = tmp_path / "island.sh"
    program.write_text('#!/bin/sh\ncase "$*" in *"--island 1"*) exit 3;; *) exec sleep 60;; esac\n')
    program.chmod(0o755)
    monkeypatch.setattr(islands.sys, "executable", str(program))
    status, text = rl("--islands", "2")
    assert status == 3 and "island 1 ended with exit status 3" in text
    assert "island 0 ended by signal 15" in text
    _, _, command = text.partition("continue all of them with\n")
    assert "--islands 2 --output-dir outputs/r --resume" in command


@pytest.mark.slow
def test_two_islands_run_by_one_command(tmp_path: Path) -> None:
    """The documents' line. Island 0 has the evaluations, and both have the student."""
    raw = tables(trainer__steps=4)
    tiny_models(raw)
    (tmp_path / "r.toml").write_text(toml(raw))
    words = ("rl", "--config", "r.toml", "--engine", "local", "--islands", "2")
    done = prime_rl(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "island 0 | step 4/4" in done.stdout and "island 1 | student: " in done.stdout
    ours, theirs = (weights(tmp_path / "outputs" / "r" / f"island_{i}") for i in (0, 1))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    again = prime_rl(*words, cwd=tmp_path)
    assert again.returncode == 2 and "continue that run with --resume" in again.stderr


@pytest.mark.slow
def test_study_compares_islands(tmp_path: Path) -> None:
    """As many rollouts in one process as in two islands; a second start keeps both."""
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
