"""A loss's state goes on after prime-rl's own resume."""

import pytest
import torch

from prime_composer.upstream.trainer.adapter import trainer_adapter
from prime_composer.upstream.trainer.journal import FILE
from tests.upstream import fake_prime_rl, scheduled_loss

SCHEDULED = {"type": scheduled_loss.NAME}
LOSSES = [5.0, 4.0, 2.5, 2.25, 1.0, 0.75]


@pytest.fixture
def start(monkeypatch):
    """Return a function that starts a trainer process on a folder, at a step."""
    monkeypatch.delenv("PRIME_COMPOSER", raising=False)

    def start(folder, step, table=SCHEDULED):
        loss, data = fake_prime_rl.loss_module("v0.7"), fake_prime_rl.data_module()
        fake_prime_rl.put(monkeypatch, loss, data)
        loss.setup_rl_loss_fn(fake_prime_rl.custom(**table))
        return data.DataLoader(folder, step)

    yield start
    trainer_adapter.cache_clear()


def means():
    return trainer_adapter().loss.objective.state_dict()["means"]


def train(loader, losses):
    """Train one step per loss; return the state before each step."""
    states = []
    for loss in losses:
        loader.get_batch()
        states.append(list(means()) if trainer_adapter().loss.objective.stateful else None)
        row, mask = torch.zeros(1), torch.ones(1, dtype=torch.bool)
        logprobs = torch.full((1,), loss, requires_grad=True)
        trainer_adapter().loss(fake_prime_rl.LossInputsV07(logprobs, row, row, row, mask))
    return states


@pytest.mark.parametrize("first", [0, 1])  # steps count from 0 in v0.6, later from 1
@pytest.mark.parametrize("done", [1, 5])
def test_resume_goes_on_as_an_uninterrupted_run(start, tmp_path, capfd, first, done):
    """The run dies one step after its checkpoint."""
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = train(start(tmp_path / "whole", first), LOSSES)
    assert whole == [LOSSES[:n] for n in range(6)]
    train(start(tmp_path / "cut", first), LOSSES[: done + 1])
    resumed = start(tmp_path / "cut", first + done)
    assert train(resumed, LOSSES[done:]) == whole[done:]
    said = capfd.readouterr().err
    assert f"goes on with its state of step {first + done}\n" in said


def test_resume_of_an_ended_run_repeats_one_step(start, tmp_path, capfd):
    """The batch after the last step was never asked for, so its state was not written."""
    train(start(tmp_path, 1), LOSSES[:3])
    loader = start(tmp_path, 4)
    assert means() == LOSSES[:2]
    assert "its state of step 3, and repeats that step's schedule" in capfd.readouterr().err
    train(loader, LOSSES[3:5])
    start(tmp_path, 5)
    assert means() == [*LOSSES[:2], LOSSES[3]]


FIRST = [(1, LOSSES[:3])]
RESUMED = {
    "two steps after the last state": (FIRST, str, 5, [], "starts its schedule anew at step 5"),
    "a run that was resumed earlier": (
        [(1, LOSSES[:4]), (2, LOSSES[4:5])], str, 4, LOSSES[:3], "with its state of step 4"),
    "a run resumed from an earlier step": (
        [(1, LOSSES), (3, [9.0, 9.0])], str, 5, [*LOSSES[:2], 9.0], "its state of step 4, and rep"),
    "a line cut short": (FIRST, lambda text: text[:-20], 3, LOSSES[:1], "its state of step 2, and"),
    "lines of another loss": (
        FIRST, lambda text: text.replace(scheduled_loss.NAME, "taid"), 3, [],
        "starts its schedule anew at step 3"),
}  # fmt: skip
"""First steps and losses of runs, a change of the file, the resumed step, its state, a message."""


@pytest.mark.parametrize("name", RESUMED)
def test_resume_reads_the_line_of_its_own_step(start, tmp_path, capfd, name):
    """Lines of steps that a resume has left, damaged ones and another loss's do not count."""
    runs, change, step, state, words = RESUMED[name]
    for first, losses in runs:
        train(start(tmp_path, first), losses)
    (tmp_path / FILE).write_text(change((tmp_path / FILE).read_text()))
    start(tmp_path, step)
    assert means() == state and words in capfd.readouterr().err


def test_waiting_for_a_batch_ends_the_step(start, tmp_path):
    """The trainer dies while it waits, after its checkpoint: the state of the next step is kept."""
    loader = start(tmp_path, 1)
    train(loader, LOSSES[:2])
    loader.wait_for_batch()
    assert means() == LOSSES[:2]
    start(tmp_path, 3)
    assert means() == LOSSES[:2]
    loader = start(tmp_path, 3)
    loader.wait_for_batch()
    train(loader, LOSSES[2:3])
    assert means() == LOSSES[:2]


def test_journal_is_written_by_rank_0_alone(start, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    train(start(tmp_path, 0), LOSSES[:2])
    assert not (tmp_path / FILE).exists()
