"""Makes the environments of the whole-run tests: v0.6.0 and the newest prime-rl need different versions of verifiers.

    python tests/upstream/make_venvs.py [newest | v0.6 | all]

Each goes to ``prime_composer/venvs/NAME`` in the per-user cache directory (or PRIME_COMPOSER_VENVS), with PyTorch's CPU
build (PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu where pip's index has none) 1.7 GB and about two minutes
each. This package is installed into it as an editable, with its .pth; prime-rl itself is never installed, it is read
from a checkout.
"""

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.prime_rl_checkout import REPO, cache_dir  # noqa: E402

NAMES = ("v0.6", "newest")
VERIFIERS = {"v0.7.0": "0.2.0", "v0.8.0": "0.2.2.dev76"}
"""Versions in between run in the newest environment, with their own verifiers in front of it."""


def venvs_dir() -> Path:
    named = os.environ.get("PRIME_COMPOSER_VENVS")
    return Path(named) if named else cache_dir() / "venvs"


def python_of(name: str) -> Path:
    folder = venvs_dir() / name
    return folder / "Scripts" / "python.exe" if os.name == "nt" else folder / "bin" / "python"


def verifiers_of(version: str) -> Path | None:
    """A folder for PYTHONPATH, for the versions that need another verifiers than their environment holds."""
    return venvs_dir() / f"verifiers-{version}" if version in VERIFIERS else None


def make(name: str) -> None:
    folder = venvs_dir() / name
    if not python_of(name).exists():
        venv.create(folder, with_pip=True)
    pip = [str(python_of(name)), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "-r", str(HERE / f"requirements_{name}.txt")], check=True)
    subprocess.run([*pip, "--no-deps", "-e", str(REPO)], check=True)
    if name == "newest":
        for version, number in VERIFIERS.items():
            target = [
                "--target",
                str(verifiers_of(version)),
                "--upgrade",
                "--no-deps",
                f"verifiers=={number}",
            ]
            subprocess.run([*pip, *target], check=True)
    print(f"{name}: {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", choices=[*NAMES, "all"], default="all", help="default: all"
    )
    names = parser.parse_args().names
    for name in NAMES if "all" in names else names:
        make(name)


if __name__ == "__main__":
    main()
