"""The program's name, version, overview, and its completion in real shells."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from prime_composer.cli.commands import TASKS, build_parser, main
from prime_composer.cli.program import NAMES, program
from tests.fork_server import REPO

LIGHT = """
import contextlib, sys
from prime_composer.cli.commands import main
for words in (["--version"], ["--help"], ["completion", "bash"], ["rl", "--help"]):
    with contextlib.suppress(SystemExit):
        main(words)
heavy = ("torch", "vllm", "transformers", "pydantic", "rich", "numpy")
print(sorted(name for name in heavy if name in sys.modules), file=sys.stderr)
"""


def test_what_a_prompt_waits_for_imports_nothing_heavy() -> None:
    """The version, help, a shell's completion, and the help of a command."""
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, cwd=REPO)
    assert done.stdout and done.stderr.splitlines()[-1] == "[]"


def test_no_command_prints_the_commands_by_task(capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr with status 2, as other programs do it where a command is missing."""
    assert main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    tasks = [line for line in lines if line.endswith(":") and line[0] != " "]
    assert tasks == [*(f"{task}:" for task in TASKS), "Options:"]
    named = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != "-"]
    assert named == build_parser().commands and len(set(named)) == len(named) > 11
    assert max(map(len, lines)) <= 80
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and capsys.readouterr().out == printed.err


def test_both_names_are_installed_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A usage line, an error and a line to paste have the name that the user typed."""
    scripts = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == dict.fromkeys(NAMES, "prime_composer.cli:main")
    for typed, shown in (
        ("/venv/bin/prime-rl", "prime-rl"),
        ("prime-composer", "prime-composer"),
        ("/site/prime_composer/__main__.py", "python -m prime_composer"),
        ("/venv/bin/pytest", "prime-rl"),
    ):
        monkeypatch.setattr(sys, "argv", [typed])
        assert program() == shown
        assert build_parser().format_usage().startswith(f"usage: {shown} ")


@pytest.mark.parametrize("typed", NAMES)
def test_messages_have_the_name_that_was_typed(
    typed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also the command lines within them, whichever of both the code has; prime-rl stays itself."""
    monkeypatch.setattr(sys, "argv", [f"/venv/bin/{typed}"])
    recipe = str(REPO / "recipes" / "gsm8k_opd.toml")
    words = ["export", recipe, "--dialect", "head", "--set", "student.prepare.seed=987"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{typed} export: ") and f"{typed} prepare --config" in said
    other = (
        "prime-rl teacher and prime-composer rl --engine prime-rl: prime-rl's trainer, rl @ FILE"
    )
    assert build_parser().as_called(other) == (
        f"{typed} teacher and {typed} rl --engine prime-rl: prime-rl's trainer, rl @ FILE"
    )


def test_rooms_of_prime_rl_name_the_other_command() -> None:
    """A user there reports `prime-rl doctor` to PRIME-RL."""
    commands = "|".join(each for task in TASKS.values() for each in task if each != "check")
    for path in sorted((REPO / "prime_composer" / "upstream").rglob("*")):
        if path.suffix in (".py", ".md"):
            found = re.findall(rf"\bprime-rl (?:{commands})\b[^\n]*", path.read_text())
            assert found == [], path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with recipes, other files and a folder."""
    for name in ("one.toml", "two words.toml", "notes.md", "sub/three.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


COMPLETIONS = {
    ("stu",): {"study"},
    ("rl", "--dr"): {"--dry-run"},
    ("rl", "--engine", ""): {"auto", "local", "prime-rl"},
    ("rl", "--config", ""): {"one.toml", "two words.toml", "sub"},
    ("check", "o"): {"one.toml"},
    ("report", ""): {"sub"},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("words", COMPLETIONS, ids=" ".join)
def test_bash_completes_without_starting_python(
    name: str,
    words: tuple[str, ...],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The script runs with an empty PATH: a completion starts no program at all."""
    assert main(["completion", "bash"]) == 0
    script = folder.parent / "completion.bash"
    script.write_text(capsys.readouterr().out)
    asks = f'source "{script}"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
    asks += 'rule=$(complete -p "$1"); rule=${rule##*-F }; compopt() { :; }; ${rule%% *}; '
    asks += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(
        [shutil.which("bash") or "bash", "--norc", "-c", asks, "bash", name, *words],
        cwd=folder,
        env={"PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.stderr == "" and set(done.stdout.splitlines()) == COMPLETIONS[words]
