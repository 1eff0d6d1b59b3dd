"""Runs whose teacher, a real vLLM server, is killed after a step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from prime_composer.backends import http
from tests.local.helpers import Silent, run, weights
from tests.vllm_process import VllmProcess

KILLED_AFTER = 2


class KillAt(Silent):
    """A display that kills a server after a step, and does something then.

    Args:
        server: the server.
        then: called after it is dead.
    """

    def __init__(self, server: VllmProcess, then: Callable[[], object]):
        super().__init__()
        self.server = server
        self.then = then

    def step(self, step: int, metrics: dict[str, float]) -> None:
        super().step(step, metrics)
        if step == KILLED_AFTER:
            self.server.kill()
            self.then()


def recipe_of(server: VllmProcess, tiny_recipe: Callable[..., Any], **teacher: Any) -> Any:
    """Return the recipe of a run with a served teacher."""
    table = {"model": str(server.directory), "url": f"{server.url}/v1", **teacher}
    return tiny_recipe(teacher=table)


def expect_wait_for_killed(
    server: VllmProcess, tiny_recipe: Callable[..., Any], folder: Path
) -> list[str]:
    """Check that a run waits for its killed teacher, and gets the numbers of one without a kill.

    Returns:
        The lines that the killed run showed.
    """
    raw = recipe_of(server, tiny_recipe)
    display = KillAt(server, then=server.start)
    run(raw, folder / "whole")
    with patch.object(http, "AWAY_SECONDS", 0.1):  # it may be back within the usual two seconds
        run(raw, folder / "killed", display)
    waiting = f"waiting for the teacher's server at {server.url}"
    assert any(text.startswith(waiting) for text in display.texts), display.texts
    assert display.steps == [1, 2, 3, 4]
    whole, killed = weights(folder / "whole"), weights(folder / "killed")
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    return display.texts
