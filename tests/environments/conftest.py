"""The environments of this folder, where verifiers finds them."""

import pytest

from tests.environments.kit import ENVIRONMENTS


@pytest.fixture(autouse=True)
def environments_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let verifiers, and the tool servers that it starts, find the environments of this folder."""
    monkeypatch.syspath_prepend(str(ENVIRONMENTS))
    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS), prepend=":")
