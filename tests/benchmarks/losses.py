"""Measure what each loss costs a trainer, in time and memory per step.

    python -m tests.benchmarks.losses [--device cuda]
    python -m tests.benchmarks.losses --apart sampled_reverse_kl "topk_reverse_kl tail" "plain JSD"

A step is the head's log-probs at the sampled token and the K ids, the loss, and the backward into
hidden states and head, at vocabulary 151,936: the part of a step that depends on the loss. The
losses take turns, so that other load on the machine affects all of them. A CPU's times are those of
one thread. The ratio is that of the medians against the first loss. Aim: at most 1.2 for every loss
on a top-K support. ``plain JSD`` materializes the logits.

With ``--apart`` each loss has a process of its own, whose peak is printed too, imports included.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from prime_composer.contract import LossInputs, Support
from prime_composer.divergences import generalized_jsd
from prime_composer.lm_head import selected_logprobs
from prime_composer.losses import LOSS_TYPES, setup_loss_fn
from tests.benchmarks.turns import answer, children, peak_mib

VOCAB, K = 151_936, 32

TAIL = {"type": "topk_reverse_kl", "k": K}
LOSSES = {
    "sampled_reverse_kl": {},
    "sampled_reverse_kl signed": {"mode": "signed"},
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


PLAIN = "plain JSD"
NAMES = (*LOSSES, PLAIN)


def make_step(args: argparse.Namespace) -> Callable[[str], float]:
    """Return a function that runs a step of a loss, and returns its seconds."""
    g = torch.Generator().manual_seed(0)
    n = args.tokens
    hidden = torch.randn(n, args.hidden, generator=g).to(args.device).requires_grad_()
    weight = torch.randn(VOCAB, args.hidden, generator=g) * args.hidden**-0.5
    weight = weight.to(args.device).requires_grad_()
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
    losses = {
        name: setup_loss_fn(LOSS_TYPES[name.split()[0]](**knobs)) for name, knobs in LOSSES.items()
    }

    def head(columns):
        return selected_logprobs(hidden, weight, columns)

    def value(name):
        if name == PLAIN:
            logits = hidden @ weight.T
            student, other = logits.log_softmax(-1), logits.detach().roll(1, 0).log_softmax(-1)
            return generalized_jsd(student, other, 0.3, "full").sum()
        loss = losses[name]
        if "support" not in loss.config.needs:
            return loss(LossInputs(head(tokens.unsqueeze(-1))[:, 0], **common)).loss
        chosen = head(torch.cat([tokens.unsqueeze(-1), ids], dim=1))
        support = Support(ids, teacher, chosen[:, 1:])
        return loss(LossInputs(chosen[:, 0], support=support, **common)).loss

    def step(name: str) -> float:
        clock = time.process_time
        if args.device == "cuda":
            clock = time.perf_counter
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = clock()
        value(name).backward()
        if args.device == "cuda":
            torch.cuda.synchronize()
        seconds = clock() - start
        hidden.grad = weight.grad = None
        return seconds

    return step


def take_turns(args: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return seconds of each step, and peaks on a GPU in MiB."""
    step = make_step(args)
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    peaks: dict[str, float] = {}
    for round_ in range(args.rounds + 1):
        for name in NAMES:
            seconds = step(name)
            if args.device == "cuda":
                peaks[name] = torch.cuda.max_memory_allocated() / 2**20
            if round_:  # the first round warms up
                times[name].append(seconds)
    return times, peaks


def take_turns_apart(args: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return seconds of each step, and the peak of each process in MiB."""
    times: dict[str, list[float]] = {name: [] for name in args.apart}
    each = [[*sys.argv[1:], "--child", name] for name in args.apart]
    with children("tests.benchmarks.losses", each) as started:
        own = dict(zip(args.apart, started, strict=True))
        for _ in range(args.rounds):
            for name, child in own.items():
                times[name] += child.step()
        return times, {name: child.first for name, child in own.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--apart", nargs="+", choices=NAMES)
    parser.add_argument("--child", choices=NAMES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        step = make_step(args)
        step(args.child)
        answer(peak_mib(), lambda: [step(args.child)])
        return
    times, peaks = take_turns_apart(args) if args.apart else take_turns(args)
    print(
        f"V {VOCAB}, K {K}, {args.tokens} tokens, hidden {args.hidden}, {args.device}, "
        f"{args.rounds} rounds"
    )
    base = next(iter(times))
    for name, values in times.items():
        median = statistics.median(values)
        ratio = median / statistics.median(times[base])
        memory = f"  {peaks[name]:8.0f} MiB {peaks[name] / peaks[base]:5.2f}x" if peaks else ""
        print(f"{name:34s} {1000 * median:9.1f} ms  {ratio:5.2f}x{memory}")


if __name__ == "__main__":
    main()
