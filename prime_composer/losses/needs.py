"""Inputs that a loss may need, and what to do about each where it is missing.

A new need is a field of ``LossInputs``, a row of ``NEEDS``, and the code of the hosts.
"""

from collections.abc import Collection, Iterator
from typing import Any, Literal

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
    "balance": {
        "call": "Pass LossInputs.balance: Balance.of_sequences of the whole step, for each token.",
        "prime_rl": "Its trainer gets a step's sequences one by one, and their environments not at "
        f"all: leave the table out, {_RUN_LOCALLY}",
        "trl": f"It has no environments: leave the table out. {_ONE_MACHINE_HAS_IT}",
    },
}
"""Every optional input, by its field of ``LossInputs``, and the remedy of each host that may lack
it."""

OF_TEACHER = frozenset({"ref_logprobs", "support", "hidden_states"})
"""The inputs that are computed from a teacher's scores."""


def missing_inputs(
    config: Any, available: Collection[str], host: Host, section: str = "loss"
) -> Iterator[str]:
    """Yield a sentence with the host's remedy for each input that a loss needs and a host lacks.

    ``config`` is a ``LossConfig``.
    """
    for below, (loss, needs) in config.needs_by_section(section).items():
        for need in sorted(needs.difference(available)):
            remedy = NEEDS.get(need, {}).get(host, "")
            yield (
                f"[{below}] type = {loss.type!r} needs {need}, which {PROVIDERS[host]} does not "
                f"provide. {remedy}"
            ).rstrip()


def require_inputs(
    config: Any, available: Collection[str], host: Host, section: str = "loss"
) -> None:
    """Raise the first of ``missing_inputs``."""
    for sentence in missing_inputs(config, available, host, section):
        raise ValueError(sentence)
