"""The error for a prime-rl that goes past a hook of ours, where nothing else would fail.

prime-rl runs what we put in the place of its own functions because it looks them up by name. Where
it stops doing so its own code runs, and the run trains something else.
"""

DOCTOR = "`prime-composer doctor` says what differs, and what works with it."  # The remedy


class SilentHook(RuntimeError):
    """prime-rl went past a hook of ours that had work."""
