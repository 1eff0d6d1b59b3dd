"""The whole-run adapter's environment variable. Without torch: every process of a run reads it."""

import json
import os
from typing import Any

SWITCH = "PRIME_COMPOSER"
"""Environment variable of the whole-run adapter: "1", or a JSON object with the loss table under ``loss``."""

EXAMPLE = f"""{SWITCH}='{{"loss": {{"type": "topk_reverse_kl", "k": 32}}}}'"""

SECTION = "trainer.loss.kwargs"
"""Where a loss table stands in prime-rl's config."""


def switch() -> dict[str, Any] | None:
    """What the environment says about the whole-run adapter: None when off, else its settings ({} for "1").

    Raises:
        ValueError: the value is neither "1" nor a JSON object.
    """
    value = os.environ.get(SWITCH, "").strip()
    if value in ("", "0"):
        return None
    if value == "1":
        return {}
    try:
        settings = json.loads(value)
    except json.JSONDecodeError:
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(
            f"{SWITCH}={value!r}: write {SWITCH}=1, or a JSON object such as {EXAMPLE}"
        )
    unknown = set(settings) - {"loss"}
    if unknown:
        raise ValueError(
            f"{SWITCH}: unknown key {sorted(unknown)[0]!r}; known: loss. Example: {EXAMPLE}"
        )
    return settings


def needs_adapter(table: dict[str, Any]) -> bool:
    """Whether a loss table says that this run's teachers are mixed or routed by the adapter (``adapter = true``)."""
    return str(table.get("adapter", False)).lower() == "true"
