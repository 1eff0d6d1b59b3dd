"""The list of mutants stays in step with the code and with its recorded result; ``python tests/mutants.py`` runs it."""

from tests.mutation.mutants import MUTANTS, RESULT, ROOT


def test_every_mutant_still_finds_its_line():
    for name, (file, right, wrong) in MUTANTS.items():
        source = (ROOT / "prime_composer" / file).read_text()
        assert source.count(right) == 1, (
            f"{name}: {right!r} stands {source.count(right)} times in {file}"
        )
        assert right != wrong


def test_the_recorded_result_names_a_killer_for_every_mutant():
    recorded = dict(line.rsplit(": ", 1) for line in RESULT.read_text().splitlines())
    assert recorded.keys() == MUTANTS.keys(), "run python tests/mutants.py"
    assert "SURVIVED" not in recorded.values()
