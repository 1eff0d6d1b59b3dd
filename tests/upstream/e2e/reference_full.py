"""Compute the reverse KL over the whole vocabulary in float64, step by step.

usage: reference_full.py STUDENT STEPS.json STOPS.json

Imports nothing of this package. STUDENT is the folder of a model. STEPS is a list of {"weights":
folder of the student's weights in that step or null for its own, "rollouts": list of {"tokens",
"prompt": its length, "read": what the teachers read in its place, "teachers": {folder: its
weight}}}. STOPS is a list of ids, which are one
outcome. Prints JSON:

    steps       per step the mean of KL(p || sum of w q) over all completion tokens, and over those
                of each rollout
    norm        norm of the first step's gradient of the mean; of a student with adapters, that of
                their left factors, as the right ones have none while the left ones are 0
    agreement   per matrix, the share of its entries that the first update moved against their
                gradient, among the tenth with the largest gradients. Of a student with adapters,
                these matrices are the adapters' left factors, which begin as 0
"""

import json
import sys
from pathlib import Path

import torch
from adapters import pairs, scale_of  # beside this program
from reference_model import load


def distribution(model, tokens, stops):
    p = torch.softmax(model(torch.tensor([tokens])).logits[0], dim=-1)
    if not stops:
        return p
    others = [v for v in range(p.shape[1]) if v not in stops]
    return torch.cat([p[:, others], p[:, stops].sum(-1, keepdim=True)], dim=1)


def divergences(model, teachers, rollouts, stops):
    """Return the KL of each completion token, one tensor per rollout."""
    parts = []
    for rollout in rollouts:
        tokens, prompt, read = rollout["tokens"], rollout["prompt"], rollout["read"]
        p = distribution(model, tokens, stops)
        p, own = p[prompt - 1 : -1], [*read, *tokens[prompt:]]
        with torch.no_grad():
            q = sum(
                weight * distribution(teachers[folder], own, stops)[len(read) - 1 : -1]
                for folder, weight in rollout["teachers"].items()
            )
        parts.append((p * (p.log() - q.log())).sum(-1))
    return parts


def has_adapters(weights):
    return (Path(weights) / "adapter_config.json").exists()


def gradients(before, weights):
    """Return the first step's gradients of what is trained."""
    if not has_adapters(weights):
        return [parameter.grad for parameter in before.parameters()]
    return [
        scale_of(weights) * (before.get_parameter(name).grad @ right.T)
        for name, (_, right) in pairs(weights).items()
    ]


def updates(before, student, weights):
    """Yield the name of each trained matrix, its gradient and the first update's change."""
    if has_adapters(weights):
        for name, (left, right) in pairs(weights).items():
            yield name, before.get_parameter(name).grad @ right.T, left
        return
    moved = dict(load(student, weights).named_parameters())
    for name, parameter in before.named_parameters():
        if parameter.dim() > 1:
            yield name, parameter.grad, moved[name].detach() - parameter.detach()


def agreement(before, student, weights):
    shares = {}
    for name, grad, change in updates(before, student, weights):
        large = grad.abs() >= grad.abs().flatten().quantile(0.9)
        shares[name] = float((grad.sign() == -change.sign())[large].double().mean())
    return shares


def main(student, steps, stops):
    steps, stops = (json.loads(Path(file).read_text()) for file in (steps, stops))
    folders = {f for step in steps for r in step["rollouts"] for f in r["teachers"]}
    teachers = {folder: load(folder) for folder in folders}
    results, first = [], None
    for step in steps:
        model = load(student, step["weights"])
        parts = divergences(model, teachers, step["rollouts"], stops)
        mean = torch.cat(parts).mean()
        if first is None:
            mean.backward()
            first = model
        of_rollouts = [float(part.mean()) for part in parts]
        results.append({"mean": float(mean), "rollouts": of_rollouts})
    shares = agreement(first, student, steps[1]["weights"])
    norm = torch.stack([grad.norm() for grad in gradients(first, steps[1]["weights"])]).norm()
    print(json.dumps({"steps": results, "norm": float(norm), "agreement": shares}))


if __name__ == "__main__":
    main(*sys.argv[1:])
