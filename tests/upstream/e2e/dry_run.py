"""Run prime-rl's own parser and launcher on each file, and stop before anything starts.

usage: dry_run.py FILE...
"""

import json
import os
import sys
import traceback


def main(files):
    from prime_rl.entrypoints.rl import main as launch

    results = {}
    for file in files:
        # The launcher has put the loss of the file before into it.
        os.environ["PRIME_COMPOSER"] = "1"
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
