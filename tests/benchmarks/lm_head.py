"""Measure what a top-K loss costs the trainer's head, in time and peak memory per step.

    python -m tests.benchmarks.lm_head

One step is the head, the loss and the backward into hidden states and head, at vocabulary 151,936,
width 1,024 and 512 tokens in float32. It is the part of a step that depends on the loss. The
transformer below it would only level the ratios. ``sampled`` is sampled_reverse_kl and ``top-K``
topk_reverse_kl (K = 32, tail), both through the chunked head. ``full JSD`` is the generalized JSD
on plain log-softmaxes of [tokens, vocabulary] of student and teacher.

Each variant runs in a process of its own, for its own peak memory. The variants take turns step by
step, so that other load on the machine affects all of them. Aim: top-K takes at most 1.15 times the
time and 1.2 times the peak of sampled.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

VARIANTS = ("sampled", "top-K", "full JSD")
K, BETA = 32, 0.5


def make_step(variant: str, vocab: int, width: int, tokens: int):
    """A function that runs one step and returns its loss."""
    from prime_composer.contract import LossInputs, Support
    from prime_composer.lm_head import selected_logprobs
    from prime_composer.losses import LOSS_TYPES, setup_loss_fn

    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=g).requires_grad_()
    weight = torch.randn(vocab, width, generator=g).mul_(width**-0.5).requires_grad_()
    labels = torch.randint(0, vocab, (tokens, 1), generator=g)
    mask = torch.ones(tokens, dtype=torch.bool)
    ids = labels
    if variant == "top-K":
        others = torch.stack([torch.randperm(vocab, generator=g)[:K] for _ in range(tokens)])
        ids = torch.cat([labels, others], dim=1)
        teacher = torch.randn(tokens, K, generator=g).log_softmax(dim=-1) - 0.05
    if variant == "full JSD":
        teacher = torch.randn(tokens, vocab, generator=g).log_softmax(dim=-1)

    def chunked() -> torch.Tensor:
        logprobs = selected_logprobs(hidden, weight, ids)
        own = logprobs[:, 0]
        inputs = LossInputs(
            trainer_logprobs=own,
            inference_logprobs=own.detach(),
            ref_logprobs=own.detach() - 0.1,
            advantages=None,
            loss_mask=mask,
            support=Support(ids[:, 1:], teacher, logprobs[:, 1:]) if variant == "top-K" else None,
        )
        return loss(inputs).loss

    def plain() -> torch.Tensor:
        student = torch.log_softmax(hidden @ weight.T, dim=-1)
        mixture = torch.log(BETA * teacher.exp() + (1 - BETA) * student.exp())
        forward = (teacher.exp() * (teacher - mixture)).sum()
        return BETA * forward + (1 - BETA) * (student.exp() * (student - mixture)).sum()

    name = "sampled_reverse_kl" if variant == "sampled" else "topk_reverse_kl"
    settings = {"k": K} if variant == "top-K" else {}
    loss = setup_loss_fn(LOSS_TYPES[name](**settings))

    def step() -> float:
        hidden.grad = weight.grad = None
        value = (plain if variant == "full JSD" else chunked)() / tokens
        value.backward()
        return float(value.detach())

    return step


def serve(variant: str, sizes: list[int]) -> None:
    """Run one step per input line. Answer with seconds and the peak so far in MiB."""
    step = make_step(variant, *sizes)
    step()
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        step()
        seconds = time.perf_counter() - began
        print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = [arguments.vocab, arguments.hidden, arguments.tokens]
    if arguments.child:
        serve(arguments.child, sizes)
        return
    command = [
        sys.executable,
        __file__,
        "--vocab",
        str(sizes[0]),
        "--hidden",
        str(sizes[1]),
        "--tokens",
        str(sizes[2]),
    ]
    children, seconds, peaks = {}, {name: [] for name in VARIANTS}, {}
    try:
        for name in VARIANTS:
            children[name] = subprocess.Popen(
                [*command, "--child", name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert children[name].stdout.readline() == "ready\n", f"{name} did not start"
        for _ in range(arguments.rounds):
            for name, child in children.items():
                child.stdin.write("\n")
                child.stdin.flush()
                took, peaks[name] = (float(number) for number in child.stdout.readline().split())
                seconds[name].append(took)
    finally:
        for child in children.values():
            child.stdin.close()
            child.wait()
    base = VARIANTS[0]
    print(
        f"vocabulary {sizes[0]}, width {sizes[1]}, {sizes[2]} tokens, float32, "
        f"{torch.get_num_threads()} thread(s)"
    )
    print(f"{'':<10}{'s':>8}{'x':>7}{'peak MiB':>10}{'x':>7}")
    for name in VARIANTS:
        time_ratio = statistics.median(seconds[name]) / statistics.median(seconds[base])
        print(
            f"{name:<10}{statistics.median(seconds[name]):>8.2f}{time_ratio:>7.2f}"
            f"{peaks[name]:>10.0f}{peaks[name] / peaks[base]:>7.2f}"
        )


if __name__ == "__main__":
    main()
