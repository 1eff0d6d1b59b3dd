"""Records what prime-rl's own loss functions return on the parity inputs, for machines without a checkout.

    python tests/parity/record_goldens.py [CHECKOUT]

Writes goldens.json beside this file: inputs are those of cases.py, numbers are ``float.hex`` of float32, the commits
that were run stand inside.
"""

import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.parity.outcomes import GOLDENS, live  # noqa: E402
from tests.prime_rl_checkout import VERSIONS, commit_of, extract, find_checkout  # noqa: E402


def main(place: str | None) -> None:
    checkout = find_checkout(place)
    if checkout is None:
        raise SystemExit("no checkout of prime-rl: pass its path")
    versions = {}
    commits = {}
    with tempfile.TemporaryDirectory() as folder:
        for version in VERSIONS:
            outcome = live(extract(checkout, version, Path(folder)), version, Path(folder))
            if isinstance(outcome, str):
                raise SystemExit(outcome)
            recorded: dict[str, dict] = {}
            for (kind, case), row in outcome["functions"].items():
                theirs = row["theirs"]
                recorded.setdefault(kind, {})[case] = {
                    "loss": theirs["loss"].item().hex(),
                    "grad": [x.hex() for x in theirs["grad"][0].tolist()],
                    "metrics": {
                        name: float(value).hex() for name, value in theirs["metrics"].items()
                    },
                }
            versions[version] = recorded
            commits[version] = commit_of(checkout, version)
    repository = "https://github.com/PrimeIntellect-ai/prime-rl"
    content = {
        "repository": repository,
        "module": "prime_rl/trainer/rl/loss.py",
        "commits": commits,
    }
    GOLDENS.write_text(
        json.dumps({**content, "versions": versions}, indent=0, sort_keys=True) + "\n"
    )
    print(f"{GOLDENS}: {', '.join(f'{v} {c[:8]}' for v, c in commits.items())}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
