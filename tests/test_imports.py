"""What an import costs: in a new interpreter, or in one that has torch and pydantic."""

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import tomli_w

from tests.fork_server import REPO, ForkServer, new_process

HEAVY = (
    "vllm",
    "transformers",
    "prime_rl",
    "httpx",
    "rich",
    "matplotlib",
    "tensorboard",
    "datasets",
    "trl",
)


Run = Callable[..., subprocess.CompletedProcess[str]]


def loaded_after(code: str, run: Run = new_process) -> set[str]:
    """Return the top-level modules of ``HEAVY`` that an interpreter has after ``code``."""
    script = f"{code}\nimport sys\n"
    script += f"print('loaded:', *[name for name in {HEAVY!r} if name in sys.modules])"
    done = run("-c", script, cwd=REPO)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("loaded:")[2].split())


def test_the_package_and_every_loss_need_no_optional_part() -> None:
    code = "import prime_composer\nimport prime_composer.losses\n"
    code += "import prime_composer.divergences, prime_composer.lm_head\n"
    code += "for name in prime_composer.__all__: getattr(prime_composer, name)"
    assert loaded_after(code) == set()


def test_a_path_with_a_typo_is_refused_before_an_engine_is_imported(
    torch_forks: ForkServer, tmp_path: Path
) -> None:
    raw = tomllib.loads((REPO / "recipes" / "gsm8k_opd.toml").read_text())
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps(raw | {"student": {"model": "models/small/studnt"}}))
    code = "from prime_composer.cli.commands import main\n"
    words = ["rl", "--config", str(recipe), "--output-dir", str(tmp_path / "run")]
    code += f"assert main({words!r}) == 2"
    loaded = loaded_after(code, torch_forks.run)
    assert not loaded & {"vllm", "transformers"} and [*tmp_path.iterdir()] == [recipe]


def test_libraries_use_their_own_compiled_files() -> None:
    """None that a module of ours imports is compiled again, under the name of jaxtyping's hook."""
    cached = {
        name: getattr(module, "__dict__", {}).get("__cached__") or ""
        for name, module in sys.modules.items()
    }
    assert cached["torch"]
    assert [name for name, file in cached.items() if ".opt-jaxtyping" in file] == []
