"""Measure what each loss costs a trainer, in time and memory per step.

    python -m tests.benchmarks.losses [--device cuda]

A step is the head's log-probs at the sampled token and the K ids, the loss, and the backward into
hidden states and head, at vocabulary 151,936. The losses take turns, so that other load on the
machine affects all of them. The ratio is that of the medians against ``sampled_reverse_kl``. Aim:
at most 1.2 for every loss on a top-K support. ``plain full JSD`` materializes the logits.
"""

import argparse
import statistics
import time

import torch

from prime_composer.contract import LossInputs, Support
from prime_composer.divergences import generalized_jsd
from prime_composer.lm_head import selected_logprobs
from prime_composer.losses import LOSS_TYPES, setup_loss_fn

VOCAB, K = 151_936, 32

TAIL = {"type": "topk_reverse_kl", "k": K}
LOSSES = {
    "sampled_reverse_kl": {},
    "sampled_reverse_kl signed, vOPD": {"mode": "signed", "baseline": "topk_kl", "k": K},
    "topk_reverse_kl tail": {"k": K},
    "topk_reverse_kl renorm": {"k": K, "normalization": "renorm"},
    "topk_forward_kl": {"k": K},
    "generalized_jsd": {"k": K, "beta": 0.3},
    "head_tail_reverse_kl": {"k": K},
    "taid": {"k": K, "total_steps": 10},
    "entropy_aware_opd": {"k": K, "tau": 1.0, "alpha": 0.5},
    "self_distillation": {"k": K},
    "alpha_beta": {"k": K},
    "skewed_kl": {"k": K},
    "total_variation": {"k": K},
    "todi": {"k": K},
    "amid": {"k": K},
    "adaptive_kl": {"k": K},
    "topk_reverse_kl all modifiers": {
        "k": K,
        "special_tokens": {"ids": [1, 2, 3]},
        "position_weights": {},
        "rl_mix": {"kd": 0.5},
    },
    "compose rl + tail + taid": {
        "distillation": {
            "tail": {"weight": 1, "loss": TAIL},
            "taid": {"weight": 1, "loss": {"type": "taid", "k": K, "total_steps": 10}},
        }
    },
    "default (RL)": {},
    "ipo (RL)": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    g = torch.Generator().manual_seed(0)
    dtype, n = getattr(torch, args.dtype), args.tokens
    hidden = torch.randn(n, args.hidden, generator=g).to(args.device, dtype).requires_grad_()
    weight = (
        (torch.randn(VOCAB, args.hidden, generator=g) * args.hidden**-0.5)
        .to(args.device, dtype)
        .requires_grad_()
    )
    ids = torch.stack([torch.randperm(VOCAB, generator=g)[:K] for _ in range(n)]).to(args.device)
    teacher = (torch.randn(n, K, generator=g) * 2).log_softmax(-1).to(args.device) - 0.1
    tokens = torch.where(
        torch.rand(n, generator=g).to(args.device) < 0.9,
        ids[:, 0],
        ids[:, 0] + 1 - 2 * (ids[:, 0] > 0).long(),
    )
    common = dict(
        inference_logprobs=-12 * torch.rand(n, generator=g).to(args.device),
        ref_logprobs=teacher[:, 0],
        advantages=torch.randn(n, generator=g).to(args.device),
        loss_mask=torch.rand(n, generator=g).to(args.device) > 0.1,
        token_ids=tokens,
        segment_ids=(torch.arange(n) // 64).to(args.device),
    )

    def head(columns):
        return selected_logprobs(hidden, weight, columns).float()

    def step(loss):
        if loss is None:
            logits = (hidden @ weight.T).float()
            value = generalized_jsd(
                logits.log_softmax(-1), logits.detach().roll(1, 0).log_softmax(-1), 0.3, "full"
            ).sum()
        elif "support" in loss.config.needs:
            chosen = head(torch.cat([tokens.unsqueeze(-1), ids], dim=1))
            value = loss(
                LossInputs(chosen[:, 0], support=Support(ids, teacher, chosen[:, 1:]), **common)
            ).loss
        else:
            value = loss(LossInputs(head(tokens.unsqueeze(-1))[:, 0], **common)).loss
        value.backward()
        hidden.grad = weight.grad = None

    losses = {
        name: setup_loss_fn(LOSS_TYPES[name.split()[0]](**knobs)) for name, knobs in LOSSES.items()
    }
    losses["plain full JSD"] = None
    times: dict[str, list[float]] = {name: [] for name in losses}
    peak: dict[str, int] = {}
    for round_ in range(args.rounds + 1):
        for name, loss in losses.items():
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            step(loss)
            if cuda:
                torch.cuda.synchronize()
                peak[name] = torch.cuda.max_memory_allocated()
            if round_:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    base = "sampled_reverse_kl"
    print(
        f"V {VOCAB}, K {K}, {n} tokens, hidden {args.hidden}, {args.dtype}, {args.device}, "
        f"{args.rounds} rounds"
    )
    for name, values in times.items():
        median = statistics.median(values)
        line = (
            f"{name:34s} {1000 * median:9.1f} ms  {median / statistics.median(times[base]):5.2f}x"
        )
        print(
            line
            + (f"  {peak[name] / 2**20:8.0f} MiB {peak[name] / peak[base]:5.2f}x" if cuda else "")
        )


if __name__ == "__main__":
    main()
