"""The README: its length, its code, its paths and its command lines."""

import re
import shlex
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest

from prime_composer.cli.commands import build_parser

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def is_code(line: str) -> bool:
    """Code blocks are indented by four spaces."""
    return line.startswith("    ")


def prose() -> str:
    return "\n".join(line for line in README.splitlines() if not is_code(line))


def code_blocks() -> list[str]:
    """Each block of indented lines, without the indentation."""
    blocks = re.findall(r"(?:^(?:    .*)?\n)+", README, flags=re.MULTILINE)
    texts = ["\n".join(line[4:] for line in block.splitlines()).strip() for block in blocks]
    return [text for text in texts if text]


def block_with(text: str) -> str:
    (block,) = (block for block in code_blocks() if text in block)
    return block


def commands() -> list[str]:
    """Every command line of the program, in code blocks and between backticks."""
    lines = [line for block in code_blocks() for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", prose())
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [part for part in parts if part.startswith(("prime-rl ", "prime-composer "))]


def paths() -> list[str]:
    """Every relative link, and every path between backticks."""
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", prose())]
    folders = "|".join(
        path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] not in "._"
    )
    named = re.findall(rf"`((?:{folders})/[^`\s]*|[\w.-]+\.(?:md|toml|py))`", prose())
    in_commands = re.findall(rf"(?:{folders})/\S+", "\n".join(commands()))
    every = [*links, *named, *in_commands]
    return sorted({path for path in every if path and not path.startswith(("http", "outputs/"))})


def test_readme_paths_exist() -> None:
    assert paths() and [path for path in paths() if not (ROOT / path).exists()] == []


def test_readme_command_lines_parse() -> None:
    assert commands()
    for command in commands():
        build_parser().parse_args(shlex.split(command, comments=True)[1:])


def test_python_block_of_the_losses_runs_and_its_comment_holds() -> None:
    names: dict[str, Any] = {}
    page = (ROOT / "prime_composer" / "losses" / "README.md").read_text(encoding="utf-8")
    code = textwrap.dedent(page.partition("## Use a loss in Python\n")[2])
    exec(compile(code, "README.md", "exec"), names)
    printed = re.search(r"p\.grad is (\[.*?\])", code)
    assert printed is not None
    expected = [float(number) for number in printed[1].strip("[]").split(",")]
    assert names["p"].grad.tolist() == pytest.approx(expected)


def test_readme_toml_lines_name_a_loss_of_ours() -> None:
    import prime_composer.upstream
    from prime_composer.losses import LOSS_TYPES

    block = block_with("[trainer.loss]")
    assert len(block.splitlines()) == 5
    loss = tomllib.loads(block)["trainer"]["loss"]
    module, _, name = loss["import_path"].rpartition(".")
    assert module == prime_composer.upstream.__name__ and hasattr(prime_composer.upstream, name)
    assert loss["kwargs"]["type"] in LOSS_TYPES


def test_readme_table_of_losses_names_losses_of_ours() -> None:
    from prime_composer.losses import LOSS_TYPES

    (table,) = re.findall(
        r"^\| `type` \| loss \|\n\|---\|---\|\n((?:\|.*\n)+)", README, re.MULTILINE
    )
    names = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert len(names) == 6 and set(names) <= set(LOSS_TYPES)
