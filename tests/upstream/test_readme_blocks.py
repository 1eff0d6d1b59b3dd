"""The blocks about prime-rl in both READMEs, run as they are written where they put the reader.

That is an unmodified prime-rl's environment and a folder without this repository's recipes. They
are read from the pages, not copied. Stand-ins on PATH for what a test cannot do: ``uv`` notes what
it would install (the environment has this package already), ``inference`` and ``prime-composer
teacher`` start no server, and ``rl`` and ``prime-composer rl`` get ``--dry-run``, so that prime-rl
checks everything and starts nothing. Whatever else they are given reaches the real programs.
"""

import re
import stat
import subprocess
from textwrap import dedent

import pytest

from prime_composer.cli.commands import build_parser
from tests.prime_rl_checkout import REPO
from tests.upstream.in_prime_rl import environment_of
from tests.upstream.make_venvs import python_of

PAGES = {
    "readme": (REPO / "README.md", "## Inside prime-rl", "\n| prime-rl | v0.6"),
    "guide": (REPO / "prime_composer/upstream/README.md", "# Inside prime-rl", "\n## The variable"),
    "whole": (REPO / "prime_composer/upstream/README.md", "### The whole", "\n### The teacher"),
    "doctor": (
        REPO / "prime_composer/upstream/README.md",
        "## Does it fit",
        "\n## Troubleshooting",
    ),
}
COMMANDS = ("uv", "prime-composer", "rl", "inference", "PRIME_COMPOSER")

STAND_INS = {
    "uv": 'echo "$@" >> uv.txt',
    "inference": 'echo "$@" >> inference.txt',
    "rl": 'exec PYTHON -m prime_rl.entrypoints.rl "$@" --dry-run',
    "prime-composer": """
        if [ "$1" = teacher ]; then echo "$@" >> teacher.txt; exit 0; fi
        if [ "$1" = rl ]; then set -- "$@" --dry-run; fi
        exec PYTHON -c "import sys; sys.argv[0] = 'prime-composer'
        from prime_composer.cli import main; sys.exit(main())" "$@"
    """,
}


def blocks(page):
    """Return the code blocks of a part of a page."""
    path, begin, end = PAGES[page]
    text = path.read_text().partition(begin)[2].partition(end)[0]
    found = re.findall(r"(?:^    .*\n)+", text, flags=re.MULTILINE)
    return [dedent(block) for block in found]


def native_tables():
    """Return the whole native TOML of the guide, as text."""
    (block,) = (block for block in blocks("guide") if "[orchestrator.algo]" in block)
    return block


@pytest.fixture
def shell(trees, tmp_path):
    """Run lines as a reader does, in a folder that has nothing but a TOML; return the process."""
    env = environment_of("head", trees, tmp_path)
    folder = tmp_path / "stand-ins"
    folder.mkdir()
    for name, text in STAND_INS.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{dedent(text).replace('PYTHON', str(python_of('head')))}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    env["PATH"] = f"{folder}:{env['PATH']}"
    work = tmp_path / "prime-rl"
    work.mkdir()
    (work / "opd.toml").write_text(native_tables())

    words = {"PATH": str(REPO), "CHECKOUT": str(trees("head")), "FILE": "opd.toml"}

    def run(lines):
        script = "set -e\n" + re.sub(r"\b(PATH|CHECKOUT|FILE)\b", lambda m: words[m[0]], lines)
        return subprocess.run(
            ["bash", "-c", script], cwd=work, env=env, capture_output=True, text=True, timeout=280
        )

    run.folder = work
    return run


def test_blocks_for_prime_rls_checkout_name_no_path_of_ours():
    """The reader is elsewhere: recipes are below PATH, and the command is prime-composer."""
    for page in PAGES:
        for block in blocks(page):
            for line in block.splitlines():
                assert not re.search(r"(?<!PATH/)\brecipes/", line), line
                assert not re.match(r"\s*prime-rl ", line), line
                if line.startswith("prime-composer ") and not line.endswith("\\"):
                    build_parser().parse_args(line.partition("#")[0].split()[1:])


@pytest.mark.upstream
@pytest.mark.parametrize("page", PAGES)
def test_blocks_run_where_the_reader_is(shell, page):
    """Every command of a page; the launcher's dry run accepts what it is given."""
    lines = [b for b in blocks(page) if b.startswith(COMMANDS)]
    assert lines
    done = shell("".join(lines))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    if page != "doctor":
        assert "dry run accepts the file" in done.stdout or "Dry run complete" in done.stdout
    if page in ("readme", "guide"):
        assert (shell.folder / "uv.txt").read_text() == f"pip install {REPO}\n"
