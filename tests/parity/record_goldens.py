"""Record what prime-rl's own losses return on the inputs of cases.py.

    python -m tests.parity.record_goldens [CHECKOUT]

Writes goldens.json: float32 with nine significant digits and float64 with seventeen, which
name every value exactly, and the commits that were run.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch

from tests.parity import cases
from tests.parity.outcomes import GOLDENS, live
from tests.prime_rl_checkout import VERSIONS, commit_of, extract, find_checkout


def number(value: torch.Tensor) -> float:
    """Return the shortest decimal that reads as this value again."""
    digits = 9 if value.dtype == torch.float32 else 17
    return float(format(value.item(), f".{digits}g"))


def record(functions: dict) -> dict[str, dict]:
    """Return prime-rl's side of a driver's result as JSON."""
    by_kind: dict[str, dict] = {}
    for (kind, name), row in functions.items():
        theirs = row["theirs"]
        if theirs["loss"].dtype == torch.bfloat16:
            continue
        by_kind.setdefault(kind, {})[name] = {
            "loss": number(theirs["loss"]),
            "grad": [number(value) for value in theirs["grad"][0]],
            "metrics": {metric: number(value) for metric, value in theirs["metrics"].items()},
        }
    return by_kind


def main(place: str | None) -> None:
    checkout = find_checkout(place)
    if checkout is None:
        raise SystemExit("no checkout of prime-rl: pass its path")
    versions: dict[str, dict] = {}
    commits = {version: commit_of(checkout, version) for version in VERSIONS}
    with tempfile.TemporaryDirectory() as folder:
        for version in VERSIONS:
            outcome = live(extract(checkout, version, Path(folder)), version, Path(folder))
            if isinstance(outcome, str):
                raise SystemExit(outcome)
            versions[version] = record(outcome["functions"])
    lines = []
    for version, table in versions.items():
        kinds = [
            f'"{kind}": {{\n'
            + ",\n".join(f'"{name}": {json.dumps(row)}' for name, row in rows.items())
            + "\n}"
            for kind, rows in table.items()
        ]
        lines.append(f'"{version}": {{\n' + ",\n".join(kinds) + "\n}")
    GOLDENS.write_text(
        '{\n"repository": "https://github.com/PrimeIntellect-ai/prime-rl",\n'
        '"module": "prime_rl/trainer/rl/loss.py",\n'
        f'"commits": {json.dumps(commits)},\n"versions": {{\n' + ",\n".join(lines) + "\n}\n}\n"
    )
    assert list(json.loads(GOLDENS.read_text())["versions"]) == list(cases.CONTRACTS)
    print(f"{GOLDENS.name}: {', '.join(f'{name} {c[:8]}' for name, c in commits.items())}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
