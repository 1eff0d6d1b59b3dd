"""The ``prime-rl`` command."""

from prime_composer.cli.commands import main as main
