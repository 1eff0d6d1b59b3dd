"""The script of the room's README."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.fork_server import REPO

README = REPO / "prime_composer" / "trl" / "README.md"


def script() -> str:
    """Return the first block of code that imports."""
    blocks = re.findall(r"(?:^(?:    .*)?\n)+", README.read_text(encoding="utf-8"), re.MULTILINE)
    return next(text for text in map(textwrap.dedent, blocks) if "import sys" in text)


@pytest.mark.slow
def test_script_of_the_readme_trains(trl, models, tmp_path: Path):
    """It prints a smaller KL after than before. Two steps, on models of another vocabulary."""
    code = script()
    assert "max_steps=60" in code
    (tmp_path / "distill.py").write_text(code.replace("max_steps=60", "max_steps=2"))
    done = subprocess.run(
        [sys.executable, "distill.py", str(models.folder), str(models.teacher_folder)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPO), "PATH": "", "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    last = done.stdout.strip().splitlines()[-1]
    before, after = map(float, re.findall(r"\d+\.\d+", last))
    assert last.startswith("reverse KL per token: ") and 0 < after < before
