"""The .pth: free when off, lazy hooks when on, in a wheel and in an editable install."""

import importlib
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from prime_composer.upstream.autoload import HOOKS
from tests.prime_rl_checkout import REPO

PTH = REPO / "prime_composer" / "upstream" / "prime_composer.pth"
SHOW = (
    "import sys; print([type(f).__name__ for f in sys.meta_path],"
    " [m for m in sys.modules if 'prime' in m or m == 'torch'])"
)


def interpreter(tmp_path, code, switch=None):
    """Run code in a new interpreter whose site directory has our .pth, as an editable install."""
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


@pytest.mark.parametrize("switch", [None, "", "0", " OFF "])
def test_pth_switched_off_imports_nothing(tmp_path, switch):
    done = interpreter(tmp_path, SHOW, switch)
    assert done.returncode == 0 and done.stderr == ""
    assert "prime" not in done.stdout.lower() and "torch" not in done.stdout


def test_pth_processed_twice_hooks_once(tmp_path):
    """Some environments do so. Two finders that ask each other would never end."""
    again = f"exec(open({str(PTH)!r}).read())\n"
    look = "import sys\nfor f in [*sys.meta_path]: f.find_spec('prime_rl.utils.config', None)\n"
    done = interpreter(tmp_path, again + look + SHOW, "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'Hooks'") == 1


@pytest.mark.parametrize("switch", ["1", "garbage", '{"loss": null}'])
def test_pth_switched_on_costs_other_processes_nothing(tmp_path, switch):
    """Without prime-rl the same modules are loaded as with the switch off, and nothing is said."""
    count = "import sys; print(len(sys.modules))"
    on, off = interpreter(tmp_path, count, switch), interpreter(tmp_path, count)
    assert (on.stdout, on.stderr, on.returncode) == (off.stdout, "", 0)
    done = interpreter(tmp_path, SHOW, switch)
    assert done.stdout.count("type") >= 1 and "torch" not in done.stdout
    assert "prime_composer.upstream" not in done.stdout and "autoload" not in done.stdout


def with_prime_rl(tmp_path, code):
    """Return code that has a package prime_rl with a module to hook."""
    package = tmp_path / "lib" / "prime_rl" / "utils"
    package.mkdir(parents=True, exist_ok=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "config.py").write_text("def cli(cls):\n    return cls\n")
    return f"import sys; sys.path.insert(0, {str(tmp_path / 'lib')!r})\n{code}"


def test_pth_garbage_is_one_line_in_prime_rl_alone(tmp_path):
    """prime-rl would train without our losses, so its processes end. Nobody else hears of it."""
    looks = "import importlib.util; importlib.util.find_spec('prime_rl'); print('found')"
    done = interpreter(tmp_path, with_prime_rl(tmp_path, looks), "garbage")
    assert (done.stdout, done.stderr, done.returncode) == ("found\n", "", 0)
    done = interpreter(tmp_path, with_prime_rl(tmp_path, "import prime_rl.utils.config"), "garbage")
    assert done.stdout == "" and done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("PRIME_COMPOSER='garbage': write PRIME_COMPOSER=1, ")
    url = '[{"url": "http://me:secret@host:1/v1"}]'
    done = interpreter(tmp_path, with_prime_rl(tmp_path, "import prime_rl.utils.config"), url)
    assert "not shown: it may have a password" in done.stderr and "secret" not in done.stderr


def test_env_server_never_imports_torch(tmp_path):
    code = with_prime_rl(
        tmp_path,
        f"sys.path.append({sysconfig.get_path('purelib')!r})\n"  # pydantic
        "from prime_rl.utils.config import cli\n"
        "assert 'prime_composer.upstream.launcher_hook' in sys.modules\n"
        "assert hasattr(cli, '__wrapped__')\n"
        "assert cli({}) == {}\n"  # its config has no trainer
        "print('torch' in sys.modules)\n",
    )
    done = interpreter(tmp_path, code, "1")
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_wheel_has_the_pth_and_the_environment_module(tmp_path):
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
        for name in (".pth", "_problems.py", "_orders.py"):
            assert f"prime_composer{name}" in names


def test_hooks_name_functions_that_exist():
    """A hook is looked up by name when prime-rl loads its module."""
    for hooks in HOOKS.values():
        for hook in hooks:
            name, _, function = hook.partition(":")
            assert callable(getattr(importlib.import_module(name), function))
