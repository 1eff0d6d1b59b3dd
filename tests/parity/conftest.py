"""Run prime-rl's own functions from a checkout, and print at the end which versions ran."""

import pytest

from tests.parity import outcomes
from tests.prime_rl_checkout import commit_of

revisions: dict[str, str] = {}


@pytest.fixture(scope="session")
def live(checkout, trees, tmp_path_factory, torch_forks):
    """Version -> what prime-rl's functions and ours returned there. Skips without a checkout."""
    cache = {}
    folder = tmp_path_factory.mktemp("outcomes")

    def run(version):
        if version not in cache:
            cache[version] = outcomes.live(trees(version), version, folder, torch_forks.run)
            revisions[version] = commit_of(checkout, version)[:8]
        if isinstance(cache[version], str):
            pytest.fail(cache[version])
        return cache[version]

    return run


def pytest_sessionfinish(session):
    """Hand the versions to the process that prints, where tests run in several."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["revisions"] = revisions


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    revisions.update(getattr(node, "workeroutput", {}).get("revisions", {}))


def pytest_terminal_summary(terminalreporter):
    if revisions:
        line = ", ".join(f"{version} ({revision})" for version, revision in revisions.items())
        terminalreporter.write_line(f"live parity with prime-rl: {line}")
