"""Make the environments in which prime-rl runs on a CPU, for the whole-run tests.

    python tests/upstream/make_venvs.py [VERSION ... | all]

A version is v0.6 or head; "newest" is another name of "head". v0.6 needs other versions of
libraries.

An environment goes to ``prime_composer/venvs/NAME`` in the per-user cache directory, or below
PRIME_COMPOSER_VENVS. It takes 1.7 GB and about two minutes with PyTorch's CPU build (set
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu where pip's index has none). This package
is installed into it as an editable, with its .pth. prime-rl itself is never installed; the tests
read it from a checkout.
"""

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.prime_rl_checkout import REPO, VERSIONS, cache_dir  # noqa: E402

ALIASES = {"newest": "head"}
REQUIREMENTS = dict.fromkeys(VERSIONS, "requirements_head.txt") | {"v0.6": "requirements_v0.6.txt"}
"""Version -> the file in this folder with the environment in which it runs on a CPU."""

FOLDERS = {"requirements_v0.6.txt": "v0.6", "requirements_head.txt": "newest"}
"""Requirements file -> folder of its environment."""

NO_VENV = "no environment for it (python tests/upstream/make_venvs.py)"
"""The one reason for which a test that needs an environment is skipped."""


def venvs_dir() -> Path:
    """Return the folder of all environments."""
    named = os.environ.get("PRIME_COMPOSER_VENVS")
    return Path(named) if named else cache_dir() / "venvs"


def python_of(version: str) -> Path:
    """Return the interpreter that runs a version, whether it exists or not."""
    requirements = REQUIREMENTS[ALIASES.get(version, version)]
    folder = venvs_dir() / FOLDERS.get(requirements, Path(requirements).stem)
    return folder / "Scripts" / "python.exe" if os.name == "nt" else folder / "bin" / "python"


def is_ready(version: str) -> bool:
    """Return whether the environment of a version exists."""
    return python_of(version).exists()


def make(requirements: str) -> None:
    """Make or update an environment."""
    names = [name for name, file in REQUIREMENTS.items() if file == requirements]
    python = python_of(names[0])
    if not python.exists():
        venv.create(python.parents[1], with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "-r", str(HERE / requirements)], check=True)
    subprocess.run([*pip, "--no-deps", "-e", str(REPO)], check=True)
    print(f"{', '.join(names)}: {python.parents[1]}")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    choices = [*VERSIONS, *ALIASES, "all"]
    parser.add_argument("names", nargs="*", choices=choices, default="all", help="default: all")
    names = parser.parse_args().names
    versions = VERSIONS if "all" in names else [ALIASES.get(name, name) for name in names]
    for requirements in dict.fromkeys(REQUIREMENTS[version] for version in versions):
        make(requirements)


if __name__ == "__main__":
    main()
