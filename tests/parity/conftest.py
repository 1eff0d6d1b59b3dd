"""Which upstream commits the parity tests run, and how: live from a checkout, else from recorded goldens."""

import pytest

from tests.parity.outcomes import golden, live
from tests.prime_rl_checkout import COMMITS, commit_of

ran: dict[str, str] = {}


@pytest.fixture(scope="session")
def outcomes(checkout, trees, tmp_path_factory):
    """Version -> what prime-rl's functions and ours returned, live or from goldens."""
    cache = {}
    folder = tmp_path_factory.mktemp("outcomes")

    def run(version):
        if version not in cache:
            if checkout is None:
                ran[version] = f"{COMMITS[version][:8]} goldens"
                cache[version] = golden(version)
            else:
                ran[version] = f"{commit_of(checkout, version)[:8]} live"
                cache[version] = live(trees(version), version, folder)
        if isinstance(cache[version], str):
            if "No module named 'pydantic_config'" in cache[version]:
                pytest.skip(
                    "prime-rl's config package needs `pip install prime-pydantic-config` to be imported"
                )
            pytest.fail(cache[version])
        return cache[version]

    return run


def pytest_terminal_summary(terminalreporter):
    if ran:
        line = ", ".join(f"{version} ({ran[version]})" for version in sorted(ran))
        terminalreporter.write_line(f"prime-rl parity: {line}")
