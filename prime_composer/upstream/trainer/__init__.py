"""The adapter in prime-rl's trainer process."""
