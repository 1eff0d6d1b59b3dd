"""A task of an environment by id, in the place of a problem."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from prime_composer.problems.config import Problem


@dataclass(frozen=True)
class Task(Problem):
    """A task of an environment by id: ``question`` is its prompt's text, ``answer`` is empty."""

    index: int = 0  # its place among the environment's tasks
    messages: str = "[]"  # that it begins with, as JSON


class Parts(NamedTuple):
    """Problems and tasks of a list of both, by their places in it."""

    problems: dict[int, Problem]  # what is asked with one prompt
    tasks: dict[int, Task]  # what is played


def problems_and_tasks(both: Iterable[Problem]) -> Parts:
    """Tell the problems of a list from its tasks."""
    parts = Parts({}, {})
    for place, one in enumerate(both):
        if isinstance(one, Task):
            parts.tasks[place] = one
        else:
            parts.problems[place] = one
    return parts
