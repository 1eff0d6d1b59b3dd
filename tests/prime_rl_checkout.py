"""Finds a checkout of prime-rl and reads any of its versions with git, without touching its work tree.

Looked for: ``pytest --prime-rl=PATH`` (with the ``=``: pytest learns of the option from a conftest, and until then takes a
path after a space for a folder of tests), the environment variable PRIME_RL_CHECKOUT, ``prime_composer/prime-rl`` in the
per-user cache directory (``git clone https://github.com/PrimeIntellect-ai/prime-rl`` there).
"""

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

VERSIONS = {"v0.6.0": "v0.6.0", "v0.7.0": "v0.7.0", "v0.8.0": "v0.8.0", "newest": "HEAD"}
"""Name of a version in the tests: its git revision."""

COMMITS = {
    "v0.6.0": "38494ccb4140897b1c9e7a9ba8da59dcd8940d47",
    "v0.7.0": "d334ea52940b47f426293a7d146239e3fbf91caa",
    "v0.8.0": "60bc29547a8824ad1de7b9af8d265e2b27b2a72d",
    "newest": "559b44772e471d1538537b8805cc77f3824a5e64",
}
"""What was read when this was written; "newest" moves with the checkout."""

REPO = Path(__file__).resolve().parent.parent


def cache_dir() -> Path:
    """The per-user cache directory of this project on this platform."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif os.name == "nt":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "prime_composer"


def find_checkout(option: str | None = None) -> Path | None:
    """The checkout's directory, or None.

    Raises:
        FileNotFoundError: a place was named and holds no checkout, or PRIME_COMPOSER_REQUIRE_UPSTREAM=1 and there is
            none.
    """
    named = option or os.environ.get("PRIME_RL_CHECKOUT")
    place = Path(named) if named else cache_dir() / "prime-rl"
    if (place / ".git").exists():
        return place
    if named or os.environ.get("PRIME_COMPOSER_REQUIRE_UPSTREAM") == "1":
        raise FileNotFoundError(
            f"no git checkout of prime-rl at {place}: pass --prime-rl=PATH, set PRIME_RL_CHECKOUT, or clone "
            "https://github.com/PrimeIntellect-ai/prime-rl there"
        )
    return None


def commit_of(checkout: Path, version: str) -> str:
    """The full hash of a version."""
    command = ["git", "-C", str(checkout), "rev-parse", f"{VERSIONS[version]}^{{commit}}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def extract(checkout: Path, version: str, target: Path) -> Path:
    """The tree of a version in ``target/<version>``: sources, config package and unit tests of the trainer."""
    tree = target / version
    if not tree.exists():
        paths = ["src", "packages/prime-rl-configs", "tests/unit/train/rl"]
        command = [
            "git",
            "-C",
            str(checkout),
            "archive",
            "--format=tar",
            commit_of(checkout, version),
            *paths,
        ]
        data = subprocess.run(command, check=True, capture_output=True).stdout
        partial = target / f".{version}.{os.getpid()}"
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(partial, filter="data")
        partial.rename(tree)
    return tree


def pythonpath(tree: Path, *more: Path | str) -> str:
    """prime_rl is one namespace package over two source folders; both are needed."""
    folders = [*more, tree / "src", tree / "packages" / "prime-rl-configs" / "src", REPO]
    return os.pathsep.join(str(folder) for folder in folders)
