"""Install the rig in a Python process whose PYTHONPATH has this folder, if PRIME_CPU_RIG is 1."""

import os

if os.environ.get("PRIME_CPU_RIG") == "1":
    import cpu_rig

    cpu_rig.install()
