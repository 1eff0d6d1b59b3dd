"""Runs against a real `prime-rl teacher` that is killed, and with a tape of its answers.

``tests/faults`` has the same without vLLM.
"""

from pathlib import Path

import pytest
import torch

from prime_composer.local.tracker import read_metrics
from prime_composer.teachers.tape.store import inspect
from tests.command import numbers
from tests.local.helpers import run, tiny_models, weights
from tests.local.killed_teacher import expect_wait_for_killed, recipe_of
from tests.vllm_process import QUICK, TeacherProcess

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

OPTIONS = ("--dtype", "float32", "--max-model-len", 256, *QUICK)


@pytest.fixture(scope="module")
def server(tiny_recipe, vllm_forks, tmp_path_factory):
    teacher = tiny_models(tiny_recipe())["teacher"]
    log = tmp_path_factory.mktemp("log") / "server.log"
    with TeacherProcess(teacher, log, *OPTIONS, forks=vllm_forks) as process:
        yield process


def test_run_waits_for_a_killed_prime_rl_teacher(server, tiny_recipe, tmp_path):
    """It is back seconds later with its plugin, and nothing falls back to JSON."""
    texts = expect_wait_for_killed(server, tiny_recipe, tmp_path)
    assert not any("JSON" in text for text in texts), texts


def test_tape_of_a_real_server_lets_it_stop(server, tiny_recipe, tmp_path):
    """The second run reads every answer, and the third has no server: all end alike to the bit."""
    tape = str(tmp_path / "tape")
    raw = recipe_of(server, tiny_recipe, tape=tape)
    run(raw, tmp_path / "first")
    run(raw, tmp_path / "second")
    run(tiny_recipe(teacher={"tape": tape, "tape_only": True}), tmp_path / "alone")
    read = [record.get("tape/read") for record in read_metrics(tmp_path / "second")]
    assert read == [None, 1.0, 1.0, 1.0, 1.0]
    for name in ("second", "alone"):
        assert numbers(tmp_path / name) == numbers(tmp_path / "first")
        ours, theirs = weights(tmp_path / name), weights(tmp_path / "first")
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert inspect(Path(tape)).damage == []
