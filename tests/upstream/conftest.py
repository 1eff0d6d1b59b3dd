"""PRIME_COMPOSER_WHOLE_RUNS=all selects every whole run, whatever its markers are."""

import os

import pytest

MARKERS = {"upstream", "slow", "vllm"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Take the markers off the whole runs, unless ``-m`` on the command line selects by them."""
    default = config.option.markexpr in config.getini("addopts")
    if os.environ.get("PRIME_COMPOSER_WHOLE_RUNS") != "all" or not default:
        return
    for item in items:
        if item.path.name.startswith("test_whole_run"):
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name not in MARKERS]
            item.add_marker(pytest.mark.xdist_group("servers"))
