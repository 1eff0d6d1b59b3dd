"""Better distillation losses for PRIME-RL, as drop-in adapters; the same TOML recipe runs on one machine and on a cluster.

A map, in the order of the imports; nothing on the left knows anything on its right:

- ``contract``, ``masked``, ``divergences``, ``lm_head``: the tensors a loss reads, the reductions, the maths.
- ``losses`` (with ``modifiers``, ``loss_metrics``, ``trust_region``, ``preferences``, which they share): one file per loss;
  ``LOSS_FNS`` is the table that everything else follows from.
- ``recipe``, ``data``, ``prepare``, ``rollout``, ``scorer``: what a run is made of, described without importing it.
- ``upstream``: the prime-rl room. ``backends``: vLLM and transformers.
- ``student``, ``replay``, ``self_teacher``, ``gradients``, ``engine``, ``preflight``, ``evaluate``, ``checkpoint``, ``tracker``,
  ``train``: the one-machine engine.
- ``runs``, ``show``, ``report``, ``study``, ``cli``: what a person sees.

The public names below are imported when they are first used, so that ``prime-rl --help`` does not wait for torch.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "LossInputs": "contract",
    "LossOutputs": "contract",
    "Support": "contract",
    "LOSS_FNS": "losses",
    "LOSS_TYPES": "losses",
    "setup_loss_fn": "losses",
    "forward_kl": "divergences",
    "generalized_jsd": "divergences",
    "reverse_kl": "divergences",
    "selected_logprobs": "lm_head",
    "Recipe": "recipe",
    "RecipeError": "recipe",
    "load_recipe": "recipe",
    "TAIDScheduler": "losses.taid",
    "Rollout": "backends.protocols",
    "SamplingParams": "backends.protocols",
    "TeacherScores": "backends.protocols",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
