"""Options and commands of islands, for the parser of the whole program."""

import argparse
from typing import Any

from prime_composer.cli.machine import set_environment

Option = tuple[tuple[str, ...], dict[str, Any]]

PORT = 29510
"""Where a lighthouse listens. Its board has the next port."""

RL: tuple[Option, ...] = (
    (
        ("--island",),
        {
            "type": int,
            "metavar": "I",
            "help": "of a recipe with [diloco]: run island I, from 0; goes with --lighthouse",
        },
    ),
    (
        ("--lighthouse",),
        {
            "metavar": "URL",
            "help": "with --island: what `lighthouse` printed, for example http://10.0.0.1:29510",
        },
    ),
    (
        ("--islands",),
        {
            "type": int,
            "metavar": "N",
            "help": "of a recipe with [diloco]: run a lighthouse and all N islands on this "
            "machine, to try it",
        },
    ),
)
LIGHTHOUSE: tuple[Option, ...] = (
    (
        ("--host",),
        {
            "default": "127.0.0.1",
            "help": "address to listen at, of a private network that all islands reach; default: "
            "127.0.0.1, this machine. Nothing is encrypted, and nobody is asked who they are",
        },
    ),
    (
        ("--port",),
        {"type": int, "default": PORT, "help": f"this port and the next one; default: {PORT}"},
    ),
)


def run_lighthouse(args: argparse.Namespace) -> int:
    """Run ``prime-rl lighthouse``."""
    from prime_composer.local.signals import ending_at_once, stopping_at_once

    set_environment()
    with ending_at_once():
        from prime_composer.cli.islands.run import serve_lighthouse

    with stopping_at_once():
        return serve_lighthouse(args.config, args.overrides, args.host, args.port)


def check_options(island: int | None, lighthouse: str | None, islands: int | None) -> bool:
    """Return whether a command asks for islands."""
    if islands is not None and (island is not None or lighthouse is not None):
        raise ValueError("--islands runs all of them here; --island and --lighthouse run one")
    if (island is None) != (lighthouse is None):
        raise ValueError("--island and --lighthouse go together; --islands N runs all of them here")
    if lighthouse is not None:
        from prime_composer.recipe.urls import checked_url

        checked_url(lighthouse)
    return island is not None or islands is not None
