"""What an import costs, measured in a fresh interpreter."""

import subprocess
import sys

from tests.prime_rl_checkout import REPO

HEAVY = (
    "vllm",
    "transformers",
    "prime_rl",
    "httpx",
    "tenacity",
    "rich",
    "matplotlib",
    "tensorboard",
    "datasets",
)


def loaded_after(code: str) -> set[str]:
    """Return the top-level modules of ``HEAVY`` that a fresh interpreter has after ``code``."""
    script = f"{code}\nimport sys\n"
    script += f"print('loaded:', *[name for name in {HEAVY!r} if name in sys.modules])"
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=REPO
    )
    return set(process.stdout.rpartition("loaded:")[2].split())


def test_the_package_and_every_loss_need_no_optional_part() -> None:
    code = "import prime_composer\nimport prime_composer.losses\n"
    code += "import prime_composer.divergences, prime_composer.lm_head"
    assert loaded_after(code) == set()


def test_every_public_name_resolves_without_an_optional_part() -> None:
    code = "import prime_composer\n"
    code += "for name in prime_composer.__all__: getattr(prime_composer, name)"
    assert loaded_after(code) == set()


def test_loading_a_recipe_imports_no_engine() -> None:
    code = "from prime_composer.recipe import load_recipe\nload_recipe('recipes/gsm8k_opd.toml')"
    assert loaded_after(code) == set()


def test_the_help_text_does_not_import_torch() -> None:
    code = "import prime_composer.cli.commands as cli, sys\n"
    code += "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    assert loaded_after(code) == set()
