"""A task of an environment by id, in the place of a problem."""

from dataclasses import dataclass

from prime_composer.problems.config import Problem


@dataclass(frozen=True)
class Task(Problem):
    """A task of an environment by id. ``question`` is the text of its prompt, ``answer`` is empty.

    Attributes:
        index: its place among the environment's tasks.
        messages: the messages that it begins with, as JSON.
    """

    index: int = 0
    messages: str = "[]"
