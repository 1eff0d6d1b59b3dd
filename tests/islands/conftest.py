"""Fixtures of the tests of islands."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prime_composer.local.islands import board as board_module
from prime_composer.local.islands.board import Board
from tests.fork_server import ForkServer
from tests.islands.rig import OpenRig, Rig, free_ports, tables
from tests.local.helpers import tiny_models


@pytest.fixture
def at_board(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of a lighthouse that is a board alone."""
    monkeypatch.setattr(board_module, "FIRST_SECONDS", 0.0)
    port = free_ports()
    board = Board("127.0.0.1", port + 1, {})
    yield f"http://127.0.0.1:{port}"
    board.close()


@pytest.fixture
def rig(engine_forks: ForkServer, tmp_path: Path) -> Iterator[OpenRig]:
    """Return what opens a rig, with its lighthouse, for ``section__key=value`` changes."""
    rigs: list[Rig] = []

    def open_rig(**changes: Any) -> Rig:
        folder = tmp_path / str(len(rigs))
        folder.mkdir()
        raw = tables(**changes)
        tiny_models(raw)
        rigs.append(Rig(engine_forks, folder, raw))
        return rigs[-1]

    yield open_rig
    for one in rigs:
        one.close()
