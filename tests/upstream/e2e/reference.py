"""The same numbers in float64, from the sequences that the servers saw: nothing of this package is imported.

usage: reference.py STUDENT TEACHER K SEQUENCES.json [BROADCAST_DIR]

SEQUENCES: a list of [tokens, length of the prompt]. Prints JSON: the reverse KL of student against teacher on the
teacher's top-K plus one bucket for the rest, per sequence the mean over its completion tokens, from the initial weights;
the sampled-token log-ratio likewise; and how far the broadcast weights are from the initial ones.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def probabilities(path, tokens):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    with torch.no_grad():
        return [torch.softmax(model(torch.tensor([t])).logits[0], dim=-1) for t, _ in tokens]


def main(student, teacher, k, sequences, broadcast=None):
    rows = json.loads(Path(sequences).read_text())
    p_all, q_all = probabilities(student, rows), probabilities(teacher, rows)
    tail, ratio = [], []
    for (tokens, prompt), p_seq, q_seq in zip(rows, p_all, q_all, strict=True):
        here, sampled = [], []
        for t in range(prompt, len(tokens)):
            p, q = p_seq[t - 1], q_seq[t - 1]
            ids = sorted(range(len(q)), key=lambda v: -float(q[v]))[:k]
            ps, qs = [float(p[v]) for v in ids], [float(q[v]) for v in ids]
            pairs = [*zip(ps, qs, strict=True), (1 - sum(ps), 1 - sum(qs))]
            here.append(sum(a * (torch.tensor(a / b, dtype=torch.float64).log().item()) for a, b in pairs))
            sampled.append(float(q[tokens[t]].log() - p[tokens[t]].log()))
        tail.append(sum(here) / len(here))
        ratio.append(sum(sampled) / len(sampled))
    out = {"tail_kl": tail, "log_ratio": ratio}
    if broadcast is not None:
        start, moved = load_file(Path(student) / "model.safetensors"), 0.0
        for file in Path(broadcast).glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                if name in start:
                    moved = max(moved, float((tensor.float() - start[name].float()).abs().max()))
        out["moved"] = moved
    print(json.dumps(out))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
