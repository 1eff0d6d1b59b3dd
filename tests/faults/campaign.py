"""Hunt for wrong numbers taken in silence, and for tracebacks, with other seeds at each call.

    python -m tests.faults.campaign --seed 7 --minutes 20 [--only signal scores ...] [--verbose]

Each trial disturbs one whole run, or one recipe, at random:

    signal       SIGINT, SIGTERM or SIGHUP at a random moment, once or twice, then --resume
    scores       a teacher's answers spoiled after some requests, for some requests, in some rows
    rollouts     a rollout server's answers, likewise
    recipe       one or two keys of a recipe replaced by nonsense, checked and run for a step
    checkpoint   files of a run's checkpoints changed, cut, lost or mixed, then --resume

``tests.faults.points`` kills a run at every point. A disturbed run may end right (bit-equal to an
undisturbed one), or be refused with one sentence. It must never train on a wrong number, and no
user ever sees a traceback. The table counts how trials ended; the exit status is 1 where a wrong
number or a traceback was found.
"""

import argparse
import copy
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from tests.command import toml
from tests.faults import child, modes
from tests.faults.compare import differences, steps_of
from tests.fork_server import Fork, ForkServer

OUTCOMES = ("right", "waited", "refused", "plausible", "wrong", "traceback", "hung", "unclear")
BAD = ("wrong", "traceback", "hung", "unclear")
STEPS = 5
LONGEST_MESSAGE = 1500

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

PLAUSIBLE = {"tempered", "other_model", "other_model_for_new", "stale", "mu_shifted"}
"""Ways of spoiling that may leave an answer which some model could have given: for one row, or
between two canaries. A run that trains on one is counted as plausible."""

LOSSES: tuple[dict[str, Any], ...] = (
    {"type": "topk_reverse_kl", "k": 8},
    {"type": "topk_reverse_kl", "k": 1},
    {"type": "sampled_reverse_kl"},
)
"""Losses that a server without the scoring plugin, as the spoiling one, has answers for."""

NONSENSE: tuple[Any, ...] = (
    math.inf, -math.inf, math.nan, -1, 0, 1, 2.5, 1e300, 10**11, 2**63, True, "", "x", "\0", "🙂",
    "a" * 10_000, [], [1], {}, {"a": 1}, {"type": []}, [[]], "1", "[/b]", "../..", "none",
)  # fmt: skip


@dataclass
class Trial:
    """What a trial did, and how it ended."""

    part: str
    what: str
    outcome: str
    detail: str = ""


class Ended(Exception):
    """A run ended in one of the ways ``BAD``."""

    def __init__(self, outcome: str, detail: str):
        super().__init__(outcome)
        self.outcome, self.detail = outcome, detail


class Campaign:
    """The undisturbed run of each recipe, and what all trials share.

    A method of ``PARTS`` notes in ``what`` what it does, and returns outcome and detail.
    """

    def __init__(self, rng: random.Random, folder: Path, server: ForkServer):
        self.random, self.folder, self.server = rng, folder, server
        self.teacher: Any = None  # a server of the teacher, which also has the student's model
        self.student: Any = None
        self.what = ""
        self._wholes: dict[str, tuple[Path, float]] = {}  # recipe -> undisturbed run, its seconds
        self._count = 0

    @classmethod
    @contextmanager
    def opened(cls, seed: int) -> Iterator["Campaign"]:
        """Start what trials need, and stop it."""
        from tests.faults.server import SpoilingServer
        from tests.local.helpers import tiny_models

        with ExitStack() as stack:
            name = tempfile.TemporaryDirectory(prefix="prime_composer_campaign_")
            folder, server = Path(stack.enter_context(name)), child.server()
            stack.callback(server.close)
            os.environ["PRIME_COMPOSER_CACHE"] = str(folder / "cache")
            found = cls(random.Random(seed), folder, server)
            paths = tiny_models(found.recipe())
            teacher = SpoilingServer(paths["teacher"], other=paths["student"])
            found.teacher = stack.enter_context(teacher)
            found.student = stack.enter_context(SpoilingServer(paths["student"]))
            yield found

    def trial(self, part: str) -> Trial:
        """Run one trial, and remove its folder."""
        try:
            outcome, detail = PARTS[part](self)
        except Ended as ended:
            outcome, detail = ended.outcome, ended.detail
        for old in self.folder.glob("trial_*"):
            shutil.rmtree(old, ignore_errors=True)
        return Trial(part, self.what, outcome, detail)

    def new_folder(self) -> Path:
        self._count += 1
        folder = self.folder / f"trial_{self._count}"
        folder.mkdir()
        return folder

    def recipe(self, **changes: Any) -> dict[str, Any]:
        """Return a tiny recipe of five steps, with ``section__key=value`` changes."""
        from tests.conftest import TINY_RECIPE

        raw = copy.deepcopy(TINY_RECIPE)
        raw["trainer"] |= {"steps": STEPS}
        raw["eval"] = {"every": 0, "size": 2, "kl_size": 2}
        raw["checkpoint"] = {"every": 1, "keep": STEPS + 1}
        for key, value in changes.items():
            section, name = key.split("__")
            raw.setdefault(section, {})[name] = value
        return raw

    def run(self, raw: dict[str, Any], folder: Path, *words: str, **how: Any) -> child.Done:
        """Run a recipe in ``folder``/run, which has to end in order."""
        file = folder / "recipe.toml"
        file.write_text(toml(raw), encoding="utf-8")
        all_words = ["rl", "--engine", "local", "--config", file, "--output-dir", folder / "run"]
        return in_order(child.run(self.server, [*all_words, *words], folder, **how))

    def whole(self, raw: dict[str, Any]) -> tuple[Path, float]:
        """Return the undisturbed run of a recipe, made once, and its seconds.

        No number depends on how often checkpoints are written or canaries asked.
        """
        raw = raw | {"checkpoint": self.recipe()["checkpoint"], "checks": {"every": 1}}
        key = toml(raw)
        if key not in self._wholes:
            folder, start = self.folder / f"whole_{len(self._wholes)}", time.monotonic()
            folder.mkdir()
            done = self.run(raw, folder)
            assert done.status == 0, done.output
            self._wholes[key] = folder / "run", time.monotonic() - start
        return self._wholes[key]

    def finished(self, raw: dict[str, Any], folder: Path) -> tuple[str, str]:
        """Finish a run that may be finished already, or may not have begun."""
        done = self.run(raw, folder, *["--resume"] * bool(steps_of(folder / "run")))
        if done.status != 0 and STEPS not in steps_of(folder / "run"):
            return "unclear", done.message
        found = differences(folder / "run", self.whole(raw)[0])
        return ("wrong", "; ".join(found)) if found else ("right", "")

    def signal(self) -> tuple[str, str]:
        """Send a signal once or twice, then resume."""
        raw = self.recipe(checkpoint__every=self.random.choice((1, 3)))
        folder, number = self.new_folder(), self.random.choice(SIGNALS)
        moment, twice = self.random.uniform(0, self.whole(raw)[1]), self.random.random() < 0.25
        self.what = f"{number.name} after {moment:.2f} s{', twice' if twice else ''}"

        def send(process: Fork) -> None:
            process.poll(moment)
            for _ in range(1 + twice):
                process.send_signal(number)
                process.poll(0.2)

        done = self.run(raw, folder, meanwhile=send)
        if done.status not in (0, -number, 128 + number):
            return "unclear", f"status {done.status}: {done.message}"
        return self.finished(raw, folder)

    def scores(self) -> tuple[str, str]:
        """Spoil a teacher's answers at random positions."""
        raw = self.recipe(
            teacher__url=self.teacher.url,
            teacher__wait=3.0,
            checks__every=self.random.choice((1, 1, 2)),
        ) | {"loss": self.random.choice(LOSSES)}
        names = [
            *modes.ROWS, *modes.ANSWERS, *modes.CHOICES, *modes.BODIES, *modes.MODELS, "stale",
            "drop", "drop_after_headers", "cut", "status_400", "status_429", "status_500",
            "status_503_after", "status_504",
        ]  # fmt: skip
        return self.spoiled("scoring", self.teacher, raw, names)

    def rollouts(self) -> tuple[str, str]:
        """Spoil a rollout server's answers at random positions."""
        raw = self.recipe(teacher__backend="transformers")
        raw["rollout"] |= {"backend": "server", "url": self.student.url, "wait": 3.0}
        names = [
            *modes.SAMPLES, *modes.CHOICES, *modes.BODIES, "drop", "cut", "status_429",
            "status_500", "status_503_after", "reload_ignored",
        ]  # fmt: skip
        return self.spoiled("sampling", self.student, raw, names)

    def spoiled(
        self, road: str, server: Any, raw: dict[str, Any], names: list[str]
    ) -> tuple[str, str]:
        """Run with a spoiled server, then resume with a right one."""
        whole, folder = self.whole(raw)[0], self.new_folder()
        self.reset()
        mode, times = self.random.choice(names), self.random.choice((1, 1, 2, 3, None))
        after = self.random.randint(*((0, 45) if mode != "reload_ignored" else (4, 8)))
        row = self.random.choice((None, None, -1, -2, -4))
        server.spoil(mode, after, times, road=modes.road_of(mode) or road, row=row)
        self.what = f"{mode}, after {after}, times {times}, row {row} {raw['loss']}"
        done = self.run(raw, folder, limit=180)
        hits = server.spoiled[mode]
        self.reset()
        if steps_of(folder / "run") and (found := differences(folder / "run", whole)):
            return "plausible" if mode in PLAUSIBLE else "wrong", "; ".join(found)
        if done.status == 0:
            return "waited" if hits else "right", ""
        if not done.message.strip() or len(done.message) > LONGEST_MESSAGE:
            return "unclear", done.output[-2000:]
        # The run directory must be one that goes on, or starts again.
        later, detail = self.finished(raw, folder)
        if later != "right":
            return later, f"after the refusal {done.message!r}: {detail}"
        return "refused", done.message

    def reset(self) -> None:
        """Let both servers answer right, with their own weights."""
        for server in (self.teacher, self.student):
            server.heal()
            server.swap(server.model)
            server.spoiled.clear()

    def recipe_of_nonsense(self) -> tuple[str, str]:
        """Put nonsense into a recipe; check it, and run one step of what passes."""
        raw, folder = self.recipe(trainer__steps=1), self.new_folder()
        self.what = "; ".join(self.mutate(raw) for _ in range(self.random.choice((1, 1, 2))))
        file = folder / "recipe.toml"
        file.write_text(toml_of(raw), encoding="utf-8", errors="surrogateescape")
        done = in_order(child.run(self.server, ["check", file], folder, limit=30))
        if done.status == 0:
            words = ["rl", "--engine", "local", "--config", file, "--output-dir", folder / "run"]
            done = in_order(child.run(self.server, words, folder, limit=60))
        if done.status == 0:
            return "right", ""
        if len(done.output) > 20_000 or not done.message:
            return "unclear", f"{len(done.output)} characters"
        return "refused", done.message

    def mutate(self, raw: dict[str, Any]) -> str:
        """Change one key of a recipe."""
        tables = [(name, table) for name, table in raw.items() if isinstance(table, dict)]
        name, table = self.random.choice(tables)
        while True:
            inner = [(key, value) for key, value in table.items() if isinstance(value, dict)]
            if not inner or self.random.random() < 0.5:
                break
            key, table = self.random.choice(inner)
            name += f".{key}"
        known = sorted(KEYS.get(name, set()) | table.keys())
        key, value = self.random.choice(known), self.random.choice(NONSENSE)
        if self.random.random() < 0.05:
            table.pop(key, None)
            return f"{name}.{key} left out"
        table[key] = value
        return f"{name}.{key} = {str(value)[:30]!r}"

    def checkpoint(self) -> tuple[str, str]:
        """Damage a run that was stopped after three steps, then resume it."""
        raw = self.recipe()
        whole, folder = self.whole(raw)[0], self.new_folder()
        run_dir = folder / "run"
        shutil.copytree(whole, run_dir)
        for step in (STEPS, STEPS - 1):
            shutil.rmtree(run_dir / "checkpoints" / f"step_{step:06d}")
        self.what = "; ".join(self.damage(run_dir) for _ in range(self.random.choice((1, 1, 2))))
        words = ("--resume", "--step", "2") if self.random.random() < 0.2 else ("--resume",)
        self.what += f"; {' '.join(words)}"
        done = self.run(raw, folder, *words)
        if done.status != 0:
            return "refused", done.message
        ours = [text for text in differences(run_dir, whole) if not text.startswith("records")]
        return ("wrong", "; ".join(ours)) if ours else ("right", "")

    def damage(self, run_dir: Path) -> str:
        """Damage one file or folder of a run."""
        folder = self.random.choice(sorted((run_dir / "checkpoints").glob("step_*")))
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        if self.random.random() < 0.15:
            files = [run_dir / "metrics.jsonl", run_dir / "recipe.json"]
        file = self.random.choice(files)
        if not file.exists():
            return f"{file.name} was gone"
        way = self.random.choice(
            ("flip", "cut", "empty", "delete", "swap", "rename", "garbage", "link", "extra")
        )
        content = bytearray(file.read_bytes())
        if way == "flip" and content:
            at = self.random.randrange(len(content))
            content[at] ^= 1 << self.random.randrange(8)
            file.write_bytes(content)
        elif way == "cut":
            file.write_bytes(content[: self.random.randrange(len(content) + 1)])
        elif way == "empty":
            file.write_bytes(b"")
        elif way == "delete":
            file.unlink()
        elif way == "swap":
            others = sorted((run_dir / "checkpoints").glob(f"step_*/{file.name}"))
            if others:
                file.write_bytes(self.random.choice(others).read_bytes())
        elif way == "rename":
            folder.rename(folder.with_name(f"step_{self.random.choice((4, 99)):06d}"))
        elif way == "garbage":
            file.write_bytes(self.random.randbytes(200))
        elif way == "link":
            link = run_dir / "checkpoints" / "step_000009.tmp"
            if not link.is_symlink():
                link.symlink_to(run_dir)
        else:
            (folder / "extra.bin").write_bytes(b"x")
        return f"{way} {folder.name}/{file.name}"


def in_order(done: child.Done) -> child.Done:
    """Return how a command ended, unless it hung or showed a traceback."""
    if done.has_traceback:
        raise Ended("traceback", done.output[-3000:])
    if done.timed_out:
        raise Ended("hung", done.output[-500:])
    return done


KEYS: dict[str, set[str]] = {
    "trainer": {
        "lr", "betas", "weight_decay", "max_grad_norm", "batch_size", "steps", "warmup_steps",
        "schedule", "seed", "dtype",
    },
    "rollout": {"temperature", "top_p", "group_size", "max_tokens", "max_model_len", "backend",
                "student_fraction", "url", "wait"},
    "eval": {"every", "size", "kl_size", "kl_support", "temperature"},
    "loss": {"type", "k"},
    "data": {"source", "size", "path"},
    "checkpoint": {"every", "keep"},
    "checks": {"every"},
    "teacher": {"model", "url", "backend", "dtype", "wait"},
    "student": {"model"},
}  # fmt: skip


def toml_of(raw: dict[str, Any]) -> str:
    """Return a recipe as TOML, infinities and NaN as TOML writes them where all of it is TOML."""
    try:
        return tomli_w.dumps(raw)
    except (TypeError, OverflowError):
        return toml(raw)


PARTS: dict[str, Callable[[Campaign], tuple[str, str]]] = {
    "signal": Campaign.signal,
    "scores": Campaign.scores,
    "rollouts": Campaign.rollouts,
    "recipe": Campaign.recipe_of_nonsense,
    "checkpoint": Campaign.checkpoint,
}


def print_table(trials: list[Trial]) -> None:
    """Print how trials ended, by part."""
    counts = Counter((part, one.outcome) for one in trials for part in (one.part, "all"))
    print(f"{'':<12}{'trials':>8}" + "".join(f"{name:>11}" for name in OUTCOMES))
    for part in dict.fromkeys([*(one.part for one in trials), "all"]):
        numbers = [counts[part, name] for name in OUTCOMES]
        print(f"{part:<12}{sum(numbers):>8}" + "".join(f"{number:>11}" for number in numbers))


def main() -> int:
    """Run trials of each part in turn until the time is over; print those that went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--verbose", action="store_true", help="print every trial")
    arguments = parser.parse_args()
    end, trials = time.monotonic() + 60 * arguments.minutes, []
    with Campaign.opened(arguments.seed) as campaign:
        while time.monotonic() < end:
            one = campaign.trial(arguments.only[len(trials) % len(arguments.only)])
            trials.append(one)
            if one.outcome in BAD:
                print(f"--- {one.outcome}: {one.part}, {one.what}\n{one.detail}\n", flush=True)
            elif arguments.verbose:
                print(f"{one.outcome}: {one.part}, {one.what}: {one.detail[:200]}", flush=True)
    print_table(trials)
    return int(any(trial.outcome in BAD for trial in trials))


if __name__ == "__main__":
    sys.exit(main())
