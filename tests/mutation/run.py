"""Run the mutants: does a test fail on each of them?

    python -m tests.mutation.run [NAME ...] [--jobs N]

Each mutant is a copy of package and tests with one mistake in one function. The tests that
``mutants.TESTS`` names for its file run until one fails. results.md, the table of killers and
survivors, is written after every mutant. The exit status is 1 if a mutant survives that has no
reason to.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutation.mutants import MUTANTS, TESTS
from tests.mutation.tree import mutated

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.md")
SURVIVED = "SURVIVED"
HEADER = """# Mutants

Written by `python -m tests.mutation.run`. Each line is a mistake in one function, and the first
test that failed on it.

| mutant | function | killed by |
|---|---|---|
"""


def copy_with(name: str, target: Path) -> None:
    """Copy package and tests to ``target``, with the mutant in the package."""
    for part in ("prime_composer", "tests", "recipes"):
        shutil.copytree(ROOT / part, target / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", target)
    mutant = MUTANTS[name]
    path = target / "prime_composer" / mutant.file
    path.write_text(mutated(path.read_text(), mutant.function, mutant.edits))


def killer(name: str) -> str | None:
    """Return the first test that fails on the mutant, or None."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch)
        copy_with(name, target)
        # The mutant's own package, not the installed one. No bytecode.
        environment = {**os.environ, "PYTHONPATH": str(target), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "--no-header"]
        command += ["-p", "no:cacheprovider", *TESTS[MUTANTS[name].file]]
        process = subprocess.run(
            command, cwd=target, env=environment, capture_output=True, text=True
        )
    if process.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?::[^\s\[]+|\S+)", process.stdout, re.MULTILINE)
    if failed is None or process.returncode not in (1, 2):
        raise SystemExit(f"mutant {name!r}: no test ran.\n{process.stdout}\n{process.stderr}")
    return failed[1]


def read_results() -> dict[str, str]:
    """Return killer or ``SURVIVED`` by mutant, as results.md contains them."""
    if not RESULTS.exists():
        return {}
    rows = re.findall(r"^\| (.+?) \| `.+?` \| (.+?) \|$", RESULTS.read_text(), re.MULTILINE)
    return {name: SURVIVED if result.startswith(SURVIVED) else result for name, result in rows}


def write_results(results: dict[str, str]) -> None:
    lines = []
    for name, mutant in MUTANTS.items():
        if name in results:
            reason = f": {mutant.survives_because}" if results[name] == SURVIVED else ""
            place = f"{mutant.file.removesuffix('.py').replace('/', '.')}.{mutant.function}"
            lines.append(f"| {name} | `{place}` | {results[name]}{reason} |\n")
    survive = sum(result == SURVIVED for result in results.values())
    total = f"\n{len(results) - survive} mutants are killed, {survive} survive.\n"
    RESULTS.write_text(HEADER + "".join(lines) + total)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="mutants to run; all of them by default")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    names = args.names or list(MUTANTS)
    results = {name: result for name, result in read_results().items() if name in MUTANTS}
    survivors = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for name, test in zip(names, pool.map(killer, names), strict=True):
            results[name] = test or SURVIVED
            survivors += test is None and not MUTANTS[name].survives_because
            print(f"{name}: {results[name]}", flush=True)
            write_results(results)
    print(f"{len(names) - survivors} of {len(names)} killed, or survive for a reason")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
