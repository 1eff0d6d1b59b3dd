"""Hunt for tracebacks of recipes with nonsense in them, with other seeds at each call.

    python -m tests.faults.campaign --seed 7 --minutes 20 [--verbose]

Each trial replaces one or two keys of a recipe by nonsense, checks it, and runs a step of what
passes. It ends right or with one sentence. The exit status is 1 where one showed a traceback, hung,
or ended without a sentence.
"""

import argparse
import copy
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import tomli_w

from tests.command import toml
from tests.conftest import TINY_RECIPE
from tests.faults import child

OUTCOMES = ("right", "refused", "traceback", "hung", "unclear")
BAD = ("traceback", "hung", "unclear")

NONSENSE: tuple[Any, ...] = (
    math.inf, -math.inf, math.nan, -1, 0, 1, 2.5, 1e300, 10**11, 2**63, True, "", "x", "\0", "🙂",
    "a" * 10_000, [], [1], {}, {"a": 1}, {"type": []}, [[]], "1", "[/b]", "../..", "none",
)  # fmt: skip

KEYS: dict[str, set[str]] = {
    "trainer": {
        "lr", "betas", "weight_decay", "max_grad_norm", "batch_size", "steps", "warmup_steps",
        "schedule", "seed", "dtype",
    },
    "rollout": {"temperature", "top_p", "group_size", "max_tokens", "max_model_len", "backend",
                "student_fraction", "url", "wait"},
    "eval": {"every", "size", "kl_size", "kl_support", "temperature"},
    "loss": {"type", "k"},
    "data": {"source", "size", "path"},
    "checkpoint": {"every", "keep"},
    "checks": {"every"},
    "teacher": {"model", "url", "backend", "dtype", "wait"},
    "student": {"model"},
}  # fmt: skip


def mutate(raw: dict[str, Any], rng: random.Random) -> str:
    """Change one key of a recipe; return what was done."""
    name, table = rng.choice([(key, one) for key, one in raw.items() if isinstance(one, dict)])
    while True:
        inner = [(key, value) for key, value in table.items() if isinstance(value, dict)]
        if not inner or rng.random() < 0.5:
            break
        key, table = rng.choice(inner)
        name += f".{key}"
    known = sorted(KEYS.get(name, set()) | table.keys())
    key, value = rng.choice(known), rng.choice(NONSENSE)
    if rng.random() < 0.05:
        table.pop(key, None)
        return f"{name}.{key} left out"
    table[key] = value
    return f"{name}.{key} = {str(value)[:30]!r}"


def toml_of(raw: dict[str, Any]) -> str:
    """Return a recipe as TOML, infinities and NaN as TOML writes them where all of it is TOML."""
    try:
        return tomli_w.dumps(raw)
    except (TypeError, OverflowError):
        return toml(raw)


def ended(done: child.Done) -> tuple[str, str]:
    """Return how a command ended, and the words for it."""
    if done.has_traceback:
        return "traceback", done.output[-3000:]
    if done.timed_out:
        return "hung", done.output[-500:]
    if done.status == 0:
        return "right", ""
    if len(done.output) > 20_000 or not done.message:
        return "unclear", f"{len(done.output)} characters"
    return "refused", done.message


def trial(rng: random.Random, folder: Path, server: Any) -> tuple[str, str, str]:
    """Check and run a recipe with nonsense; return what it has, its outcome, and the words."""
    raw = copy.deepcopy(TINY_RECIPE)
    raw["trainer"] |= {"steps": 1}
    raw["eval"] = {"every": 0, "size": 2, "kl_size": 2}
    what = "; ".join(mutate(raw, rng) for _ in range(rng.choice((1, 1, 2))))
    file = folder / "recipe.toml"
    file.write_text(toml_of(raw), encoding="utf-8", errors="surrogateescape")
    run = ["rl", "--engine", "local", "--config", file, "--output-dir", folder / "run"]
    outcome = ended(child.run(server, ["check", file], folder, limit=30))
    if outcome[0] == "right":
        outcome = ended(child.run(server, run, folder, limit=60))
    shutil.rmtree(folder / "run", ignore_errors=True)
    return what, *outcome


def main() -> int:
    """Run trials until the time is over; print those that went wrong, and how many ended how."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--verbose", action="store_true", help="print every trial")
    arguments = parser.parse_args()
    rng, end = random.Random(arguments.seed), time.monotonic() + 60 * arguments.minutes
    counts, server = Counter[str](), child.server()
    with tempfile.TemporaryDirectory(prefix="prime_composer_campaign_") as name:
        os.environ["PRIME_COMPOSER_CACHE"] = f"{name}/cache"
        (folder := Path(name) / "trial").mkdir()
        while time.monotonic() < end:
            what, outcome, words = trial(rng, folder, server)
            counts[outcome] += 1
            if outcome in BAD or arguments.verbose:
                print(f"--- {outcome}: {what}\n{words}\n", flush=True)
    server.close()
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES))
    return int(any(counts[outcome] for outcome in BAD))


if __name__ == "__main__":
    sys.exit(main())
