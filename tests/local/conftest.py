"""A run that those which were interrupted are compared with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.local.helpers import run


@pytest.fixture(scope="session")
def whole(
    tiny_recipe: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Run the tiny recipe without an interruption; nobody changes its directory."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    run(tiny_recipe(), run_dir)
    return run_dir
