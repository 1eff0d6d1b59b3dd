"""What pip reads of pyproject.toml: offline, with empty packages in the place of the real ones."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.fork_server import REPO

PINNED, NEWER = "2.13.0", "2.99.0"


def write_wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel without a module, of a package without dependencies."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder with a stand-in for every requirement, and two versions of torch."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["local"], *extras["engine"], *extras["metrics"]]
    for requirement in asked:
        name = re.split(r"[\[<>=]", requirement)[0]
        exact = re.search(r"==([0-9.]+)", requirement)
        if name not in ("prime-composer", "torch"):
            write_wheel(tmp_path, name, exact[1] if exact else "99.0")
    for version in (PINNED, NEWER):
        write_wheel(tmp_path, "torch", version)
    return tmp_path


def opened(index: Path, *words: str) -> tuple[set[str], str]:
    """Return the versions of torch that pip opened, and its last line."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--isolated", "--no-build-isolation", "--no-index", "--find-links", str(index)]
    # ``--isolated`` still reads the machine's own files, which may pin a torch.
    env = dict(os.environ) | {"PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run([*command, *words], capture_output=True, text=True, cwd=REPO, env=env)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"Processing \S*/torch-([0-9.]+)-py3", done.stdout)
    return set(found), done.stdout.splitlines()[-1]


def test_pip_opens_the_pinned_torch_alone(index: Path) -> None:
    """A wheel that it opens is one that it downloads where the index has no metadata beside it."""
    versions, result = opened(index, "-e", ".[local]")
    assert versions == {PINNED} and f"torch-{PINNED}" in result


def test_torch_of_others_has_no_upper_bound() -> None:
    """Inside prime-rl or beside trl this package takes the torch that is there."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["torch"]]
    of_torch = [one for one in map(Requirement, asked) if one.name == "torch"]
    assert of_torch and all(NEWER in one.specifier for one in of_torch)
