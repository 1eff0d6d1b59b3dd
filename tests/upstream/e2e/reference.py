"""Compute the numbers of a run in float64, from the sequences that the servers received.

usage: reference.py STUDENT K SEQUENCES.json [BROADCAST_DIR]

Imports nothing of this package. SEQUENCES is a list of [tokens, length of the prompt, {folder of a
teacher: its weight}]. In the place of the prompt's length there may be a list of the completion's
places in several turns. Prints JSON, from the initial weights:

    tail_kl    reverse KL of student against teacher on the teacher's top-K plus one bucket for the
               rest: per sequence the mean over its completion tokens
    tail_kl_bfloat16  the same from models in bfloat16, as the servers and the trainer have them
    common_kl_bfloat16  of each completion token, per sequence: p (log p - log q) over the top-K,
               and log p - log q of the sampled token where it is outside of it
    log_ratio  log q - log p of each completion token, per sequence
    moved      largest difference between the broadcast weights and the initial ones

Of several teachers each counts on its own top-K, and all of them on the sampled token.
"""

import json
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def probabilities(path, rows, dtype):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    with torch.no_grad():
        return [
            torch.softmax(model(torch.tensor([tokens])).logits[0].double(), dim=-1)
            for tokens, *_ in rows
        ]


def mixed(teachers, k, sampled):
    """Return the K ids of the most mass with their mass, and the mass of the sampled token.

    ``teachers``: [(weight, distribution), ...].
    """
    mass = {}
    for weight, q in teachers:
        for v in sorted(range(len(q)), key=lambda v: -float(q[v]))[:k]:
            mass[v] = mass.get(v, 0.0) + weight * float(q[v])
    sampled_mass = sum(weight * float(q[sampled]) for weight, q in teachers)
    if sampled in mass:
        mass[sampled] = sampled_mass
    return dict(sorted(mass.items(), key=lambda item: -item[1])[:k]), sampled_mass


def with_rest(p, head):
    """Return the pairs of student and teacher at the ids of ``head``, and at the rest."""
    pairs = [(float(p[v]), q) for v, q in head.items()]
    return [*pairs, (1 - sum(a for a, _ in pairs), 1 - sum(b for _, b in pairs))]


def compare(student, k, rows, dtype=torch.float64):
    """Return ``tail_kl``, ``log_ratio`` and ``common_kl`` of models in ``dtype``, in float64."""
    p_all = probabilities(student, rows, dtype)
    q_all = {
        folder: probabilities(folder, rows, dtype)
        for folder in {f for _, _, weights in rows for f in weights}
    }
    tail_kl, log_ratio, common_kl = [], [], []
    for i, (tokens, prompt, weights) in enumerate(rows):
        divergences, ratios, common = [], [], []
        for t in prompt if isinstance(prompt, list) else range(prompt, len(tokens)):
            p = p_all[i][t - 1]
            head, sampled_mass = mixed(
                [(w, q_all[folder][i][t - 1]) for folder, w in weights.items()],
                k,
                tokens[t],
            )
            within = sum(float(p[v]) * math.log(float(p[v]) / q) for v, q in head.items())
            divergences.append(sum(a * math.log(a / b) for a, b in with_rest(p, head)))
            ratios.append(math.log(sampled_mass) - float(p[tokens[t]].log()))
            common.append(within - (0.0 if tokens[t] in head else ratios[-1]))
        tail_kl.append(sum(divergences) / len(divergences))
        log_ratio.append(ratios)
        common_kl.append(common)
    return tail_kl, log_ratio, common_kl


def main(student, k, sequences, broadcast=None):
    rows = json.loads(Path(sequences).read_text())
    tail_kl, log_ratio, _ = compare(student, k, rows)
    rounded, _, common = compare(student, k, rows, torch.bfloat16)
    out = {"tail_kl": tail_kl, "tail_kl_bfloat16": rounded, "log_ratio": log_ratio}
    out["common_kl_bfloat16"] = common
    if broadcast is not None:
        start, moved = load_file(Path(student) / "model.safetensors"), 0.0
        files = list(Path(broadcast).glob("*.safetensors"))
        assert files, f"no weights in {broadcast}"
        for file in files:
            for name, tensor in load_file(file).items():
                if name in start:
                    moved = max(moved, float((tensor.float() - start[name].float()).abs().max()))
        out["moved"] = moved
    print(json.dumps(out))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
