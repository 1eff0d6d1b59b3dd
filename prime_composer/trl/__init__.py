"""TRL as a host: trl's own distillation trainer with the losses of this package.

    objective   reads a loss, and refuses those that trl has no inputs for
    teacher     opens the teacher: a model in this process, or a server
    batch       trl's padded batch as rollouts
    trainer     ``OnPolicyDistillationTrainer``

It needs the extra ``trl``. The trainer is imported at first use. See README.md in this
folder.
"""

from typing import Any

__all__ = ["OnPolicyDistillationTrainer"]


def __getattr__(name: str) -> Any:
    if name == "OnPolicyDistillationTrainer":
        from prime_composer.trl.trainer import OnPolicyDistillationTrainer

        return OnPolicyDistillationTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
