"""Print what the README's first command reports under the arithmetic of other processors.

    python -m tests.studies.processors [RECIPE] [--seeds 5] [--jobs 2]

The libraries of matrix products choose their instructions by the processor. Three variables make
them take older ones, which add in another order. Each row is the smallest and the largest value
over the seeds.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prime_composer.local.tracker import read_metrics

ARITHMETIC = {
    "this processor's": {},
    "AVX2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "SSE4": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
}
COLUMNS = {
    "teacher": "teacher/accuracy",
    "student before": "eval/accuracy",
    "student after": "eval/accuracy",
    "KL before": "eval/reverse_kl",
    "KL after": "eval/reverse_kl",
}


def run(recipe: Path, seed: int, variables: dict[str, str], folder: Path) -> list[float]:
    """Return the columns of one run."""
    command = [
        *(sys.executable, "-m", "prime_composer.cli", "rl", "--config", str(recipe)),
        *("--set", f"trainer.seed={seed}", "--output-dir", str(folder)),
    ]
    subprocess.run(command, env={**os.environ, **variables}, check=True, capture_output=True)
    records = [row for row in read_metrics(folder) if "eval/accuracy" in row]
    first, last = records[0], records[-1]
    return [(last if "after" in name else first)[key] for name, key in COLUMNS.items()]


def shown(name: str, values: list[float]) -> str:
    """Return the range of some values."""
    low, high = min(values), max(values)
    if "KL" in name:
        return f"{low:.3f} to {high:.3f}"
    return f"{low:.1%} to {high:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", type=Path, default=Path("recipes/gsm8k_opd.toml"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    print("| arithmetic |" + "".join(f" {name} |" for name in COLUMNS))
    print("|---" * (len(COLUMNS) + 1) + "|")
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(args.jobs) as pool:
        for place, (name, variables) in enumerate(ARITHMETIC.items()):
            work = [
                pool.submit(run, args.recipe, seed, variables, Path(scratch) / f"{place}_{seed}")
                for seed in range(args.seeds)
            ]
            columns = zip(*(one.result() for one in work), strict=True)
            cells = [shown(*pair) for pair in zip(COLUMNS, map(list, columns), strict=True)]
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
