"""Variance of the distillation gradient: sampled token against top K, by rollout length and
future-reward coupling gamma.

    python -m tests.studies.gradient_variance

The toy study of "Revisiting On-Policy Distillation" (2026), https://arxiv.org/abs/2603.25562, in
its token analogue: instead of a Gaussian policy in continuous control, whose variance has to be
estimated, a table of logits over a small vocabulary. The state is the last token, student p(y|s)
and teacher q(y|s) are tables, and every moment of a rollout's gradient follows from a recursion
over the steps: no sampling anywhere, so the numbers carry no error of their own.

Per rollout of T tokens, gradients with respect to the student's table (score_t = grad log
p(y_t|s_t)):

    sampled, gamma   g = (1/T) sum_t score_t sum_{t' >= t} gamma^(t'-t) r_t',
                     r = log p(y) - log q(y)
    tail K           g = (1/T) sum_t grad KL_tail(p || q) at s_t
    head-tail K      g = (1/T) sum_t sum_S grad p log p/q + score_t 1[y not in S] r_t
    the same, event  g = tail K's + (1/T) sum_t score_t 1[y not in S] (r_t - log of the masses'
                     ratio outside S)

gamma = 1 has the gradient of the sequences' KL (divided by T), gamma = 0 that of the per-token KL
on the student's own states. Printed, as means over three random pairs of tables: the standard
deviation of one rollout's gradient over the length of its mean, sqrt(E|g - Eg|^2)/|Eg| (a batch of
B rollouts divides it by sqrt(B)).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LENGTHS = (5, 20, 80)


@dataclass(frozen=True)
class Tables:
    """log p and log q, [V states, V tokens], float64. A token leads to the state of its name; a
    rollout starts in state 0."""

    student: Tensor
    teacher: Tensor


def random_tables(vocab: int, seed: int, sharpness: float = 2.0, distance: float = 1.0) -> Tables:
    """Normal logits of standard deviation ``sharpness`` for the student; the teacher's differ by
    normal ``distance``."""
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(vocab, vocab, generator=generator, dtype=torch.float64)
    other = logits + distance * torch.randn(vocab, vocab, generator=generator, dtype=torch.float64)
    return Tables(logits.log_softmax(-1), other.log_softmax(-1))


def scores(tables: Tables) -> Tensor:
    """grad log p(y|s) with respect to the logits of row s, [s, y, V]; all other rows have none."""
    vocab = tables.student.shape[0]
    return torch.eye(vocab, dtype=torch.float64) - tables.student.exp()[:, None, :]


def sampled_parts(tables: Tables) -> tuple[Tensor, Tensor]:
    """Reward r(s, y) that is coupled to the future, and a gradient that is not (none), [s, y] and
    [s, y, V]."""
    return tables.student - tables.teacher, torch.zeros_like(scores(tables))


def support_parts(
    tables: Tables, k: int, event: bool = True, sampled: bool = False
) -> tuple[Tensor, Tensor]:
    """Reward of a sampled token outside the teacher's top K, and the gradient on it, at (s, y)."""
    p, ratio = tables.student.exp(), tables.student - tables.teacher
    top = tables.teacher.topk(k, dim=-1).indices
    on_support = torch.zeros_like(p, dtype=torch.bool).scatter(1, top, True)
    # The tokens outside S are one outcome: each of them carries the ratio of the masses.
    p_rest, q_rest = (
        torch.where(on_support, 0.0, x.exp()).sum(-1, keepdim=True)
        for x in (tables.student, tables.teacher)
    )
    outside = (p_rest / q_rest).log() if event else torch.zeros_like(p_rest)
    signal = torch.where(on_support, ratio, outside)
    grad = p * (signal - (p * signal).sum(-1, keepdim=True))
    reward = torch.where(on_support, 0.0, ratio - outside) if sampled else torch.zeros_like(p)
    return reward, grad[:, None, :].expand(-1, p.shape[1], -1)


def moments(
    tables: Tables, reward: Tensor, own: Tensor, length: int, gamma: float
) -> tuple[Tensor, float]:
    """Mean [V, V] and total variance of a rollout's gradient (1/T) sum_t (G_t score_t + own_t),
    exactly.

    With G_t = r_t + gamma G_{t+1} and g_t = G_t score_t + own_t + g_{t+1}, both from step t on,
    backwards over the steps for every state: E G, E G^2, E g, E G g and E |g|^2.
    """
    vocab = reward.shape[0]
    p, score = tables.student.exp(), scores(tables)
    rows = torch.arange(vocab)
    ret, ret2, norm2 = (
        torch.zeros(vocab, dtype=torch.float64) for _ in range(3)
    )  # of the state that comes next
    mean, with_ret = (
        torch.zeros(vocab, vocab, vocab, dtype=torch.float64) for _ in range(2)
    )  # [state, row, column]
    for _ in range(length):
        # Given s and y: E G, E G^2, E g', E G g', with ' for the next state, which is y.
        ret_sy = reward + gamma * ret
        ret2_sy = reward**2 + 2 * gamma * reward * ret + gamma**2 * ret2
        after = mean  # [y, row, column]
        ret_after = reward[:, :, None, None] * mean + gamma * with_ret  # [s, y, row, column]
        ret_after_s = ret_after[
            rows, :, rows, :
        ]  # row s of it: what meets score_t and own_t, [s, y, column]
        after_s = after[:, rows, :].transpose(0, 1)  # [s, y, column]
        norm2_sy = (
            ret2_sy * (score**2).sum(-1)
            + 2 * ret_sy * (score * own).sum(-1)
            + (own**2).sum(-1)
            + 2 * (score * ret_after_s).sum(-1)
            + 2 * (own * after_s).sum(-1)
            + norm2
        )
        new_mean = torch.einsum("sy,yrc->src", p, after)
        new_mean[rows, rows] += torch.einsum("sy,syc->sc", p, ret_sy[:, :, None] * score + own)
        new_with_ret = torch.einsum("sy,syrc->src", p, ret_after)
        new_with_ret[rows, rows] += torch.einsum(
            "sy,syc->sc", p, ret2_sy[:, :, None] * score + ret_sy[:, :, None] * own
        )
        ret, ret2, norm2 = (p * ret_sy).sum(-1), (p * ret2_sy).sum(-1), (p * norm2_sy).sum(-1)
        mean, with_ret = new_mean, new_with_ret
    first = mean[0] / length
    return first, float(norm2[0] / length**2 - (first**2).sum())


def relative_noise(
    tables: Tables, parts: tuple[Tensor, Tensor], length: int, gamma: float = 0.0
) -> float:
    mean, variance = moments(tables, *parts, length, gamma)
    return max(variance, 0.0) ** 0.5 / float(mean.norm())


def table(
    vocab: int = 12, lengths: Sequence[int] = LENGTHS, seeds: Sequence[int] = (0, 1, 2)
) -> str:
    k = vocab // 4
    estimators: dict[str, tuple[Callable[[Tables], tuple[Tensor, Tensor]], float]] = {
        f"tail, K = {k}": (lambda tables: support_parts(tables, k), 0.0),
        f"head-tail, K = {k}": (lambda tables: support_parts(tables, k, False, True), 0.0),
        "the same, event": (lambda tables: support_parts(tables, k, True, True), 0.0),
        "sampled, gamma 0": (sampled_parts, 0.0),
        "sampled, gamma 1": (sampled_parts, 1.0),
    }
    pairs = [random_tables(vocab, seed) for seed in seeds]
    lines = [f"V = {vocab}; noise of one rollout's gradient over the length of its mean"]
    lines.append(f"{'':20}" + "".join(f"{f'T = {n}':>9}" for n in lengths))
    for name, (parts, gamma) in estimators.items():
        noise = [
            sum(relative_noise(one, parts(one), n, gamma) for one in pairs) / len(pairs)
            for n in lengths
        ]
        lines.append(f"{name:20}" + "".join(f"{value:9.2f}" for value in noise))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
