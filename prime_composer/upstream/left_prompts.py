"""Prompts that a teacher reads in the place of the student's, where the trainer asks it.

The orchestrator has the messages and writes the prompts, and no field of prime-rl's sample can
carry them. It leaves them in the folder of the launch, a file per prompt that the student read: a
group of rollouts shares one. The trainer finds a file by the tokens before an answer.
"""

import os
import secrets
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from prime_composer.backends.protocols import Rollout, Scorer
from prime_composer.teachers.own_prompt import OwnPromptScorer, StudentAnswer
from prime_composer.upstream import launches
from prime_composer.upstream.keys import PROMPTS_KEY, SWITCH

SECONDS = 30  # That a file may take to come, on a file system of several machines


def leave(name: str, answers: Sequence[StudentAnswer]) -> None:
    """Write what the teacher that is served as ``name`` reads before each answer of a rollout."""
    for answer in answers:
        file = _file(name, answer.rollout.token_ids[: answer.start].tolist())
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            unfinished = file.with_suffix(f".{secrets.token_hex(4)}")
            unfinished.write_bytes(np.asarray(answer.prompt, "<i4").tobytes())
            os.replace(unfinished, file)


class LeftPromptScorer(OwnPromptScorer):
    """Scores of a student's answers behind the prompts that the orchestrator has left."""

    def __init__(self, scorer: Scorer, name: str):
        self.scorer, self._name = scorer, name

    def pieces(self, rollout: Rollout) -> list[StudentAnswer]:
        """Return the answers in a rollout: the tokens that train, in runs."""
        mask = rollout.loss_mask.numpy()
        edges = np.diff(mask, prepend=False, append=False).nonzero()[0].tolist()
        pieces = []
        for first, last in zip(edges[::2], edges[1::2], strict=True):
            own = Rollout.not_sampled(rollout.token_ids[:last], first, rollout.finish_reason)
            pieces.append(StudentAnswer(own, self._left(rollout.token_ids[:first].tolist())))
        return pieces

    def _left(self, read: Sequence[int]) -> list[int]:
        """Return the teacher's prompt in the place of what the student read."""
        file, until = _file(self._name, read), time.monotonic() + SECONDS
        while not file.exists():
            if time.monotonic() > until:
                raise ValueError(
                    f"{PROMPTS_KEY}: the orchestrator has left no prompt of {self._name!r} for "
                    f"{len(read)} tokens of the student in {file.parent}: let both processes reach "
                    "that folder, and begin in one launch."
                )
            time.sleep(0.2)
        return np.fromfile(file, "<i4").tolist()


def _file(name: str, read: Sequence[int]) -> Path:
    """Return where the prompt of a teacher lies, by what the student read in its place."""
    launch = launches.own()
    if launch is None:
        raise ValueError(
            f"{PROMPTS_KEY}: where the trainer asks, prompts go through the folder of a launch: "
            f"start by prime-rl's launcher `rl`, or give each process its {SWITCH}=@FILE."
        )
    digest = sha256(name.encode() + b"\0" + np.asarray(read, "<i4").tobytes()).hexdigest()
    return launch / "prompts" / digest
