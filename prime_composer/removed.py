"""What earlier versions had, and what to do instead.

This file imports no other file of the package. It may go at 1.0.
"""

REMOVED: dict[str, str] = {
    "stages": "begin another run with the checkpoint of the first one, as student.model",
    "rollout.growth": "leave the table out; each step samples up to rollout.max_tokens",
}
"""Key of a recipe, or ``loss.type=NAME`` -> what to do instead, without a full stop."""
