"""A run that fails at a point, and every point of a run: ``tests.faults.points``."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.points import ROADS, WRONG, Point, Road, models, opened, pairs_of, sample_of, walk
from tests.faults.watched import BROKEN, FULL, KILL, SIZE, UNWATCHED, Plan, read_log
from tests.fork_server import ForkServer
from tests.vllm_process import QUICK, TeacherProcess

ANSWERS = r"answers-[^ /]+"  # Files of a tape, one a call: they change their ends

SAMPLE = 12
"""Trials of each road: one of each fault on the served one."""

WRITER = """
from tests.faults.watched import install
install()
import os, shutil, sys
from pathlib import Path
folder = Path(sys.argv[1])
folder.mkdir()
with open(folder / "text", "w") as file:
    file.write("x" * 100)
    file.flush()
    os.fsync(file.fileno())
os.rename(folder / "text", folder / "renamed")
try:
    (folder / "second").write_bytes(b"y" * 10)
except OSError as error:
    print(error.errno, error.filename)
shutil.rmtree(folder)
"""


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


@pytest.fixture
def written(torch_forks: ForkServer, tmp_path: Path) -> Any:
    """Run ``WRITER`` with a fault; return its status, its output, and the names of its points."""

    def run(point: str | None = None, fault: str | None = None) -> tuple[int, str, list[str]]:
        log = tmp_path / "log"
        plan = Plan({str(tmp_path / "folder"): "folder"}, str(log), point, fault)
        env = dict(os.environ) | plan.variable()
        done = torch_forks.run("-c", WRITER, tmp_path / "folder", env=env)
        names = [note["name"] for note in read_log(log)]
        return done.returncode, done.stdout, [name for name in names if not name.startswith(SIZE)]

    return run


def test_watched_names_every_change_of_a_file(written: Any) -> None:
    """A buffered write is named as it leaves the buffer."""
    status, _, names = written()
    assert status == 0
    assert names == [
        "mkdir folder #1",
        "create folder/text #1",
        "write folder/text #1",
        "fsync folder/text #1",
        "rename folder/text -> folder/renamed #1",
        "create folder/second #1",
        "write folder/second #1",
        "unlink folder/renamed #1",
        "unlink folder/second #1",
        "rmdir folder #1",
    ] or sorted(names[7:9]) == ["unlink folder/renamed #1", "unlink folder/second #1"]


@pytest.mark.parametrize(
    ("point", "fault", "ended", "last", "left"),
    [
        # Half of a write arrives. What needs no room goes on.
        ("write folder/second #1", FULL, (0, "28 None\n"), "rmdir folder #1", {}),
        ("write folder/second #1", KILL, (-9, ""), "write folder/second #1", {"second": b"y" * 5}),
        # A rename that fails changes nothing.
        (
            "rename folder/text -> folder/renamed #1", BROKEN, (1, ""),
            "rename folder/text -> folder/renamed #1", {"text": b"x" * 100},
        ),
    ],
    ids=["full", "kill", "broken"],
)  # fmt: skip
def test_watched_fault_comes_at_its_point(
    point: str,
    fault: str,
    ended: tuple[int, str],
    last: str,
    left: dict[str, bytes],
    written: Any,
    tmp_path: Path,
) -> None:
    status, output, names = written(point, fault)
    assert (status, output) == ended and names[-1] == last
    assert all((tmp_path / "folder" / name).read_bytes() == data for name, data in left.items())


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


def test_points_sample_covers_kinds_and_faults() -> None:
    """Each fault comes as often, and a kind with one point is chosen as early as one with many."""
    points = [Point(f"write run/many #{n}", "write run/many") for n in range(20)]
    points += [Point("fsync run/one #1", "fsync run/one"), Point("rename a #1", "rename a")]
    chosen = sample_of(points, 6, seed=3)
    assert {point.kind for point, _ in chosen[:4]} == {point.kind for point in points}
    assert [fault for _, fault in chosen].count(KILL) == 2
    assert {fault for _, fault in chosen[:3]} == {FULL, BROKEN, KILL}
    assert chosen == sample_of(points, 6, seed=3) != sample_of(points, 6, seed=4)
    assert len(set(sample_of(points, 99, seed=0))) == len(pairs_of(points))


def test_points_sample_ends_right(recorded: tuple[Road, list[Point]]) -> None:
    """A sample with every fault: each run goes on or ends with a sentence, and then ends right."""
    road, points = recorded
    trials = [road.disturb(*pair) for pair in sample_of(points, SAMPLE, seed=1)]
    assert [(one.words, one.message, one.detail) for one in trials if one.last == WRONG] == []
    assert {one.fault for one in trials} == {fault for _, fault in pairs_of(points)}


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("name", ROADS)
def test_points_all_end_right(name: str, forks: ForkServer, tmp_path: Path) -> None:
    """Every point with each of its faults."""
    _, trials = walk(name, tmp_path, forks, 2, pairs_of, lambda trial: None)
    assert [(one.words, one.message, one.detail) for one in trials if one.last == WRONG] == []


@pytest.mark.slow
@pytest.mark.vllm
def test_points_of_a_real_teacher_end_right(
    forks: ForkServer, vllm_forks: ForkServer, tmp_path: Path
) -> None:
    """The same with vLLM's answers: a point of each kind of request to it, and some of files."""
    folder, log = models(tmp_path) / "teacher", tmp_path / "server.log"
    options = ("--dtype", "float32", "--max-model-len", 128, *QUICK)
    with (
        TeacherProcess(folder, log, *options, forks=vllm_forks) as server,
        opened("served", tmp_path / "road", forks, server.url) as road,
    ):
        points = [
            point
            for point in road.record()
            if point.server == "teacher" or "step_000002" in point.name
        ]
        trials = [road.disturb(*pair) for pair in sample_of(points, 12, seed=1)]
    assert [(one.words, one.message, one.detail) for one in trials if one.last == WRONG] == []
    assert {one.point.server for one in trials} == {None, "teacher"}
