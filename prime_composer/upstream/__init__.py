"""The prime-rl room: our losses in an unmodified prime-rl (v0.6.x, and v0.7.0 up to 559b4477 of 2026-08-21).

    probe         which prime-rl this is, by its surface
    registration  a loss in prime-rl's terms; ``loss_fn`` for ``[trainer.loss] import_path``
    switch        the environment variable of the whole-run adapter
    autoload      lazy hooks in every process of a run, through a .pth file; ``hooks`` says which
    orchestrator  asks the teacher for its top-K and puts it on the wire (``wire``)
    trainer       takes it off the wire, and gathers the student's log-probs beside the label's (``student``)
    journal       keeps the state of a schedule for a resume
    export        a recipe as a native prime-rl TOML; ``environment`` is its problems there
    launch        starts prime-rl's own launcher with the adapter on

Importing this package imports neither prime-rl nor torch; ``loss_fn`` does.
"""

import sys
from typing import Any

__all__ = ["loss_fn"]


def __getattr__(name: str) -> Any:
    if name == "loss_fn":
        from prime_composer.upstream.registration import enter

        return enter(sys._getframe(1))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
