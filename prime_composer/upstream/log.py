"""Lines for the log of the prime-rl process that this runs in."""

import sys
from typing import Literal


def log(text: str, level: Literal["info", "error"] = "info") -> None:
    """Write one line to prime-rl's log, or to stderr where its logger is not loaded."""
    logger = sys.modules.get("prime_rl.utils.logger")
    line = f"prime_composer: {text}"
    if logger is None:
        print(line, file=sys.stderr, flush=True)
    else:
        getattr(logger.get_logger(), level)(line)
