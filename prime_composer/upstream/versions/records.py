"""Versions of prime-rl: one record each, and the old ones by name.

A version is detected from its API, never from its version string. 67 upstream commits already have
the newer loss contract while their version string still says 0.6.0.

Two things changed at different times, so there are two records. A ``LossContract`` describes what a
loss receives and which function holds the distillation loss; v0.6, with the five lines of
``[trainer.loss]`` alone, has one of its own. A ``Version`` describes the TOML of a prime-rl with
the contract of episodes, which everything else needs. Nothing outside ``VERSIONS`` compares version
names. README.md of this folder shows how to add a record.

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
from prime_composer.upstream.versions.toml_shapes import PLACES, PLACES_OF_MAIN, Places

LOSS_MODULE = "prime_rl.trainer.rl.loss"
CONFIGS = {  # Config classes whose fields tell the versions apart, by module and name
    "rl": ("prime_rl.configs.rl", "RLConfig"),
    "orchestrator": ("prime_rl.configs.orchestrator", "OrchestratorConfig"),
    "orchestrator.train": ("prime_rl.configs.orchestrator", "TrainConfig"),
    "teacher": ("prime_rl.configs.algorithm", "FrozenModelConfig"),
}


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
LOSS_CONTRACTS = (LOSS_V0_6, LOSS_V0_7)


@dataclass(frozen=True)
class Version:
    """What export and launcher have to know about one version of prime-rl."""

    name: str  # what users type after --dialect, and the key of [prime_rl.NAME]
    # full hash of the commit that this record was written from. None: single files were read, and
    # nobody has run it.
    commit: str | None
    # entries of ``config_surface`` that tell this version from all older ones
    surface: tuple[str, ...]
    places: Places = PLACES  # where [orchestrator] has the keys that main moved
    # key of [orchestrator] that is set to false so that rollouts without an advantage train. None:
    # no key does, and the adapter's orchestrator keeps them.
    zero_advantages: str | None = "train.filter_zero_advantages"

    @property
    def replays_sampling(self) -> bool:
        """Whether the trainer replays top-p: its log-probs are those among the kept ids."""
        return self.places.top_p == PLACES_OF_MAIN.top_p


_V0_8_SURFACE = ("orchestrator.algo", "orchestrator.train.source")
_HEAD = Version(
    name="head",
    commit="559b44772e471d1538537b8805cc77f3824a5e64",
    surface=(*_V0_8_SURFACE, "teacher.base_url: str"),
)
_V0_9 = replace(_HEAD, name="v0.9", commit=None, surface=(*_HEAD.surface, "rl.dashboard"))
_MAIN = replace(
    _V0_9,
    name="main",
    surface=("orchestrator.train.algo",),
    places=PLACES_OF_MAIN,
    zero_advantages=None,
)
VERSIONS: dict[str, Version] = {v.name: v for v in (_HEAD, _V0_9, _MAIN)}  # The oldest first

NEWEST_RUN = [version for version in VERSIONS.values() if version.commit][-1]  # By the tests

OLD: dict[str, tuple[str, ...]] = {
    "v0.6": ("orchestrator.training_mode",),
    "v0.7": ("orchestrator.algo", "orchestrator.train.env"),
    "v0.8": _V0_8_SURFACE,
}
"""Older version -> the entries of ``config_surface`` that tell it from all before, the oldest
first. v0.6 has the five lines in [trainer.loss], and the others have nothing."""

LAST_COMMIT = "5218d7f"  # The last one of this package that had all of ``OLD``


class OldVersion(UnknownSurface):
    """The importable prime-rl is one of ``OLD``."""

    def __init__(self, name: str):
        self.name = name
        own = f"prime-rl {name} is no longer supported:"
        if name == "v0.6":
            own = (
                f"in prime-rl {name} this package has the five lines in [trainer.loss] alone, "
                "without PRIME_COMPOSER; for all else"
            )
        super().__init__(
            f"{own} install prime-rl {versions_that_run()}, or prime_composer at its "
            f"commit {LAST_COMMIT}, the last one that had {name}."
        )


def versions_that_run() -> str:
    """Return the version of prime-rl to install, for messages, and those that nobody has run."""
    read = ", ".join(version.name for version in VERSIONS.values() if not version.commit)
    return f"{(NEWEST_RUN.commit or '')[:8]} ({read}: read in part, never run)"


def probe_contract(module: ModuleType) -> LossContract:
    """Return the loss contract of prime-rl's loss module.

    The slot is a capability of its own: a loss of rl tokens does without it.
    """
    setup, inputs, _ = (take(each, module) for each in (LOSS_SETUP, LOSS_INPUTS, LOSS_OUTPUTS))
    fields = signature_of(inputs)
    for contract in LOSS_CONTRACTS:
        if setup.__name__ == contract.setup and contract.ref_field in fields:
            return contract
    raise UnknownSurface(
        f"{module.__name__} ({module.__file__}) has {setup.__name__} with "
        f"LossInputs({', '.join(fields)}), which is no loss contract that prime_composer supports. "
        f"Install prime-rl {versions_that_run()}; v0.6 has the five lines in [trainer.loss]."
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
    for name, own in reversed(OLD.items()):
        if entries.issuperset(own):
            raise OldVersion(name)
    raise UnknownSurface(
        "The importable prime-rl's config classes fit no version that prime_composer can write a "
        f"TOML for. Missing: {' | '.join(reports)}. Found: {', '.join(sorted(entries))}. "
        f"Install prime-rl {versions_that_run()}; v0.6 has the five lines in [trainer.loss]."
    )
