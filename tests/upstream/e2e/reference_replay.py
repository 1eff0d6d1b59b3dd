"""Compute a top-K loss in float64, step by step, with the experts that sampled.

usage: reference_replay.py STUDENT TEACHER K STEPS.json

Imports nothing of this package. STUDENT and TEACHER are folders of models. STEPS is a list of
{"weights": folder of the student's weights in that step or null for its own, "rollouts": list of
{"tokens", "prompt": its length}}. A rollout's "experts", [tokens, layers, k], take the place of
the routers' own choice. Prints JSON, per step:

    kl       sum of the reverse KL of student against teacher on the teacher's top-K, plus one
             bucket for the rest
    rollouts the mean of these, for each rollout
    tokens   number of completion tokens
"""

import json
import math
import sys
from pathlib import Path

import torch
from experts import Routing  # beside this program
from reference_model import load


def tail_kl(p, q, k):
    top = q.topk(k).indices
    pairs = [(float(p[v]), float(q[v])) for v in top]
    pairs.append((1 - sum(a for a, _ in pairs), 1 - sum(b for _, b in pairs)))
    return sum(a * math.log(a / b) for a, b in pairs)


@torch.no_grad()
def main(student, teacher, k, steps):
    q_model, sums = load(teacher), []
    for step in json.loads(Path(steps).read_text()):
        p_model = load(student, step["weights"])
        kl = []
        for rollout in step["rollouts"]:
            ids, prompt = rollout["tokens"], rollout["prompt"]
            if "experts" in rollout:
                Routing(p_model).given = torch.tensor(rollout["experts"])
            p, q = (
                torch.softmax(model(torch.tensor([ids])).logits[0], dim=-1)
                for model in (p_model, q_model)
            )
            kl.append([tail_kl(p[t - 1], q[t - 1], k) for t in range(prompt, len(ids))])
        means = [sum(values) / len(values) for values in kl]
        total, tokens = sum(map(sum, kl)), sum(map(len, kl))
        sums.append({"kl": total, "rollouts": means, "tokens": tokens})
    print(json.dumps(sums))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
