"""Upper bounds of a recipe's numbers: far beyond any machine, and still no nonsense."""

LARGEST_BATCH = 1_000_000
"""Of what one step asks for."""

LONGEST_CONTEXT = 100_000_000
"""Of lengths in tokens."""

MOST_STEPS = 100_000_000
"""Of steps and intervals."""
