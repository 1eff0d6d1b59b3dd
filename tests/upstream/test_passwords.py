"""A password in a server's URL: in the one file that a launcher reads, and nowhere else."""

import stat
import subprocess

import pytest
import tomli_w

from prime_composer.cli.commands import main
from prime_composer.upstream import launch
from prime_composer.upstream.versions.records import VERSIONS
from tests.upstream.export_recipes import tables

WITH_PASSWORD = "http://me:secret@host:8001"


def recipe_file(folder, teachers):
    """Write a recipe whose servers all have a password, one of them behind a gateway."""
    raw = tables(rollout={"backend": "server", "url": WITH_PASSWORD})
    raw["teacher"]["url"] = "http://me:secret@gateway"
    if teachers == 2:
        raw["teachers"] = {name: {**raw["teacher"]} for name in "ab"}
        del raw["teacher"]
    path = folder / "mine.toml"
    path.write_text(tomli_w.dumps(raw))
    return path


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("teachers", [1, 2])
def test_export_to_stdout_has_no_password(teachers, tmp_path, capsys):
    """The screen shows ***, and stderr says how to get a file with the password."""
    path = recipe_file(tmp_path, teachers)
    assert main(["export", str(path), "--dialect", "head"]) == 0
    shown = capsys.readouterr()
    assert "secret" not in shown.out + shown.err
    assert "http://***@host:8001/v1" in shown.out and "http://***@gateway/v1" in shown.out
    assert "--output FILE" in shown.err


@pytest.mark.parametrize("table,variable", [("rollout", "STUDENT_KEY"), ("teacher", "MATH_KEY")])
def test_export_of_password_and_api_key_is_refused(table, variable, tmp_path, monkeypatch, capsys):
    """prime-rl would drop the key, and say nothing."""
    raw = tables(rollout={"backend": "server", "url": WITH_PASSWORD, "api_key_var": "STUDENT_KEY"})
    raw["teacher"] |= {"url": WITH_PASSWORD, "api_key_var": "MATH_KEY"}
    path = tmp_path / "mine.toml"
    path.write_text(tomli_w.dumps(raw))
    assert main(["export", str(path), "--dialect", "head"]) == 0
    monkeypatch.setenv(variable, "key")
    assert main(["export", str(path), "--dialect", "head"]) == 2
    shown = capsys.readouterr().err
    message = (
        f"The url in [{table}] has a user or password, and the environment variable {variable}"
    )
    assert message in " ".join(shown.split()) and "secret" not in shown


@pytest.mark.parametrize("private", [True, False])
def test_export_with_a_password_is_private(tmp_path, capsys, private):
    """It is outside of the comment, and the file its owner's alone; others have the usual mode."""
    path, output = tmp_path / "mine.toml", tmp_path / "native.toml"
    path.write_text(tomli_w.dumps(tables()))
    if private:
        recipe_file(tmp_path, 2)
    assert main(["export", str(path), "--dialect", "head", "--output", str(output)]) == 0
    comment = "".join(line for line in output.read_text().splitlines() if line.startswith("#"))
    assert (WITH_PASSWORD in output.read_text()) is private and "secret" not in comment
    assert mode(output) == (0o600 if private else mode(path))
    shown = capsys.readouterr()
    assert "secret" not in shown.out + shown.err


def test_launch_keeps_the_password_in_a_private_file(tmp_path, monkeypatch, capfd):
    """Also where a readable file of the same name is replaced. A dry run shows ***."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "has_prime_rl", lambda: True)
    monkeypatch.setattr(launch, "check_pth", lambda: None)
    monkeypatch.setattr(launch, "probe_version", lambda: VERSIONS["head"])
    monkeypatch.setattr(launch.subprocess, "call", lambda command, env: 0)
    refused = subprocess.CompletedProcess([], 1, f"base_url={WITH_PASSWORD!r} is wrong", "")
    monkeypatch.setattr(launch.subprocess, "run", lambda *args, **kwargs: refused)
    path = recipe_file(tmp_path, 1)
    kept = tmp_path / "outputs" / "mine.prime_rl.toml"
    kept.parent.mkdir()
    kept.write_text("older")
    kept.chmod(0o644)
    assert launch.launch(path) == 0
    assert WITH_PASSWORD in kept.read_text() and mode(kept) == 0o600
    assert launch.launch(path, dry_run=True) == 1
    shown = capfd.readouterr()
    assert "secret" not in shown.out + shown.err and "***@host" in shown.out
