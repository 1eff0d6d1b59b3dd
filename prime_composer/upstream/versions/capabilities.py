"""What this package touches in prime-rl: one table, and the rule that says whether it fits.

A capability is found at the first of its places that fits. A place fits when the names that we need
are there and everything else has a default. A new required parameter is refused by name.

Two readers give the same signature to the same rule: ``inspect`` reads what a hook is about to
wrap, at import time (``take``), and ``ast`` reads prime-rl's sources before anything starts
(``doctor``). README.md of this folder says what to do when a name moves.

This module uses the standard library alone.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

Signature = Mapping[str, bool]  # Name of a parameter or a field -> whether it has to be given

Read = Callable[[str, str], Signature | None]  # Module, dotted name -> signature; None: not there

ROADS = {  # Road -> what a run on it does
    "losses": "a loss of rl tokens, in [trainer.loss]",
    "slot": "a distillation loss on the sampled token, in [trainer.loss]",
    "adapter": "distillation on the teacher's top K",
    "full": "distillation on the whole vocabulary",
    "rl": "rl environments beside distillation",
    "export": "recipes, written as prime-rl's TOML",
}

PLAIN = ("losses", "slot")
ADAPTER = ("adapter", "full", "rl")
TRAINER = (*PLAIN, *ADAPTER)


class UnknownSurface(RuntimeError):
    """The importable prime-rl is not a version that this package supports."""


@dataclass(frozen=True)
class HookPlace:
    """One place where prime-rl has, or had, what we touch."""

    module: str  # the module, by its full name
    attribute: str  # what is touched there, dotted below the module
    needs: tuple[str, ...] = ()  # the names of parameters or fields that we read or pass
    # we hand on whatever else comes, or only read: another required name is no misfit
    open: bool = False

    def __str__(self) -> str:
        return f"{self.module.removeprefix('prime_rl.')}:{self.attribute}"


@dataclass(frozen=True)
class Capability:
    """One thing that we touch in prime-rl."""

    name: str  # what it does for us, as the doctor's table says it
    roads: tuple[str, ...]  # the roads that end without it
    places: tuple[HookPlace, ...]  # where it is, the newest first
    optional: bool = False  # nothing is lost where prime-rl has no such thing


@dataclass(frozen=True)
class HookFinding:
    """Where a capability was found, and what does not fit there."""

    capability: Capability
    place: HookPlace | None  # None where it is gone
    misfits: tuple[str, ...] = ()  # what differs, nothing where it fits
    note: str = ""  # what else there is to say of it

    @property
    def verdict(self) -> str:
        """What does not fit, and which roads that costs."""
        return f"{'; '.join(self.misfits)} (costs {', '.join(self.capability.roads)})"

    def __str__(self) -> str:
        where = "" if self.place is None else f"{self.place} "
        return f"{self.capability.name}: {where}{self.verdict}"


def _capability(
    name: str, roads: tuple[str, ...], *places: str, optional: bool = False
) -> Capability:
    """Return a capability, given its places as "module:attribute needs"; "..." says ``open``."""
    return Capability(name, roads, tuple(map(_place, places)), optional)


def _place(text: str) -> HookPlace:
    where, *needs = text.split()
    module, _, attribute = where.partition(":")
    names = tuple(name for name in needs if name != "...")
    return HookPlace(f"prime_rl.{module}", attribute, names, open="..." in needs)


_NEWER = "trainer_logprobs inference_logprobs ref_logprobs advantages loss_mask"
_OF_V0_6 = "trainer_logprobs inference_logprobs teacher_logprobs advantages loss_mask"
_WEIGHTS = "rl_weights ce_weights ref_kl_weights rl_loss_fn rl_scale ce_scale ref_kl_scale"
_TOKENS = "input_ids loss_mask temperatures routed_experts env_names sequence_lengths"
_HEAD = "hidden_states labels temperature"
_WIRE = ("transports.batch.types", "transports.rollouts.types")
_ALGO = "orchestrator.algo"

LOSS_SETUP = _capability(
    "import of our loss",
    TRAINER,
    "trainer.rl.loss:setup_rl_loss_fn loss_config",
    "trainer.rl.loss:setup_loss_fns loss_config",
)
LOSS_CONFIG = _capability(
    "[trainer.loss]",
    (*TRAINER, "export"),
    "configs.trainer:CustomLossConfig type import_path kwargs",
)
LOSS_INPUTS = _capability(
    "inputs of a loss",
    TRAINER,
    f"trainer.rl.loss:LossInputs {_NEWER}",
    f"trainer.rl.loss:LossInputs {_OF_V0_6}",
)
LOSS_OUTPUTS = _capability("outputs of a loss", TRAINER, "trainer.rl.loss:LossOutputs loss metrics")
GET_BATCH = _capability("batch of a step", TRAINER, "trainer.rl.data:DataLoader.get_batch")
WAIT_FOR_BATCH = _capability("end of a step", TRAINER, "trainer.rl.data:DataLoader.wait_for_batch")
LOADER_INIT = _capability(
    "run directory", TRAINER, "trainer.rl.data:DataLoader.__init__ output_dir start_step ..."
)
SLOT = _capability(
    "distillation slot",
    ("slot", *ADAPTER),
    "trainer.rl.loss:ref_kl_loss_fn inputs",
    "trainer.rl.loss:opd_loss_fn inputs",
)
COMPUTE_LOSS = _capability(
    "call of the losses",
    ADAPTER,
    f"trainer.rl.loss:compute_loss {_NEWER} {_WEIGHTS}",
)
MICRO_BATCH = _capability(
    "micro-batch",
    ADAPTER,
    f"trainer.rl.data:TensorMicroBatch {_TOKENS} rl_weights ref_kl_weights ...",
)
FORWARD = _capability("student's forward", ADAPTER, "trainer.model:forward model input_ids ...")
_LAYERS = "trainer.models.layers"
FUSED_HEAD, PLAIN_HEAD, GEMMA_FUSED_HEAD, GEMMA_PLAIN_HEAD = HEADS = tuple(
    _capability(name, ADAPTER, f"{_LAYERS}.{head}.forward {_HEAD}", optional="gemma" in head)
    for name, head in (
        ("fused output head", "lm_head:FusedOutputLinear"),
        ("plain output head", "lm_head:VanillaOutputLinear"),
        ("Gemma's fused head", "lm_head_gemma:GemmaFusedOutputLinear"),
        ("Gemma's plain head", "lm_head_gemma:GemmaVanillaOutputLinear"),
    )
)
CONTEXT_PARALLEL = _capability(
    "context parallelism",
    ADAPTER,
    "utils.cp:setup_cp_params cp_rank cp_world_size cp_group ...",
    optional=True,
)
PREFILL = _capability(
    "questions to teachers",
    ADAPTER,
    "orchestrator.clients:prefill_logprobs openai model token_ids",
    "utils.client:prefill_logprobs openai model token_ids",
)
OPD_SCORES = _capability(
    "scores of opd", ADAPTER, f"{_ALGO}.opd:OPDAlgorithm.score_episode episode"
)
OPSD_SCORES = _capability(
    "hints of opsd", ADAPTER, f"{_ALGO}.opsd:OPSDAlgorithm.score_episode episode", optional=True
)
OPD_GROUP = _capability(
    "groups of opd", ADAPTER, f"{_ALGO}.opd:OPDAlgorithm.score_group episodes", optional=True
)
OPSD_GROUP = _capability(
    "groups of opsd", ADAPTER, f"{_ALGO}.opsd:OPSDAlgorithm.score_group episodes", optional=True
)
REFERENCE = _capability(
    "support into rollouts", ADAPTER, f"{_ALGO}.routing:assign_reference_logprobs branch values"
)
SAMPLES = _capability(
    "samples of a rollout", ADAPTER, "orchestrator.trajectories:trace_to_samples trace ..."
)
SAMPLE = _capability(
    "sample",
    ADAPTER,
    *(f"{module}:TrainingSample token_ids ref_logprobs routed_experts ..." for module in _WIRE),
)
PAYLOAD = _capability(
    "carrier of the support",
    ADAPTER,
    *(f"{module}:RoutedExperts data shape dtype" for module in _WIRE),
)
STAMPS = _capability(
    "loss of a token", ADAPTER, f"{_ALGO}.routing:stamp_loss_routing sample action_loss_type"
)
RL_LOSS = _capability(
    "own loss of rl tokens", ("rl",), "trainer.rl.loss:setup_rl_loss_fn loss_config"
)
GRPO = _capability(
    "GRPO's algorithm",
    ("rl",),
    f"{_ALGO}.grpo:GRPOAlgorithm.__init__ config clients",
    f"{_ALGO}.grpo:GRPOAlgorithm.__init__ config policy_pool",
)
GRPO_CONFIG = _capability("GRPO's defaults", ("rl",), f"{_ALGO}.grpo:GRPOAlgoConfig")
GRPO_GROUP = _capability(
    "GRPO's advantages", ("rl",), f"{_ALGO}.grpo:GRPOAlgorithm.score_group episodes"
)
CLI = _capability("launcher's config", ADAPTER, "utils.config:cli ...")
LAUNCHER = _capability("launcher", TRAINER, "entrypoints.rl:main")
CLEAN = _capability(
    "start of a launch",
    ADAPTER,
    "utils.pathing:clean_future_steps output_dir resume_step",
    optional=True,
)
TEACHER = _capability(
    "teacher's client",
    (*ADAPTER, "export"),
    "configs.algorithm:FrozenModelConfig name base_url api_key_var headers ...",
)
OPD_CONFIG = _capability(
    "opd's config",
    (*ADAPTER, "export"),
    "configs.algorithm:OPDAlgoConfig type teacher ...",
)
ALGORITHM = _capability(
    "place of the algorithm",
    (*ADAPTER, "export"),
    "configs.orchestrator:TrainConfig algo ...",
    "configs.orchestrator:OrchestratorConfig algo ...",
)
ENVIRONMENTS = _capability(
    "environments", ("full", "export"), "configs.orchestrator:TrainConfig source ..."
)
ENVIRONMENT_NAME = _capability(
    "environment's name", ("full",), "configs.orchestrator:EnvConfig.resolved_name"
)

CAPABILITIES = (  # Everything that we touch: trainer, orchestrator, launcher
    *(LOSS_SETUP, LOSS_CONFIG, LOSS_INPUTS, LOSS_OUTPUTS, GET_BATCH, WAIT_FOR_BATCH, LOADER_INIT),
    *(SLOT, COMPUTE_LOSS, MICRO_BATCH, FORWARD, *HEADS, CONTEXT_PARALLEL),
    *(PREFILL, OPD_SCORES, OPSD_SCORES, OPD_GROUP, OPSD_GROUP, REFERENCE, SAMPLES, SAMPLE, PAYLOAD),
    *(STAMPS, RL_LOSS, GRPO, GRPO_CONFIG, GRPO_GROUP),
    *(CLI, LAUNCHER, CLEAN, TEACHER, OPD_CONFIG, ALGORITHM, ENVIRONMENTS, ENVIRONMENT_NAME),
)


def misfits(signature: Signature, place: HookPlace) -> tuple[str, ...]:
    """Return what keeps a signature from fitting a place, nothing if it fits."""
    lost = [name for name in place.needs if name not in signature]
    new = [name for name, required in signature.items() if required and name not in place.needs]
    found = []
    if lost:
        found.append(f"has no {', '.join(lost)}")
    if new and not place.open:
        found.append(f"requires {', '.join(new)}, which we do not know")
    return tuple(found)


def find(capability: Capability, read: Read) -> HookFinding:
    """Return where a capability is: the first place that fits, else the one that differs least."""
    findings = [
        HookFinding(capability, place, misfits(signature, place))
        for place in capability.places
        if (signature := read(place.module, place.attribute)) is not None
    ]
    if findings:
        return min(findings, key=lambda finding: len(finding.misfits))
    if capability.optional:
        return HookFinding(capability, None)
    places = " or ".join(dict.fromkeys(map(str, capability.places)))
    return HookFinding(capability, None, (f"there is no {places}",))


def take(capability: Capability, module: ModuleType) -> Any:
    """Return what a hook is about to wrap, None if there is none; otherwise as ``located``."""
    found = located(capability, module)
    return None if found is None else found[1]


def replace(capability: Capability, module: ModuleType, wrapped: Callable[[Any], Any]) -> None:
    """Put the wrapper that ``wrapped`` returns in the place of what ``take`` returns, if any."""
    found = located(capability, module)
    if found is not None:
        owner, _, name = found[0].attribute.rpartition(".")
        setattr(_member(module, owner) if owner else module, name, wrapped(found[1]))


def located(capability: Capability, module: ModuleType) -> tuple[HookPlace, Any] | None:
    """Return the place of a capability in a loaded module of prime-rl, and what is there.

    None: another module may have it, or nothing is lost without it. What does not fit is refused.
    """
    here = tuple(place for place in capability.places if place.module == module.__name__)
    members = {
        place.attribute: member
        for place in here
        if (member := _member(module, place.attribute)) is not None
    }
    if not members and (capability.optional or here != capability.places):
        return None
    finding = find(
        Capability(capability.name, capability.roads, here),
        lambda _, attribute: (
            _inspected(members[attribute], attribute, module) if attribute in members else None
        ),
    )
    if finding.place is None or finding.misfits:
        raise UnknownSurface(misfit_message([finding], getattr(module, "__file__", None)))
    return finding.place, members[finding.place.attribute]


def misfit_message(findings: Sequence[HookFinding], where: object, remedy: str = "") -> str:
    """Return the text of an error: each misfit in a line of its own, and what still works."""
    lines = "\n".join(f"  {finding}" for finding in findings)
    remedy = remedy or "`prime-composer doctor` says what works with it."
    return f"prime_composer does not fit this prime-rl ({where}):\n{lines}\n{remedy}"


def _member(module: ModuleType, attribute: str) -> Any:
    member: Any = module
    for name in attribute.split("."):
        member = getattr(member, name, None)
    return member


def signature_of(member: Any) -> Signature:
    """Return the signature of a function, or the fields of a class, by ``inspect``."""
    return {
        name: parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for name, parameter in inspect.signature(member).parameters.items()
    }


def _inspected(member: Any, attribute: str, module: ModuleType) -> Signature:
    """Return the signature without ``self``, where the owner is a class."""
    signature = dict(signature_of(member))
    owner = _member(module, attribute.rpartition(".")[0]) if "." in attribute else None
    if inspect.isclass(owner):
        signature.pop(next(iter(signature), ""), None)
    return signature
