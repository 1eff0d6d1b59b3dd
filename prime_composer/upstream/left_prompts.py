"""Prompts that a teacher reads in the place of the student's, where the trainer asks it.

The orchestrator has the messages and writes the prompts, and no field of prime-rl's sample can
carry them. It leaves them in the folder of the launch, a file per prompt that the student read, of
which a group of rollouts shares one. The trainer finds a file by the tokens before an answer. Each
hour has a folder, and those of some hours ago are removed.
"""

import os
import secrets
import shutil
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from prime_composer.backends.alignment import runs_of
from prime_composer.backends.protocols import Rollout, Scorer
from prime_composer.teachers.own_prompt import OwnPromptScorer, StudentAnswer
from prime_composer.upstream import launches
from prime_composer.upstream.keys import PROMPTS_KEY, SWITCH

HOURS_KEPT = 3  # More than a rollout waits for its step


def leave(name: str, answers: Sequence[StudentAnswer]) -> None:
    """Write what the teacher that is served as ``name`` reads before each answer of a rollout."""
    now = int(time.time() // 3600)
    folder = _prompts() / str(now)
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.parent.iterdir():
            if int(old.name) < now - HOURS_KEPT:
                shutil.rmtree(old, ignore_errors=True)
    for answer in answers:
        file = folder / _digest(name, answer.rollout.token_ids[: answer.start].tolist())
        prompt = np.asarray(answer.prompt, "<i4").tobytes()
        if not file.exists():
            unfinished = file.with_suffix(f".{secrets.token_hex(4)}")
            unfinished.write_bytes(prompt)
            os.replace(unfinished, file)
        elif file.read_bytes() != prompt:
            raise ValueError(
                f"{PROMPTS_KEY}: {name!r} has two prompts for one of the student: its template "
                "writes what the student's leaves out, as earlier reasoning. Let the orchestrator "
                'ask (asked_by = "orchestrator", and a number k).'
            )


class LeftPromptScorer(OwnPromptScorer):
    """Scores of a student's answers behind the prompts that the orchestrator has left."""

    def __init__(self, scorer: Scorer, name: str):
        self.scorer, self._name = scorer, name

    def pieces(self, rollout: Rollout) -> list[StudentAnswer]:
        """Return the answers in a rollout: the tokens that train, in runs."""
        pieces, ids = [], rollout.token_ids
        for run in runs_of(rollout.loss_mask):
            own = Rollout.not_sampled(ids[: run.stop], run.start, rollout.finish_reason)
            pieces.append(StudentAnswer(own, self._left(ids[: run.start].tolist())))
        return pieces

    def _left(self, read: Sequence[int]) -> list[int]:
        """Return the teacher's prompt in the place of what the student read."""
        folder, digest, until = _prompts(), _digest(self._name, read), None
        while True:
            if found := max(folder.glob(f"*/{digest}"), default=None):
                return np.fromfile(found, "<i4").tolist()
            until = until or time.monotonic() + launches.WAIT
            if time.monotonic() > until:
                raise ValueError(
                    f"{PROMPTS_KEY}: the orchestrator has left no prompt of {self._name!r} for "
                    f"{len(read)} tokens of the student in {folder}: let both processes reach that "
                    "folder, and begin in one launch."
                )
            time.sleep(0.2)


def _prompts() -> Path:
    """Return the folder of all prompts of this launch."""
    launch = launches.own()
    if launch is None:
        raise ValueError(
            f"{PROMPTS_KEY}: where the trainer asks, prompts go through the folder of a launch: "
            f"start by prime-rl's launcher `rl`, or give each process its {SWITCH}=@FILE."
        )
    return launch / "prompts"


def _digest(name: str, read: Sequence[int]) -> str:
    """Return the file's name of a teacher's prompt, by what the student read in its place."""
    return sha256(name.encode() + b"\0" + np.asarray(read, "<i4").tobytes()).hexdigest()
