"""Fixtures of the tests of islands."""

from collections.abc import Iterator

import pytest

from prime_composer.local.islands import board as board_module
from prime_composer.local.islands.board import Board
from tests.islands.rig import free_ports


@pytest.fixture
def at_board(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of a lighthouse that is a board alone."""
    monkeypatch.setattr(board_module, "FIRST_SECONDS", 0.0)
    port = free_ports()
    board = Board("127.0.0.1", port + 1)
    yield f"http://127.0.0.1:{port}"
    board.close()
