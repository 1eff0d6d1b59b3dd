"""The adapter for an unmodified prime-rl, of the versions that ``versions.records`` names.

    settings        what all processes of a run share, in one environment variable
    versions/       one record per version of prime-rl, the one table of what we touch in it, and
                    the doctor, which checks that table
    autoload        lazy hooks in every process of a run, installed by a .pth file
    refusals        what does not go together: rules that launcher and export read alike
    launcher_hook   in prime-rl's launcher: checks the loss, resolves the settings
    launches        what processes of a launch leave, so that an absent one is noticed
    meeting         compares a teacher's server with the student, once
    orchestrator/   asks the teachers for their top-K and sends it to the trainer
    wire            how the top-K is sent
    trainer/        one ``Adapter``: receives the top-K, computes the loss
    plain_launcher  a loss without the adapter: ``loss_fn`` for ``[trainer.loss] import_path``
    export/         a recipe as a native prime-rl TOML; ``environment`` is its problems there
    launch          starts prime-rl's own launcher with the adapter on

Importing this package imports neither prime-rl nor torch; ``loss_fn`` imports torch.
"""

import sys
from typing import Any

__all__ = ["loss_fn"]


def __getattr__(name: str) -> Any:
    if name == "loss_fn":
        from prime_composer.upstream.plain_launcher import enter

        return enter(sys._getframe(1))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
