"""Distillation losses for PRIME-RL, as drop-in adapters, and a one-machine engine to try them.

A map, in the order of the imports; CONTRIBUTING.md walks through it. No room imports one below it:

- ``contract``, ``fused``, ``divergences``, ``lm_head``, ``full_vocabulary``: the tensors between
  trainer and loss with the types of its metrics, what a GPU compiles, the maths of divergences,
  log-probs from hidden states, divergences over the vocabulary.
- ``tables``: the base of every table that a user writes.
- ``removed``: keys of earlier versions, and what to do instead.
- ``extras``: the pip line of an optional part, as every message has it.
- ``losses``: one file per loss, the registry, and what binds them. See losses/README.md.
- ``problems``: the questions and how answers are checked. It imports no other room.
- ``recipe``: what a recipe may say, and which teacher scores which problem.
- ``scoring``: the plugin inside vLLM that gives a teacher's scores, and its wire.
- ``cross_tokenizer``: a teacher's probabilities of the student's tokens, where its own are others.
- ``backends``: what runs a model: transformers, vLLM in this process, a vLLM server.
- ``step``: what every host does with a batch: micro-batches, the student's forward, gradients.
- ``samplers``: who writes rollouts.
- ``teachers``: who scores them: models of their own, mixtures, the policy itself; their tapes.
- ``tiny_models``: small models that are trained on the spot, and their cache.
- ``environments``: tasks by id, played through verifiers.
- ``local``: the one-machine run.
- ``upstream``: the same losses inside an unmodified prime-rl. It imports no local engine.
- ``trl``: the same losses inside trl's own distillation trainer.
- ``cli``: the command ``prime-rl``; ``__main__`` is the same program for ``python -m``.

The public names below are imported at first use, so that ``prime-rl --help`` does not import torch.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "LossInputs": "contract",
    "LossOutputs": "contract",
    "Scores": "contract",
    "Support": "contract",
    "LOSS_FNS": "losses",
    "LOSS_TYPES": "losses",
    "setup_loss_fn": "losses",
    "forward_kl": "divergences",
    "generalized_jsd": "divergences",
    "reverse_kl": "divergences",
    "selected_logprobs": "lm_head",
    "distill": "cli.distill",
    "Recipe": "recipe",
    "RecipeError": "recipe",
    "load_recipe": "recipe",
    "TAIDScheduler": "losses.taid",
    "Rollout": "backends.protocols",
    "SamplingParams": "backends.protocols",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
