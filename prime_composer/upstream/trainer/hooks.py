"""Hooks on the modules of prime-rl's trainer; ``autoload.HOOKS`` lists them.

The trainer runs as ``__main__``, so names of its own module cannot be replaced. Each hook runs when
a module that the trainer imports has been loaded, before the trainer copies names out of it.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prime_composer.upstream import capabilities
from prime_composer.upstream.trainer.adapter import Shard, adapter
from prime_composer.upstream.trainer.batches import TrackedBatches
from prime_composer.upstream.trainer.head import gather_head
from prime_composer.upstream.versions import UnknownSurface, expect

DATA_MODULE = "prime_rl.trainer.rl.data"


def hook_loss(module: Any) -> None:
    """Let ``compute_loss`` note its tensors' places, and register the loss of the settings.

    38494ccb loss.py:298, 559b4477 loss.py:255.
    TODO(prime-rl): remove once custom losses receive the micro-batch.
    """
    compute_loss = capabilities.take(capabilities.COMPUTE_LOSS, module)

    @functools.wraps(compute_loss)
    def placed(*args: Any, **kwargs: Any) -> Any:
        batch = adapter().micro_batch
        if batch is None:
            return compute_loss(*args, **kwargs)
        batch.place(kwargs["trainer_logprobs"] if "trainer_logprobs" in kwargs else args[0])
        gather_head(adapter())
        try:
            return compute_loss(*args, **kwargs)
        finally:
            batch.slices.clear()

    module.compute_loss = placed
    adapter().whole_run = True
    settings = adapter().settings
    if settings is not None and settings.loss is not None:
        adapter().register(settings.loss)


def hook_data(module: Any) -> None:
    """Let ``DataLoader`` end steps, report micro-batches, and open the journal. Works once.

    ``get_batch``: 38494ccb data.py:216, 559b4477 data.py:182; ``wait_for_batch`` is called
    before it in each step. ``__init__`` receives the run's
    directory and first step: 38494ccb data.py:176, 559b4477 data.py:165.
    TODO(prime-rl): remove once custom losses receive the micro-batch and can save a state.
    """
    loader = module.DataLoader
    if getattr(loader.get_batch, "of_prime_composer", False):
        return
    get_batch = expect(loader, "get_batch", ("self",), "prime_rl/trainer/rl/data.py")
    wait_for_batch = expect(loader, "wait_for_batch", ("self",), "prime_rl/trainer/rl/data.py")
    init = loader.__init__
    names = _signature(init, {"output_dir", "start_step"}, "DataLoader")

    @functools.wraps(wait_for_batch)
    def waited(self: Any) -> Any:
        adapter().ask_for_batch()
        return wait_for_batch(self)

    @functools.wraps(get_batch)
    def tracked(self: Any) -> Any:
        adapter().ask_for_batch()
        batches = get_batch(self)
        adapter().batch_came(batches)
        return TrackedBatches(batches, adapter().begin) if adapter().whole_run else batches

    @functools.wraps(init)
    def journalled(*args: Any, **kwargs: Any) -> None:
        init(*args, **kwargs)
        given = names.bind(*args, **kwargs).arguments
        adapter().open_journal(Path(given["output_dir"]), given["start_step"])

    tracked.of_prime_composer = True  # type: ignore[attr-defined]  # marks the hook as in place
    loader.get_batch = tracked
    loader.wait_for_batch = waited
    loader.__init__ = journalled


def hook_model(module: Any) -> None:
    """Note the model that ``forward`` runs (38494ccb model.py:1167, 559b4477 model.py:1431).

    TODO(prime-rl): remove once the loss can read the output head.
    """
    forward = module.forward
    names = _signature(forward, {"model", "input_ids"}, "forward")

    @functools.wraps(forward)
    def noted(*args: Any, **kwargs: Any) -> Any:
        adapter().model = names.bind(*args, **kwargs).arguments["model"]
        return forward(*args, **kwargs)

    module.forward = noted


def hook_context_parallel(module: Any) -> None:
    """Note this rank's shard from ``setup_cp_params`` (38494ccb cp.py:150, 559b4477 cp.py:142).

    TODO(prime-rl): remove with ``head.hook_head``.
    """
    setup_cp_params = module.setup_cp_params
    names = _signature(setup_cp_params, {"cp_rank", "cp_world_size", "cp_group"}, "setup_cp_params")

    @functools.wraps(setup_cp_params)
    def noted(*args: Any, **kwargs: Any) -> Any:
        given = names.bind(*args, **kwargs).arguments
        adapter().shard = Shard(given["cp_rank"], given["cp_world_size"], given["cp_group"])
        return setup_cp_params(*args, **kwargs)

    module.setup_cp_params = noted


def _signature(function: Callable[..., Any], needed: set[str], label: str) -> inspect.Signature:
    signature = inspect.signature(function)
    missing = needed - set(signature.parameters)
    if missing:
        raise UnknownSurface(
            f"{label} lost {', '.join(sorted(missing))}; it has {', '.join(signature.parameters)}."
        )
    return signature
