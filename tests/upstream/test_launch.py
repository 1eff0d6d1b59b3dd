"""Launch with ``--engine prime-rl``: a recipe or a native TOML, started or dry-run."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w

from prime_composer.recipe.schema import RecipeError
from prime_composer.upstream import launch
from prime_composer.upstream.versions.records import VERSIONS
from tests.prime_rl_checkout import REPO
from tests.upstream.export_recipes import tables
from tests.upstream.in_prime_rl import environment_of
from tests.upstream.make_venvs import python_of

NATIVE = "[orchestrator]\nbatch_size = 1\n[slurm]\njob_name = 'x'\n"


@pytest.fixture
def no_prime_rl(monkeypatch):
    """Act as an environment without prime-rl."""
    monkeypatch.setattr(launch, "has_prime_rl", lambda: False)


@pytest.fixture
def some_prime_rl(monkeypatch, tmp_path):
    """Act as head's environment in an empty folder; return the commands that are started."""
    started = []

    def call(command, env):
        started.append((command, env))
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PRIME_COMPOSER", raising=False)
    monkeypatch.setattr(launch, "has_prime_rl", lambda: True)
    monkeypatch.setattr(launch, "check_pth", lambda: None)
    monkeypatch.setattr(launch, "probe_version", lambda: VERSIONS["head"])
    monkeypatch.setattr(launch.subprocess, "call", call)
    return started


def write_recipe(folder, **changes):
    """Write the tests' recipe with a student for which prime-rl has a renderer."""
    path = folder / "mine.toml"
    path.write_text(tomli_w.dumps(tables(student={"model": "Qwen/Qwen3-0.6B"}, **changes)))
    return path


def test_launch_recipe_names_the_loss_in_the_file(some_prime_rl, tmp_path):
    """Children inherit the switch, and find this environment's commands first."""
    assert launch.launch(write_recipe(tmp_path)) == 0
    ((command, env),) = some_prime_rl
    file = tmp_path / "outputs" / "mine.prime_rl.toml"
    assert command[1:] == ["-m", "prime_rl.entrypoints.rl", "@", "outputs/mine.prime_rl.toml"]
    table = tomllib.loads(file.read_text())
    assert env["PRIME_COMPOSER"] == "1"
    assert table["trainer"]["loss"]["kwargs"] == {"type": "topk_reverse_kl", "k": 16}
    assert table["output_dir"] == "outputs" and table["run"] == {"name": "mine"}
    assert file.read_text().startswith("# Written by prime_composer")
    assert env["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


OWN = '{"loss": {"type": "taid", "total_steps": 5}}'


@pytest.mark.parametrize("before,after", [("0", "1"), (OWN, OWN)])
def test_launch_native_keeps_a_loss_in_the_environment(
    some_prime_rl, tmp_path, monkeypatch, before, after
):
    monkeypatch.setenv("PRIME_COMPOSER", before)
    (tmp_path / "native.toml").write_text(NATIVE)
    assert launch.launch(tmp_path / "native.toml") == 0
    assert some_prime_rl[0][1]["PRIME_COMPOSER"] == after


def test_dry_run_without_prime_rl_prints_the_export(no_prime_rl, tmp_path, monkeypatch, capsys):
    """Models that would be built have a placeholder. Then it says that prime-rl is missing."""
    monkeypatch.chdir(tmp_path)
    recipe = REPO / "recipes" / "gsm8k_opd.toml"
    with pytest.raises(RecipeError, match="no prime-rl in this environment"):
        launch.launch(recipe, ["trainer.seed=3"], dry_run=True)
    output = capsys.readouterr()
    for part in (
        f"export PRIME_COMPOSER=@{tmp_path}/outputs/gsm8k_opd.prime_rl.toml",
        'name = "<built by prime-composer prepare: student>"',
    ):
        assert part in output.out
    assert "not carried to prime-rl: " in output.err
    assert list(tmp_path.iterdir()) == []


def resolved_by(output):
    """Return the settings of a dry run, as a shell reads the line that is printed to be pasted."""
    (line,) = (line for line in output.splitlines() if "export PRIME_COMPOSER=" in line)
    done = subprocess.run(
        ["sh", "-c", f"{line}; printenv PRIME_COMPOSER"], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


CODE = """
import sys
from prime_composer.upstream.launch import launch

sys.exit(launch(sys.argv[1], sys.argv[2:], "runs/here", resume=True, dry_run=True))
"""


@pytest.mark.upstream
@pytest.mark.xdist_group("prime-rl's launcher")
def test_dry_run_with_prime_rl_checks_a_recipe_and_its_export(trees, tmp_path):
    """The second file is the first one's export, a native TOML. Nothing is left behind."""
    env = environment_of("head", trees, tmp_path)
    work, native = tmp_path / "work", tmp_path / "native.toml"
    work.mkdir()
    recipe = write_recipe(tmp_path)
    # prime-rl has to refuse a wrong file, or its verdict says nothing.
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[orchestrator]\nno_such_key = 1\n")
    for file, override, k in ((recipe, "loss.k=4", 4), (native, "trainer.loss.kwargs.k=6", 6)):
        command = [str(python_of("head")), "-c", CODE, str(file), override]
        done = subprocess.run(
            command, cwd=work, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert "prime-rl: head\n" in done.stdout
        assert "prime-rl's own dry run accepts the file" in done.stdout
        assert resolved_by(done.stdout)["k"] == k
        body = done.stdout.partition("\nfile: ")[2].partition("\n\n")[2]
        text = body.rpartition("prime-rl's own dry run")[0]
        assert tomllib.loads(text)["trainer"]["loss"]["kwargs"]["k"] == k
        table = tomllib.loads(text)
        table.pop("resume", None)
        native.write_text(tomli_w.dumps(table))
        assert list(work.iterdir()) == []
    command = [str(python_of("head")), "-c", CODE, str(wrong)]
    done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no-such-key" in done.stderr
    assert "refuses the file" in done.stdout and list(work.iterdir()) == []
