"""The switch: a .pth that costs nothing when off, and lazy hooks when on, in a wheel and in an editable install."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.prime_rl_checkout import REPO

PTH = REPO / "prime_composer" / "upstream" / "prime_composer.pth"
SHOW = "import sys; print([type(f).__name__ for f in sys.meta_path], [m for m in sys.modules if 'prime' in m or m == 'torch'])"


def interpreter(tmp_path, code, switch=None):
    """A fresh interpreter whose site directory holds our .pth and, like an editable install, a path to the repository."""
    site = tmp_path / "site"
    site.mkdir(exist_ok=True)
    (site / "prime_composer.pth").write_text(PTH.read_text())
    (site / "_editable.pth").write_text(f"{REPO}\n")
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PRIME_COMPOSER", "PYTHONPATH")
    }
    env |= {} if switch is None else {"PRIME_COMPOSER": switch}
    # -S keeps other .pth files out; addsitedir then does what site would.
    start = f"import site; site.addsitedir({str(site)!r})\n"
    return subprocess.run(
        [sys.executable, "-S", "-c", start + code], env=env, capture_output=True, text=True
    )


@pytest.mark.parametrize("switch", [None, "", "0"])
def test_off_it_installs_and_imports_nothing(tmp_path, switch):
    done = interpreter(tmp_path, SHOW, switch)
    assert done.returncode == 0 and done.stderr == ""
    assert "Hooks" not in done.stdout and "prime" not in done.stdout and "torch" not in done.stdout


def test_on_it_installs_one_finder_and_imports_neither_torch_nor_the_package(tmp_path):
    done = interpreter(tmp_path, SHOW, "1")
    assert done.stderr == ""
    assert done.stdout.count("Hooks") == 1 and "torch" not in done.stdout
    assert "prime_composer.upstream" not in done.stdout


def test_the_pth_is_one_line_that_starts_with_import():
    lines = PTH.read_text().splitlines()
    assert len(lines) == 1 and lines[0].startswith("import ")


def test_a_hook_runs_right_after_its_module_and_before_anyone_copies_from_it(tmp_path):
    package = tmp_path / "lib" / "prime_rl" / "utils"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "config.py").write_text("def cli(cls):\n    return cls\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'lib')!r})\n"
        "import types\n"
        "hooks = types.ModuleType('prime_composer.upstream.hooks')\n"
        "def launcher(module): module.cli = lambda cls: 'hooked'\n"
        "hooks.launcher = launcher\n"
        "sys.modules['prime_composer.upstream.hooks'] = hooks\n"
        "from prime_rl.utils.config import cli\n"
        "print(cli(int))"
    )
    assert interpreter(tmp_path, code, "1").stdout.strip() == "hooked"
    assert interpreter(tmp_path, code).stdout.strip() == "<class 'int'>"


def test_an_env_server_never_pays_for_torch(tmp_path):
    package = tmp_path / "lib" / "prime_rl" / "utils"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "config.py").write_text("def cli(cls):\n    return cls()\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'lib')!r})\n"
        "import importlib.util\n"
        "from prime_rl.utils.config import cli\n"
        "assert cli.__module__ == 'prime_composer.upstream.hooks', cli.__module__\n"
        "assert cli(dict) == {}\n"  # its config has no trainer
        "print('torch' in sys.modules)\n"
    )
    done = interpreter(tmp_path, code, "1")
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_the_wheel_puts_the_pth_and_the_environment_module_beside_the_package(tmp_path):
    pytest.importorskip("hatchling")
    pytest.importorskip("editables")
    code = "from hatchling.build import build_wheel, build_editable; import sys; "
    code += "print(build_wheel(sys.argv[1])); print(build_editable(sys.argv[1] + '/e'))"
    (tmp_path / "e").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for wheel in (*tmp_path.glob("*.whl"), *Path(tmp_path / "e").glob("*.whl")):
        names = zipfile.ZipFile(wheel).namelist()
        assert "prime_composer.pth" in names and "prime_composer_problems.py" in names
