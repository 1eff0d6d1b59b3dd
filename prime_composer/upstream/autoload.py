"""Start of the whole-run adapter: lazy hooks in every process of a prime-rl run.

Where PRIME_COMPOSER is set, ``prime_composer.pth`` puts a small finder in front of all others at
the start of each interpreter of the environment. It runs this file when the first module of
prime-rl is imported: in launcher, orchestrator, env servers and trainer ranks, on every node. Other
processes pay nothing. This file installs the finder of ``HOOKS`` and imports nothing. A hook runs
right after prime-rl has loaded its module, before other modules copy names out of it. When the
variable is unset, or one of 0, false, no and off, the .pth line reads it and stops.

This file uses the standard library alone and is loaded without its package, so that an env server
never imports torch.
"""

import importlib
import importlib.abc
import os
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import cast

LAUNCHER = "prime_composer.upstream.launcher_hook"
TRAINER = "prime_composer.upstream.trainer.hooks"
HEAD = "prime_composer.upstream.trainer.head"
ORCHESTRATOR = "prime_composer.upstream.orchestrator.hooks"

HOOKS: dict[str, tuple[str, ...]] = {  # Module of prime-rl -> functions called once it is loaded
    "prime_rl.utils.config": (f"{LAUNCHER}:hook_config",),
    "prime_rl.utils.pathing": (f"{LAUNCHER}:hook_run_dir",),
    "prime_rl.trainer.rl.loss": (f"{TRAINER}:hook_loss",),
    "prime_rl.trainer.rl.data": (f"{TRAINER}:hook_data",),
    "prime_rl.trainer.model": (f"{TRAINER}:hook_model",),
    "prime_rl.trainer.models.layers.lm_head": (f"{HEAD}:hook_head",),
    "prime_rl.trainer.models.layers.lm_head_gemma": (f"{HEAD}:hook_head",),
    "prime_rl.utils.cp": (f"{TRAINER}:hook_context_parallel",),
    "prime_rl.orchestrator.clients": (f"{ORCHESTRATOR}:hook_client",),
    "prime_rl.utils.client": (f"{ORCHESTRATOR}:hook_client",),
    "prime_rl.orchestrator.algo.opd": (f"{ORCHESTRATOR}:hook_algorithm",),
    "prime_rl.orchestrator.algo.opsd": (f"{ORCHESTRATOR}:hook_algorithm",),
    "prime_rl.orchestrator.algo.routing": (
        f"{ORCHESTRATOR}:hook_routing",
        f"{ORCHESTRATOR}:hook_stamps",
    ),
    "prime_rl.orchestrator.trajectories": (f"{ORCHESTRATOR}:hook_samples",),
}


class Hooks(importlib.abc.MetaPathFinder):
    """Finds the modules of ``HOOKS`` as the other finders do, and hooks them once loaded."""

    is_prime_composer = True

    def find_spec(
        self, fullname: str, path: Iterable[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders find, with a loader that runs the hooks."""
        hooks = HOOKS.get(fullname)
        if hooks is None:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                break
        else:
            return None
        if spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for hook in hooks:
                    name, _, function = hook.partition(":")
                    getattr(importlib.import_module(name), function)(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one spec
        return spec


def install() -> Hooks:
    """Put the finder in front of all others, once, and return it."""
    value = os.environ.get("PRIME_COMPOSER", "").strip()
    if value != "1" and not value.startswith(("{", "@")):
        shown = repr(value if len(value) <= 60 else f"{value[:60]}...")
        if "@" in value:
            shown = "... (not shown: it may have a password)"
        raise SystemExit(
            f"PRIME_COMPOSER={shown}: write PRIME_COMPOSER=1, PRIME_COMPOSER=@FILE, or a JSON "
            "object with a loss; 0, false, no, off or nothing is off"
        )
    # Some environments process their .pth files twice, which gives this file two classes Hooks.
    for finder in sys.meta_path:
        if hasattr(finder, "is_prime_composer"):
            return cast(Hooks, finder)
    hooks = Hooks()
    sys.meta_path.insert(0, hooks)
    return hooks
