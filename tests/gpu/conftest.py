"""Every test of this folder needs a CUDA device, and says so where there is none.

``PRIME_COMPOSER_GPU_TESTS_ON=cpu`` runs the same functions on the CPU, at small sizes: for those
who change them without a GPU. What asks CUDA itself (``cuda``) is skipped then.
"""

import os
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

FOLDER = Path(__file__).parent
DEVICE = os.environ.get("PRIME_COMPOSER_GPU_TESTS_ON", "cuda")
TIMEOUT = 1800
"""Seconds for a test: an engine on a GPU compiles for minutes before it answers."""


def pytest_configure(config):
    """Let ``pytest tests/gpu`` select these tests, which the default selection leaves out."""
    invocation = config.invocation_params
    if is_this_folder_alone(config.args, invocation.args, invocation.dir):
        config.option.markexpr = "gpu"


def is_this_folder_alone(paths, words, directory):
    """Return whether a command line names paths of this folder only, and no selection of its own.

    Args:
        paths: files, folders or tests, relative to ``directory``.
        words: of the command line.
        directory: where it was typed.
    """
    if any(str(word).startswith("-m") for word in words):
        return False
    files = [(directory / path.partition("::")[0]).resolve() for path in paths]
    return all(file.is_relative_to(FOLDER) for file in files)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark all tests, and keep them to one process: they share one GPU."""
    for item in items:
        if FOLDER in item.path.parents:
            for mark in (pytest.mark.gpu, pytest.mark.timeout(TIMEOUT)):
                item.add_marker(mark)
            item.add_marker(pytest.mark.xdist_group("gpu"))
            if DEVICE == "cuda" and not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def device() -> str:
    """Return the device of these tests."""
    return DEVICE


@pytest.fixture
def cuda(device):
    """Return "cuda", or skip a test that asks CUDA itself for its peak memory."""
    if device != "cuda":
        pytest.skip("asks CUDA itself")
    return device


class Sizes(NamedTuple):
    """Sizes of two heads: tokens, widths, vocabulary, and the blocks that they are computed in."""

    tokens: int
    width: int
    teacher_width: int
    vocab: int
    blocks: dict[str, int]


@pytest.fixture(params=["odd", "real"])
def sizes(request, device):
    """Return sizes that no block divides, or those of 0.6B from 8B, in the default blocks."""
    if request.param == "odd":
        return Sizes(257, 128, 192, 5003, {"block": (100, 1024)})
    return Sizes(512, 1024, 4096, 151_936, {}) if device == "cuda" else Sizes(64, 32, 48, 701, {})
