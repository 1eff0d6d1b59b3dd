"""Marks of a launch: a process that runs without the package is noticed by all others."""

import os

import pytest

from prime_composer.upstream import launches
from prime_composer.upstream.keys import SWITCH
from prime_composer.upstream.silent_hook import SilentHook


@pytest.fixture
def launch(monkeypatch, tmp_path):
    """Return a function that begins a launch, of which this process is then a part."""
    monkeypatch.setattr(launches, "SEEN", set())
    monkeypatch.setattr(launches, "WAIT", 0.0)

    def begin():
        file = launches.begin(tmp_path, "{}")
        monkeypatch.setenv(SWITCH, f"@{file}")
        return file.parent

    return begin


def as_rank(monkeypatch, rank, size):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))


def mark_rank():
    launches.mark(launches.TRAINER + os.environ.get("RANK", "0"))


def trained(run_dir, step, where="broadcasts"):
    """Write what a trainer leaves of a step."""
    folder = run_dir / where / f"step_{step}"
    folder.mkdir(parents=True)
    return folder


def test_ranks_name_those_that_lack_the_package(monkeypatch, launch):
    """One node of two without it: its gradients are those of prime-rl's own loss."""
    launch()
    launches.mark(launches.ORCHESTRATOR)
    for rank in (0, 1, 3):
        as_rank(monkeypatch, rank, 4)
        mark_rank()
    with pytest.raises(SilentHook, match="without this package.*: trainer_2[.].*uv sync"):
        launches.judge_ranks(True)
    as_rank(monkeypatch, 2, 4)
    mark_rank()
    launches.judge_ranks(True)


def test_ranks_name_an_orchestrator_that_lacks_the_package(launch, capfd):
    """A loss of rl tokens asks nothing of it."""
    launch()
    mark_rank()
    launches.judge_ranks(False)
    assert not capfd.readouterr().err
    launches.judge_ranks(True)
    assert "orchestrator runs without this package" in capfd.readouterr().err


def test_marks_of_an_earlier_start_do_not_count(monkeypatch, launch):
    """Processes that are started by hand may be given the file of an old launch."""
    folder = launch()
    mark_rank()
    os.utime(folder / "trainer_0", (1, 1))
    with pytest.raises(SilentHook, match="trainer_0"):
        launches.judge_ranks(False)


@pytest.mark.parametrize("where", launches.TRAINED)
def test_orchestrator_ends_a_run_that_trains_without_us(launch, tmp_path, where):
    """Not before a step is trained: the trainer may be slow to start."""
    launch()
    launches.judge_trainer()
    trained(tmp_path, 0, where)
    launches.judge_trainer()
    trained(tmp_path, 1, where)
    with pytest.raises(SilentHook, match="has trained, and without this package"):
        launches.judge_trainer()
    mark_rank()
    launches.judge_trainer()


def test_missing_names_the_launch_that_trained_without_us(launch, tmp_path):
    """The launch before it was right, and the one after it ended before its first step."""
    assert launches.missing(tmp_path) == []
    launch()
    mark_rank()
    trained(tmp_path, 1)
    assert launches.missing(tmp_path) == []
    bad = launch()
    trained(tmp_path, 2)
    launch()
    (sentence,) = launches.missing(tmp_path)
    assert str(bad) in sentence and "Delete that folder" in sentence
    assert launches.missing(tmp_path, up_to=1) == []
    assert launches.missing(tmp_path, up_to=2) == [sentence]
