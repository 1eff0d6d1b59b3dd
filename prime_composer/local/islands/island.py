"""One island of several: a whole run whose weights are averaged with those of the others.

Islands compare before the first step, twice: their recipes, before a model is opened, to choose the
step to start from; and what they have opened. One that comes back to a run that goes on starts from
its own newest step, and torchft gives it the others' state at its first outer step.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from prime_composer.contract import given
from prime_composer.local.engine import Engine
from prime_composer.local.islands.join import Facts, IslandRefused, Join, json_digest
from prime_composer.local.islands.outer import OuterSteps
from prime_composer.local.student import Student
from prime_composer.local.watch import Watch, WatchFailed
from prime_composer.recipe.schema import Recipe
from prime_composer.samplers.server import ServerSampler


def tensors_digest(tensors: Sequence[Tensor]) -> str:
    """Return the SHA-256 of tensors' bytes, in their order."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


class Island:
    """This process among the islands of a run."""

    outer: OuterSteps  # from ``meet`` on

    def __init__(self, recipe: Recipe, index: int, lighthouse: str, status: Callable[[str], None]):
        self.config, self.status = given(recipe.diloco), status
        self.place = (index, self.config.replicas)  # its number, and how many there are
        self.evaluates = index == 0  # it measures the student for all of them
        self.finished = 0  # the last step after which an outer step was taken
        self.metrics: dict[str, float] = {}  # of the last outer step
        self.warning = ""  # what went wrong at it; empty where nothing did
        self._names = [f"island {one}" for one in range(self.config.replicas)]
        self._join = Join(lighthouse, self._names[index], recipe)
        self._opened = ExitStack()

    def __enter__(self) -> "Island":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()
        self._join.leave()

    def join(self, starts: Sequence[int]) -> int | None:
        """Compare recipes with the others, and return the step to start from.

        ``starts`` are the finished steps of the checkpoints that this island can start from; 0
        alone for a new run. The result is the newest that every island has; None where the others
        train already.
        """
        self._join.say("starts", list(starts))
        everyone = {self._join.name: list(starts)}
        everyone |= {other: facts["starts"] for other, facts in self._gather("starts").items()}
        if self._join.is_late:
            return None
        if common := set(starts).intersection(*everyone.values()):
            return max(common)
        raise IslandRefused(
            f"the islands have no step in common to start from ({everyone}): give --resume on all "
            "of them, or --overwrite on all for a new run"
        )

    def meet(self, student: Student, engine: Engine, watch: Watch, state: Any = None) -> None:
        """Compare what the islands have opened, and begin to take outer steps with them.

        ``state`` is that of ``outer`` in the checkpoint; None for a new run.
        """
        served = engine.sampler.started() if isinstance(engine.sampler, ServerSampler) else None
        teachers = json.dumps(watch.state_dict()["teachers"], default=Tensor.tolist)
        digests = {
            "problems": json_digest(engine.data_digests),
            "teachers' tokenizers": json_digest(engine.tokenizer_pairs),
        }
        if not self._join.is_late:
            digests["student's weights at the start"] = tensors_digest(student.trained)
        self._join.say("opened", {"sampler": served, "teachers": teachers}, **digests)
        for other, theirs in self._gather("opened").items():
            if served is not None and served == theirs["opened"]["sampler"]:
                raise IslandRefused(
                    f"[rollout] {self._join.name} and {other} have one sampler at their "
                    "rollout.url, which can have the weights of one of them: start a server for "
                    "each"
                )
            self._compare_teachers(watch, other, theirs["opened"]["teachers"])
        self._student, self.finished = student, student.steps
        self.outer = OuterSteps(
            *(self.config, self.place[0], self._join.lighthouse, student.trained),
            *(self._save, self._load, state),
        )
        self._opened.callback(self.outer.close)
        self._join.say("running", True)
        self._gather("running")  # an outer step waits for whoever is there

    def is_outer(self, step: int) -> bool:
        """Return whether an outer step belongs to the end of a step."""
        return step % self.config.every == 0

    def end_step(self, step: int) -> None:
        """Count a step of the student, and take the outer step where it is due.

        It may change weights, optimizer and number of the student's steps: to those of the others,
        for an island that was away, or back to the last outer step, where this one failed.
        """
        self.warning, before = "", self.finished
        self.outer.count_step()
        if not self.is_outer(step):
            return
        taken, together = self.outer.manager.current_step(), self.outer.manager.num_participants()
        self.metrics = {"islands/outer_steps": float(taken), "islands/together": float(together)}
        self.finished = self._student.steps = taken * self.config.every
        if self.finished == before:
            self.warning = (
                f"the outer step failed ({self.outer.failure}); "
                f"the steps {self.finished + 1} to {step} are taken again"
            )
        elif self.finished != step:
            self.warning = f"took over step {self.finished} from the other islands"

    def _save(self) -> dict[str, Any]:
        """Return the state that an island which comes back takes over."""
        trained = [parameter.detach().clone() for parameter in self._student.trained]
        return {"trained": trained, "student": self._student.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        """Take over another island's state."""
        with torch.no_grad():
            for parameter, value in zip(self._student.trained, state["trained"], strict=True):
                parameter.copy_(value)
        self._student.load_state_dict(state["student"], self._student.steps)

    def _gather(self, key: str) -> dict[str, Facts]:
        return self._join.gather(key, self._names, self.config.wait, self.status)

    def _compare_teachers(self, watch: Watch, other: str, theirs: str) -> None:
        """Ask this island's teachers what those of another have answered, as a resumed run does.

        No digest tells it: processors round differently.
        """

        def tensors(table: dict[str, Any]) -> dict[str, Any]:
            return {k: torch.tensor(v) if isinstance(v, list) else v for k, v in table.items()}

        teachers = json.loads(theirs, object_hook=tensors)
        try:
            watch.load_state_dict({"safe_step": watch.safe_step, "teachers": teachers})
        except WatchFailed as error:
            raise IslandRefused(
                f"{self._join.name} has another teacher than {other}, by a question with a known "
                f"answer: {error}"
            ) from error
