"""Inputs that a loss may need, and what to do about each where it is missing.

A new need is a field of ``LossInputs``, a row of ``NEEDS``, and the code of the hosts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

Host = Literal["call", "recipe", "prime_rl", "trl"]

PROVIDERS: dict[Host, str] = {
    "call": "the trainer",
    "recipe": "this recipe",
    "prime_rl": "prime-rl's trainer",
    "trl": "trl's DistillationTrainer",
}
"""Who provides the inputs, by host: who calls a loss, the one-machine engine, prime-rl, trl."""

START_ADAPTER = (
    "Start the run with the adapter: `prime-composer rl --config FILE --engine prime-rl`, or "
    "PRIME_COMPOSER=1 in front of prime-rl's own `rl @ FILE`."
)
_ADD_TEACHER = "Remedy: add a [teacher] table, or several [teachers.*]."
_RUN_LOCALLY = "or run the recipe with --engine local."
_NO_PAIRS = (
    "prime-rl gives a loss one sequence at a time, and no field ties two of them together into a "
    f"preference pair. Set the replay channel's weight to 0, {_RUN_LOCALLY}"
)
_ONE_MACHINE_HAS_IT = "prime-composer rl --config RECIPE provides it."


NEEDS: dict[str, dict[Host, str]] = {
    "ref_logprobs": {
        "call": "Configure a [teacher] that scores the student's tokens.",
        "recipe": _ADD_TEACHER,
    },
    "support": {
        "call": "Configure a [teacher]: its scorer returns the top-K support of each position.",
        "recipe": _ADD_TEACHER,
        "prime_rl": START_ADAPTER,
    },
    "hidden_states": {
        "call": "Configure a [teacher] on this machine, or serve one by prime-composer teacher; or "
        "set k to a number.",
        "recipe": _ADD_TEACHER,
        "prime_rl": START_ADAPTER,
    },
    "advantages": {
        "call": "Configure rewards: [rollout] group_size of at least 2 and a dataset with answers.",
        "recipe": "It compares the rollouts of a group: set rollout.group_size to 2 or more.",
        "prime_rl": "prime-rl gives no advantages to tokens that a teacher scores. "
        f"The adapter does. {START_ADAPTER} For sampled_reverse_kl alone, "
        'dialect = "v0_7" needs none.',
        "trl": f"It has no rewards: leave rl_mix and RL losses out. {_ONE_MACHINE_HAS_IT}",
    },
    "token_ids": {"call": "Pass LossInputs.token_ids.", "prime_rl": START_ADAPTER},
    "stops": {"call": "Pass LossInputs.stops, log p at its stop_ids.", "prime_rl": START_ADAPTER},
    "segment_ids": {
        "call": "Preference losses read pairs of sequences: pass LossInputs.segment_ids "
        "(2i chosen, 2i + 1 rejected).",
        "prime_rl": _NO_PAIRS,
    },
    "balance": {
        "call": "Pass LossInputs.balance: Balance.of_sequences of the whole step, for each token.",
        "prime_rl": "Its trainer gets a step's sequences one by one, and their environments not at "
        f"all: leave the table out, {_RUN_LOCALLY}",
        "trl": f"It has no environments: leave the table out. {_ONE_MACHINE_HAS_IT}",
    },
    "replay": {
        "call": "Configure a source of preference pairs, or set the weight of the replay channel "
        "to 0.",
        "recipe": "It pairs the rollouts of a group: set rollout.group_size to 2 or more, or name "
        'a file of pairs with [replay] source = "jsonl" and path.',
        "prime_rl": _NO_PAIRS,
        "trl": "It has no preference pairs: set the weight of the replay channel to 0.",
    },
}
"""Every optional input, by its field of ``LossInputs``, and the remedy of each host that may lack
it."""

OF_TEACHER = frozenset({"ref_logprobs", "support", "hidden_states"})
"""The inputs that are computed from a teacher's scores."""


@runtime_checkable
class HasNeeds(Protocol):
    """What is read of a ``LossConfig`` here."""

    def needs_by_section(self, section: str = "loss") -> dict[str, tuple[Any, frozenset[str]]]:
        """Map each recipe section to its loss and its needs."""


@dataclass(frozen=True)
class Unmet:
    """One input that a loss needs and nobody provides."""

    section: str  # recipe section of the loss
    loss: str  # the loss's ``type``
    need: str  # name of the input in ``LossInputs``


def unknown(names: Iterable[str]) -> str:
    """Return what to say of inputs without a row in ``NEEDS``, "" where each has one."""
    others = sorted(set(names) - NEEDS.keys())
    if not others:
        return ""
    return f"names {', '.join(others)}; a loss may need: {', '.join(NEEDS)} ({__name__}.NEEDS)."


def unmet(config: HasNeeds, available: Iterable[str], section: str = "loss") -> list[Unmet]:
    """Return the needs of a loss, and of the losses within it, that are not among ``available``."""
    provided = set(available)
    return [
        Unmet(below, loss.type, need)
        for below, (loss, needs) in config.needs_by_section(section).items()
        for need in sorted(needs - provided)
    ]


def require(
    config: HasNeeds,
    available: Iterable[str],
    host: Host,
    section: str = "loss",
    provider: str | None = None,
) -> None:
    """Raise unless a host provides all that a loss needs; the message has its remedies.

    ``provider`` is what provides the inputs, for the message. None: as in ``PROVIDERS``.
    """
    provider = provider or PROVIDERS[host]
    available = set(available)
    if complaint := unknown(available):
        raise ValueError(f"what {provider} provides {complaint}")
    for missing in unmet(config, available, section):
        label = f"[{missing.section}] type = {missing.loss!r}"
        if complaint := unknown([missing.need]):
            raise ValueError(f"{label} {complaint}")
        remedy = NEEDS[missing.need].get(host, "")
        raise ValueError(
            f"{label} needs {missing.need}, which {provider} does not provide. {remedy}".rstrip()
        )
