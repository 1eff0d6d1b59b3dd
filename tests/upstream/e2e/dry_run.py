"""Runs prime-rl's own parser and launcher, stopped before anything starts, on each file. usage: dry_run.py FILE..."""

import json
import os
import sys
import traceback


def main(files):
    from prime_rl.entrypoints.rl import main as launch

    results = {}
    for file in files:
        os.environ["PRIME_COMPOSER"] = "1"  # the launcher of the file before has put its loss there
        sys.argv = ["rl", "@", file, "--dry-run"]
        try:
            launch()
            results[file] = "ok"
        except SystemExit as stop:
            results[file] = "ok" if not stop.code else f"exit {stop.code}"
        except Exception:
            results[file] = traceback.format_exc()[-1500:]
    print("RESULT " + json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
