"""What processes of ours leave in the run directory, so that an absent one is noticed.

A process in which this package is absent cannot say so: it trains prime-rl's own loss. So the
launcher gives each launch a folder in the run directory, with the settings for all its processes.
The trainer's ranks and the orchestrator, each when it first works, leave a mark there. After the
first step a missing mark ends the run, or names it: the other ranks, the orchestrator,
``prime-composer report`` and the next resume look. Marks of other launches in the same directory do
not count, and a launch that trained nothing needs none.

Nobody looks where no process of a launch has the package.
"""

import os
import time
from pathlib import Path

from prime_composer.upstream.keys import SWITCH
from prime_composer.upstream.log import log
from prime_composer.upstream.silent_hook import SilentHook

FOLDER = "prime_composer"
SETTINGS = "settings.json"
ORCHESTRATOR, TRAINER = "orchestrator", "trainer_"  # Marks; a trainer's ends with its rank

TRAINED = ("checkpoints", "broadcasts")  # Folders of a run where a step leaves ``step_N``

HOOKED = "any(hasattr(finder, 'is_prime_composer') for finder in sys.meta_path)"
"""Python for whether an interpreter has our hooks, where ``sys`` is imported."""

WAIT = 90.0  # Seconds that a mark may be late: NFS keeps listings of a folder for up to a minute

BEGAN = time.time() - 1800  # Younger marks are of this start: processes need minutes to start

SEEN: set[Path] = set()  # Marks that this process has left or seen

REMEDY = (
    "Install this package for every process of the run (a plain `uv sync` removes it), set "
    f"{SWITCH} for each, and resume from an earlier checkpoint."
)


def begin(run_dir: Path, settings: str) -> Path:
    """Write the settings of a new launch, which may have passwords, and return their file."""
    folder = run_dir.resolve() / FOLDER / f"launch_{time.time_ns()}"
    folder.mkdir(parents=True)
    file = folder / SETTINGS
    with open(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as out:
        out.write(settings)
    return file


def own() -> Path | None:
    """Return the folder of the launch that this process is of; None where it has none."""
    value = os.environ.get(SWITCH, "").strip()
    file = Path(value[1:])
    return file.parent if value.startswith("@") and file.name == SETTINGS else None


def mark(name: str) -> None:
    """Say that this process runs, once; a trainer's mark ends with its rank."""
    folder = own()
    if folder is not None and (file := folder / name) not in SEEN:
        file.touch()
        SEEN.add(file)


def _written(file: Path) -> float:
    """Return when a file was written, in seconds; 0 where prime-rl has deleted it meanwhile."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _marks(folder: Path, since: float = 0.0) -> set[str]:
    return {file.name for file in folder.iterdir() if _written(file) >= since}


def judge_ranks(compares: bool) -> None:
    """Check after the first step that each rank of the trainer has the package.

    ``compares`` says whether the loss reads a teacher, so that the orchestrator needs it too. Where
    it must not be without, it was refused before the step.
    """
    folder, end = own(), time.monotonic() + WAIT
    if folder is None:
        return
    ranks = {f"{TRAINER}{rank}" for rank in range(int(os.environ.get("WORLD_SIZE", "1")))}
    while absent := ranks - _marks(folder, BEGAN):
        if time.monotonic() >= end:
            names = ", ".join(sorted(absent))
            raise SilentHook(
                f"prime_composer: the first step has ended, and these ranks of the trainer ran "
                f"without this package, on prime-rl's own loss: {names}. {REMEDY}"
            )
        time.sleep(1)
    if compares and ORCHESTRATOR not in _marks(folder, BEGAN):
        log(f"the orchestrator runs without this package, or asks no teacher. {REMEDY}", "error")


def judge_trainer() -> None:
    """Check, in the orchestrator, that the trainer has the package if it has trained a step."""
    mark(ORCHESTRATOR)
    folder = own()
    if folder is None or folder in SEEN:
        return
    if any(name.startswith(TRAINER) for name in _marks(folder, BEGAN)):
        SEEN.add(folder)
    elif _steps(folder, until=time.time() - WAIT):
        raise SilentHook(f"prime_composer: {_sentence(folder)}")


def missing(run_dir: Path, up_to: int | None = None) -> list[str]:
    """Return a sentence for each launch whose trainer had no mark and trained, up to a step."""
    folders = sorted((run_dir.resolve() / FOLDER).glob("launch_*"))
    ends = [*map(_began, folders[1:]), time.time()]
    return [
        _sentence(folder)
        for folder, until in zip(folders, ends, strict=False)
        if not any(name.startswith(TRAINER) for name in _marks(folder))
        and any(up_to is None or step <= up_to for step in _steps(folder, until))
    ]


def _began(folder: Path) -> float:
    return int(folder.name.removeprefix("launch_")) / 1e9


def _steps(folder: Path, until: float) -> list[int]:
    """Return the steps that were written since a launch began, and until a time."""
    files = (file for where in TRAINED for file in (folder.parents[1] / where).glob("step_*"))
    written = (file for file in files if _began(folder) < _written(file) < until)
    return [step for file in written if (step := int(file.name.removeprefix("step_"))) > 0]


def _sentence(folder: Path) -> str:
    return (
        f"the trainer of {folder} has trained, and without this package: it used prime-rl's own "
        f"loss. {REMEDY} Delete that folder if this was meant."
    )
