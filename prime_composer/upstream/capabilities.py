"""What this package touches in prime-rl: one table, and the rule that says whether it fits.

A capability is found at the first of its places that fits. A place fits when the names that we need
are there and everything else has a default. A new required parameter is refused by name.

Two readers give the same signature to the same rule: ``inspect`` reads what a hook is about to
wrap, at import time (``take``), and ``ast`` reads prime-rl's sources before anything starts
(``doctor``). README.md in this folder, "Support a new version of prime-rl", says what to do when a
name moves.

This module uses the standard library alone.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

Signature = Mapping[str, bool]
"""Name of a parameter or a field -> whether it has to be given."""

Read = Callable[[str, str], Signature | None]
"""Module, dotted attribute -> its signature; None where there is no such thing."""

ROADS = {
    "losses": "a loss of rl tokens, in [trainer.loss]",
    "slot": "a distillation loss on the sampled token, in [trainer.loss]",
    "adapter": "distillation on the teacher's top K",
    "full": "distillation on the whole vocabulary",
    "rl": "rl environments beside distillation",
    "export": "recipes, written as prime-rl's TOML",
}
"""Road -> what a run on it does."""

PLAIN = ("losses", "slot")
ADAPTER = ("adapter", "full", "rl")
TRAINER = (*PLAIN, *ADAPTER)


class UnknownSurface(RuntimeError):
    """The importable prime-rl is not a version that this package supports."""


@dataclass(frozen=True)
class Place:
    """One place where prime-rl has, or had, what we touch.

    Attributes:
        module: the module, by its full name.
        attribute: what is touched there, dotted below the module.
        needs: the names of parameters or fields that we read or pass.
        open: we hand on whatever else comes, or only read: another required name is no misfit.
    """

    module: str
    attribute: str
    needs: tuple[str, ...] = ()
    open: bool = False

    def __str__(self) -> str:
        return f"{self.module.removeprefix('prime_rl.')}:{self.attribute}"


@dataclass(frozen=True)
class Capability:
    """One thing that we touch in prime-rl.

    Attributes:
        name: what it does for us, as the doctor's table says it.
        roads: the roads that end without it.
        places: where it is, the newest first.
        optional: nothing is lost where prime-rl has no such thing.
    """

    name: str
    roads: tuple[str, ...]
    places: tuple[Place, ...]
    optional: bool = False


@dataclass(frozen=True)
class Finding:
    """Where a capability was found, and what does not fit there.

    Attributes:
        capability: what was looked for.
        place: where it is; None where it is gone.
        misfits: what differs, nothing where it fits.
        note: what else there is to say of it.
    """

    capability: Capability
    place: Place | None
    misfits: tuple[str, ...] = ()
    note: str = ""

    @property
    def verdict(self) -> str:
        """What does not fit, and which roads that costs."""
        return f"{'; '.join(self.misfits)} (costs {', '.join(self.capability.roads)})"

    def __str__(self) -> str:
        where = "" if self.place is None else f"{self.place} "
        return f"{self.capability.name}: {where}{self.verdict}"


def _at(where: str, needs: str = "", open: bool = False) -> Place:
    module, _, attribute = where.partition(":")
    return Place(f"prime_rl.{module}", attribute, tuple(needs.split()), open)


def _capability(
    name: str, roads: tuple[str, ...], *places: Place, optional: bool = False
) -> Capability:
    return Capability(name, roads, places, optional)


_V0_6_SCORES = _at(
    "orchestrator.utils:compute_teacher_logprobs", "clients model_name samples"
)  # v0.6 asks the teacher, and has the samples, in this one function
_SAMPLED = "trainer_logprobs inference_logprobs"
_TOKENS = "input_ids loss_mask temperatures routed_experts env_names sequence_lengths"
_HEAD = "hidden_states labels temperature"
_WIRE = ("transports.batch.types", "transports.rollouts.types", "transport.types")

LOSS_SETUP = _capability(
    "import of our loss",
    TRAINER,
    _at("trainer.rl.loss:setup_rl_loss_fn", "loss_config"),
    _at("trainer.rl.loss:setup_loss_fns", "loss_config"),
)
LOSS_CONFIG = _capability(
    "[trainer.loss]",
    (*TRAINER, "export"),
    _at("configs.trainer:CustomLossConfig", "type import_path kwargs"),
)
LOSS_INPUTS = _capability(
    "inputs of a loss",
    TRAINER,
    _at("trainer.rl.loss:LossInputs", f"{_SAMPLED} ref_logprobs advantages loss_mask"),
    _at("trainer.rl.loss:LossInputs", f"{_SAMPLED} teacher_logprobs advantages loss_mask"),
)
LOSS_OUTPUTS = _capability(
    "outputs of a loss", TRAINER, _at("trainer.rl.loss:LossOutputs", "loss metrics")
)
GET_BATCH = _capability("batch of a step", TRAINER, _at("trainer.rl.data:DataLoader.get_batch"))
WAIT_FOR_BATCH = _capability(
    "end of a step", TRAINER, _at("trainer.rl.data:DataLoader.wait_for_batch")
)
LOADER_INIT = _capability(
    "run directory",
    TRAINER,
    _at("trainer.rl.data:DataLoader.__init__", "output_dir start_step", open=True),
)
SLOT = _capability(
    "distillation slot",
    ("slot", *ADAPTER),
    _at("trainer.rl.loss:ref_kl_loss_fn", "inputs"),
    _at("trainer.rl.loss:opd_loss_fn", "inputs"),
)
COMPUTE_LOSS = _capability(
    "call of the losses",
    ADAPTER,
    _at(
        "trainer.rl.loss:compute_loss",
        f"{_SAMPLED} ref_logprobs advantages loss_mask rl_weights ce_weights ref_kl_weights "
        "rl_loss_fn rl_scale ce_scale ref_kl_scale",
    ),
    _at(
        "trainer.rl.loss:compute_loss",
        f"{_SAMPLED} teacher_logprobs advantages loss_mask loss_fns loss_scale",
    ),
)
MICRO_BATCH = _capability(
    "micro-batch",
    ADAPTER,
    _at(
        "trainer.rl.data:TensorMicroBatch",
        f"{_TOKENS} rl_weights ref_kl_weights",
        open=True,
    ),
    _at(
        "trainer.rl.data:TensorMicroBatch",
        f"{_TOKENS} training_mode",
        open=True,
    ),
)
FORWARD = _capability(
    "student's forward", ADAPTER, _at("trainer.model:forward", "model input_ids", open=True)
)
FUSED_HEAD, PLAIN_HEAD, GEMMA_FUSED_HEAD, GEMMA_PLAIN_HEAD = HEADS = (
    _capability(
        "fused output head",
        ADAPTER,
        _at("trainer.models.layers.lm_head:FusedOutputLinear.forward", _HEAD),
    ),
    _capability(
        "plain output head",
        ADAPTER,
        _at("trainer.models.layers.lm_head:VanillaOutputLinear.forward", _HEAD),
    ),
    _capability(
        "Gemma's fused head",
        ADAPTER,
        _at("trainer.models.layers.lm_head_gemma:GemmaFusedOutputLinear.forward", _HEAD),
        optional=True,
    ),
    _capability(
        "Gemma's plain head",
        ADAPTER,
        _at("trainer.models.layers.lm_head_gemma:GemmaVanillaOutputLinear.forward", _HEAD),
        optional=True,
    ),
)
CONTEXT_PARALLEL = _capability(
    "context parallelism",
    ADAPTER,
    _at("utils.cp:setup_cp_params", "cp_rank cp_world_size cp_group", open=True),
    optional=True,
)
PREFILL = _capability(
    "questions to teachers",
    ADAPTER,
    _at("orchestrator.clients:prefill_logprobs", "openai model token_ids"),
    _at("utils.client:prefill_logprobs", "openai model token_ids"),
    _V0_6_SCORES,
)
OPD_SCORES = _capability(
    "scores of opd",
    ADAPTER,
    _at("orchestrator.algo.opd:OPDAlgorithm.score_episode", "episode"),
    _at("orchestrator.algo.opd:OPDAlgorithm.score_rollout", "rollout"),
    _V0_6_SCORES,
)
OPSD_SCORES = _capability(
    "hints of opsd",
    ADAPTER,
    _at("orchestrator.algo.opsd:OPSDAlgorithm.score_episode", "episode"),
    _at("orchestrator.algo.opsd:OPSDAlgorithm.score_rollout", "rollout"),
    optional=True,
)
OPD_GROUP = _capability(
    "groups of opd",
    ADAPTER,
    _at("orchestrator.algo.opd:OPDAlgorithm.score_group", "episodes"),
    _at("orchestrator.algo.opd:OPDAlgorithm.score_group", "group"),
    optional=True,
)
OPSD_GROUP = _capability(
    "groups of opsd",
    ADAPTER,
    _at("orchestrator.algo.opsd:OPSDAlgorithm.score_group", "episodes"),
    _at("orchestrator.algo.opsd:OPSDAlgorithm.score_group", "group"),
    optional=True,
)
REFERENCE = _capability(
    "support into rollouts",
    ADAPTER,
    _at("orchestrator.algo.routing:assign_reference_logprobs", "branch values"),
    _at("orchestrator.algo.opd:OPDAlgorithm.score_rollout", "rollout"),
    _V0_6_SCORES,
)
SAMPLES = _capability(
    "samples of a rollout",
    ADAPTER,
    _at("orchestrator.trajectories:trace_to_samples", "trace", open=True),
    _V0_6_SCORES,
)
SAMPLE = _capability(
    "sample",
    ADAPTER,
    *(
        _at(f"{module}:TrainingSample", "token_ids ref_logprobs routed_experts", open=True)
        for module in _WIRE
    ),
    _at(
        "transport.types:TrainingSample",
        "prompt_ids completion_ids env_name teacher_logprobs routed_experts",
        open=True,
    ),
)
PAYLOAD = _capability(
    "carrier of the support",
    ADAPTER,
    *(_at(f"{module}:RoutedExperts", "data shape dtype") for module in _WIRE),
)
STAMPS = _capability(
    "loss of a token",
    ADAPTER,
    _at("orchestrator.algo.routing:stamp_loss_routing", "sample action_loss_type"),
    _V0_6_SCORES,
)
RL_LOSS = _capability(
    "own loss of rl tokens", ("rl",), _at("trainer.rl.loss:setup_rl_loss_fn", "loss_config")
)
GRPO = _capability(
    "GRPO's algorithm",
    ("rl",),
    _at("orchestrator.algo.grpo:GRPOAlgorithm.__init__", "config clients"),
    _at("orchestrator.algo.grpo:GRPOAlgorithm.__init__", "config policy_pool"),
)
GRPO_CONFIG = _capability("GRPO's defaults", ("rl",), _at("orchestrator.algo.grpo:GRPOAlgoConfig"))
GRPO_GROUP = _capability(
    "GRPO's advantages",
    ("rl",),
    _at("orchestrator.algo.grpo:GRPOAlgorithm.score_group", "episodes"),
    _at("orchestrator.algo.grpo:GRPOAlgorithm.score_group", "group"),
)
CLI = _capability("launcher's config", ADAPTER, _at("utils.config:cli", open=True))
LAUNCHER = _capability("launcher", TRAINER, _at("entrypoints.rl:main"))
TEACHER = _capability(
    "teacher's client",
    (*ADAPTER, "export"),
    _at("configs.algorithm:FrozenModelConfig", "name base_url api_key_var headers", open=True),
    _at("configs.orchestrator:RolloutModelConfig", "model client", open=True),
)
OPD_CONFIG = _capability(
    "opd's config",
    (*ADAPTER, "export"),
    _at("configs.algorithm:OPDAlgoConfig", "type teacher", open=True),
    _at("configs.orchestrator:OrchestratorConfig", "training_mode teacher", open=True),
)
ALGORITHM = _capability(
    "place of the algorithm",
    (*ADAPTER, "export"),
    _at("configs.orchestrator:TrainConfig", "algo", open=True),
    _at("configs.orchestrator:OrchestratorConfig", "algo", open=True),
    _at("configs.orchestrator:OrchestratorConfig", "training_mode", open=True),
)
ENVIRONMENTS = _capability(
    "environments",
    ("full", "export"),
    _at("configs.orchestrator:TrainConfig", "source", open=True),
    _at("configs.orchestrator:TrainConfig", "env", open=True),
)
ENVIRONMENT_NAME = _capability(
    "environment's name", ("full",), _at("configs.orchestrator:EnvConfig.resolved_name")
)

CAPABILITIES = (
    *(LOSS_SETUP, LOSS_CONFIG, LOSS_INPUTS, LOSS_OUTPUTS, GET_BATCH, WAIT_FOR_BATCH, LOADER_INIT),
    *(SLOT, COMPUTE_LOSS, MICRO_BATCH, FORWARD, *HEADS, CONTEXT_PARALLEL),
    *(PREFILL, OPD_SCORES, OPSD_SCORES, OPD_GROUP, OPSD_GROUP, REFERENCE, SAMPLES, SAMPLE, PAYLOAD),
    *(STAMPS, RL_LOSS, GRPO, GRPO_CONFIG, GRPO_GROUP),
    *(CLI, LAUNCHER, TEACHER, OPD_CONFIG, ALGORITHM, ENVIRONMENTS, ENVIRONMENT_NAME),
)
"""Everything that we touch: trainer, orchestrator, launcher."""


def misfits(signature: Signature, place: Place) -> tuple[str, ...]:
    """Return what keeps a signature from fitting a place, nothing if it fits."""
    lost = [name for name in place.needs if name not in signature]
    new = [name for name, required in signature.items() if required and name not in place.needs]
    found = []
    if lost:
        found.append(f"has no {', '.join(lost)}")
    if new and not place.open:
        found.append(f"requires {', '.join(new)}, which we do not know")
    return tuple(found)


def find(capability: Capability, read: Read) -> Finding:
    """Return where a capability is: the first place that fits, else the one that differs least."""
    findings = [
        Finding(capability, place, misfits(signature, place))
        for place in capability.places
        if (signature := read(place.module, place.attribute)) is not None
    ]
    if findings:
        return min(findings, key=lambda finding: len(finding.misfits))
    if capability.optional:
        return Finding(capability, None)
    places = " or ".join(dict.fromkeys(map(str, capability.places)))
    return Finding(capability, None, (f"there is no {places}",))


def take(capability: Capability, module: ModuleType) -> Any:
    """Return what a hook is about to wrap, after a check that it fits.

    Args:
        capability: what is wrapped.
        module: a module of prime-rl that has one of its places, loaded.

    Returns:
        The function; None where another module may have it, or where nothing is lost without it.

    Raises:
        UnknownSurface: it does not fit, or is gone.
    """
    found = _found(capability, module)
    return None if found is None else found[1]


def replace(capability: Capability, module: ModuleType, wrapped: Callable[[Any], Any]) -> bool:
    """Put a wrapper in the place of what ``take`` returns, and return whether there was any.

    Args:
        capability: what is wrapped.
        module: as ``take``'s.
        wrapped: returns the wrapper of a function.

    Raises:
        UnknownSurface: as ``take``.
    """
    found = _found(capability, module)
    if found is None:
        return False
    owner, _, name = found[0].rpartition(".")
    setattr(_member(module, owner) if owner else module, name, wrapped(found[1]))
    return True


def _found(capability: Capability, module: ModuleType) -> tuple[str, Any] | None:
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
        raise UnknownSurface(explain([finding], getattr(module, "__file__", None)))
    return finding.place.attribute, members[finding.place.attribute]


def explain(findings: Sequence[Finding], where: object, remedy: str = "") -> str:
    """Return the text of an error: each misfit in a line of its own, and what still works."""
    lines = "\n".join(f"  {finding}" for finding in findings)
    remedy = remedy or "`prime-rl doctor` says what works with it."
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
