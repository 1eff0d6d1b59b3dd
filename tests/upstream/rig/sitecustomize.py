"""Loaded by every Python process of a test run whose PYTHONPATH holds this folder; does nothing unless switched on."""

import os

if os.environ.get("PRIME_CPU_RIG") == "1":
    import cpu_rig

    cpu_rig.install()
