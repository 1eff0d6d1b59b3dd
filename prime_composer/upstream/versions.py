"""Versions of prime-rl: one record each, and the detection of the installed one.

A version is detected from its API, never from its version string. 67 upstream commits already have
the newer loss contract while their version string still says 0.6.0.

Two things changed at different times, so there are two records. A ``LossContract`` describes what a
loss receives and which function holds the distillation loss. A ``Version`` refers to one of them
and describes the TOML: where teachers, environments, evaluation, W&B and the rest are written.
Nothing outside ``VERSIONS`` compares version names. README.md in this folder, "Support a new
version of prime-rl", shows how to add a record.

    meaning           v0.6                        v0.7                      v0.8           head
    distillation      training_mode = "opd"       [orchestrator.algo]       =              =
    teacher           [orchestrator.teacher.*]    algo.teacher, URL list    =              one URL
    environment       [[orchestrator.train.env]]  = (taskset, harness)      [[...source]]  =
    verifiers' API    v0                          v0, v1                    =              v1
    its own teacher   header of the one client    its own algo.teacher      =              =
    several mixed     header of the one client    header of the teacher     =              =
    zero advantages   post_batch_filters          =                         =              train
    evaluation        [[orchestrator.eval.env]]   =                         [[...source]]  =
    vLLM's arguments  [inference], vllm_extra     =                         =              vllm
    W&B               [wandb]                     =                         =              monitors

v0.9, a release of three days after head, has head's keys. main moved four of them, each at another
time, so that what is installed may lie between the two: ``probe_version`` looks each one up.

    meaning           head, v0.9                            main
    algorithm         [orchestrator.algo]                   [orchestrator.train.algo]
    group_size        [orchestrator]                        [orchestrator.train]
    eval's size       [orchestrator.eval] num_examples      [orchestrator.eval.select] limit
    top-p             train.sampling.extra_body             train.sampling, replayed by the trainer
    zero advantages   train.filter_zero_advantages          always dropped; the adapter keeps them

Nobody has run the two. v0.9 is what pull requests and the versions of single files around 24 August
2026 say: release 0.9.0 is pull request 3379, `dashboard` came with 3371 of that day, and
`filter_zero_advantages` went with 3463 of 1 September. main is single files of October and November
2026: configs/{rl,orchestrator,algorithm,inference,shared,trainer}.py.

Importing this module imports the standard library alone: CI reads the records before anything is
installed.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from prime_composer.upstream.capabilities import (
    LOSS_INPUTS,
    LOSS_OUTPUTS,
    LOSS_SETUP,
    UnknownSurface,
    signature_of,
    take,
)
from prime_composer.upstream.toml_shapes import (
    PLACES,
    PLACES_OF_MAIN,
    EnvironmentWriter,
    Places,
    Table,
    TeachersWriter,
    environment_of_bridge,
    environment_with_args,
    environment_with_taskset,
    inference_by_vllm_name,
    inference_with_extra,
    no_advantage_filter,
    no_advantage_pruning,
    output_dir_and_name,
    output_dir_itself,
    resume_newest_step,
    resume_table,
    source_of_bridge,
    source_with_agent,
    teacher_of_each_environment,
    teacher_of_the_run,
)

if TYPE_CHECKING:  # pydantic, which a script that makes environments does not have
    from prime_composer.upstream.config_fields import ConfigFields

LOSS_MODULE = "prime_rl.trainer.rl.loss"
RL_CONFIGS = "prime_rl.configs.rl"
ORCHESTRATOR_CONFIGS = "prime_rl.configs.orchestrator"
ALGORITHM_CONFIGS = "prime_rl.configs.algorithm"


@dataclass(frozen=True)
class LossContract:
    """One form of prime-rl's interface between trainer and loss.

    Attributes:
        name: the first version that has it.
        setup: function of the loss module that imports a custom loss.
        slot: module global that computes the distillation loss; no TOML key selects it.
        ref_field: field of LossInputs with the teacher's log-probs.
        separates_kinds: a run may have both rl and distillation tokens. Each kind has its own loss,
            and prime-rl gives advantages to rl tokens alone.
        distillation_key: the TOML setting that produces distillation tokens.
        rl_key: the TOML setting that produces rl tokens.
    """

    name: str
    setup: str
    slot: str
    ref_field: str
    separates_kinds: bool
    distillation_key: str
    rl_key: str

    def distils(self, loss: Any) -> bool:
        """Return whether a loss is called on distillation tokens; else it is called on rl tokens.

        Where the kinds are separate, a loss of rewards and a teacher is called on rl tokens, to
        which the adapter's orchestrator gives a teacher's scores.

        Args:
            loss: its ``LossConfig``.
        """
        on_rl_tokens = self.separates_kinds and loss.reads_rewards_and_teacher
        return bool(loss.compares_with_teacher and not on_rl_tokens)

    def provides(self, loss: Any, adapter: bool) -> frozenset[str]:
        """Return the inputs that the trainer provides to a loss.

        Args:
            loss: its ``LossConfig``.
            adapter: the hooks of the whole-run adapter are active.
        """
        inputs = {"ref_logprobs"}
        if adapter or not (self.separates_kinds and loss.compares_with_teacher):
            inputs.add("advantages")
        if adapter:
            inputs |= {"support", "hidden_states", "token_ids"}
        return frozenset(inputs)


LOSS_V0_6 = LossContract(
    name="v0.6",
    setup="setup_loss_fns",
    slot="opd_loss_fn",
    ref_field="teacher_logprobs",
    separates_kinds=False,
    distillation_key='[orchestrator] training_mode = "opd"',
    rl_key='[orchestrator] training_mode = "rl"',
)
LOSS_V0_7 = LossContract(
    name="v0.7",
    setup="setup_rl_loss_fn",
    slot="ref_kl_loss_fn",
    ref_field="ref_logprobs",
    separates_kinds=True,
    distillation_key='[orchestrator.algo] type = "opd" (or "opsd")',
    rl_key="[orchestrator.algo] of an rl algorithm",
)

_ENGINE_LOCAL = "or run the recipe with --engine local."
_PAIRS = (
    "prime-rl gives a loss one sequence at a time, and no field ties two of them together into a "
    f"preference pair. Set the replay channel's weight to 0, {_ENGINE_LOCAL}"
)
_ADAPTER = (
    "Start the run with the adapter: `prime-rl rl --config FILE --engine prime-rl`, or "
    "PRIME_COMPOSER=1 in front of prime-rl's own `rl @ FILE`."
)
REMEDIES = {
    "by_teacher": f"Its rollouts are all the student's: choose another loss, {_ENGINE_LOCAL}",
    "support": _ADAPTER,
    "hidden_states": _ADAPTER,
    "token_ids": _ADAPTER,
    "replay": _PAIRS,
    "segment_ids": _PAIRS,
    "advantages": (
        "From v0.7 on prime-rl gives no advantages to tokens that a teacher scores. The adapter "
        f'does. {_ADAPTER} For sampled_reverse_kl alone, dialect = "v0_7" needs none.'
    ),
}
"""Input that a loss needs and prime-rl does not provide -> what to do."""


@dataclass(frozen=True)
class Version:
    """Everything that export, launcher and tests have to know about one version of prime-rl.

    Attributes:
        name: what users type after --dialect, and the key of [prime_rl.NAME].
        revision: git revision that the tests read and run.
        commit: full hash of the commit that this record was written from. None: single files were
            read, and nobody has run it.
        surface: entries of ``config_surface`` that tell this version from all older ones.
        contract: its interface between trainer and loss.
        loss_dialect: value of the loss knob ``dialect``, where a loss has one: the first version
            with the same arithmetic.
        environment_key: key of the environments in [orchestrator.train] and [orchestrator.eval].
        environments: API of verifiers -> what writes an environment of it.
        api: the API of verifiers that an environment by id has, unless the recipe says another.
        teachers: writes the teachers into the table of ``algo`` or into the environments.
        teacher_by_environment: each environment may have a teacher of its own, without the adapter.
        keep_zero_advantages: changes [orchestrator] so that rollouts without an advantage train.
            None: no key does, and the adapter's orchestrator keeps them.
        url_is_list: base_url is a list of URLs.
        self_distillation: it has the algorithm ``opsd``.
        student_client: table of [orchestrator] that holds the policy's client.
        first_step: number of the first training step, as evaluation counts.
        inference: writes [inference] from vLLM's arguments by vLLM's names.
        model_option: option of its command ``inference`` that names the model.
        vllm_option: prefix of options of its command ``inference`` that vLLM receives.
        float32_head: field of [inference] that computes logits in float32; true by default.
        wandb: path of the W&B table.
        run_dir: writes the run directory.
        resume: changes a TOML table so that the run continues from its newest checkpoint.
        requirements: file in tests/upstream with the environment in which it runs on a CPU. None:
            it was never run.
        places: where [orchestrator] has the keys that main moved.
        verifiers: version of verifiers, where it differs from the one in ``requirements``.
        vllm_without_plugins: the vLLM that it pins, where that has no endpoint plugins.
    """

    name: str
    revision: str
    commit: str | None
    surface: tuple[str, ...]
    contract: LossContract
    loss_dialect: str
    environment_key: str
    environments: Mapping[str, EnvironmentWriter]
    api: str
    teachers: TeachersWriter
    teacher_by_environment: bool
    keep_zero_advantages: Callable[[Table], None] | None
    url_is_list: bool
    self_distillation: bool
    student_client: str
    first_step: int
    inference: Callable[[Table], Table]
    model_option: str
    vllm_option: str
    float32_head: str
    wandb: tuple[str, ...]
    run_dir: Callable[[Path], Table]
    resume: Callable[[Table], None]
    requirements: str | None
    places: Places = PLACES
    verifiers: str | None = None
    vllm_without_plugins: str | None = None

    @property
    def environment_of_problems(self) -> EnvironmentWriter:
        """What writes the environment of our own problems, which is of its newest API."""
        return self.environments[max(self.environments)]

    @property
    def replays_sampling(self) -> bool:
        """Whether the trainer replays top-p: its log-probs are those among the kept ids."""
        return self.places.top_p == PLACES_OF_MAIN.top_p

    def base_url(self, url: str) -> str | list[str]:
        """Return a URL as this version's clients expect it."""
        return [url] if self.url_is_list else url


_V0_6 = Version(
    name="v0.6",
    revision="v0.6.0",
    commit="38494ccb4140897b1c9e7a9ba8da59dcd8940d47",
    surface=("orchestrator.training_mode",),
    contract=LOSS_V0_6,
    loss_dialect="v0.6",
    environment_key="env",
    environments={"v0": environment_with_args},
    api="v0",
    teachers=teacher_of_the_run,
    teacher_by_environment=False,
    keep_zero_advantages=no_advantage_filter,
    url_is_list=True,
    self_distillation=False,
    student_client="student",
    first_step=0,
    inference=inference_with_extra,
    model_option="--model.name",
    vllm_option="--vllm-extra.",
    float32_head="enable_fp32_lm_head",
    wandb=("wandb",),
    run_dir=output_dir_itself,
    resume=resume_newest_step,
    requirements="requirements_v0.6.txt",
    vllm_without_plugins="0.22",
)
_V0_7 = Version(
    name="v0.7",
    revision="v0.7.0",
    commit="d334ea52940b47f426293a7d146239e3fbf91caa",
    surface=("orchestrator.algo", "orchestrator.train.env"),
    contract=LOSS_V0_7,
    loss_dialect="v0.7",
    environment_key="env",
    environments={"v0": environment_of_bridge, "v1": environment_with_taskset},
    api="v0",
    teachers=teacher_of_each_environment,
    teacher_by_environment=True,
    keep_zero_advantages=no_advantage_filter,
    url_is_list=True,
    self_distillation=True,
    student_client="model",
    first_step=1,
    inference=inference_with_extra,
    model_option="--model.name",
    vllm_option="--vllm-extra.",
    float32_head="enable_fp32_lm_head",
    wandb=("wandb",),
    run_dir=output_dir_itself,
    resume=resume_newest_step,
    requirements="requirements_head.txt",
    verifiers="0.2.0",
    vllm_without_plugins="0.24",
)
_V0_8 = Version(
    name="v0.8",
    revision="v0.8.0",
    commit="60bc29547a8824ad1de7b9af8d265e2b27b2a72d",
    surface=("orchestrator.algo", "orchestrator.train.source"),
    contract=LOSS_V0_7,
    loss_dialect="v0.7",
    environment_key="source",
    environments={"v0": source_of_bridge, "v1": source_with_agent},
    api="v1",
    teachers=teacher_of_each_environment,
    teacher_by_environment=True,
    keep_zero_advantages=no_advantage_filter,
    url_is_list=True,
    self_distillation=True,
    student_client="model",
    first_step=1,
    inference=inference_with_extra,
    model_option="--model.name",
    vllm_option="--vllm-extra.",
    float32_head="enable_fp32_lm_head",
    wandb=("wandb",),
    run_dir=output_dir_itself,
    resume=resume_newest_step,
    requirements="requirements_head.txt",
    verifiers="0.2.2.dev76",
)
_HEAD = Version(
    name="head",
    revision="HEAD",
    commit="559b44772e471d1538537b8805cc77f3824a5e64",
    surface=("orchestrator.algo", "orchestrator.train.source", "teacher.base_url: str"),
    contract=LOSS_V0_7,
    loss_dialect="v0.7",
    environment_key="source",
    environments={"v1": source_with_agent},
    api="v1",
    teachers=teacher_of_each_environment,
    teacher_by_environment=True,
    keep_zero_advantages=no_advantage_pruning,
    url_is_list=False,
    self_distillation=True,
    student_client="model",
    first_step=1,
    inference=inference_by_vllm_name,
    model_option="--vllm.model",
    vllm_option="--vllm.",
    float32_head="enable_fp32_lm_head",
    wandb=("monitors", "wandb"),
    run_dir=output_dir_and_name,
    resume=resume_table,
    requirements="requirements_head.txt",
)
_V0_9 = replace(
    _HEAD,
    name="v0.9",
    revision="v0.9.0",
    commit=None,
    surface=(*_HEAD.surface, "rl.dashboard"),
    requirements=None,
)
_MAIN = replace(
    _V0_9,
    name="main",
    revision="main",
    surface=("orchestrator.train.algo",),
    loss_dialect="main",
    places=PLACES_OF_MAIN,
    keep_zero_advantages=None,
)
VERSIONS: dict[str, Version] = {v.name: v for v in (_V0_6, _V0_7, _V0_8, _HEAD, _V0_9, _MAIN)}
"""All supported versions of prime-rl by name, the oldest first."""

NEWEST_RUN = [version for version in VERSIONS.values() if version.commit][-1]
"""The newest version that the tests run."""


def loss_contracts() -> tuple[LossContract, ...]:
    """Return the loss contracts of all versions, each once, the oldest first."""
    return tuple(dict.fromkeys(version.contract for version in VERSIONS.values()))


def known_versions() -> str:
    """Describe all supported versions, for error messages."""
    return "; ".join(
        f"{version.name} ({version.revision}, "
        f"{f'read at {version.commit[:8]}' if version.commit else 'read in part, never run'}: "
        f"{version.contract.setup}, {version.contract.slot}, {version.contract.ref_field})"
        for version in VERSIONS.values()
    )


def probe_contract(module: ModuleType | None = None) -> LossContract:
    """Return the loss contract of the importable prime-rl.

    The slot is a capability of its own: a loss of rl tokens does without it.

    Args:
        module: prime-rl's loss module; None imports it.

    Raises:
        UnknownSurface: no contract fits; the message names what differs.
        ImportError: prime-rl is not installed.
    """
    module = importlib.import_module(LOSS_MODULE) if module is None else module
    setup, inputs, _ = (take(each, module) for each in (LOSS_SETUP, LOSS_INPUTS, LOSS_OUTPUTS))
    for contract in loss_contracts():
        if setup is getattr(module, contract.setup, None):
            if contract.ref_field in signature_of(inputs):
                return contract
    raise UnknownSurface(
        f"{module.__name__} ({module.__file__}) has {setup.__name__} with "
        f"LossInputs({', '.join(signature_of(inputs))}), which is no loss contract that "
        f"prime_composer supports. Supported: {known_versions()}."
    )


def config_surface() -> frozenset[str]:
    """Return the fields of prime-rl's config classes that tell its versions apart.

    Entries are ``rl.FIELD``, ``orchestrator.FIELD``, ``orchestrator.train.FIELD`` and
    ``teacher.FIELD: TYPE``.

    Raises:
        ImportError: prime-rl is not installed.
    """
    module = importlib.import_module(ORCHESTRATOR_CONFIGS)
    entries = {f"orchestrator.{field}" for field in module.OrchestratorConfig.model_fields}
    if importlib.util.find_spec(RL_CONFIGS) is not None:
        fields = importlib.import_module(RL_CONFIGS).RLConfig.model_fields
        entries |= {f"rl.{field}" for field in fields}
    train = getattr(module, "TrainConfig", None)
    if train is not None:
        entries |= {f"orchestrator.train.{field}" for field in train.model_fields}
    if importlib.util.find_spec(ALGORITHM_CONFIGS) is not None:
        teacher = importlib.import_module(ALGORITHM_CONFIGS).FrozenModelConfig
        for field, info in teacher.model_fields.items():
            annotation = info.annotation
            name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
            entries.add(f"teacher.{field}: {name}")
    return frozenset(entries)


def match_version(surface: Iterable[str]) -> Version:
    """Return the newest version whose ``surface`` is among the given entries.

    Raises:
        UnknownSurface: no version fits; the message says what each one lacks.
    """
    entries = frozenset(surface)
    reports = []
    for version in reversed(VERSIONS.values()):
        missing = [entry for entry in version.surface if entry not in entries]
        if not missing:
            return version
        reports.append(f"{version.name}: {', '.join(missing)}")
    raise UnknownSurface(
        "The importable prime-rl's config classes fit no version that prime_composer can write a "
        f"TOML for. Missing: {' | '.join(reports)}. Found: {', '.join(sorted(entries))}. "
        f"Supported: {known_versions()}."
    )


def fitted(version: Version, fields: "ConfigFields") -> Version:
    """Return a record with each key that main moved where the config classes have it.

    A key that they have in neither place stays where the record has it.
    """
    places = {}
    for name, at_main in PLACES_OF_MAIN._asdict().items():
        candidates = (at_main, getattr(PLACES, name))
        found = [place for place in candidates if fields.has(f"orchestrator.{place}")]
        places[name] = found[0] if found else getattr(version.places, name)
    keep = version.keep_zero_advantages
    if fields.has("orchestrator.train.filter_zero_advantages"):
        keep = no_advantage_pruning
    elif keep is no_advantage_pruning:
        keep = None
    changed = replace(version, places=Places(**places), keep_zero_advantages=keep)
    return version if changed == version else changed


def probe_version() -> Version:
    """Return the version of the importable prime-rl, by the fields of its config classes.

    Raises:
        UnknownSurface: no version fits.
        ImportError: prime-rl is not installed.
    """
    from prime_composer.upstream.config_fields import importable_fields

    version, fields = match_version(config_surface()), importable_fields()
    return version if fields is None else fitted(version, fields)


def has_prime_rl() -> bool:
    """Return whether prime-rl's trainer can be imported, without importing it."""
    try:
        return importlib.util.find_spec(LOSS_MODULE) is not None
    except ImportError:
        return False
