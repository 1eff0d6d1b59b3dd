"""A schedule inside prime-rl goes on after prime-rl's own resume."""

import types

import pytest

from prime_composer.upstream import journal, registration
from prime_composer.upstream.versions import UnknownSurface
from tests.upstream import fake_prime_rl

TAID = {"type": "taid", "k": 4, "total_steps": 10, "t_start": 0.2, "alpha": 0.5, "beta": 0.5}


@pytest.fixture
def trainer(monkeypatch):
    """Registers a loss anew, as the trainer of a run does, and makes its DataLoader."""
    fake_prime_rl.put(monkeypatch, fake_prime_rl.loss_module("v0.7"))
    monkeypatch.setattr(registration, "_adapter_for", lambda config: lambda inputs: (None, None))

    def start(folder, step, table=TAID):
        registration.unregister()
        registered = registration.register(table)
        data = types.ModuleType("prime_rl.trainer.rl.data")

        class DataLoader:
            def __init__(self, output_dir, start_step, dp_world_size, config):
                self.made = True

        data.DataLoader = DataLoader
        journal.hook_data(data)
        assert data.DataLoader(folder, step, 1, config=None).made
        return registered

    yield start
    registration.unregister()


def train(registered, losses):
    ts = []
    for loss in losses:
        registered.calls = 1
        registered._global_totals = lambda loss=loss: (loss, 1.0, 1.0, 0.0, 0.0)
        registered.end_step()
        ts.append(registered.loss.state and registered.loss.state.t)
    return ts


LOSSES = [5.0, 4.0, 2.5, 2.4, 1.0, 0.7]


@pytest.mark.parametrize("first", [0, 1])
def test_a_resume_from_any_checkpoint_goes_on_to_the_numbers_of_an_uninterrupted_run(
    trainer, tmp_path, capfd, first
):
    (tmp_path / "whole").mkdir()
    whole = train(trainer(tmp_path / "whole", first), LOSSES)
    assert len(set(whole)) == 6
    for done in (1, 3, 5):
        folder = tmp_path / f"cut{done}"
        folder.mkdir()
        train(trainer(folder, first), LOSSES[: done + 1])  # dies one step after its checkpoint
        resumed = trainer(folder, first + done)
        assert train(resumed, LOSSES[done:]) == whole[done:]
    assert f"goes on with its state of step {first + 5}" in capfd.readouterr().err


def test_a_state_that_was_not_kept_is_said_and_a_line_cut_short_is_passed_over(
    trainer, tmp_path, capfd
):
    train(trainer(tmp_path, 0), LOSSES[:2])
    path = tmp_path / journal.FILE
    path.write_text(path.read_text()[:-20])
    assert trainer(tmp_path, 2).loss.state.t == 0.2
    assert "starts its schedule anew at step 2" in capfd.readouterr().err
    assert trainer(tmp_path, 1).loss.state.previous_loss == 5.0


def test_only_one_rank_writes_and_a_loss_without_a_state_writes_nothing(
    trainer, tmp_path, monkeypatch
):
    train(trainer(tmp_path, 0, {"type": "topk_reverse_kl", "k": 4}), LOSSES[:2])
    monkeypatch.setenv("RANK", "1")
    train(trainer(tmp_path, 0), LOSSES[:2])
    assert not (tmp_path / journal.FILE).exists()


def test_another_data_loader_is_an_unknown_surface():
    module = types.ModuleType("prime_rl.trainer.rl.data")
    module.DataLoader = type("DataLoader", (), {"__init__": lambda self, folder: None})
    with pytest.raises(UnknownSurface, match="lost output_dir, start_step"):
        journal.hook_data(module)
