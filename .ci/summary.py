"""Print what pytest's JUnit files contain: per road, results and the reasons of skipped tests."""

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree


def main(files: list[str]) -> None:
    total: Counter[str] = Counter()
    for file in files:
        if not Path(file).exists():
            print(f"{Path(file).stem} road: ended without results")
            continue
        results: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        for case in ElementTree.parse(file).iter("testcase"):
            skipped = case.find("skipped")
            if skipped is not None:
                results["skipped"] += 1
                reasons[(skipped.get("message") or "no reason").splitlines()[0]] += 1
            elif case.find("failure") is not None or case.find("error") is not None:
                results["failed"] += 1
            else:
                results["passed"] += 1
        print(f"{Path(file).stem} road: {line(results)}")
        for reason, count in reasons.most_common():
            print(f"    {count} skipped: {reason}")
        total += results
    print(line(total))


def line(results: Counter[str]) -> str:
    return ", ".join(f"{results[name]} {name}" for name in ("passed", "failed", "skipped"))


if __name__ == "__main__":
    main(sys.argv[1:])
