"""Print what each run of a study has spent until its evaluation's reverse KL is small enough.

    python -m tests.studies.until_kl outputs/growth [--kl 0.05]

Between two evaluations log KL is taken to fall on a line. The steps are those up to there, and so
are the tokens that were sampled to train on, without those of evaluations. "seconds" are the steps'
own, and compare on a machine that does nothing else.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prime_composer.local.run_dir.recipe_file import read_recipe
from prime_composer.local.tracker import read_metrics

KL = "eval/reverse_kl"


class Spent(NamedTuple):
    """What a run has spent.

    Attributes:
        steps: training steps, with the part of the last one.
        tokens: that were sampled in them.
        seconds: that they took.
    """

    steps: float
    tokens: float
    seconds: float


def spent_until(
    records: Sequence[Mapping[str, Any]], rollouts: int, largest: float
) -> Spent | None:
    """Return what a run has spent until its reverse KL was ``largest``; None if it never was.

    Args:
        records: of a run, from step 0 on.
        rollouts: of a step.
        largest: nats per token.
    """
    measured = [(record["step"], record[KL]) for record in records if KL in record]
    for (before, high), (after, low) in zip(measured, measured[1:], strict=False):
        if low <= largest:
            share = math.log(high / largest) / math.log(high / low)
            end = before + share * (after - before)
            parts = [
                (record, min(1.0, end - record["step"] + 1))
                for record in records
                if 0 < record["step"] < end + 1
            ]
            tokens = sum(part * record["rollout/tokens"] for record, part in parts)
            seconds = sum(part * record["time/step"] for record, part in parts)
            return Spent(end, rollouts * tokens, seconds)
    return None


def shown(values: Sequence[float]) -> str:
    """Return the mean and the range."""
    mean = sum(values) / len(values)
    return f"{mean:,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("--kl", type=float, default=0.05)
    args = parser.parse_args()
    spent: dict[str, list[Spent]] = defaultdict(list)
    ends: dict[str, list[float]] = defaultdict(list)
    for folder in sorted(args.study.glob("*-seed*")):
        if not (folder / "metrics.jsonl").exists():
            continue
        variant, records = folder.name.rpartition("-seed")[0], read_metrics(folder)
        ends[variant].append([record[KL] for record in records if KL in record][-1])
        one = spent_until(records, read_recipe(folder)["trainer"]["batch_size"], args.kl)
        spent[variant] += [] if one is None else [one]
        print(folder.name, "never" if one is None else [round(value, 1) for value in one])
    print(f"\n| variant | runs | steps | tokens | seconds until KL {args.kl:g} | KL at the end |")
    print("|---|---:|---:|---:|---:|---:|")
    for variant, runs in spent.items():
        columns = [shown(values) for values in zip(*runs, strict=True)] or ["never"] * 3
        last, count = ends[variant], f"{len(runs)} of {len(ends[variant])}"
        end = f"{sum(last) / len(last):.4f} ({min(last):.4f} to {max(last):.4f})"
        print(f"| {variant} | {count} | {' | '.join(columns)} | {end} |")


if __name__ == "__main__":
    main()
