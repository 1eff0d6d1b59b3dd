"""The toy study's moments against enumeration of every rollout, with autograd for every
gradient."""

import itertools

import pytest
import torch

from tests.studies.gradient_variance import (
    moments,
    random_tables,
    sampled_parts,
    table,
    top_k_parts,
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


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_moments_of_the_coupled_sampled_estimator(gamma: float) -> None:
    def surrogate(student, teacher, states, tokens):
        log_p = [student[s, y] for s, y in zip(states, tokens, strict=True)]
        reward = [
            (lp - teacher[s, y]).detach() for lp, s, y in zip(log_p, states, tokens, strict=True)
        ]
        return sum(
            log_p[t] * sum(gamma ** (u - t) * reward[u] for u in range(t, LENGTH))
            for t in range(LENGTH)
        )

    tables = random_tables(VOCAB, seed=7)
    mean, variance = moments(tables, *sampled_parts(tables), LENGTH, gamma)
    expected_mean, expected_variance = enumerated(surrogate)
    torch.testing.assert_close(mean, expected_mean, rtol=0, atol=1e-12)
    assert variance == pytest.approx(expected_variance, abs=1e-12)


@pytest.mark.parametrize("head_tail", [False, True])
def test_moments_of_the_top_k_estimators(head_tail: bool) -> None:
    def surrogate(student, teacher, states, tokens):
        total = 0.0
        for s, y in zip(states, tokens, strict=True):
            ids = teacher[s].topk(2).indices
            (out,) = set(range(VOCAB)) - set(ids.tolist())
            p, q = student[s, ids], teacher[s, ids]
            if head_tail:
                total = total + (p.exp() * (p - q).detach()).sum()
                if y == out:
                    total = total + student[s, y] * (student[s, y] - teacher[s, y]).detach()
            else:
                total = (
                    total
                    + (p.exp() * (p - q)).sum()
                    + student[s, out].exp() * (student[s, out] - teacher[s, out])
                )
        return total

    tables = random_tables(VOCAB, seed=7)
    mean, variance = moments(tables, *top_k_parts(tables, 2, head_tail), LENGTH, gamma=0.0)
    expected_mean, expected_variance = enumerated(surrogate)
    torch.testing.assert_close(mean, expected_mean, rtol=0, atol=1e-12)
    assert variance == pytest.approx(expected_variance, abs=1e-12)


def test_full_coupling_has_the_gradient_of_the_sequences_kl() -> None:
    tables = random_tables(VOCAB, seed=7)
    logits = tables.student.clone().requires_grad_()
    student = logits.log_softmax(-1)
    kl = 0.0
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        pairs = list(zip((0, *tokens[:-1]), tokens, strict=True))
        log_p = sum(student[s, y] for s, y in pairs)
        kl = kl + log_p.exp() * (log_p - sum(tables.teacher[s, y] for s, y in pairs))
    expected = torch.autograd.grad(kl / LENGTH, logits)[0]
    mean, _ = moments(tables, *sampled_parts(tables), LENGTH, gamma=1.0)
    torch.testing.assert_close(mean, expected, rtol=0, atol=1e-12)


def test_the_table_has_a_row_for_each_estimator() -> None:
    lines = table(vocab=4, lengths=(2, 3), seeds=(0,)).splitlines()
    assert len(lines) == 3 + 5 + 3 + 2 and "T = 3" in lines[2]
    unbiased = [
        line for line in lines if line.startswith(("sampled, gamma 0 ", "tail, K = 4", "head-tail"))
    ]
    assert [line.split()[-2] for line in unbiased] == ["0.00"] * 4
