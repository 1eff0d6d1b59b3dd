"""The whole-run adapter's switch: lazy hooks in every process of a prime-rl run.

``prime_composer.pth`` runs this file when PRIME_COMPOSER is set, at the start of each interpreter of the environment:
launcher, orchestrator, env servers, trainer ranks, on every node. It installs one import finder and imports nothing; a
hook runs right after prime-rl has loaded the module that it is for, before anyone copies names out of it. When the
variable is unset the .pth line reads it and stops.

This file uses the standard library alone and is loaded without its package, so that an env server never pays for torch.
"""

import importlib
import importlib.abc
import sys
from typing import Any

HOOKS = {
    "prime_rl.utils.config": "launcher",
    "prime_rl.trainer.rl.loss": "trainer_loss",
    "prime_rl.trainer.rl.data": "trainer_data",
    "prime_rl.trainer.optim.offload": "trainer_offload",
    "prime_rl.trainer.models.layers.lm_head": "trainer_head",
    "prime_rl.trainer.models.layers.lm_head_gemma": "trainer_head",
    "prime_rl.utils.cp": "trainer_cp",
    "prime_rl.orchestrator.utils": "orchestrator_v0_6",
    "prime_rl.utils.client": "orchestrator_client",
    "prime_rl.orchestrator.algo.opd": "orchestrator_algorithm",
    "prime_rl.orchestrator.algo.opsd": "orchestrator_algorithm",
    "prime_rl.orchestrator.algo.routing": "orchestrator_routing",
    "prime_rl.orchestrator.trajectories": "orchestrator_samples",
}
"""Upstream module: function of ``prime_composer.upstream.hooks`` that is called with it once it is loaded."""


class Hooks(importlib.abc.MetaPathFinder):
    """Finds the modules of ``HOOKS`` like everyone else does, and lets the hook run after they are loaded."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        name = HOOKS.get(fullname)
        if name is None:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(fullname, path, target)
            if spec is not None:
                break
        else:
            return None
        if spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                getattr(importlib.import_module("prime_composer.upstream.hooks"), name)(module)

            spec.loader.exec_module = exec_module
        return spec


def install() -> None:
    """Put the finder in front, once."""
    if not any(
        type(finder).__name__ == "Hooks" and hasattr(finder, "is_prime_composer")
        for finder in sys.meta_path
    ):
        finder = Hooks()
        finder.is_prime_composer = True
        sys.meta_path.insert(0, finder)
