"""What importing costs, seen from a fresh interpreter."""

import subprocess
import sys

HEAVY = (
    "vllm",
    "transformers",
    "prime_rl",
    "httpx",
    "rich",
    "matplotlib",
    "tensorboard",
    "datasets",
)


def loaded_after(code: str) -> set[str]:
    """Top-level modules of ``HEAVY`` that a fresh interpreter holds after running ``code``."""
    script = f"{code}\nimport sys\nprint('loaded:', *[name for name in {HEAVY!r} if name in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    return set(out.rpartition("loaded:")[2].split())


def test_importing_the_package_and_every_loss_needs_no_optional_part() -> None:
    code = "import prime_composer\nimport prime_composer.losses, prime_composer.divergences, prime_composer.lm_head"
    assert loaded_after(code) == set()


def test_every_public_name_resolves_without_an_optional_part() -> None:
    code = (
        "import prime_composer\nfor name in prime_composer.__all__: getattr(prime_composer, name)"
    )
    assert loaded_after(code) == set()


def test_loading_a_recipe_imports_no_engine() -> None:
    code = "from prime_composer.recipe import load_recipe\nload_recipe('recipes/gsm8k_opd.toml')"
    assert loaded_after(code) == set()


def test_the_help_text_does_not_even_import_torch() -> None:
    code = "import prime_composer.cli.commands as cli, sys\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    assert loaded_after(code) == set()
