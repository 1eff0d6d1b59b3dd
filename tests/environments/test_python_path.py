"""Where tool servers, which start in folders of their own, look for the environment's module."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prime_composer.environments.runner import absolute_python_path


def test_relative_path_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my_environment.py").write_text("")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["mine", "/absolute", "."]))
    absolute_python_path()
    whole = [str(tmp_path / "mine"), "/absolute", str(tmp_path)]
    assert os.environ["PYTHONPATH"].split(os.pathsep) == whole
    command = [sys.executable, "-S", "-c", "import my_environment"]
    subprocess.run(command, cwd=tmp_path / "elsewhere", check=True)
