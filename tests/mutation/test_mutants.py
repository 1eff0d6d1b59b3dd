"""The mutants fit the code, and so does their recorded result. ``python -m tests.mutation.run``."""

import ast

import pytest

from tests.mutation import run
from tests.mutation.mutants import MUTANTS, TESTS
from tests.mutation.run import RESULTS, ROOT, read_results
from tests.mutation.tree import mutated


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS.values()}))
def test_every_mutant_finds_exactly_one_place(file):
    source = (ROOT / "prime_composer" / file).read_text()
    for name, mutant in MUTANTS.items():
        if mutant.file == file:
            try:
                ast.parse(mutated(source, mutant.function, mutant.edits))
            except (LookupError, ValueError) as error:
                pytest.fail(f"{name}: {error}")


def test_every_mutant_has_tests_that_exist():
    assert {mutant.file for mutant in MUTANTS.values()} <= TESTS.keys()
    missing = {test for tests in TESTS.values() for test in tests if not (ROOT / test).exists()}
    assert not missing


def test_the_recorded_results_name_a_killer_for_every_mutant():
    results = read_results()
    assert results.keys() == MUTANTS.keys(), f"python -m tests.mutation.run writes {RESULTS.name}"
    survivors = {name for name, result in results.items() if result == "SURVIVED"}
    assert survivors == {name for name, mutant in MUTANTS.items() if mutant.survives_because}
    for killer in {*results.values()} - {"SURVIVED"}:
        file, _, test = killer.partition("::")
        name = test.partition("[")[0].partition("@")[0]
        assert f"def {name}(" in (ROOT / file).read_text(), killer


def test_the_recorded_results_are_as_the_program_writes_them(tmp_path, monkeypatch):
    """A row by hand is neither there twice nor in another place, and the last line counts them."""
    results = read_results()
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results.md")
    run.write_results(results)
    assert run.RESULTS.read_text() == RESULTS.read_text()
