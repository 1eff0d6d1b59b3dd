"""The plain launcher: prime-rl's own, with our loss named in ``[trainer.loss]`` and no adapter.

``[trainer.loss] type = "custom", import_path = "prime_composer.upstream.loss_fn"``, with our loss
table as ``kwargs``. prime-rl imports the path in its ``setup_*`` function and binds it to its rl
tokens only. It passes the kwargs on with each call, and a distillation loss is never called. So the
kwargs are read from the frame of the function that imports.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from prime_composer.upstream.trainer.adapter import trainer_adapter
from prime_composer.upstream.trainer.hooks import DATA_MODULE, hook_data, placed
from prime_composer.upstream.versions.records import LOSS_CONTRACTS, LOSS_MODULE

SETUPS = frozenset(contract.setup for contract in LOSS_CONTRACTS)


def loss_fn(inputs: Any, **table: Any) -> Any:
    """Return the loss of one sequence of rl tokens; ``[trainer.loss] import_path`` names this.

    Args:
        inputs: prime-rl's ``LossInputs``.
        table: our loss table.

    Returns:
        prime-rl's ``LossOutputs``: the SUM over the mask, and 0-dim metrics.

    Raises:
        ValueError: the table is wrong, or the loss cannot be computed on these tokens.
    """
    registered = trainer_adapter().loss
    if registered is None:
        registered = trainer_adapter().register(table, in_file=True)
    return registered.rl_tokens(inputs)


def enter(frame: FrameType | None) -> Callable[..., Any]:
    """Return ``loss_fn``; if prime-rl's ``setup_*`` imports it, register the loss first.

    The kwargs are the local ``loss_config`` of that function (38494ccb loss.py:262, 559b4477
    loss.py:262). The train loop, which calls it, has copied ``compute_loss`` by name already:
    its own name is hooked.
    TODO(prime-rl): remove once ``[trainer.loss]`` reaches distillation tokens.
    """
    while frame is not None:
        if frame.f_code.co_name in SETUPS and frame.f_globals.get("__name__") == LOSS_MODULE:
            trainer_adapter().register(frame.f_locals["loss_config"].kwargs, in_file=True)
            _hook_loop(frame.f_globals, frame.f_back)
            break
        frame = frame.f_back
    return loss_fn


def _hook_loop(loss_module: dict[str, Any], caller: FrameType | None) -> None:
    if DATA_MODULE in sys.modules:
        hook_data(sys.modules[DATA_MODULE])
    compute_loss: Callable[..., Any] = loss_module["compute_loss"]
    train_loop: dict[str, Any] = {} if caller is None else caller.f_globals
    if not trainer_adapter().whole_run and train_loop.get("compute_loss") is compute_loss:
        train_loop["compute_loss"] = placed(compute_loss)
