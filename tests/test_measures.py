"""What does not grow with features: sizes of files and functions, modules per room, parameters.

`python -m tests.measures` prints the numbers. A limit below is the goal, or today's number where
that is still above it; such a number may only fall.
"""

from tests.measures import (
    comparisons_of_backends,
    containers_of_scores,
    file_lines,
    functions,
    modules_per_folder,
)

LONGEST_FILE = 500
LONGER_FILES = {"backends/http.py": 599}
LONGEST_BODY = 70
DEEPEST_BLOCK = 4
MODULES = 16
MORE_MODULES = {"losses": 34}
TAKE_A_RECIPE = 34
CONTAINERS = {"contract.Scores", "contract.Support"}
"""A teacher's response from the wire to the loss: the record, and its columns at the loss."""


def test_no_file_is_longer_than_its_limit() -> None:
    too_long = {
        name: count
        for name, count in file_lines().items()
        if count > LONGER_FILES.get(name, LONGEST_FILE)
    }
    assert not too_long


def test_no_function_is_longer_or_deeper_than_the_limits() -> None:
    found = functions()
    assert [f.name for f in found if f.body > LONGEST_BODY or f.nesting > DEEPEST_BLOCK] == []


def test_no_room_has_more_modules_than_its_limit() -> None:
    crowded = {
        room: count
        for room, count in modules_per_folder().items()
        if count > MORE_MODULES.get(room, MODULES)
    }
    assert not crowded


def test_few_functions_take_a_whole_recipe() -> None:
    takers = [f.name for f in functions() if f.takes_recipe]
    assert len(takers) <= TAKE_A_RECIPE, takers


def test_scores_have_two_containers() -> None:
    assert set(containers_of_scores()) == CONTAINERS


def test_backends_are_compared_by_their_registry_alone() -> None:
    assert comparisons_of_backends() == []
