"""Write the table of losses as Markdown, from the first lines of their docstrings.

python -m docs.losses                  # print it
python -m docs.losses --write FILE     # renew it between the markers of FILE
python -m docs.losses --check FILE     # fail if FILE is stale

The page is prime_composer/losses/README.md, whose links are names of files of its folder.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prime_composer.losses.registry import LOSS_TYPES

BEGIN = "<!-- table: begin, from python -m docs.losses --write FILE -->"
END = "<!-- table: end -->"


def loss_table() -> str:
    """Return one row per loss of the package: type, first line of its docstring, needs."""
    rows = ["| `type` | loss | needs |", "|---|---|---|"]
    for name, config in built_in_losses().items():
        file = config.__module__.rpartition(".")[2]
        summary = summary_of(config).rstrip(".").replace("||", "‖")
        rows.append(f"| [`{name}`]({file}.py) | {summary} | {_needs(config)} |")
    return "\n".join(rows) + "\n"


def built_in_losses() -> dict[str, type[Any]]:
    """Return the configs by type, without losses from outside that this process has registered."""
    return {name: config for name, config in LOSS_TYPES.items() if ":" not in name}


def summary_of(config: type[Any]) -> str:
    """Return the first line of what documents a loss: its file, or its class within a family."""
    file = sys.modules[config.__module__]
    name = config.model_fields["type"].default
    documented = file if file.__name__.endswith(f".{name}") else config
    return (documented.__doc__ or "").partition("\n")[0]


def between_markers(page: str, begin: str, end: str, content: str) -> str:
    """Return a page with other content between two lines, which it has to have."""
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the page needs the lines {begin!r} and {end!r}")
    return f"{before}{begin}\n\n{content}\n{end}{after}"


def page_parser(description: str) -> argparse.ArgumentParser:
    """Return the parser of a program that generates a part of a page."""
    parser = argparse.ArgumentParser(description=description)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--write", type=Path, metavar="FILE", help="renew it in FILE")
    choice.add_argument("--check", type=Path, metavar="FILE", help="fail if FILE is stale")
    return parser


def generate(
    program: str, markers: tuple[str, str], content: str, options: argparse.Namespace
) -> int:
    """Print, write or check what ``python -m program`` generates. Return the exit status."""
    path = options.write or options.check
    if path is None:
        print(content, end="")
        return 0
    page = path.read_text(encoding="utf-8")
    current = between_markers(page, *markers, content)
    if options.write is not None:
        path.write_text(current, encoding="utf-8")
    elif page != current:
        print(f"{path} is stale; renew it: python -m {program} --write {path}", file=sys.stderr)
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print, write or check the table. Return the exit status."""
    options = page_parser("The table of losses.").parse_args(arguments)
    return generate("docs.losses", (BEGIN, END), loss_table(), options)


def _needs(config: Any) -> str:
    first = config(**config.examples[0])
    if config.is_sum():
        return "what its channels need"
    return ", ".join(f"`{need}`" for need in sorted(first.needs)) or "nothing else"


if __name__ == "__main__":
    sys.exit(main())
