"""Weights of a step's samples by the loss's balance, and what each of its parts is of the step."""

from collections.abc import Sequence
from dataclasses import replace

from prime_composer.contract import given
from prime_composer.losses.shared.balance import Balance
from prime_composer.step.batch import Sample


def balanced(samples: Sequence[Sample], balance: Balance) -> list[Sample]:
    """Return the samples of a step with the weight of their tokens.

    Of a conversation that branched, each sample counts as a sequence.
    """
    environments = [sample.problem.environment for sample in samples]
    weights = balance.of_sequences([sample.trained for sample in samples], environments)
    return [replace(sample, weight=weight) for sample, weight in zip(samples, weights, strict=True)]


def share_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return what each part is of a step (``part_names``); nothing where the step has only one.

    - ``rollout/token_share/NAME``: its share of the trained tokens.
    - ``rollout/weight_share/NAME``: the same of the weights by the loss's ``balance``.
    """
    names = part_names(samples)
    if len(set(names)) < 2:
        return {}
    metrics = shares("rollout/token_share", names, [float(sample.trained) for sample in samples])
    if samples[0].weight is not None:
        weights = [given(sample.weight) * sample.trained for sample in samples]
        metrics |= shares("rollout/weight_share", names, weights)
    return metrics


def part_names(samples: Sequence[Sample]) -> list[str]:
    """Return the name of each sample's environment, or of the teacher that its row names."""
    return [sample.problem.teacher or sample.problem.environment for sample in samples]


def shares(name: str, environments: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Return each environment's share of the values' sum; nothing where the sum is 0."""
    sums, total = dict.fromkeys(environments, 0.0), sum(values)
    for environment, value in zip(environments, values, strict=True):
        sums[environment] += value
    return {f"{name}/{environment}": part / total for environment, part in sums.items() if total}
