"""The entry points of vLLM: ``vllm.general_plugins`` and ``vllm.endpoint_plugins``.

vLLM loads general plugins in every process of every engine where VLLM_PLUGINS is unset, prime-rl's
own inference included. Ours does nothing then, and loads nothing. An endpoint plugin is loaded only
where VLLM_PLUGINS names it; without the variable vLLM writes one line that it is there.
"""

import os
from typing import Any


def is_named() -> bool:
    """Return whether VLLM_PLUGINS names this plugin."""
    return "prime_composer" in os.environ.get("VLLM_PLUGINS", "").split(",")


def install() -> None:
    """Patch vLLM in this process, where the plugin is named."""
    if is_named():
        from prime_composer.scoring import patches

        patches.install_patches()


def endpoint() -> Any:
    from prime_composer.scoring.endpoint import ScoringEndpoint

    return ScoringEndpoint()
