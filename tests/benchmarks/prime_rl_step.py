"""Measure what our losses cost inside prime-rl's trainer, against prime-rl's own distillation.

    python -m tests.benchmarks.prime_rl_step CHECKOUT --vocab 32768 --rounds 3

prime-rl's own ``prime_rl.trainer.rl.train.train`` runs, unmodified, on a Qwen3 of ``--layers``
layers: its setup_model under FSDP2 (bfloat16 compute, float32 master weights, one rank over gloo),
its micro-batches (packed by its prepare_batch, sent and received over its filesystem transport),
its forward, its fused head, compute_loss, backward, clip_grad_norm_, AdamW and metrics. The numbers
are prime-rl's own metrics of each step: time/step (loading the batch, forward and backward,
clipping, the optimizer, statistics) and perf/peak_memory (the most resident memory within it).

Four things around it are replaced. The rig of tests/upstream stands in for the GPU. train.py's
clock is the process's CPU time, which does not depend on other load. The CUDA memory counters read
/proc (Linux). No weights are broadcast, which costs the same with every loss. Activation
checkpointing is off: it makes prime-rl's own step longer and so every ratio smaller. The adapter
is switched on by its environment variable, as in a real run.

The variants:

    prime-rl again  prime-rl's own OPD against itself (nothing of ours imported): the noise
    sampled         the adapter on, sampled_reverse_kl
    topk            the adapter on, topk_reverse_kl with a tail bucket, K ids spread over the whole
                    vocabulary

Each is a new process in every one of ``--rounds`` rounds, in rotating order. Within a process,
steps with the adapter and steps of prime-rl's own OPD (without hooks, and without a support in the
batch) alternate, off on on off, so that a slow moment of the machine affects both: two processes of
the same program differ by more than what is measured here. Peaks are read first, with a C library
that returns freed tensors to the kernel at once. Then it keeps them, as the CUDA allocator does,
because page faults are otherwise a third of the CPU time and most of its noise. ``--pairs`` pairs
are timed.

Printed: prime-rl's own median, the median ratio to it of all pairs, and the smallest and the
largest of the rounds' median ratios.

Needs the environment of tests/upstream/make_venvs.py (``--python``), and reads prime-rl from a git
checkout.
"""

import argparse
import asyncio
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from prime_composer.contract import Scores  # noqa: E402
from tests.prime_rl_checkout import extract, pythonpath  # noqa: E402

VARIANTS = ("prime-rl again", "sampled", "topk")
K, TOKENS, MICRO_BATCHES = 32, 512, 2  # of a support, of a micro-batch, of a step


def table_of(variant):
    """Return the loss table of a variant, or None."""
    return {
        "prime-rl again": None,
        "sampled": {"type": "sampled_reverse_kl", "dialect": "head"},
        "topk": {"type": "topk_reverse_kl", "k": K},
    }[variant]


def peak():
    """Return the most resident memory since the last step began, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")


def keep_freed_memory(keep):
    """Set glibc's allocator: keep freed memory, or return every tensor to the kernel when freed."""
    libc = ctypes.CDLL(None)
    # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX of malloc.h
    trim, pad, threshold, count = -1, -2, -3, -4
    settings = {trim: -1, pad: 1 << 26, count: 0} if keep else {threshold: 1 << 16, trim: 1 << 17}
    assert all(libc.mallopt(name, value) for name, value in settings.items())


def support(n, vocab, generator):
    """Return [n, K] ids, distinct in a row and all over the vocabulary, and their log-probs."""
    import torch

    start = torch.randint(0, vocab, (n, 1), generator=generator)
    stride = torch.randint(1, vocab // K, (n, 1), generator=generator)
    ids = (start + stride * torch.arange(K)) % vocab
    logits = torch.randn(n, K, generator=generator).sort(descending=True).values
    return ids, logits.log_softmax(-1) - 0.1


def samples(args, step, topk):
    """Return one step's rollouts as prime-rl's TrainingSamples.

    They have four lengths that fill a micro-batch; a quarter of each is the prompt.
    """
    import torch
    from prime_rl.transports.rollouts.types import RoutedExperts, TrainingSample

    generator = torch.Generator().manual_seed(step // 2)  # a pair trains on the same tokens
    made = []
    for n in (TOKENS // 2, TOKENS // 4, TOKENS // 8, TOKENS // 8 - 3) * MICRO_BATCHES:
        prompt = n // 4
        tokens = torch.randint(0, args.vocab, (n,), generator=generator).tolist()
        mu = (
            -torch.tensor(float(args.vocab)).log() + 0.1 * torch.randn(n, generator=generator)
        ).tolist()
        teacher = (-3 * torch.rand(n, generator=generator)).tolist()
        ids, log_q = support(n, args.vocab, generator)
        log_q[0] = float("nan")  # nothing scores the first token
        routed = None
        if topk:
            from prime_composer.upstream import wire

            packed = wire.pack(Scores(log_q[:, 0], ids, log_q))
            routed = RoutedExperts(
                data=packed.tobytes(), shape=list(packed.shape), dtype=str(packed.dtype)
            )
        mask = [t >= prompt for t in range(n)]
        made.append(
            TrainingSample(
                token_ids=tokens,
                mask=mask,
                logprobs=mu,
                temperatures=[1.0] * n,
                env_name="bench",
                ref_logprobs=teacher,
                routed_experts=routed,
                rl_weights=[0.0] * n,
                ref_kl_weights=[float(m) for m in mask],
            )
        )
    return made


def send(args, folder, first, schedule):
    """Leave every step's micro-batches where prime-rl's receiver looks for them."""
    from prime_rl.trainer.batch import prepare_batch
    from prime_rl.transports.rollouts import setup_micro_batch_sender

    transport = SimpleNamespace(type="filesystem")
    common = dict(seq_len=TOKENS, num_train_workers=1, bin_cost=sum, pad_to_multiple_of=1)
    sender = setup_micro_batch_sender(folder, 1, first, transport)
    for step, on in enumerate(schedule):
        batch = samples(args, step, on and args.variant == "topk")
        sent = sender.send(prepare_batch(batch, **common))
        if sent is not None:
            asyncio.run(sent)


def adapter(table):
    """Put the adapter into this process; return a function that turns its hooks on and off."""
    import prime_rl.trainer.rl.loss as loss

    own = loss.ref_kl_loss_fn
    if table is not None:
        from prime_composer.upstream import autoload
        from prime_composer.upstream.trainer.hooks import hook_loss

        os.environ["PRIME_COMPOSER"] = json.dumps({"loss": table})
        assert not {
            name for name in autoload.HOOKS if "trainer" in name and name in sys.modules
        } - {loss.__name__}
        autoload.install()
        hook_loss(loss)
    import prime_rl.trainer.models.layers.lm_head as head
    import prime_rl.trainer.rl.train as rl

    if table is None:
        assert "prime_composer.losses" not in sys.modules
        return lambda on: None
    hooked = [(loss, "ref_kl_loss_fn"), (rl, "compute_loss"), (rl.DataLoader, "get_batch")]
    hooked += [(head.FusedOutputLinear, "forward"), (head.VanillaOutputLinear, "forward")]
    ours = [getattr(owner, name) for owner, name in hooked]
    theirs = [own, *(function.__wrapped__ for function in ours[1:])]

    def switch(on):
        for (owner, name), function in zip(hooked, ours if on else theirs, strict=True):
            setattr(owner, name, function)

    return switch


FIRST, PEAKS, SETTLE, TIMED = (
    [True, False],
    [False, True, True, False],
    [True, False],
    [False, True, True, False],
)


def plan(args):
    """Return whether the adapter is on, for every step of a process."""
    return FIRST + PEAKS + SETTLE + TIMED * (args.pairs // 2)


def in_pairs(columns, schedule):
    """Return (prime-rl's own, ours) of each pair: peaks of early steps, times of late ones."""
    peaks, times = len(FIRST), len(FIRST + PEAKS + SETTLE)
    spans = {
        "peak": range(peaks, peaks + len(PEAKS), 2),
        "step": range(times, len(schedule), 2),
    }
    return {
        name: [
            (columns[name][at + schedule[at]], columns[name][at + 1 - schedule[at]]) for at in span
        ]
        for name, span in spans.items()
    }


def measure(args):
    """Run prime-rl's train() in this process; return its metrics of each pair, as ``in_pairs``."""
    keep_freed_memory(False)
    import torch

    torch.set_num_threads(1)
    schedule = plan(args)
    table = table_of(args.variant)
    switch = adapter(table)
    import prime_rl.trainer.rl.train as rl
    from prime_rl.configs.trainer import TrainerConfig
    from prime_rl.trainer.ckpt import Progress

    began = []

    def step_begins():
        if len(began) == len(FIRST + PEAKS):
            keep_freed_memory(True)
        if len(began) < len(schedule):
            switch(schedule[len(began)])
        began.append(True)
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak

    torch.cuda.reset_peak_memory_stats = step_begins
    torch.cuda.max_memory_reserved = peak
    folder = Path(os.environ["BENCH_FOLDER"])
    model = {
        "name": str(folder),
        "seq_len": TOKENS,
        "ac": None,
        "ac_offloading": None,
        "compile": None,
        "optim_cpu_offload": False,
        "fused_lm_head_token_chunk_size": 8192,
        "attn": "flash_attention_2",
        "impl": "custom",
        "debug": {"random_init": True},
    }
    loss = {}
    if table is not None:
        custom = {"type": "custom", "import_path": "prime_composer.upstream.loss_fn"}
        loss = {"loss": {**custom, "kwargs": table}}
    config = TrainerConfig.model_validate(
        {"model": model, "output_dir": str(folder), "max_steps": len(schedule), **loss}
        | {"log": {"level": "warning"}, "rollout_transport": {"type": "filesystem"}}
    )
    rows = []

    async def log(metrics, step=None, **_):
        rows.append(metrics)

    rl.monitors.log = log
    setup_model = rl.setup_model

    def filled(*a, **k):  # prime-rl's random_init leaves the memory as it is
        model = setup_model(*a, **k)
        torch.manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                local.fill_(1.0) if "norm" in name else local.normal_(0, 0.02)
        return model

    rl.setup_model = filled
    rl.setup_weight_broadcast = lambda *a, **k: None
    rl.time = SimpleNamespace(perf_counter=time.process_time)
    send(args, folder, Progress().step, schedule)
    rl.train(config)
    keys = {"step": "time/step", "peak": "perf/peak_memory", "norm": "optim/grad_norm"}
    columns = {name: [row[key] for row in rows if key in row] for name, key in keys.items()}
    assert all(len(column) == len(schedule) for column in columns.values()), {
        k: len(v) for k, v in columns.items()
    }
    assert all(0 < norm < 1e4 for norm in columns["norm"]), columns["norm"]
    if table is not None:  # each step ran what it was said to run
        named = [
            any(key.startswith(table["type"]) for key in row) for row in rows if "loss/mean" in row
        ]
        assert named == schedule, named
    columns["peak"] = [peak * 1024 for peak in columns["peak"]]
    return in_pairs(columns, schedule)


def model_config(args):
    """Return the config of a Qwen3 with the proportions of Qwen3-0.6B."""
    heads = args.hidden // 64
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": args.vocab,
        "head_dim": 64,
        "hidden_size": args.hidden,
        "intermediate_size": 3 * args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def one_round(args, tree, variants, results):
    rig = REPO / "tests" / "upstream" / "rig"
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PRIME_COMPOSER", "WANDB"))
    }
    env |= {"PYTHONPATH": pythonpath(tree, rig), "PRIME_CPU_RIG": "1", "TORCHDYNAMO_DISABLE": "1"}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for variant in variants:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(model_config(args)))
            command = [args.python, __file__, *sys.argv[1:], "--variant", variant]
            own = env | {"BENCH_FOLDER": folder}
            done = subprocess.run(command, env=own, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{variant}: {done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        results[variant].append(json.loads(done.stdout.splitlines()[-1]))


def main(args):
    results = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        tree = extract(Path(args.checkout), "head", Path(folder))
        for number in range(args.rounds):
            turn = number % len(VARIANTS)
            one_round(args, tree, VARIANTS[turn:] + VARIANTS[:turn], results)
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    print(
        f"prime-rl, vocabulary {args.vocab:,}, hidden {args.hidden:,}, {args.layers} layers, "
        f"{MICRO_BATCHES} x {TOKENS} tokens, K {K}, bfloat16, one thread; CPU seconds, "
        f"{args.rounds} rounds of {args.pairs} pairs"
    )
    print(" " * 15 + "".join(f"{name + ': prime-rl, ratio':>36}" for name in ("step", "peak")))
    for variant, rounds in results.items():
        cells = []
        for name in ("step", "peak"):
            base = statistics.median(off for row in rounds for off, _ in row[name])
            ratio = statistics.median(on / off for row in rounds for off, on in row[name])
            each = [statistics.median(on / off for off, on in row[name]) for row in rounds]
            shown = f"{base:.0f} MiB" if name == "peak" else f"{base:.3f} s"
            cells.append(f"{shown} {ratio:.3f}x [{min(each):.3f}, {max(each):.3f}]")
        print(f"{variant:15}" + "".join(f"{cell:>36}" for cell in cells))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout")
    parser.add_argument(
        "--python", default=sys.executable, help="the Python of the environment that can import it"
    )
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=4, help="timed pairs of steps, an even number")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.variant:
        print("\n" + json.dumps(measure(given)))
    else:
        main(given)
