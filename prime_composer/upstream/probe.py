"""Which prime-rl is this? Answered by its surface, never by its version: 67 upstream commits carry the newer loss
contract while their version string still says 0.6.0.

Two things changed at different times, so there are two answers: the *loss era* (what a loss is handed, what holds the
distillation loss) and the *dialect* (the words of the TOML). Every hook asks ``expect`` about the one name it rebinds.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

LOSS_MODULE = "prime_rl.trainer.rl.loss"
DIALECTS = ("v0.6", "v0.7", "v0.8", "head")
KNOWN = (
    "v0.6.x (38494ccb: setup_loss_fns, opd_loss_fn, teacher_logprobs) and v0.7.0, v0.8.0 up to 559b4477 of 2026-08-21 "
    "(setup_rl_loss_fn, ref_kl_loss_fn, ref_logprobs, loss_weights)"
)


class UnknownSurface(RuntimeError):
    """The importable prime-rl is none that this package knows."""


@dataclass(frozen=True)
class Era:
    """One spelling of prime-rl's loss contract.

    Attributes:
        name: "v0.6" or "v0.7", after the first release that has it.
        setup: the function of the loss module that imports a custom loss.
        slot: the module global that distillation tokens are sent to; no recipe key reaches it.
        ref_field: where LossInputs holds the teacher's log-probs.
        inputs: the fields of LossInputs.
        compute_loss: the parameters of compute_loss.
        first_commit: upstream's commit that introduced it.
    """

    name: str
    setup: str
    slot: str
    ref_field: str
    inputs: tuple[str, ...]
    compute_loss: tuple[str, ...]
    first_commit: str


_COMMON = ("trainer_logprobs", "inference_logprobs")
V0_6 = Era(
    name="v0.6",
    setup="setup_loss_fns",
    slot="opd_loss_fn",
    ref_field="teacher_logprobs",
    inputs=(*_COMMON, "teacher_logprobs", "advantages", "loss_mask"),
    compute_loss=(
        *_COMMON, "teacher_logprobs", "advantages", "loss_mask", "loss_fns", "loss_scale", "training_mode"
    ),
    first_commit="eaf95997f",
)  # fmt: skip
V0_7 = Era(
    name="v0.7",
    setup="setup_rl_loss_fn",
    slot="ref_kl_loss_fn",
    ref_field="ref_logprobs",
    inputs=(*_COMMON, "ref_logprobs", "advantages", "loss_mask", "loss_weights"),
    compute_loss=(
        *_COMMON, "ref_logprobs", "advantages", "loss_mask", "rl_weights", "ce_weights", "ref_kl_weights",
        "rl_loss_fn", "rl_scale", "ce_scale", "ref_kl_scale",
    ),
    first_commit="0be5ac452",
)  # fmt: skip
ERAS = (V0_6, V0_7)


def parameters(function: Any) -> tuple[str, ...]:
    """Names of a callable's parameters, in order."""
    return tuple(inspect.signature(function).parameters)


def differences(era: Era, module: ModuleType) -> list[str]:
    """What of ``era``'s surface the loss module lacks or spells differently; empty: it is this era."""
    found = []
    for name, wanted in (
        (era.setup, ("loss_config",)),
        (era.slot, ("inputs",)),
        ("compute_loss", era.compute_loss),
        ("LossInputs", era.inputs),
        ("LossOutputs", ("loss", "metrics")),
    ):
        there = getattr(module, name, None)
        if there is None:
            found.append(f"{name} is missing")
        elif parameters(there) != wanted:
            found.append(f"{name}({', '.join(parameters(there))}) instead of ({', '.join(wanted)})")
    return found


def probe_loss(module: ModuleType | None = None) -> Era:
    """The era of the importable prime-rl's loss module.

    Raises:
        UnknownSurface: it is neither; the message says what was looked for and which versions are known.
        ImportError: there is no prime-rl.
    """
    module = importlib.import_module(LOSS_MODULE) if module is None else module
    reports = []
    for era in ERAS:
        lacks = differences(era, module)
        if not lacks:
            return era
        reports.append(f"{era.name}: {'; '.join(lacks)}")
    raise UnknownSurface(
        f"{module.__name__} ({module.__file__}) has none of the surfaces that prime_composer knows. Looked for "
        + " | ".join(reports)
        + f". Known: {KNOWN}."
    )


def expect(owner: Any, name: str, wanted: Sequence[str], known_at: str) -> Any:
    """``owner.name``, checked to be a callable with exactly the parameters ``wanted``: what a hook may rebind.

    Raises:
        UnknownSurface: it is gone or changed; ``known_at`` says where the expected one stands.
    """
    label = f"{getattr(owner, '__name__', owner)}.{name}"
    there = inspect.getattr_static(owner, name, None)
    if there is None:
        raise UnknownSurface(
            f"prime_composer hooks {label}, which is gone (it stands in {known_at}). Known: {KNOWN}."
        )
    there = getattr(owner, name)
    if parameters(there) != tuple(wanted):
        raise UnknownSurface(
            f"prime_composer hooks {label}({', '.join(wanted)}) as in {known_at}, but here it takes "
            f"({', '.join(parameters(there))}). Known: {KNOWN}."
        )
    return there


def probe_dialect() -> str:
    """The TOML dialect of the importable prime-rl, one of ``DIALECTS``, by the fields of its config classes.

    Raises:
        UnknownSurface: it is none of them.
        ImportError: there is no prime-rl.
    """
    orchestrator = importlib.import_module("prime_rl.configs.orchestrator")
    fields = set(orchestrator.OrchestratorConfig.model_fields)
    train = getattr(orchestrator, "TrainConfig", None)
    train_fields = set() if train is None else set(train.model_fields)
    if "training_mode" in fields:
        return "v0.6"
    if "algo" in fields and "env" in train_fields:
        return "v0.7"
    if "algo" in fields and "source" in train_fields:
        frozen = importlib.import_module("prime_rl.configs.algorithm").FrozenModelConfig
        return "head" if frozen.model_fields["base_url"].annotation is str else "v0.8"
    raise UnknownSurface(
        "The importable prime-rl's orchestrator config is none that prime_composer can write: looked for "
        "OrchestratorConfig.training_mode (v0.6), .algo with train.env (v0.7) or train.source (v0.8 and newer); found "
        f"the fields {', '.join(sorted(fields))}. Known: {KNOWN}."
    )


def has_prime_rl() -> bool:
    """Whether prime-rl's trainer can be imported here; imports nothing of it."""
    try:
        return importlib.util.find_spec(LOSS_MODULE) is not None
    except ImportError:
        return False
