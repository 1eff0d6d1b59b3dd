"""The toy study's moments against enumeration of every rollout, with autograd for every
gradient."""

import itertools

import pytest
import torch

from tests.studies.gradient_variance import (
    moments,
    random_tables,
    sampled_parts,
    support_parts,
)

VOCAB, LENGTH = 3, 4


def enumerated(per_rollout) -> tuple[torch.Tensor, float]:
    """Mean and total variance of ``per_rollout(logits, tokens) -> scalar to backpropagate`` over
    all rollouts."""
    tables = random_tables(VOCAB, seed=7)
    grads, weights = [], []
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        states = (0, *tokens[:-1])
        logits = tables.student.clone().requires_grad_()
        student = logits.log_softmax(-1)
        weights.append(
            float(sum(student[s, y].detach() for s, y in zip(states, tokens, strict=True)).exp())
        )
        value = per_rollout(student, tables.teacher, states, tokens) / LENGTH
        grads.append(torch.autograd.grad(value, logits)[0])
    weight = torch.tensor(weights, dtype=torch.float64)
    assert abs(float(weight.sum()) - 1) < 1e-12
    grad = torch.stack(grads)
    mean = torch.einsum("n,nij->ij", weight, grad)
    return mean, float((weight * ((grad - mean) ** 2).sum((1, 2))).sum())


def coupled(gamma: float):
    """Return the sampled token's surrogate, whose reward is coupled to the future by gamma."""

    def surrogate(student, teacher, states, tokens):
        log_p = [student[s, y] for s, y in zip(states, tokens, strict=True)]
        pairs = zip(log_p, states, tokens, strict=True)
        reward = [(own - teacher[s, y]).detach() for own, s, y in pairs]
        to_go = [sum(gamma ** (u - t) * reward[u] for u in range(t, LENGTH)) for t in range(LENGTH)]
        return sum(own * rest for own, rest in zip(log_p, to_go, strict=True))

    return surrogate


def event_of_one(student, teacher, states, tokens):
    """Return the surrogate of the teacher's most probable token and, sampled, which other one."""
    total = 0.0
    for s, y in zip(states, tokens, strict=True):
        top = int(teacher[s].argmax())
        others = [one for one in range(VOCAB) if one != top]
        pairs = [(row[s, top], row[s, others].logsumexp(0)) for row in (student, teacher)]
        total += sum(p.exp() * (p - q) for p, q in zip(*pairs, strict=True))
        if y != top:
            (_, p_outside), (_, q_outside) = pairs
            ratio = student[s, y] - p_outside - (teacher[s, y] - q_outside)
            total += student[s, y] * ratio.detach()
    return total


@pytest.mark.parametrize(
    ("surrogate", "parts", "gamma"),
    [
        (coupled(0.5), sampled_parts, 0.5),
        (event_of_one, lambda tables: support_parts(tables, 1, sampled=True), 0.0),
    ],
    ids=["coupled", "event"],
)
def test_moments_are_those_of_all_rollouts(surrogate, parts, gamma: float) -> None:
    tables = random_tables(VOCAB, seed=7)
    mean, variance = moments(tables, *parts(tables), LENGTH, gamma)
    expected_mean, expected_variance = enumerated(surrogate)
    torch.testing.assert_close(mean, expected_mean, rtol=0, atol=1e-12)
    assert variance == pytest.approx(expected_variance, abs=1e-12)
