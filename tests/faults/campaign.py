"""Hunt for wrong numbers taken in silence, and for tracebacks, with other seeds at each call.

    python -m tests.faults.campaign --seed 7 --minutes 20 [--only kill signal ...] [--verbose]

Each trial disturbs one whole run, or one recipe, at random:

    kill         SIGKILL at random moments, then the same command with --resume
    signal       SIGINT, SIGTERM or SIGHUP at a random moment, once or twice, then --resume
    scores       a teacher's answers spoiled after some requests, for some requests, in some rows
    rollouts     a rollout server's answers, likewise
    recipe       one or two keys of a recipe replaced by nonsense, checked and run for a step
    checkpoint   files of a run's checkpoints changed, cut, lost or mixed, then --resume

A disturbed run may end right (bit-equal to an undisturbed one), or be refused with one sentence. It
must never train on a wrong number, and no user ever sees a traceback. The table counts how trials
ended; the exit status is 1 where a wrong number or a traceback was found.
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
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import child, modes
from tests.faults.compare import differences, steps_of
from tests.fork_server import Fork, ForkServer

OUTCOMES = ("right", "waited", "refused", "plausible", "wrong", "traceback", "hung", "unclear")
BAD = ("wrong", "traceback", "hung", "unclear")
STEPS = 5
LONGEST_MESSAGE = 1500

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

PLAUSIBLE = {
    "positive_0.001", "own_shifted_0.01", "own_shifted_2", "own_lowered_5", "own_zero", "zeros",
    "support_zero", "mass_1.01", "tempered", "other_model", "other_model_for_new", "stale",
    "duplicates", "mu_shifted", "mu_zeros",
}  # fmt: skip
"""Ways of spoiling that may leave an answer which some model could have given: for one row, with
K = 0, or between two canaries. A run that trains on one is counted as plausible."""

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


@dataclass
class Campaign:
    """The undisturbed run of each recipe, and what all trials share.

    Attributes:
        random: decides everything.
        folder: where runs are.
        server: starts processes.
        teacher: a server of the teacher, which also has the student's model.
        student: a server of the student.
        wholes: undisturbed runs, by their recipe as TOML.
        seconds: how long each of them took.
        count: trials so far.
    """

    random: random.Random
    folder: Path
    server: ForkServer
    teacher: Any = None
    student: Any = None
    wholes: dict[str, Path] = field(default_factory=dict)
    seconds: dict[Path, float] = field(default_factory=dict)
    count: int = 0

    def new_folder(self) -> Path:
        """Return an empty folder for a trial."""
        self.count += 1
        folder = self.folder / f"trial_{self.count}"
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
        """Run a recipe in ``folder``/run."""
        from tests.command import toml

        file = folder / "recipe.toml"
        file.write_text(toml(raw), encoding="utf-8")
        all_words = ["rl", "--engine", "local", "--config", file, "--output-dir", folder / "run"]
        return child.run(self.server, [*all_words, *words], folder, **how)

    def whole(self, raw: dict[str, Any]) -> Path:
        """Return the undisturbed run of a recipe, made once.

        No number depends on how often checkpoints are written or canaries asked.
        """
        from tests.command import toml

        raw = raw | {"checkpoint": self.recipe()["checkpoint"], "checks": {"every": 1}}
        key = toml(raw)
        if key not in self.wholes:
            folder = self.folder / f"whole_{len(self.wholes)}"
            folder.mkdir()
            start = time.monotonic()
            done = self.run(raw, folder)
            assert done.status == 0, done.output
            self.wholes[key] = folder / "run"
            self.seconds[folder / "run"] = time.monotonic() - start
        return self.wholes[key]

    def judge(self, done: child.Done, raw: dict[str, Any], folder: Path) -> tuple[str, str]:
        """Return how a disturbed run ended, with what is to be said of it."""
        if done.has_traceback:
            return "traceback", done.output[-3000:]
        if done.timed_out:
            return "hung", done.output[-500:]
        if steps_of(folder / "run") and (found := differences(folder / "run", self.whole(raw))):
            return "wrong", "; ".join(found)
        if done.status == 0:
            return "right", ""
        if not done.message.strip() or len(done.message) > LONGEST_MESSAGE:
            return "unclear", done.output[-2000:]
        return "refused", done.message

    def kill(self) -> Trial:
        """Kill a run up to three times."""
        raw = self.recipe(checkpoint__every=self.random.choice((1, 2, 3)))
        folder, times = self.new_folder(), self.random.choice((1, 2, 3))
        moments = [self.moment(raw) for _ in range(times)]
        for number, moment in enumerate(moments):

            def shoot(process: Fork, moment: float = moment) -> None:
                process.poll(moment)
                process.kill()

            words = ("--resume",) if number and self.random.random() < 0.9 else ()
            done = self.run(raw, folder, *words, meanwhile=shoot)
            if done.has_traceback:
                return Trial("kill", f"{moments}", "traceback", done.output)
            if done.status == 0:
                break
        return Trial("kill", f"at {moments}", *self.finish_killed(raw, folder))

    def moment(self, raw: dict[str, Any]) -> float:
        """Return a random moment of a run, in seconds after its start."""
        whole = self.whole(raw)
        return self.random.uniform(0.0, self.seconds[whole])

    def finish_killed(self, raw: dict[str, Any], folder: Path) -> tuple[str, str]:
        """Finish a run that may be finished already, or may not have begun."""
        words = ("--resume",) if steps_of(folder / "run") else ()
        done = self.run(raw, folder, *words)
        if done.has_traceback:
            return "traceback", done.output
        if done.status != 0 and STEPS not in steps_of(folder / "run"):
            return "unclear", done.message
        found = differences(folder / "run", self.whole(raw))
        return ("wrong", "; ".join(found)) if found else ("right", "")

    def signal(self) -> Trial:
        """Send a signal once or twice, then resume."""
        raw = self.recipe(checkpoint__every=self.random.choice((1, 3)))
        folder, number = self.new_folder(), self.random.choice(SIGNALS)
        moment, twice = self.moment(raw), self.random.random() < 0.25
        what = f"{number.name} after {moment:.2f} s{', twice' if twice else ''}"

        def send(process: Fork) -> None:
            process.poll(moment)
            for _ in range(1 + twice):
                process.send_signal(number)
                process.poll(0.2)

        done = self.run(raw, folder, meanwhile=send)
        if done.has_traceback:
            return Trial("signal", what, "traceback", done.output)
        if done.timed_out:
            return Trial("signal", what, "hung", done.output)
        if done.status not in (0, -number, 128 + number):
            return Trial("signal", what, "unclear", f"status {done.status}: {done.message}")
        return Trial("signal", what, *self.finish_killed(raw, folder))

    def scores(self) -> Trial:
        """Spoil a teacher's answers at random positions."""
        loss = self.random.choice(LOSSES)
        raw = self.recipe(
            teacher__url=self.teacher.url,
            teacher__wait=3.0,
            checks__every=self.random.choice((1, 1, 2)),
        ) | {"loss": loss}
        names = [
            *modes.ROWS, *modes.ANSWERS, *modes.CHOICES, *modes.BODIES, *modes.MODELS, "stale",
            "drop", "drop_after_headers", "cut", "status_400", "status_429", "status_500",
            "status_503_after", "status_504",
        ]  # fmt: skip
        return self.spoiled("scores", self.teacher, raw, names, str(loss))

    def rollouts(self) -> Trial:
        """Spoil a rollout server's answers at random positions."""
        raw = self.recipe(
            teacher__backend="transformers",
            rollout__backend="server",
            rollout__url=self.student.url,
        )
        raw["rollout"]["wait"] = 3.0
        names = [
            *modes.SAMPLES, *modes.CHOICES, *modes.BODIES, "drop", "cut", "status_429",
            "status_500", "status_503_after", "reload_ignored",
        ]  # fmt: skip
        return self.spoiled("rollouts", self.student, raw, names, "")

    def spoiled(
        self, part: str, server: Any, raw: dict[str, Any], names: list[str], note: str
    ) -> Trial:
        """Run with a spoiled server, then resume with a right one."""
        self.whole(raw)
        self.reset()
        mode, times = self.random.choice(names), self.random.choice((1, 1, 2, 3, None))
        after = (
            self.random.randint(0, 45) if mode != "reload_ignored" else self.random.randint(4, 8)
        )
        row = self.random.choice((None, None, -1, -2, -4))
        road = "scoring" if part == "scores" else "sampling"
        own = modes.road_of(mode)
        server.spoil(mode, after, times, road=own or road, row=row)
        what = f"{mode}, after {after}, times {times}, row {row} {note}"
        folder = self.new_folder()
        done = self.run(raw, folder, limit=180)
        outcome, detail = self.judge(done, raw, folder)
        hits = server.spoiled[mode]
        self.reset()
        if outcome == "wrong" and mode in PLAUSIBLE:
            return Trial(part, what, "plausible", detail)
        if outcome == "right" and hits:
            outcome = "waited"
        if outcome == "refused":
            # The run directory must be one that goes on, or starts again.
            later, more = self.finish_killed(raw, folder)
            if later != "right":
                return Trial(part, what, later, f"after the refusal {detail!r}: {more}")
        return Trial(part, what, outcome, detail)

    def reset(self) -> None:
        """Let both servers answer right, with their own weights."""
        for server, path in (
            (self.teacher, self.teacher.model),
            (self.student, self.student.model),
        ):
            server.heal()
            server.swap(path)
            server.spoiled.clear()

    def recipe_of_nonsense(self) -> Trial:
        """Put nonsense into a recipe; check it, and run one step of what passes."""
        raw = self.recipe(trainer__steps=1)
        what = []
        for _ in range(self.random.choice((1, 1, 2))):
            what.append(self.mutate(raw))
        folder = self.new_folder()
        from tests.command import toml

        try:
            text = toml_of(raw)
        except ValueError:
            text = toml(raw)
        (folder / "recipe.toml").write_text(text, encoding="utf-8", errors="surrogateescape")
        done = child.run(self.server, ["check", folder / "recipe.toml"], folder, limit=30)
        if done.status == 0:
            words = ["rl", "--engine", "local", "--config", folder / "recipe.toml"]
            words += ["--output-dir", folder / "run"]
            done = child.run(self.server, words, folder, limit=60)
        description = "; ".join(what)
        if done.has_traceback:
            return Trial("recipe", description, "traceback", done.output[-3000:])
        if done.timed_out:
            return Trial("recipe", description, "hung", done.output[-500:])
        if done.status == 0:
            return Trial("recipe", description, "right")
        if len(done.output) > 20_000 or not done.message:
            return Trial("recipe", description, "unclear", f"{len(done.output)} characters")
        return Trial("recipe", description, "refused", done.message)

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

    def checkpoint(self) -> Trial:
        """Damage a run that was stopped after four steps, then resume it."""
        raw = self.recipe()
        whole, folder = self.whole(raw), self.new_folder()
        run_dir = folder / "run"
        shutil.copytree(whole, run_dir)
        newest = run_dir / "checkpoints" / f"step_{STEPS:06d}"
        shutil.rmtree(newest)
        shutil.rmtree(run_dir / "checkpoints" / f"step_{STEPS - 1:06d}")
        what = "; ".join(self.damage(run_dir) for _ in range(self.random.choice((1, 1, 2))))
        words = ("--resume", "--step", "2") if self.random.random() < 0.2 else ("--resume",)
        what += f"; {' '.join(words)}"
        done = self.run(raw, folder, *words)
        if done.has_traceback:
            return Trial("checkpoint", what, "traceback", done.output[-3000:])
        if done.timed_out:
            return Trial("checkpoint", what, "hung", done.output[-500:])
        if done.status != 0:
            return Trial("checkpoint", what, "refused", done.message)
        ours = [text for text in differences(run_dir, whole) if not text.startswith("records")]
        if ours:
            return Trial("checkpoint", what, "wrong", "; ".join(ours))
        return Trial("checkpoint", what, "right")

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
    """Return a recipe as TOML, with infinities and NaN as TOML writes them.

    Raises:
        ValueError: it has no such form.
    """
    import tomli_w

    try:
        return tomli_w.dumps(raw)
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from error


PARTS: dict[str, Callable[[Campaign], Trial]] = {
    "kill": Campaign.kill,
    "signal": Campaign.signal,
    "scores": Campaign.scores,
    "rollouts": Campaign.rollouts,
    "recipe": Campaign.recipe_of_nonsense,
    "checkpoint": Campaign.checkpoint,
}


def print_table(trials: list[Trial]) -> None:
    """Print how trials ended, by part, and what went wrong."""
    by_part: dict[str, Counter[str]] = defaultdict(Counter)
    for trial in trials:
        by_part[trial.part][trial.outcome] += 1
        by_part["all"][trial.outcome] += 1
    print(f"{'':<12}{'trials':>8}" + "".join(f"{name:>11}" for name in OUTCOMES))
    for part, outcomes in by_part.items():
        print(
            f"{part:<12}{outcomes.total():>8}"
            + "".join(f"{outcomes[name]:>11}" for name in OUTCOMES)
        )


def main() -> int:
    """Run trials until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--verbose", action="store_true", help="print every trial")
    arguments = parser.parse_args()
    server = child.server()
    with tempfile.TemporaryDirectory(prefix="prime_composer_campaign_") as name:
        folder = Path(name)
        os.environ["PRIME_COMPOSER_CACHE"] = str(folder / "cache")
        campaign = Campaign(random.Random(arguments.seed), folder, server)
        end = time.monotonic() + 60 * arguments.minutes
        trials = hunt(campaign, arguments.only, end, arguments.verbose)
    server.close()
    print_table(trials)
    return int(any(trial.outcome in BAD for trial in trials))


def hunt(campaign: Campaign, parts: list[str], end: float, verbose: bool) -> list[Trial]:
    """Run trials of each part in turn, and print those that went wrong."""
    from tests.faults.server import SpoilingServer
    from tests.local.helpers import tiny_models

    paths = tiny_models(campaign.recipe())
    trials = []
    with (
        SpoilingServer(paths["teacher"], other=paths["student"]) as campaign.teacher,
        SpoilingServer(paths["student"]) as campaign.student,
    ):
        while time.monotonic() < end:
            part = parts[len(trials) % len(parts)]
            trial = PARTS[part](campaign)
            trials.append(trial)
            if trial.outcome in BAD:
                print(f"--- {trial.outcome}: {part}, {trial.what}\n{trial.detail}\n", flush=True)
            elif verbose:
                print(f"{trial.outcome}: {part}, {trial.what}: {trial.detail[:200]}", flush=True)
            for old in campaign.folder.glob("trial_*"):
                shutil.rmtree(old, ignore_errors=True)
    return trials


if __name__ == "__main__":
    sys.exit(main())
