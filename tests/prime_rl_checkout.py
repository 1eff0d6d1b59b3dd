"""Find a checkout of prime-rl and read any of its versions with git, without its work tree.

Places, the first one wins: ``pytest --prime-rl=PATH`` (with the ``=``: pytest reads the option from
a conftest, and would take a path after a space for a folder of tests), the environment variable
PRIME_RL_CHECKOUT, and ``prime_composer/prime-rl`` in the per-user cache directory (make it with
``git clone https://github.com/PrimeIntellect-ai/prime-rl``).
"""

import os
import subprocess
import sys
from pathlib import Path

from prime_composer.upstream.versions import records

VERSIONS = {"v0.6": "v0.6.0", "head": "HEAD"}
"""Name of a version that we run: its git revision. "head" moves with the checkout."""

COMMITS = {
    "v0.6": "38494ccb4140897b1c9e7a9ba8da59dcd8940d47",
    "head": records.NEWEST_RUN.commit,
}
"""Name of a version: the full hash of the commit that its record was written from."""

CONTRACTS = {"v0.6": records.LOSS_V0_6, "head": records.LOSS_V0_7}
"""Name of a version: its loss contract."""

BRANCHES = {
    "orchestrator clients": "4103b28559f801cb8275b01b98f79a29ede9afe6",
    "two more fields": "326252f2f6cb2cb52a7383c6885a734ccb3e165a",
    "kept tokens": "d09488d57ae4fa32fc31a31b3d69eb66130d7e76",
    "inline images": "59bbc3d3027ffdbae485f3b4f6b4f1eecf730537",
}
"""Name of a tree with parts of the next contract: the full hash. Clones have all branches."""

REPO = Path(__file__).resolve().parent.parent

NO_CHECKOUT = "no prime-rl checkout (--prime-rl=PATH)"
"""The one reason for which a test that needs a checkout is skipped."""


def cache_dir() -> Path:
    """Return the per-user cache directory of this project on this platform."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif os.name == "nt":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "prime_composer"


def find_checkout(option: str | None = None) -> Path | None:
    """Return the checkout's directory; None without one, where it is neither named nor required."""
    named = option or os.environ.get("PRIME_RL_CHECKOUT")
    place = Path(named) if named else cache_dir() / "prime-rl"
    if (place / ".git").exists():
        return place
    if named or os.environ.get("PRIME_COMPOSER_REQUIRE_UPSTREAM") == "1":
        raise FileNotFoundError(
            f"no git checkout of prime-rl at {place}: pass --prime-rl=PATH, set PRIME_RL_CHECKOUT, "
            "or clone https://github.com/PrimeIntellect-ai/prime-rl there"
        )
    return None


def commit_of(checkout: Path, version: str) -> str:
    """Return the full hash of a version, or of one of ``BRANCHES``."""
    revision = {**VERSIONS, **BRANCHES}[version]
    command = ["git", "-C", str(checkout), "rev-parse", "--verify", f"{revision}^{{commit}}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def extract(checkout: Path, version: str, target: Path) -> Path:
    """Extract a version to ``target/<version>``: sources, config package, the trainer's unit tests.

    Its folder ``tests`` is made a regular package. As upstream's namespace package, our own
    ``tests`` would hide it.
    """
    tree = target / version
    if not tree.exists():
        paths = ["src", "packages/prime-rl-configs", "tests/unit/train/rl"]
        command = ["git", "-C", str(checkout), "archive", "--format=tar"]
        command += [commit_of(checkout, version), *paths]
        data = subprocess.run(command, check=True, capture_output=True).stdout
        partial = target / f".{version}.{os.getpid()}"
        partial.mkdir()
        subprocess.run(["tar", "-x", "-C", str(partial)], input=data, check=True)
        (partial / "tests" / "__init__.py").touch()
        partial.rename(tree)
    return tree


def pythonpath(tree: Path, *more: Path | str) -> str:
    """Return a PYTHONPATH with prime-rl's two source folders and this package.

    prime_rl is one namespace package over both folders.
    """
    configs = tree / "packages" / "prime-rl-configs" / "src"
    return os.pathsep.join(str(folder) for folder in (*more, tree / "src", configs, REPO))
