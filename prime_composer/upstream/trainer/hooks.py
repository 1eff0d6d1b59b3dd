"""Hooks on the modules of prime-rl's trainer; ``autoload.HOOKS`` lists them.

The trainer runs as ``__main__``, so names of its own module cannot be replaced. Each hook runs when
a module that the trainer imports has been loaded, before the trainer copies names out of it.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prime_composer.upstream.trainer.adapter import Shard, trainer_adapter
from prime_composer.upstream.trainer.head import gather_head
from prime_composer.upstream.versions import capabilities

DATA_MODULE = "prime_rl.trainer.rl.data"


def hook_loss(module: Any) -> None:
    """Let ``compute_loss`` note its tensors' places, and register the loss of the settings.

    38494ccb loss.py:295, 559b4477 loss.py:285.
    TODO(prime-rl): remove once custom losses receive the micro-batch.
    """
    capabilities.replace(capabilities.COMPUTE_LOSS, module, placed)
    trainer_adapter().whole_run = True
    settings = trainer_adapter().settings
    if settings is not None and settings.loss is not None:
        trainer_adapter().register(settings.loss)


def placed(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``compute_loss``, with its tensors' places noted and its call of the loss judged."""

    @functools.wraps(compute_loss)
    def compute(*args: Any, **kwargs: Any) -> Any:
        batch = trainer_adapter().micro_batch
        if batch is None:
            trainer_adapter().check_batch()
            return compute_loss(*args, **kwargs)
        batch.place(kwargs["trainer_logprobs"] if "trainer_logprobs" in kwargs else args[0])
        gather_head(trainer_adapter())
        try:
            out = compute_loss(*args, **kwargs)
        finally:
            batch.place(())
        trainer_adapter().judge_micro_batch()
        return out

    return compute


def hook_data(module: Any) -> None:
    """Let ``DataLoader`` end steps, report micro-batches, and open the journal. Works once.

    ``get_batch``: 38494ccb data.py:216, 559b4477 data.py:182; ``wait_for_batch`` comes before it.
    ``__init__`` receives the run's directory and first step: 38494ccb data.py:176, 559b4477 :165.
    TODO(prime-rl): remove once custom losses receive the micro-batch and can save a state.
    """
    if getattr(module.DataLoader.get_batch, "of_prime_composer", False):
        return
    waited = _noted(lambda _: trainer_adapter().ask_for_batch())
    capabilities.replace(capabilities.GET_BATCH, module, _tracked)
    capabilities.replace(capabilities.WAIT_FOR_BATCH, module, waited)
    capabilities.replace(capabilities.LOADER_INIT, module, _noted(_open_journal))
    fake = getattr(module, "FakeDataLoader", None)
    if fake is not None:  # of prime-rl's benchmark mode, whose batches nobody judges
        fake.wait_for_batch = waited(fake.wait_for_batch)


def _tracked(get_batch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_batch)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        trainer_adapter().ask_for_batch()
        return trainer_adapter().batch_came(get_batch(*args, **kwargs))

    tracked.of_prime_composer = True  # type: ignore[attr-defined]  # marks the hook as in place
    return tracked


def _noted(note: Callable[[dict[str, Any]], None]) -> Callable[[Callable[..., Any]], Any]:
    """Return what wraps a function so that ``note`` gets the arguments of each call by name."""

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            note(given.arguments)
            return original(*args, **kwargs)

        return run

    return wrapped


def _open_journal(given: dict[str, Any]) -> None:
    trainer_adapter().open_journal(Path(given["output_dir"]), given["start_step"])


def hook_model(module: Any) -> None:
    """Note the model that ``forward`` runs (559b4477 model.py:1431).

    TODO(prime-rl): remove once the loss can read the output head.
    """

    def note(given: dict[str, Any]) -> None:
        trainer_adapter().model = given["model"]

    capabilities.replace(capabilities.FORWARD, module, _noted(note))


def hook_context_parallel(module: Any) -> None:
    """Note this rank's shard from ``setup_cp_params`` (559b4477 cp.py:140).

    TODO(prime-rl): remove with ``head.hook_head``.
    """

    def note(given: dict[str, Any]) -> None:
        trainer_adapter().shard = Shard(given["cp_rank"], given["cp_world_size"], given["cp_group"])

    capabilities.replace(capabilities.CONTEXT_PARALLEL, module, _noted(note))
