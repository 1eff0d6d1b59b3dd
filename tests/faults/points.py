"""Let a run fail at every point where it can: each change of a file, each request, each answer.

    python -m tests.faults.points [--road served|ahead|in_process] [--sample 40 --seed 1]

A run of three steps is recorded once, and each point gets a name. ``served`` has a teacher with
the scoring plugin and a tape, and a sampler, both servers (``tests.faults.wire``). ``ahead`` is the
same with batches that are collected a step ahead. ``in_process`` prepares both models and runs them
with transformers. Each point is then disturbed once per fault:

    EIO              a change of a file fails once
    ENOSPC           a write or a creation fails, and all later ones: the disk is full
    kill             the process dies there, in a write after half of it
    lost, cut, 503   a request is not answered, or half, or with that status
    killed asking    the process dies when a request arrives, or when its answer is ready
    restarted        a server is another process with its first weights
    exchanged        a teacher is another model of the same name
    other facts      an answer names another model

A disturbed run goes on and ends as the undisturbed one, or ends with one sentence. What ended is
continued with ``--resume``, or started again where no checkpoint was saved. It ends bit-equal to
the undisturbed run. With batches ahead, which a resume samples anew, it has the same steps, and the
same records up to its checkpoint. A served one may be refused by name first, where the sampler's
server has the weights of the run that ended, and has to be started again. Nothing outside of run
directory and cache has changed, and nothing is left in them. The exit status is 1 where any of this
is not so.
"""

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.command import toml
from tests.faults import child
from tests.faults.compare import differences, record_differences, steps_of
from tests.faults.watched import BROKEN, FULL, KILL, NEEDS_ROOM, Plan, read_log
from tests.fork_server import Fork, ForkServer

ROADS = ("served", "ahead", "in_process")
STEPS = 3
SECONDS = 90.0
LONGEST_MESSAGE = 1500

LOST, CUT, BUSY = "lost", "cut", "503"
KILL_ASKING, KILL_ANSWERED = "killed asking", "killed answered"
RESTARTED, EXCHANGED, OTHER_FACTS = "restarted", "exchanged", "other facts"
OF_REQUESTS = (LOST, CUT, BUSY, KILL_ASKING, KILL_ANSWERED)

WENT_ON, RESUMED, REFUSED, WRONG = "went on", "resumed bit-equal", "refused by name", "wrong"


@dataclass(frozen=True)
class Point:
    """A place and moment of a run."""

    name: str  # what happens, where, and which time
    kind: str  # the same without the step and the time: what a sample covers
    server: str | None = None  # whom a request goes to; None for a file
    # nothing was asked of a teacher before whose answer could be compared, so that another model is
    # the run's teacher from its start
    is_first: bool = False

    def faults(self) -> tuple[str, ...]:
        """Return the ways in which it is disturbed."""
        if self.server is None:
            full = (FULL,) if self.name.split()[0] in NEEDS_ROOM else ()
            return (BROKEN, *full, KILL)
        own = (RESTARTED,) if self.server == "student" else (EXCHANGED,) * (not self.is_first)
        path = self.name.split()[1]
        if path == "models" or (self.server == "teacher" and path == "score"):
            own += (OTHER_FACTS,)
        return (*OF_REQUESTS, *own)


@dataclass
class Trial:
    """How a disturbed run ended, and the one after it."""

    point: Point
    fault: str
    first: str
    last: str
    detail: str = ""
    message: str = ""

    @property
    def words(self) -> str:
        """What is printed."""
        return f"{self.point.name} | {self.fault} | {self.first} | {self.last}"


def file_point(name: str) -> Point:
    """Return the point of a watched process's note."""
    kind = re.sub(r" #\d+$", "", name)
    kind = re.sub(r"step_\d+", "step_N", kind)
    kind = re.sub(r"[0-9a-f]{16,}", "HASH", kind)
    return Point(name, kind)


class Place:
    """A folder with a run directory, a cache, and all else that a run must not touch."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.run_dir, self.cache = folder / "run", folder / "cache"
        self._watched = {str(self.run_dir): "run", str(self.cache): "cache"}
        for name in ("tmp", "home", "work"):
            (folder / name).mkdir(parents=True)
        self._watched |= {str(folder / name): name for name in ("tmp", "tape")}

    def environment(self, plan: Plan) -> dict[str, str]:
        """Return the variables of a process that runs here."""
        places = {"HOME": "home", "TMPDIR": "tmp", "PRIME_COMPOSER_CACHE": "cache"}
        own = {name: str(self.folder / place) for name, place in places.items()}
        plan.folders = self._watched
        return dict(os.environ) | own | plan.variable()

    def strangers(self, whole: "Place") -> list[str]:
        """Return files and folders that the undisturbed run has not, and those outside."""
        return sorted(self._names() ^ whole._names())

    def _names(self) -> set[str]:
        paths = (path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*"))
        names = (re.sub(r"(tfevents\.|answers-).*", r"\1", path) for path in paths)
        return {name for name in names if not name.startswith(("points", "recipe"))}


class Road:
    """A recipe, its undisturbed run, and trials of it; one per thread."""

    def __init__(self, name: str, folder: Path, forks: ForkServer):
        self.name, self.folder, self.forks = name, folder, forks
        self.wire: Any = None
        self.whole: Place | None = None
        self.notes: list[dict[str, Any]] = []
        self.count = 0
        folder.mkdir(parents=True)

    def recipe(self) -> dict[str, Any]:
        """Return the tables of a run of three steps, each with a checkpoint."""
        from tests.conftest import TINY_RECIPE

        raw: dict[str, Any] = json.loads(json.dumps(TINY_RECIPE))
        raw["trainer"] |= {"steps": STEPS, "batch_size": 2}
        raw["eval"] = {"every": 2, "size": 2, "kl_size": 2}
        raw["checkpoint"] = {"every": 1, "keep": 2}
        raw["checks"] = {"every": 1}
        raw["data"] |= {"size": 20}
        raw["rollout"] |= {"max_tokens": 4}
        for table, steps in (("teacher", 6), ("student", 2)):
            raw[table]["prepare"] |= {"sft_steps": steps, "batch_size": 4}
        if self.wire is not None:
            how = {"wait": 5.0, "timeout": 30.0}
            raw["loss"] = {"type": "generalized_jsd", "k": "full"}
            raw["teacher"] = {"model": self.wire.teacher.model, "url": self.wire.teacher.url} | how
            raw["teacher"]["dtype"] = "float32"  # or it is asked sixteen times to see its rounding
            raw["student"] = {"model": self.wire.student.model}
            raw["data"] = {"source": "jsonl", "path": str(self.folder.parent / "models")}
            raw["rollout"] |= {"backend": "server", "url": self.wire.student.url} | how
        if self.name == "ahead":
            raw["rollout"]["ahead"] = 1
        return raw

    def new_place(self) -> Place:
        """Return an empty place, with the recipe."""
        self.count += 1
        place = Place(self.folder / f"place_{self.count}")
        raw = self.recipe()
        if self.wire is not None:
            raw["teacher"]["tape"] = str(place.folder / "tape")
        (place.folder / "recipe.toml").write_text(toml(raw))
        return place

    def run(self, place: Place, *words: str, plan: Plan | None = None) -> child.Done:
        """Run the recipe in a place."""
        all_words = ["rl", "--engine", "local", "--config", place.folder / "recipe.toml"]
        all_words += ["--output-dir", place.run_dir, *words]
        env = place.environment(plan or Plan({}, draws=False))

        def begun(process: Fork) -> None:
            if self.wire is not None:
                self.wire.process = process

        return child.run(self.forks, all_words, place.folder / "work", SECONDS, begun, env)

    def record(self) -> list[Point]:
        """Run undisturbed, and return every point in order: first files, then requests."""
        place = self.new_place()
        if self.wire is not None:
            self.wire.begin()
        log = place.folder / "points.jsonl"
        done = self.run(place, plan=Plan({}, str(log)))
        assert done.status == 0, done.output
        self.whole, self.notes = place, read_log(log)
        names = [note["name"] for note in self.notes]
        points = [file_point(name) for name in names if re.search(r" #\d+$", name)]
        return points + ([] if self.wire is None else self.wire.points())

    def disturb(self, point: Point, fault: str) -> Trial:
        """Run with a fault, and again until a run has ended right or was refused."""
        place = self.new_place()
        log, plan = place.folder / "points.jsonl", Plan({}, draws=False)
        if self.wire is not None:
            self.wire.begin()
        if point.server is None:
            plan = Plan({}, str(log), point.name, fault, "report" in point.name)
        else:
            self.wire.disturb(point.name, fault)
        done = self.run(place, plan=plan)
        reached = (
            self.wire.reached
            if point.server
            else point.name in {note["name"] for note in read_log(log)}
        )
        log.unlink(missing_ok=True)
        trial = self.judge(point, fault, place, done)
        if not reached:
            trial.last, trial.detail = WRONG, "the run did not come to this point"
        if trial.last != WRONG:
            shutil.rmtree(place.folder)
        return trial

    def judge(self, point: Point, fault: str, place: Place, done: child.Done) -> Trial:
        """Return how a disturbed run ended; continue it where it did."""
        trial = Trial(point, fault, "ended", WRONG, message=done.message)
        if done.status == 0:
            trial.first = WENT_ON
        elif done.status == -9:
            trial.first = "killed"
        trial.detail = broken_manners(done) or self.unnamed(trial, place)
        if trial.detail:
            return trial
        if done.status == 0:
            trial.detail = self.differences(place)
            if trial.detail == ANSWERS_DIFFER and "are not kept" in done.output:
                trial.detail = ""  # the report lacks them, as a warning said
            if trial.detail == f"{LEFT}tape/answers-" and "nothing more is kept" in done.output:
                trial.detail = ""  # so do later runs
            if trial.detail and fault in (BROKEN, FULL) and all_left(trial.detail):
                # What could not be deleted or drawn is, once the disk is right again.
                self.go_on(trial, place)
        else:
            self.go_on(trial, place)
            if trial.last == REFUSED:
                self.follow_refusal(trial, place)
                return trial
        if not trial.detail:
            trial.last = WENT_ON if trial.first == WENT_ON else RESUMED
        return trial

    def go_on(self, trial: Trial, place: Place) -> None:
        """Continue a run, or start it again, with a right disk and right servers."""
        if self.wire is not None:
            self.wire.heal()
        saved = steps_of(place.run_dir)[-1:]
        done = self.run(place, *["--resume"] * bool(saved))
        which = "--resume" if saved else "the second start"
        if wrong := broken_manners(done):
            trial.last, trial.detail = WRONG, f"{which}: {wrong}"
        elif done.status != 0:
            trial.last, trial.detail = REFUSED, done.message
        else:
            trial.detail = self.differences(place, *saved[: self.name == "ahead"])
            trial.last = WRONG if trial.detail else RESUMED

    def follow_refusal(self, trial: Trial, place: Place) -> None:
        """Do what a refusal says. There is one: a server keeps the weights of the run that ended.

        A run that refuses its own checkpoint did not save it whole, which is wrong.
        """
        refusal = trial.detail
        if self.wire is not None and "until it is started again" in refusal:
            self.wire.student.restart()
            self.go_on(trial, place)
        trial.last = REFUSED if trial.last == RESUMED else WRONG
        trial.detail = f"{refusal} {trial.detail}".strip()

    def unnamed(self, trial: Trial, place: Place) -> str:
        """Return what is wrong with the message of a run that ended; "" for nothing."""
        assert self.whole is not None
        server = trial.point.server
        named = place.folder if server is None else getattr(self.wire, server).url
        if trial.first != "ended" or str(named) in trial.message:
            return ""
        return f"the message does not name {named}"

    def differences(self, place: Place, last: int = STEPS) -> str:
        """Return what differs from the undisturbed run, in numbers up to a step; "" for nothing."""
        assert self.whole is not None
        runs = place.run_dir, self.whole.run_dir
        found = differences(*runs) if last == STEPS else record_differences(*runs, last)
        if steps_of(place.run_dir)[-1:] != [STEPS]:
            found.append(f"steps {steps_of(place.run_dir)}")
        found += [LEFT + name for name in place.strangers(self.whole)]
        if not found and answers_of(place, last) != answers_of(self.whole, last):
            found.append(ANSWERS_DIFFER)
        return "; ".join(found)


LEFT = "left or missing: "
ANSWERS_DIFFER = "answers.jsonl differs"


def all_left(differences: str) -> bool:
    """Return whether nothing is wrong with a run's numbers."""
    return all(one.startswith(LEFT) for one in differences.split("; "))


def answers_of(place: Place, last: int) -> dict[int, Any]:
    """Return the answers that a report shows, by step, up to the last one."""
    from prime_composer.local.answers import read_answers

    found = read_answers(place.run_dir)
    return {step: answers for step, answers in found.items() if step <= last}


def broken_manners(done: child.Done) -> str:
    """Return what is wrong with how a command ended; "" for nothing."""
    if done.has_traceback:
        return done.output[-3000:]
    if done.timed_out:
        return f"hung: {done.output[-500:]}"
    if done.status in (0, -9):
        return ""
    if not done.message.startswith("prime-rl rl: ") or len(done.message) > LONGEST_MESSAGE:
        return f"status {done.status} without one sentence: {done.output[-1000:]}"
    return ""


def pairs_of(points: Sequence[Point]) -> list[tuple[Point, str]]:
    """Return every point with each of its faults."""
    return [(point, fault) for point in points for fault in point.faults()]


def sample_of(points: Sequence[Point], size: int, seed: int) -> list[tuple[Point, str]]:
    """Choose points and faults: each fault as often, where kinds of points had the fewest."""
    left = pairs_of(points)
    random.Random(seed).shuffle(left)
    faults: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    chosen: list[tuple[Point, str]] = []
    while left and len(chosen) < size:
        pair = min(left, key=lambda pair: (faults[pair[1]], kinds[pair[0].kind]))
        left.remove(pair)
        faults[pair[1]] += 1
        kinds[pair[0].kind] += 1
        chosen.append(pair)
    return chosen


@contextmanager
def opened(road: str, folder: Path, forks: ForkServer) -> Iterator[Road]:
    """Open a road, with servers of its own if it has any."""
    found = Road(road, folder, forks)
    with ExitStack() as stack:
        if road != "in_process":
            from tests.faults.wire import Wire

            found.wire = stack.enter_context(Wire.of_folder(models(folder.parent)))
        yield found


_models = threading.Lock()


def models(folder: Path) -> Path:
    """Return a folder with the models that servers serve, and with problems; made once."""
    from tests.conftest import TINY_RECIPE
    from tests.local.helpers import tiny_models

    with _models:
        target = folder / "models"
        if not target.exists():
            for name, path in tiny_models(TINY_RECIPE).items():
                shutil.copytree(path, target / name)
            # The watch asks the sampler about every problem, up to sixteen.
            for name, first, last in (("train", 2, 6), ("test", 6, 8)):
                rows = (
                    {"question": f"Ada has {n} apples and buys 3.", "answer": f"#### {n + 3}"}
                    for n in range(first, last)
                )
                (target / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return target


def walk(
    road: str, folder: Path, forks: ForkServer, jobs: int, choose: Any, tell: Any
) -> tuple[list[Point], list[Trial]]:
    """Disturb a road, and return its points and trials."""
    with ExitStack() as stack:
        roads = [
            stack.enter_context(opened(road, folder / f"{road}_{index}", forks))
            for index in range(jobs)
        ]
        recorded = [one.record() for one in roads]
        assert all(points == recorded[0] for points in recorded), "two recordings differ"
        pairs = iter(choose(recorded[0]))
        turn = threading.Lock()

        def work(one: Road) -> list[Trial]:
            trials = []
            while True:
                with turn:
                    pair = next(pairs, None)
                if pair is None:
                    return trials
                trials.append(one.disturb(*pair))
                tell(trials[-1])

        with ThreadPoolExecutor(jobs) as threads:
            return recorded[0], [trial for found in threads.map(work, roads) for trial in found]


def main() -> int:
    """Walk over the points that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--road", nargs="+", choices=ROADS, default=list(ROADS))
    parser.add_argument("--sample", type=int, help="so many points and faults; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    arguments = parser.parse_args()

    def choose(points: list[Point]) -> list[tuple[Point, str]]:
        if arguments.sample is None:
            return pairs_of(points)
        return sample_of(points, arguments.sample, arguments.seed)

    def tell(trial: Trial) -> None:
        print(f"{trial.words} | {trial.message} | {trial.detail}", flush=True)

    forks, wrong = child.server(), 0
    with tempfile.TemporaryDirectory(prefix="prime_composer_points_") as name:
        os.environ["PRIME_COMPOSER_CACHE"] = f"{name}/cache"
        for road in arguments.road:
            points, trials = walk(road, Path(name).resolve(), forks, 2, choose, tell)
            ended = Counter(trial.last for trial in trials)
            print(f"{road}: {len(points)} points, {len(trials)} runs: {dict(ended)}")
            wrong += ended[WRONG]
    forks.close()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
