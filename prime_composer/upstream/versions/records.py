"""Versions of prime-rl: one record each.

A version is detected from its API, never from its version string. 67 upstream commits already have
the newer loss contract while their version string still says 0.6.0.

Two things changed at different times, so there are two records. A ``LossContract`` describes what a
loss receives and which function holds the distillation loss. A ``Version`` refers to one of them
and describes the TOML: where teachers, environments, evaluation, W&B and the rest are written.
Nothing outside ``VERSIONS`` compares version names. README.md of the room, "Support a new
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

Nobody has run the two. v0.9 is what pull requests and single files around 24 August 2026 say:
release 0.9.0 is pull request 3379, and ``filter_zero_advantages`` went with 3463. main is single
files of October and November 2026: configs/{rl,orchestrator,algorithm,inference,shared,trainer}.py.

Importing this module imports the standard library alone: CI reads the records before anything is
installed.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from prime_composer.upstream.versions.capabilities import (
    LOSS_INPUTS,
    LOSS_OUTPUTS,
    LOSS_SETUP,
    UnknownSurface,
    signature_of,
    take,
)
from prime_composer.upstream.versions.toml_shapes import (
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

LOSS_MODULE = "prime_rl.trainer.rl.loss"
CONFIGS = {
    "rl": ("prime_rl.configs.rl", "RLConfig"),
    "orchestrator": ("prime_rl.configs.orchestrator", "OrchestratorConfig"),
    "orchestrator.train": ("prime_rl.configs.orchestrator", "TrainConfig"),
    "teacher": ("prime_rl.configs.algorithm", "FrozenModelConfig"),
}
"""Config classes whose fields tell the versions apart, by module and name."""


@dataclass(frozen=True)
class LossContract:
    """One form of prime-rl's interface between trainer and loss."""

    name: str  # the first version that has it
    setup: str  # function of the loss module that imports a custom loss
    slot: str  # module global that computes the distillation loss; no TOML key selects it
    ref_field: str  # field of LossInputs with the teacher's log-probs
    # a run may have both rl and distillation tokens. Each kind has its own loss, and prime-rl gives
    # advantages to rl tokens alone.
    separates_kinds: bool
    distillation_key: str  # the TOML setting that produces distillation tokens
    rl_key: str  # the TOML setting that produces rl tokens

    def distils(self, loss: Any) -> bool:
        """Return whether a loss is called on distillation tokens; else it is called on rl tokens.

        Where the kinds are separate, a loss of rewards and a teacher is called on rl tokens, to
        which the adapter's orchestrator gives a teacher's scores.
        """
        on_rl_tokens = self.separates_kinds and loss.reads_rewards_and_teacher
        return bool(loss.compares_with_teacher and not on_rl_tokens)

    def provides(self, loss: Any, adapter: bool) -> frozenset[str]:
        """Return the inputs that the trainer provides to a loss."""
        inputs = {"ref_logprobs"}
        if adapter or not (self.separates_kinds and loss.compares_with_teacher):
            inputs.add("advantages")
        if adapter:
            inputs |= {"support", "hidden_states", "token_ids", "stops"}
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


@dataclass(frozen=True)
class Version:
    """What export and launcher have to know about one version of prime-rl."""

    name: str  # what users type after --dialect, and the key of [prime_rl.NAME]
    # full hash of the commit that this record was written from. None: single files were read, and
    # nobody has run it.
    commit: str | None
    # entries of ``config_surface`` that tell this version from all older ones
    surface: tuple[str, ...]
    contract: LossContract  # its interface between trainer and loss
    environment_key: str  # key of the environments in [orchestrator.train] and [orchestrator.eval]
    # API of verifiers -> what writes an environment of it
    environments: Mapping[str, EnvironmentWriter]
    api: str  # the API of verifiers that an environment by id has, unless the recipe says another
    # each environment may have an algorithm of its own: ``opd`` with a teacher of its own, without
    # the adapter, or ``opsd``
    algorithms: bool
    # writes the teachers into the table of ``algo`` or into the environments
    teachers: TeachersWriter
    # changes [orchestrator] so that rollouts without an advantage train. None: no key does, and the
    # adapter's orchestrator keeps them.
    keep_zero_advantages: Callable[[Table], None] | None
    url_is_list: bool  # base_url is a list of URLs
    student_client: str  # table of [orchestrator] that holds the policy's client
    first_step: int  # number of the first training step, as evaluation counts
    inference: Callable[[Table], Table]  # writes [inference] from vLLM's arguments by vLLM's names
    model_option: str  # option of its command ``inference`` that names the model
    vllm_option: str  # prefix of options of its command ``inference`` that vLLM receives
    wandb: tuple[str, ...]  # path of the W&B table
    run_dir: Callable[[Path], Table]  # writes the run directory
    # changes a TOML table so that the run continues from its newest checkpoint
    resume: Callable[[Table], None]
    places: Places = PLACES  # where [orchestrator] has the keys that main moved
    # the vLLM that it pins, where that has no endpoint plugins
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
    commit="38494ccb4140897b1c9e7a9ba8da59dcd8940d47",
    surface=("orchestrator.training_mode",),
    contract=LOSS_V0_6,
    environment_key="env",
    environments={"v0": environment_with_args},
    api="v0",
    algorithms=False,
    teachers=teacher_of_the_run,
    keep_zero_advantages=no_advantage_filter,
    url_is_list=True,
    student_client="student",
    first_step=0,
    inference=inference_with_extra,
    model_option="--model.name",
    vllm_option="--vllm-extra.",
    wandb=("wandb",),
    run_dir=output_dir_itself,
    resume=resume_newest_step,
    vllm_without_plugins="0.22",
)
_V0_7 = replace(
    _V0_6,
    name="v0.7",
    commit="d334ea52940b47f426293a7d146239e3fbf91caa",
    surface=("orchestrator.algo", "orchestrator.train.env"),
    contract=LOSS_V0_7,
    environments={"v0": environment_of_bridge, "v1": environment_with_taskset},
    algorithms=True,
    teachers=teacher_of_each_environment,
    student_client="model",
    first_step=1,
    vllm_without_plugins="0.24",
)
_V0_8 = replace(
    _V0_7,
    name="v0.8",
    commit="60bc29547a8824ad1de7b9af8d265e2b27b2a72d",
    surface=("orchestrator.algo", "orchestrator.train.source"),
    environment_key="source",
    environments={"v0": source_of_bridge, "v1": source_with_agent},
    api="v1",
    vllm_without_plugins=None,
)
_HEAD = replace(
    _V0_8,
    name="head",
    commit="559b44772e471d1538537b8805cc77f3824a5e64",
    surface=(*_V0_8.surface, "teacher.base_url: str"),
    environments={"v1": source_with_agent},
    keep_zero_advantages=no_advantage_pruning,
    url_is_list=False,
    inference=inference_by_vllm_name,
    model_option="--vllm.model",
    vllm_option="--vllm.",
    wandb=("monitors", "wandb"),
    run_dir=output_dir_and_name,
    resume=resume_table,
)
_V0_9 = replace(_HEAD, name="v0.9", commit=None, surface=(*_HEAD.surface, "rl.dashboard"))
_MAIN = replace(
    _V0_9,
    name="main",
    surface=("orchestrator.train.algo",),
    places=PLACES_OF_MAIN,
    keep_zero_advantages=None,
)
VERSIONS: dict[str, Version] = {v.name: v for v in (_V0_6, _V0_7, _V0_8, _HEAD, _V0_9, _MAIN)}
"""All supported versions of prime-rl by name, the oldest first."""

NEWEST_RUN = [version for version in VERSIONS.values() if version.commit][-1]
"""The newest version that the tests run."""


def listed_environments(train: Any) -> Any:
    """Return the environments of prime-rl's own [orchestrator.train], whichever key it has."""
    keys = (version.environment_key for version in reversed(VERSIONS.values()))
    return next(getattr(train, key) for key in keys if hasattr(train, key))


def loss_contracts() -> tuple[LossContract, ...]:
    """Return the loss contracts of all versions, each once, the oldest first."""
    return tuple(dict.fromkeys(version.contract for version in VERSIONS.values()))


def versions_that_run() -> str:
    """Return the versions of prime-rl to install, for messages: releases, and one commit."""
    *releases, newest = (v for v in VERSIONS.values() if v.commit)
    return f"{', '.join(v.name for v in releases)} or {(newest.commit or '')[:8]}"


def known_versions() -> str:
    """Describe all supported versions, for error messages."""
    return "; ".join(
        f"{version.name} "
        f"({f'read at {version.commit[:8]}' if version.commit else 'read in part, never run'}: "
        f"{version.contract.setup}, {version.contract.slot}, {version.contract.ref_field})"
        for version in VERSIONS.values()
    )


def probe_contract(module: ModuleType) -> LossContract:
    """Return the loss contract of prime-rl's loss module.

    The slot is a capability of its own: a loss of rl tokens does without it.
    """
    setup, inputs, _ = (take(each, module) for each in (LOSS_SETUP, LOSS_INPUTS, LOSS_OUTPUTS))
    fields = signature_of(inputs)
    for contract in loss_contracts():
        if setup.__name__ == contract.setup and contract.ref_field in fields:
            return contract
    raise UnknownSurface(
        f"{module.__name__} ({module.__file__}) has {setup.__name__} with "
        f"LossInputs({', '.join(fields)}), which is no loss contract that prime_composer supports. "
        f"Supported: {known_versions()}."
    )


def config_surface(annotations: Callable[[str, str], Mapping[str, str]]) -> frozenset[str]:
    """Return the fields of prime-rl's config classes that tell its versions apart.

    Entries are ``rl.FIELD``, ``orchestrator.FIELD``, ``orchestrator.train.FIELD`` and
    ``teacher.FIELD: TYPE``.
    """
    return frozenset(
        f"{place}.{field}: {kind}" if place == "teacher" else f"{place}.{field}"
        for place, owner in CONFIGS.items()
        for field, kind in annotations(*owner).items()
    )


def match_version(surface: Iterable[str]) -> Version:
    """Return the newest version whose ``surface`` is among the given entries."""
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
