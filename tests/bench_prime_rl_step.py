"""What our losses cost inside prime-rl's trainer: its own output head, its own compute_loss, forward and backward.

    python tests/bench_prime_rl_step.py CHECKOUT [--version newest] [--vocab 151936] [--hidden 1024] [--tokens 256] [--k 32]

Four variants, each in a fresh process, interleaved over ``--rounds``: prime-rl's own OPD; sampled_reverse_kl; topk with
the support gathered beside the head as the adapter does; and the same gathered the naive way, by ``W[ids]`` under autograd.
The transformer below the head is left out, so a whole step's ratio is closer to 1 than these.

Seconds are CPU seconds of the process, the least of ``--steps``: they do not depend on what else the machine does.

Needs the environment of tests/upstream/make_venvs.py; reads prime-rl from a git checkout.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
VARIANTS = ("prime-rl", "sampled", "topk", "topk naive")


def one(args):
    """Runs one variant in this process and prints seconds per step and peak memory above the start."""
    import torch

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    import prime_rl.trainer.models.layers.lm_head as head
    import prime_rl.trainer.rl.loss as upstream

    from prime_composer.upstream import registration, trainer, wire

    era = "v0.6" if hasattr(upstream, "setup_loss_fns") else "v0.7"
    n, k = args.tokens, args.k
    support = args.variant.startswith("topk")
    if args.variant != "prime-rl":
        trainer.hook_loss(upstream)
        trainer.hook_head(head)
        dialect = {} if support else {"dialect": "v0_6" if era == "v0.6" else "v0_7"}
        table = {"type": "topk_reverse_kl", "k": k} if support else {"type": "sampled_reverse_kl", **dialect}
        registration.register(table)
    dtype = getattr(torch, args.dtype)
    linear = head.FusedOutputLinear(args.hidden, args.vocab, args.chunk).to(dtype)
    with torch.no_grad():
        linear.weight.normal_(0, 0.05)
    hidden = torch.randn(1, n, args.hidden, dtype=dtype).requires_grad_()
    ids = torch.randint(0, args.vocab, (1, n))
    top = torch.stack([torch.randint(0, args.vocab - k, (1,)) + torch.arange(k) for _ in range(n)])
    log_q = torch.randn(n, k).log_softmax(-1) - 0.1
    mask = torch.ones(1, n, dtype=torch.bool)
    mask[0, : n // 4] = False
    rows = {"ref": -torch.rand(n), "inference": -torch.rand(n), "advantages": torch.ones(n)}
    bits = log_q.view(torch.int32)
    packed = torch.stack([top.int(), bits], dim=1)[None] if support else None
    assert wire.unpack(packed[0], k) is not None if support else True
    batch = {
        "input_ids": ids, "loss_mask": mask, "temperatures": torch.ones(1, n), "routed_experts": packed,
        "ref_kl_weights": mask.float(), "rl_weights": None,
    }  # fmt: skip
    labels = torch.cat([ids[:, 1:], torch.zeros(1, 1, dtype=torch.long)], dim=1)

    def step():
        linear.weight.grad = hidden.grad = None
        naive = None
        if args.variant == "topk naive":
            trainer.ROOM.bin = None
            shifted = torch.roll(top, -1, 0)
            out = linear(hidden, labels, temperature=torch.ones(1, n))
            z = (linear.weight[shifted].float() * hidden[0].unsqueeze(1).float()).sum(-1)
            z_label = (linear.weight[labels[0]].float() * hidden[0].float()).sum(-1, keepdim=True)
            naive = torch.cat([torch.zeros(1, k), (z - z_label)[:-1]])
        elif args.variant != "prime-rl":
            trainer.ROOM.begin(batch)
            out = linear(hidden, labels, temperature=torch.ones(1, n))
        else:
            out = linear(hidden, labels, temperature=torch.ones(1, n))
        logprobs = torch.cat([torch.zeros(1), out["logprobs"][0, :-1]])
        if naive is not None:
            trainer.ROOM.begin(batch)
            trainer.ROOM.bin.student = naive
        common = dict(
            trainer_logprobs=[logprobs], inference_logprobs=[rows["inference"]], advantages=[rows["advantages"]],
            loss_mask=[mask[0]],
        )  # fmt: skip
        scale = int(mask.sum())
        if era == "v0.6":
            fns = {"opd": upstream.opd_loss_fn}
            loss, _ = upstream.compute_loss(
                **common, teacher_logprobs=[rows["ref"]], loss_fns=fns, loss_scale=scale, training_mode="opd"
            )
        else:
            loss, _ = upstream.compute_loss(
                **common, ref_logprobs=[rows["ref"]], rl_weights=[torch.zeros(n)], ce_weights=None,
                ref_kl_weights=[mask[0].float()], rl_loss_fn=None, rl_scale=1, ce_scale=1, ref_kl_scale=scale,
            )  # fmt: skip
        loss.backward()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step()
    times = []
    for _ in range(args.steps):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": min(times), "peak_mib": peak / 1024, "grown_mib": (peak - before) / 1024}))


def main(args):
    sys.path.insert(0, str(REPO / "tests"))
    from prime_rl_checkout import extract, pythonpath

    with tempfile.TemporaryDirectory() as folder:
        tree = extract(Path(args.checkout), args.version, Path(folder))
        rig = REPO / "tests" / "upstream" / "rig"
        env = {key: value for key, value in os.environ.items() if key != "PRIME_COMPOSER"}
        env |= {"PYTHONPATH": pythonpath(tree, rig), "PRIME_CPU_RIG": "1", "TORCHDYNAMO_DISABLE": "1"}
        env |= {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
        results = {variant: [] for variant in VARIANTS}
        for _ in range(args.rounds):
            for variant in VARIANTS:
                command = [args.python, __file__, *sys.argv[1:], "--variant", variant]
                done = subprocess.run(command, env=env, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(done.stderr[-3000:])
                results[variant].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"prime-rl {args.version}, vocabulary {args.vocab}, hidden {args.hidden}, {args.tokens} tokens, K {args.k}, "
          f"{args.dtype}, {args.threads} thread(s), CPU seconds, best of {args.steps} steps, median of {args.rounds} rounds")  # fmt: skip
    first = None
    for variant, rows in results.items():
        seconds = statistics.median(row["seconds"] for row in rows)
        memory = statistics.median(row["peak_mib"] for row in rows)
        first = first or (seconds, memory)
        print(f"{variant:12} {seconds:7.3f} s  {seconds / first[0]:5.3f}x   {memory:7.0f} MiB  {memory / first[1]:5.3f}x")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout")
    parser.add_argument("--version", default="newest")
    parser.add_argument("--python", default=sys.executable, help="the Python of the environment that can import it")
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    one(given) if given.variant else main(given)
