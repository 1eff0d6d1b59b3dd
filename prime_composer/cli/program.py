"""What the program is called, which version it is, and its commands by task."""

import argparse
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

NAMES = ("prime-rl", "prime-composer")  # The second is for whoever takes the first for PRIME-RL's


def program() -> str:
    """Return what the user typed to start this program, for usage lines and for lines to paste."""
    path = Path(sys.argv[0])
    if path.name in NAMES:
        return path.name
    if path.parts[-2:] == ("prime_composer", "__main__.py"):
        return "python -m prime_composer"
    return NAMES[0]


def version() -> str:
    """Return the version of the installed package; a checkout on PYTHONPATH alone has none."""
    try:
        return f"prime_composer {metadata.version('prime-composer')}"
    except metadata.PackageNotFoundError:
        return "prime_composer, not installed"


class Program(argparse.ArgumentParser):
    """The parser of the whole program. Its help has the commands by task, a line each."""

    tasks: Mapping[str, Mapping[str, str]]  # task -> its commands -> their help

    @property
    def commands(self) -> list[str]:
        return [name for commands in self.tasks.values() for name in commands]

    def as_called(self, text: str) -> str:
        """Return a message with the command lines in it as the user starts this program."""
        names, commands = "|".join(NAMES), "|".join(self.commands)
        return re.sub(rf"\b(?:{names}) (?=(?:{commands})\b)", f"{program()} ", text)

    def format_help(self) -> str:
        """Return the overview: usage, commands by task, options."""
        width = max(map(len, self.commands)) + 4
        lines = [f"usage: {self.prog} COMMAND [OPTIONS]", "", str(self.description)]
        for task, commands in self.tasks.items():
            lines += ["", f"{task}:"]
            lines += [f"  {name:{width}}{first_sentence(text)}" for name, text in commands.items()]
        lines += ["", "Options:"]
        for words, text in (
            ("-h, --help", "Show this overview"),
            ("--version", "Show the version"),
        ):
            lines.append(f"  {words:{width}}{text}")
        lines += ["", f"{self.prog} COMMAND --help describes a command and its options."]
        return "\n".join(lines) + "\n"


def first_sentence(text: str) -> str:
    """Return the first sentence of a command's help, up to its colon."""
    return re.split(r"[.:](?:\s|$)", text, maxsplit=1)[0]
