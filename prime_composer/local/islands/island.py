"""One island of several: a whole run whose weights are averaged with those of the others.

Islands meet at the board before the first step, twice. Before a model is opened they compare their
recipes, and choose the step to continue from. Afterwards they compare what they have opened. An
island that comes back to a run takes over the others' state at their next outer step.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from prime_composer.backends.protocols import Sampler
from prime_composer.local.engine import Engine
from prime_composer.local.islands.board import Card, Seat
from prime_composer.local.islands.outer import OuterStepFailed, OuterSteps, own_address
from prime_composer.local.run_dir.recipe_file import Tables, differing_keys
from prime_composer.local.student import Student
from prime_composer.local.watch import Watch, WatchFailed
from prime_composer.recipe.diloco import DilocoConfig
from prime_composer.samplers.server import ServerSampler

OWN_KEYS = re.compile(
    r"output_dir|logging(\..*)?"
    r"|(student|teacher|teachers\.[^.]+|reference)\.(model|head|tape)"
    r"|(teacher|teachers\.[^.]+|rollout)\.(url|api_key_var|wait|timeout|gpu_memory_utilization)"
    r"|rollout\.weights_dir|(data|environments\.[^.]+|replay)\.path"
)
"""Keys in which islands may differ: where things are. What is there is compared by itself."""

KEPT_SIGNS = 8
"""Outer steps whose weights have a sign on an island's card."""

SAME_WEIGHTS = 1e-5
"""Distance of two islands' weights, as a share of their norm, along the directions of ``sign_of``.
Processors that round differently move them apart by some 1e-8 at each outer step. ``every`` steps
of AdamW on other rollouts do so by 1e-4 or more."""


class IslandRefused(ValueError):
    """Islands do not belong to one run, or no longer do. The message names both."""


def digest_of(tensors: Sequence[Tensor]) -> str:
    """Return the SHA-256 of tensors' bytes, in their order."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def sign_of(tensors: Sequence[Tensor]) -> list[float]:
    """Return the norm of all tensors together, then the sum of each, in float64."""
    sums = [tensor.detach().sum(dtype=torch.float64) for tensor in tensors]
    norm = torch.stack([tensor.detach().double().norm() for tensor in tensors]).norm()
    return [float(norm), *map(float, sums)]


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return how far the weights of two signs are apart, as a share of their norm."""
    return math.dist(one[1:], other[1:]) / one[0]


class Island:
    """This process among the islands of a run.

    Attributes:
        finished: the last step after which an outer step was taken; 0 at the start.
        is_late: the others train already.
        warning: what went wrong at the last outer step; empty where nothing did.
    """

    def __init__(
        self, config: DilocoConfig, index: int, lighthouse: str, status: Callable[[str], None]
    ):
        if not 0 <= index < config.replicas:
            raise IslandRefused(
                f"--island {index}: diloco.replicas = {config.replicas}, so name one of 0 to "
                f"{config.replicas - 1}"
            )
        self.config, self.index, self.status = config, index, status
        self.finished = 0
        self.is_late = False
        self.warning = ""
        self._is_done = False
        self._signs: dict[str, list[float]] = {}
        self._steps: OuterSteps | None = None
        self._seat = Seat(lighthouse, index)

    def __enter__(self) -> "Island":
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: object, _: object) -> None:
        if error is not None:
            self._seat.say(left=str(error) or "it was stopped")
        elif self._steps is not None and not self._is_done:
            self._seat.say(stopped=True)
        if self._steps is not None:
            self._steps.close()
        self._seat.close()

    def join(self, tables: Tables, starts: Sequence[int]) -> int | None:
        """Compare recipes with the others, and return the step to start from.

        ``starts`` are the finished steps of the checkpoints that this island can start from; 0
        alone for a new run. The result is the newest that every island has; None where the others
        train already.
        """
        self._compare_lighthouse()
        address = own_address(self._seat.lighthouse)
        self._seat.say(recipe=dict(tables), starts=list(starts), address=address)
        cards = self._gather("recipe")
        for other, card in cards.items():
            self._compare_recipes(tables, other, card["recipe"])
            self._compare_addresses(address, other, card["address"])
        if self.is_late:
            return None
        everyone = {self.index: list(starts)} | {
            other: card["starts"] for other, card in cards.items()
        }
        common = set(starts).intersection(*everyone.values())
        if not common:
            have = "; ".join(
                f"island {one} {'a new run' if steps == [0] else f'step {_listed(steps)}'}"
                for one, steps in sorted(everyone.items())
            )
            raise IslandRefused(
                f"the islands have no step in common to start from ({have}): give --resume on all "
                "of them, or --overwrite on all for a new run"
            )
        return max(common)

    def meet(self, student: Student, engine: Engine, watch: Watch, state: Any = None) -> None:
        """Compare what the islands have opened, and begin to take outer steps with them.

        ``watch`` takes the questions of the first island. ``state`` is ``state_dict`` of the
        checkpoint; None for a new run.
        """
        self._student, self._engine, self._state = student, engine, state
        self.finished = student.steps
        server = None
        if isinstance(engine.sampler, ServerSampler):
            server = engine.sampler.started()
            if self.is_late:  # the weights of the one that trains must stay in it
                for other, card in self._gather("facts").items():
                    self._compare_servers(server, other, card["facts"]["server"])
            engine.sampler.update_weights(engine.model)  # which marks its server
        facts = {
            "server": server,
            "weights": digest_of(student.trained),
            "problems": engine.data_digests,
            "tokenizers": engine.tokenizer_pairs,
            "sampler": sampler_sign(engine.sampler),
            "teachers": plain(watch.state_dict()["teachers"]),
        }
        self._seat.say(facts=facts)
        cards = self._gather("facts")
        sign = sampler_sign(engine.sampler)
        for other, card in cards.items():
            self._compare_facts(facts, sign, other, card["facts"])
        if cards and ((first := min(cards)) < self.index or self.is_late):
            self._compare_teachers(watch, first, cards[first]["facts"]["teachers"])
        self._seat.say(checked=True)
        if not self.is_late:
            self._open_outer_steps()
            self._gather("checked")

    def begin(self) -> None:
        """Begin the steps. Where the others train already, take over their state if it is newer."""
        if self.is_late:
            self._open_outer_steps()
            if self._is_behind:
                self.status("waiting for the other islands' next outer step, to take their state")
                before = self._outer.taken
                for _ in range(self.config.every):
                    self._outer.count_step()
                if self._outer.taken == before:
                    raise self._not_taken_over()
                self._note_outer_step()
                self._engine.end_step(self._student.steps)
        self._seat.say(running=True, **self._now)

    @property
    def place(self) -> tuple[int, int]:
        """The number of this island, and how many there are."""
        return self.index, self.config.replicas

    @property
    def evaluates(self) -> bool:
        """Whether this island measures the student for all of them."""
        return self.index == 0

    def is_outer(self, step: int) -> bool:
        """Return whether an outer step belongs to the end of a step."""
        return step % self.config.every == 0

    def end_step(self, step: int) -> None:
        """Count a step of the student, and take the outer step where it is due.

        It may change weights, optimizer and number of the student's steps: to those of the others,
        for an island that was away, or back to the last outer step, where this one failed.
        """
        self.warning = ""
        if not self.is_outer(step):
            self._outer.count_step()
            return
        if gone := [other for other, seen in self._seat.others.items() if "done" in seen.card]:
            raise IslandRefused(
                f"island {_listed(gone)} has finished without island {self.index}, which is at "
                f"step {self.finished}: it was away or slower than diloco.wait = "
                f"{self.config.wait:g} s allows. The student of the run is that of island {gone[0]}"
            )
        before, was_behind = self._outer.taken, self._is_behind
        self._outer.count_step()
        self._note_outer_step()
        if self._outer.taken == before:
            if was_behind:
                raise self._not_taken_over()
            self.warning = (
                f"the outer step failed ({self._outer.failure or 'too few islands'}); "
                f"the steps {self.finished + 1} to {step} are taken again"
            )
        elif self.finished != step:
            self.warning = f"took over step {self.finished} from the other islands"
        self._seat.say(**self._now)
        self._check_same_weights()

    @property
    def metrics(self) -> dict[str, float]:
        """Outer steps so far, and the islands that took part in the last one."""
        return {
            "islands/outer_steps": float(self._outer.taken),
            "islands/together": float(self._outer.islands),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides the student's own state."""
        return self._outer.state_dict()

    def finish(self) -> None:
        """Say that the last step is done."""
        self._seat.say(done=True)
        self._is_done = True
        self._check_same_weights()

    @property
    def _outer(self) -> OuterSteps:
        assert self._steps is not None, "meet or begin opens it"
        return self._steps

    @property
    def _alive(self) -> Mapping[int, Any]:
        """The islands that take part, or have left with an error a moment ago."""
        return {
            other: seen
            for other, seen in self._seat.others.items()
            if seen.alive and not seen.card.keys() & {"done", "stopped"}
        }

    @property
    def _is_behind(self) -> bool:
        """Whether another island has taken an outer step that this one has not."""
        taken = self._outer.taken
        return any(seen.card.get("outer", 0) > taken for seen in self._alive.values())

    def _not_taken_over(self) -> OuterStepFailed:
        return OuterStepFailed(
            f"island {self.index} could not take over the state of the others, which are ahead of "
            f"it ({self._outer.failure or 'too few islands'}): let the machines reach each other's "
            f"ports in both directions, or raise diloco.timeout = {self.config.timeout:g} s on all "
            "of them"
        )

    @property
    def _now(self) -> dict[str, Any]:
        return {"outer": self._outer.taken, "signs": self._signs}

    def _open_outer_steps(self) -> None:
        student = self._student
        self._steps = OuterSteps(
            self.config,
            self.index,
            self._seat.lighthouse,
            student.trained,
            self._save,
            self._load,
            self.finished // self.config.every,
        )
        if self._state is not None:
            self._steps.load_state_dict(self._state)

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

    def _note_outer_step(self) -> None:
        self.finished = self._outer.taken * self.config.every
        self._student.steps = self.finished
        self._signs[str(self._outer.taken)] = sign_of(self._student.trained)
        for old in [*self._signs][:-KEPT_SIGNS]:
            del self._signs[old]

    def _check_same_weights(self) -> None:
        """Compare the weights after outer steps that other islands have taken as well."""
        for other, seen in self._seat.others.items():
            theirs = seen.card.get("signs", {})
            for outer in self._signs.keys() & theirs.keys():
                # Not written as > SAME_WEIGHTS, which a NaN passes.
                if not distance(self._signs[outer], theirs[outer]) <= SAME_WEIGHTS:
                    raise IslandRefused(
                        f"after outer step {outer} the weights of island {self.index} are not "
                        f"those of island {other}: one went on without the other. Continue from "
                        "the checkpoint of an earlier step with --resume --step on all islands"
                    )

    def _gather(self, key: str) -> dict[int, Card]:
        """Wait until the card of every other island has an entry, and return these cards.

        Where others train already, theirs alone are returned at once.
        """
        others = {*range(self.config.replicas)} - {self.index}
        shown: set[int] = set()

        def lacking() -> set[int]:
            alive = self._alive
            return {i for i in others if i not in alive or key not in alive[i].card}

        def is_there() -> bool:
            cards = {other: seen.card for other, seen in self._alive.items()}
            running = any("running" in card and "left" not in card for card in cards.values())
            self.is_late = self.is_late or (running and key != "checked")
            for other, card in cards.items():
                if "left" in card and not running:
                    raise IslandRefused(f"island {other} has ended: {card['left']}")
            missing = lacking()
            if missing and not self.is_late and not missing <= shown:
                shown.update(missing)
                self.status(f"waiting for island {_listed(sorted(missing))}")
            return self.is_late or not missing

        if not self._seat.wait_for(is_there, self.config.wait):
            missing = _listed(sorted(lacking()))
            raise IslandRefused(
                f"island {missing} did not come within diloco.wait = {self.config.wait:g} s; start "
                "it with --island and the same --lighthouse"
            )
        needed = "running" if self.is_late else key
        return {other: seen.card for other, seen in self._alive.items() if needed in seen.card}

    def _compare_lighthouse(self) -> None:
        mine = self.config.of_lighthouse
        for key, value in self._seat.settings.items():
            if value != mine[key]:
                raise IslandRefused(
                    f"the lighthouse was started with {key} = {value:g}, and island {self.index} "
                    f"has {mine[key]:g}: give both the same file and --set"
                )

    def _compare_recipes(self, tables: Tables, other: int, theirs: Tables) -> None:
        keys = [key for key in differing_keys(theirs, tables) if not OWN_KEYS.fullmatch(key)]
        if keys:
            raise IslandRefused(
                f"the recipes of island {self.index} and island {other} differ in "
                f"{', '.join(keys)}: give both the same file and --set"
            )

    def _compare_addresses(self, mine: str, other: int, theirs: str) -> None:
        if mine.startswith("127.") != theirs.startswith("127."):
            raise IslandRefused(
                f"island {self.index} is reached at {mine}, and island {other} at {theirs}: give "
                "each a --lighthouse by an address that all machines reach, not 127.0.0.1"
            )

    def _compare_servers(self, mine: str | None, other: int, theirs: str | None) -> None:
        if mine is not None and mine == theirs:
            raise IslandRefused(
                f"[rollout] island {self.index} and island {other} have one sampler at their "
                "rollout.url, which can have the weights of one of them: start a server for each"
            )

    def _compare_facts(
        self, mine: Mapping[str, Any], sign: str | None, other: int, theirs: Mapping[str, Any]
    ) -> None:
        self._compare_servers(sign, other, theirs["sampler"])
        both = f"island {self.index} and island {other}"
        names = {"problems": "[data] the problems", "tokenizers": "the teachers' tokenizers"}
        if not self.is_late:
            names["weights"] = "[student] the weights at the start"
        for name, words in names.items():
            if mine[name] != theirs[name]:
                raise IslandRefused(f"{words} of {both} are not the same: give both the same files")

    def _compare_teachers(self, watch: Watch, other: int, theirs: Mapping[str, Any]) -> None:
        """Ask this island's teachers what those of another island have answered."""
        try:
            watch.load_state_dict({"safe_step": watch.safe_step, "teachers": tensors(theirs)})
        except WatchFailed as error:
            raise IslandRefused(
                f"island {self.index} has another teacher than island {other}, by a question with "
                f"a known answer: {error}"
            ) from error


def sampler_sign(sampler: Sampler) -> str | None:
    """Return what a sampler's server says of its weights; None for one in this process."""
    return sampler.sign() if isinstance(sampler, ServerSampler) else None


def plain(value: Any) -> Any:
    """Return nested dicts with lists in the place of tensors, as JSON takes them."""
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist(),
                "shape": list(value.shape)}  # fmt: skip
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def tensors(value: Any) -> Any:
    """Return what ``plain`` was given."""
    if isinstance(value, dict) and value.keys() == {"dtype", "values", "shape"}:
        made = torch.tensor(value["values"], dtype=getattr(torch, value["dtype"]))
        return made.reshape(value["shape"])
    return {key: tensors(item) for key, item in value.items()} if isinstance(value, dict) else value


def _listed(items: Sequence[int]) -> str:
    return ", ".join(map(str, items))
