"""Compute losses in which a teacher reweights rewards, or is gated, in float64, step by step.

usage: reference_objectives.py STUDENT TEACHER OBJECTIVE.json STEPS.json

Imports nothing of this package. STUDENT, TEACHER and STEPS are those of reference_mixed.py.
OBJECTIVE is {"rl": {"clip", "mix", "reversed"} or null, "k", "kl": factor, "beta", "gate":
factor}. Prints JSON, per step the mean over all completion tokens of

    -keep A c rho + 1e-3 (log rho)^2 + kl D + gate g (log q - log p)

with rho = p / mu, DPPO's trust region 0.2 in keep, D the reverse KL on the teacher's top k with one
bucket for the rest, g = sigmoid(beta (log q - log p)), and c = 1 or, by "rl",

    c = (1 - mix) + mix w,    w = exp(sign(A) (log q - log p)) within 1 - clip and 1 + clip

"reversed": w = exp(log p - log q) where A > 0, and 1 elsewhere.
"""

import json
import math
import sys
from pathlib import Path

import torch
from reference_mixed import tail_kl  # beside this program
from reference_model import load


def credits(rl, advantage, gaps):
    """Return c of each token of a rollout, by its log q - log p."""
    if rl is None:
        return [1.0] * len(gaps)
    sign = (advantage > 0) - (advantage < 0)
    if rl["reversed"]:
        sign = -1 if advantage > 0 else 0
    weights = [min(max(math.exp(sign * gap), 1 - rl["clip"]), 1 + rl["clip"]) for gap in gaps]
    return [1 - rl["mix"] + rl["mix"] * weight for weight in weights]


def losses(objective, rollout, p, q):
    """Return the loss of each completion token; p and q are [tokens, vocabulary]."""
    ids, advantage = rollout["tokens"], rollout["advantage"]
    rows = [(p[t - 1], q[t - 1], ids[t]) for t in range(rollout["prompt"], len(ids))]
    gaps = [math.log(q_row[y] / p_row[y]) for p_row, q_row, y in rows]
    found = []
    for (p_row, q_row, y), gap, credit, log_mu in zip(
        rows, gaps, credits(objective["rl"], advantage, gaps), rollout["logprobs"], strict=True
    ):
        own, mu = float(p_row[y]), math.exp(log_mu)
        keep = own - mu <= 0.2 if advantage > 0 else own - mu >= -0.2
        loss = -keep * advantage * credit * own / mu + 1e-3 * math.log(own / mu) ** 2
        loss += objective["kl"] * tail_kl(p_row, q_row, objective["k"])
        loss += objective["gate"] * gap / (1 + math.exp(-objective["beta"] * gap))
        found.append(loss)
    return found


@torch.no_grad()
def main(student, teacher, objective, steps):
    objective = json.loads(Path(objective).read_text())
    q_model, means = load(teacher), []
    for step in json.loads(Path(steps).read_text()):
        p_model, found = load(student, step["weights"]), []
        for rollout in step["rollouts"]:
            p, q = (
                torch.softmax(model(torch.tensor([rollout["tokens"]])).logits[0], dim=-1)
                for model in (p_model, q_model)
            )
            found += losses(objective, rollout, p, q)
        means.append(sum(found) / len(found))
    print(json.dumps(means))


if __name__ == "__main__":
    main(*sys.argv[1:5])
