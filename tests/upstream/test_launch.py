"""``--engine prime-rl``: prime-rl's own launcher, on a recipe or on a native TOML, with the adapter on."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from prime_composer.recipe.schema import RecipeError
from prime_composer.upstream import launch
from prime_composer.upstream.versions import VERSIONS
from tests.prime_rl_checkout import REPO
from tests.upstream.e2e import launch_run
from tests.upstream.make_venvs import python_of


def test_without_prime_rl_it_says_where_to_install_the_package(tmp_path):
    if launch.has_prime_rl():
        pytest.skip("prime-rl is importable here")
    with pytest.raises(RecipeError, match="no prime-rl in this environment"):
        launch.launch(tmp_path / "any.toml")


@pytest.mark.parametrize(
    "table,native",
    [
        ("[student]\nmodel='m'\n[orchestrator]", False),
        ("[orchestrator]\nbatch_size=1", True),
        ("", False),
    ],
)
def test_a_native_file_is_told_from_a_recipe(table, native):
    assert launch.is_native(tomllib.loads(table)) is native


def test_every_child_of_the_launcher_inherits_the_switch_and_finds_this_environments_commands(
    monkeypatch,
):
    monkeypatch.delenv("PRIME_COMPOSER", raising=False)
    command, env = launch.command_and_environment(
        Path("x.toml"), {"loss": {"type": "topk_reverse_kl"}}, dry_run=True
    )
    assert command[1:] == ["-m", "prime_rl.entrypoints.rl", "@", "x.toml", "--dry-run"]
    assert json.loads(env["PRIME_COMPOSER"]) == {"loss": {"type": "topk_reverse_kl"}}
    assert env["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    named = '{"loss": {"type": "taid", "total_steps": 5}}'
    for before, after in ((None, "1"), ("0", "1"), ("1", "1"), (named, named)):
        if before is not None:
            monkeypatch.setenv("PRIME_COMPOSER", before)
        assert launch.command_and_environment(Path("x.toml"), {})[1]["PRIME_COMPOSER"] == after


def test_resuming_is_said_in_each_dialects_words():
    old, new = {"ckpt": {"interval": 5}}, {}
    launch.ask_to_resume(old, "v0.8")
    launch.ask_to_resume(new, "head")
    assert old == {"ckpt": {"interval": 5, "resume_step": -1}} and new == {"resume": {}}


def test_a_native_file_for_slurm_is_told_how_to_keep_the_package(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for name, value in (
        ("has_prime_rl", lambda: True),
        ("check_pth", lambda: None),
        ("probe_version", lambda: VERSIONS["head"]),
    ):
        monkeypatch.setattr(launch, name, value)
    monkeypatch.setattr(launch.subprocess, "call", lambda command, env: 0)
    file = tmp_path / "native.toml"
    file.write_text("[orchestrator]\nbatch_size = 1\n[slurm]\njob_name = 'x'\n")
    assert launch.launch(file) == 0 and "uv pip install prime-composer" in capsys.readouterr().err
    assert launch.launch(file, ["slurm.pre_run_command=make"]) == 0 and not capsys.readouterr().err


RECIPE = """
[student]
model = "Qwen/Qwen3-0.6B"
[teacher]
model = "Qwen/Qwen3-4B"
url = "http://localhost:8001"
[loss]
type = "topk_reverse_kl"
k = 8
[rollout]
max_tokens = 64
[data]
source = "generated"
[trainer]
steps = 3
batch_size = 8
"""
CODE = (
    "import sys; from prime_composer.upstream.launch import launch; "
    "sys.exit(launch(sys.argv[1], sys.argv[2:], 'outputs/here', dry_run=True))"
)


@pytest.mark.parametrize("version", ["v0.6.0", "newest"])
def test_prime_rls_launcher_takes_a_recipe_and_then_its_own_native_export(trees, tmp_path, version):
    python = python_of("v0.6" if version == "v0.6.0" else "newest")
    if not python.exists():
        pytest.skip("no environment for it (python tests/upstream/make_venvs.py)")
    env = launch_run.environment(str(python), trees(version), tmp_path)
    del env["PRIME_CPU_RIG"]
    recipe = tmp_path / "mine.toml"
    recipe.write_text(RECIPE)
    native = tmp_path / "outputs" / "mine.prime_rl.toml"
    # The second file is the first one's export: a native TOML, passed through.
    for file, override, k in ((recipe, "loss.k=4", 4), (native, "trainer.loss.kwargs.k=6", 6)):
        command = [str(python), "-c", CODE, str(file), override]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert "Dry run complete" in done.stdout + done.stderr
        written = tmp_path / "outputs" / f"{file.stem}.prime_rl.toml"
        assert tomllib.loads(written.read_text())["trainer"]["loss"]["kwargs"]["k"] == k
        assert written.read_text().startswith("# Written by prime_composer") is (file == recipe)
    assert REPO.exists()
