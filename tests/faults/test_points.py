"""A run that fails at a point, and every point of a run: ``tests.faults.points``."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.points import ROADS, WRONG, Point, Road, opened, pairs_of, sample_of, walk
from tests.faults.watched import FULL, KILL, SIZE, UNWATCHED
from tests.fork_server import ForkServer

ANSWERS = r"answers-[^ /]+"  # Files of a tape, one a call: they change their ends

SAMPLE = {"served": 12, "ahead": 4, "in_process": 6}
"""Trials of each road: one of each fault on the served one."""


@pytest.fixture(scope="module")
def forks(engine_forks: ForkServer) -> Iterator[ForkServer]:
    """Return a server of processes that have loaded a tiny model as well."""
    modules = ("tests.faults.watched", "tests.faults.warmed")
    server = ForkServer(*modules, parent=engine_forks)
    yield server
    server.close()


@pytest.fixture(scope="module", params=ROADS)
def recorded(
    request: Any, forks: ForkServer, tmp_path_factory: Any
) -> Iterator[tuple[Road, list[Point]]]:
    """Return each road, recorded once, and its points."""
    with opened(request.param, tmp_path_factory.mktemp("points") / "road", forks) as found:
        yield found, found.record()


def test_points_miss_no_write(recorded: tuple[Road, list[Point]]) -> None:
    """The writes of the log add up to every file that is there, and nothing went past the net."""
    road, _ = recorded
    assert road.whole is not None
    assert [note["name"] for note in road.notes if note["name"].startswith(UNWATCHED)] == []
    written, found = replayed(road.notes), Counter[str]()
    for name in ("run", "cache", "tape"):
        folder = road.whole.folder / name
        for file in folder.rglob("*"):
            if file.is_file():
                place = f"{name}/{file.relative_to(folder).as_posix()}"
                found[re.sub(ANSWERS, "answers-*", place)] += file.stat().st_size
    assert found == {place: written[place] for place in found}


def replayed(notes: list[dict[str, Any]]) -> dict[str, int]:
    """Return the size of each file after all that was noted, and of a tape's files in all."""
    sizes = Counter[str]()
    for note in notes:
        name = re.sub(ANSWERS, "answers-*", re.sub(r" #\d+$", "", note["name"]))
        kind, place = name.split(" ", 1)
        if kind == "write":
            sizes[place] += note["bytes"]
        elif kind in (SIZE, "ftruncate", "truncate"):
            sizes[place] = note["bytes"] + ("*" in place) * sizes[place]
        elif kind == "rename":
            old, new = place.split(" -> ")
            for file in [file for file in sizes if file == old or file.startswith(f"{old}/")]:
                sizes[new + file[len(old) :]] = sizes.pop(file)
    return sizes


def test_points_sample_ends_right(recorded: tuple[Road, list[Point]]) -> None:
    """A sample with every fault: each run goes on or ends with a sentence, and then ends right."""
    road, points = recorded
    trials = [road.disturb(*pair) for pair in sample_of(points, SAMPLE[road.name], seed=1)]
    assert [(one.words, one.message, one.detail) for one in trials if one.last == WRONG] == []
    faults = {fault for _, fault in pairs_of(points)}
    assert len({one.fault for one in trials}) == min(len(trials), len(faults))
    ended = {(one.fault, one.first) for one in trials}
    assert {first for fault, first in ended if fault == KILL} <= {"killed"}
    # A fault that does not come would pass for one that a run survives.
    assert road.name != "in_process" or {(KILL, "killed"), (FULL, "ended")} <= ended


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("name", ROADS)
def test_points_all_end_right(name: str, forks: ForkServer, tmp_path: Path) -> None:
    """Every point with each of its faults."""
    _, trials = walk(name, tmp_path, forks, 2, pairs_of, lambda trial: None)
    assert [(one.words, one.message, one.detail) for one in trials if one.last == WRONG] == []
