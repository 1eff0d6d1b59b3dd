"""Read a loss, and refuse what trl's distillation trainer has no inputs for."""

import os
from typing import Any

from prime_composer.losses import LOSS_TYPES, LossConfig, parse_loss, require_inputs
from prime_composer.losses.needs import PROVIDERS
from prime_composer.recipe import RecipeError, load_recipe

AVAILABLE = frozenset({"ref_logprobs", "support", "hidden_states", "token_ids", "stops"})
"""Inputs of a loss that are computed from trl's batch and a teacher."""

PROVIDER = PROVIDERS["trl"]

PLAIN_SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "generation_kwargs": None,
}
"""Settings of trl with which the student samples from its own distribution."""


def read_loss(loss: LossConfig | dict[str, Any] | str | os.PathLike[str] | None) -> LossConfig:
    """Return the config of a loss, checked against what trl provides."""
    if loss is None:
        raise ValueError(
            'loss is missing: pass loss="topk_reverse_kl", the default of the recipes, a table '
            "such as {'type': 'topk_reverse_kl', 'k': 32}, or a recipe file"
        )
    if isinstance(loss, str) and _is_type(loss):
        config = parse_loss({"type": loss})
    elif isinstance(loss, (str, os.PathLike)):
        config = _loss_of_recipe(loss)
    else:
        config = parse_loss(loss)
    for section, (loss_config, _) in config.needs_by_section().items():
        if loss_config.on_given_text:
            raise ValueError(
                f"[{section}] type = {loss_config.type!r} on the student's own samples has an "
                "expected gradient of 0: leave it out, or train on given answers with trl's "
                "SFTTrainer."
            )
    require_inputs(config, AVAILABLE, "trl")
    if not config.compares_with_teacher:
        raise ValueError(
            f"[loss] type = {config.type!r} reads no teacher, and {PROVIDER} has no other signal. "
            "Choose a distillation loss."
        )
    return config


def check_arguments(config: LossConfig, args: Any) -> None:
    """Refuse settings of trl that the loss would not see, or that it would be wrong with."""
    if args.beta != 1.0:
        raise ValueError(
            f"args.beta = {args.beta} is the knob of trl's own loss, and `loss` replaces that: "
            "leave args.beta out, and set loss = {'type': 'generalized_jsd', 'beta': ...}."
        )
    if not config.reads_sampler:
        return
    for name, plain in PLAIN_SAMPLING.items():
        value = getattr(args, name)
        if value != plain and not (name == "generation_kwargs" and not value):
            raise ValueError(
                f"args.{name} = {value!r}: [loss] type = {config.type!r} reads the probability "
                "with which the student sampled a token, which trl does not keep. Set "
                f"args.{name} = {plain!r}, or choose a loss on the teacher's top K."
            )


def _is_type(name: str) -> bool:
    """Return whether a text is the type of a loss, of ours or ``my_module:my_loss``."""
    module, colon, function = name.partition(":")
    outside = bool(colon) and function.isidentifier() and "/" not in module
    return name in LOSS_TYPES or outside and not os.path.exists(name)


def _loss_of_recipe(path: str | os.PathLike[str]) -> LossConfig:
    recipe = load_recipe(path)
    extra = {
        "[teacher.policy]": recipe.policy_teacher is not None,
        "[teachers]": bool(recipe.teachers),
        "[reference]": recipe.reference is not None,
        "rollout.student_fraction": recipe.rollout.student_fraction != 1,
        "rollout.ahead": recipe.rollout.ahead > 0,
        "[diloco]": recipe.diloco is not None,
    }
    for key, is_set in extra.items():
        if is_set:
            raise RecipeError(
                f"{os.fspath(path)}: {key} is a part of this objective, and {PROVIDER} has one "
                "teacher, and the student's own samples, of its current weights. Run the recipe "
                "with prime-rl rl, or pass its [loss] table alone."
            )
    return recipe.loss
