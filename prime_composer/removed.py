"""What earlier versions had, and what to do instead.

This file imports no other file of the package. It may go at 1.0.
"""

REMOVED: dict[str, str] = {
    "eval.samples": "leave it out, with eval.temperatures",
    "eval.temperatures": "leave it out; eval measures greedy answers",
    "PRIME_COMPOSER.scores": "leave it out; a teacher gives the ids that are most probable to it",
}
"""Key of a recipe, ``loss.type=NAME``, or key of an environment variable's JSON as
``VARIABLE.KEY`` -> what to do instead, without a full stop."""
