"""The page on the one-machine run: its lines run."""

import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from prime_composer.cli.commands import build_parser

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "recipes" / "one_machine.md").read_text(encoding="utf-8")


def test_lines_of_the_page_name_what_exists() -> None:
    commands = re.findall(r"\$\(prime-rl (.+?)\)", PAGE)
    assert commands == ["completion bash", "completion zsh"]
    for command in commands:
        build_parser().parse_args(shlex.split(command))
    modules = re.findall(r"python -m ([\w.]+)", PAGE)
    assert modules and all(find_spec(module) for module in modules)
    imports = re.findall(r"from (prime_composer[\w.]*) import (\w+)", PAGE)
    assert imports and all(callable(getattr(import_module(a), b)) for a, b in imports)
