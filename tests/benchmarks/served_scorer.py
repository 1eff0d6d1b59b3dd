"""Compare the scoring plugin with vLLM's JSON: tokens per second, and CPU time of the API server.

``python -m tests.benchmarks.served_scorer`` (from the repository) starts one real vLLM server with
the plugin, on one core, and asks it in turns: JSON and binary answers at each K, hidden states, and
the largest K and hidden states where .3 of the tokens train, in turns of 20. One
request per sequence, 32 at once; the client runs on the other core. Each row is the best of its
rounds. The model is a random Qwen3.

Targets: K = 32 at least 4x JSON's rate, K = 64 at least 7x; K = 64 at most 1.15x the time of K = 1;
the API server at most 5 us per token; hidden states at least 0.8x the rate of K = 1.

``--groups`` compares the time of groups of 8 rollouts after one prompt, by a server with vLLM's
prefix cache and one without.

``--heads`` compares float32 heads (``prime-rl teacher``'s own) with rounded ones, by two servers in
turns: the time of each K, and the median of its ratios. It needs a half-precision ``--dtype``.

Two servers compute in their engines (``QUICK``): a worker polls on their core after a request.

``--runners first second`` asks two servers in turns, with each of vLLM's model runners. The second
one's kernels are interpreted on a CPU: what they take says nothing of a GPU.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from prime_composer.backends.alignment import make_rollout  # noqa: E402
from prime_composer.teachers.server import ServerScorer  # noqa: E402
from tests.tiny_qwen import make_model  # noqa: E402
from tests.vllm_process import (  # noqa: E402
    QUICK,
    SECOND_RUNNER,
    TeacherProcess,
    VllmProcess,
    save_tokenizer,
)

RUNNERS: dict[str, dict[str, str]] = {"first": {}, "second": SECOND_RUNNER}

SHARE = 0.3

Work = Callable[[list[Any]], object]
Requests = Callable[[], list[list[Any]]]  # of one round: the rollouts of each


def save_model(directory: Path, options: argparse.Namespace) -> None:
    """Save a random model with a tokenizer of numbered words."""
    model = make_model(
        True,
        0,
        options.layers,
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_attention_heads=max(1, options.hidden // 64),
        num_key_value_heads=max(1, options.hidden // 128),
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    model.to(getattr(torch, options.dtype)).save_pretrained(directory)
    save_tokenizer(directory, options.vocab)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used, all threads together."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return 1e-9 * sum(int(task.read_text().split()[0]) for task in tasks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=2000)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ks", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--groups", action="store_true")
    parser.add_argument("--heads", action="store_true")
    parser.add_argument("--runners", nargs="+", default=["first"], choices=RUNNERS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "model"
        save_model(directory, options)
        words: list[Any] = ["--dtype", options.dtype, "--max-model-len", 2048]
        words += ["--kv-cache-memory-bytes", 2**29]
        with contextlib.ExitStack() as stack:

            def serve(runner: str, *more: Any) -> VllmProcess:
                log = Path(name) / f"{len(servers)}.log"
                process = TeacherProcess(directory, log, *words, *more, **RUNNERS[runner])
                servers.append(stack.enter_context(process))
                return process

            servers: list[VllmProcess] = []
            cores = sorted(os.sched_getaffinity(0))
            if not options.groups and not options.heads:
                quick = QUICK if len(options.runners) > 1 else ()
                by_runner = {runner: serve(runner, *quick) for runner in options.runners}
                os.sched_setaffinity(0, cores[-1:])
                compare(by_runner, options)
                return
            rounded = ["--hf-overrides", '{"head_dtype": "model"}']
            (runner,) = options.runners
            serve(runner, *QUICK)
            serve(runner, *QUICK, *(rounded if options.heads else ["--no-enable-prefix-caching"]))
            os.sched_setaffinity(0, cores[-1:])
            scorers = ServerScorer(servers[0].url), ServerScorer(servers[1].url)
            (compare_heads if options.heads else compare_groups)(scorers, options)


def sequences(options: argparse.Namespace, seed: int) -> list[Any]:
    """Return rollouts of random tokens that train from the second on, other ones for each seed."""
    generator = torch.Generator().manual_seed(seed)
    size = (options.sequences, options.tokens)
    rows = torch.randint(2, options.vocab, size, generator=generator).tolist()
    return [make_rollout(ids[:1], ids[1:], [-1.0] * len(ids[1:]), "length", 0) for ids in rows]


def masked(rollouts: list[Any]) -> list[Any]:
    """Return rollouts of which ``SHARE`` of the tokens trains, in turns of 20."""
    period = round(20 / SHARE)
    turns = [torch.arange(len(one.token_ids)) % period < 20 for one in rollouts]
    return [
        replace(one, loss_mask=one.loss_mask & turn)
        for one, turn in zip(rollouts, turns, strict=True)
    ]


def cases_of(server: VllmProcess, options: argparse.Namespace) -> dict[str, Work]:
    """Return what is asked of a server, by its name."""
    scorer = ServerScorer(server.url)
    assert scorer.gives_any_ids

    def hidden(rollouts: list[Any]) -> object:
        return scorer.score(rollouts, 0, hidden=True)

    most = options.ks[-1]
    cases: dict[str, Work] = {}
    for k in options.ks:
        cases[f"JSON, K = {k}"] = lambda r, k=k: scorer.score(r, k, binary=False)
        cases[f"plugin, K = {k}"] = lambda r, k=k: scorer.score(r, k)
    cases["plugin, hidden states"] = hidden
    cases[f"K = {most}, {SHARE:.0%} train"] = lambda r: scorer.score(masked(r), most)
    cases[f"hidden states, {SHARE:.0%} train"] = lambda r: hidden(masked(r))
    return cases


def compare(servers: dict[str, VllmProcess], options: argparse.Namespace) -> None:
    """Print a row per kind of answer and server."""
    rows = [
        (f"{name}, {runner} runner", server, work)
        for runner, server in servers.items()
        for name, work in cases_of(server, options).items()
    ]
    best: dict[str, tuple[float, float]] = {}
    for _, _, work in rows:
        work(sequences(options, 0))  # warm
    seeds = itertools.count(1)  # vLLM's prefix cache has none of a row's sequences
    for _ in range(options.rounds):
        for name, server, work in rows:
            rollouts = sequences(options, next(seeds))
            before, begin = cpu_seconds(server.process.pid), time.perf_counter()
            work(rollouts)
            seconds = time.perf_counter() - begin
            used = cpu_seconds(server.process.pid) - before
            best[name] = min(best.get(name, (seconds, used)), (seconds, used))
    tokens = options.sequences * options.tokens
    print(f"vocabulary {options.vocab}, d = {options.hidden}, {options.dtype}, {tokens} tokens")
    print(f"{'':<44}{'tokens/s':>10}{'us/token':>10}{'API us/token':>14}{'x JSON':>8}")
    for name, (seconds, used) in best.items():
        by_json = best.get(name.replace("plugin", "JSON"))
        ratio = f"{by_json[0] / seconds:.1f}" if by_json and "plugin" in name else ""
        print(
            f"{name:<44}{tokens / seconds:>10,.0f}{1e6 * seconds / tokens:>10.1f}"
            f"{1e6 * used / tokens:>14.2f}{ratio:>8}"
        )


Servers = tuple[ServerScorer, ServerScorer]


def times_of(servers: Servers, rounds: int, k: int, requests: Requests) -> list[list[float]]:
    """Return seconds of both servers for each round, in turns."""
    times: list[list[float]] = []
    for _ in range(rounds):
        asked, own = requests(), []
        for scorer in servers:
            begin = time.perf_counter()
            for rollouts in asked:
                scorer.score(rollouts, k)
            own.append(time.perf_counter() - begin)
        times.append(own)
    return times


def compare_heads(servers: Servers, options: argparse.Namespace) -> None:
    """Print the time of each K with a float32 head and with a rounded one."""
    seeds, tokens = itertools.count(), options.sequences * options.tokens
    print(f"vocabulary {options.vocab}, d = {options.hidden}, {options.dtype}, {tokens} tokens")
    print(f"{'':<10}{'float32 us':>12}{'rounded us':>12}{'ratio':>8}  per token, best of each")
    for k in options.ks:
        _, *times = times_of(  # the first one warms
            servers, options.rounds + 1, k, lambda: [sequences(options, next(seeds))]
        )
        ratio = statistics.median(first / second for first, second in times)
        best = "".join(f"{1e6 * min(each) / tokens:>12.1f}" for each in zip(*times, strict=True))
        print(f"K = {k:<6}{best}{ratio:>8.2f}")


def compare_groups(servers: Servers, options: argparse.Namespace) -> None:
    """Print the time of 8 rollouts with a long, new prompt in common, one after the other."""
    generator = torch.Generator().manual_seed(1)
    prompt_tokens, completion = 1000, 128

    def random_ids(count: int) -> list[int]:
        return torch.randint(2, options.vocab, (count,), generator=generator).tolist()

    def group() -> list[list[Any]]:
        prompt, sampled = random_ids(prompt_tokens), [-1.0] * completion
        return [
            [make_rollout(prompt, random_ids(completion), sampled, "length", 0)] for _ in range(8)
        ]

    print(f"groups of 8 rollouts of {completion} tokens after a prompt of {prompt_tokens}")
    _, *times = times_of(servers, options.rounds + 1, 32, group)
    cached, without = (min(each) for each in zip(*times, strict=True))
    print(f"with the cache {cached:.3f} s, without {without:.3f} s ({without / cached:.1f}x)")


if __name__ == "__main__":
    main()
