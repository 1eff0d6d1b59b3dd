"""``prime-rl completion``: a script that completes commands, options and files in a shell.

    eval "$(prime-rl completion bash)"    # in ~/.bashrc
    eval "$(prime-rl completion zsh)"     # in ~/.zshrc, after compinit

The script has every word in it, so that a completion starts no Python.
"""

import argparse
from collections.abc import Iterator

from prime_composer.cli.program import NAMES

RECIPES = {"bash": "_prime_composer_toml_file", "zsh": "_files -g '*.toml'"}
PREAMBLE = """
# Recipes, and folders on the way to them.
_prime_composer_toml_file() {
  compgen -f -X '!*.toml' -- "$1"
  compgen -d -- "$1"
}
"""
ENDS = {
    "bash": "-F _shtab_prime_rl prime-rl",
    "zsh": "compdef _shtab_prime_rl -N prime-rl",
}
"""Where shtab's script tells the shell the name of the command."""


def completion(parser: argparse.ArgumentParser, shell: str) -> int:
    """Print the completion script of a shell, "bash" or "zsh", for the whole program's parser."""
    try:
        import shtab
    except ImportError:
        raise ValueError("completion needs shtab: pip install shtab") from None
    for action in actions_of(parser):
        of_metavar = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY, "RUN_DIR": shtab.DIRECTORY}
        of_dest = {"config": RECIPES, "model": shtab.DIRECTORY}
        complete = of_dest.get(action.dest) or of_metavar.get(str(action.metavar))
        if complete is not None:
            action.complete = complete  # type: ignore[attr-defined]
    first, second = NAMES
    parser.prog = first
    text = shtab.complete(parser, shell=shell, preamble=PREAMBLE if shell == "bash" else "")
    text = text.replace(ENDS[shell], f"{ENDS[shell]} {second}")
    print(text.replace(f"#compdef {first}\n", f"#compdef {first} {second}\n"))
    return 0


def actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield every argument of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from actions_of(command)
