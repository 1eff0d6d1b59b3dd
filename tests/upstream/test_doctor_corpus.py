"""The doctor on real commits: every one since July 2026 that the checkout's refs name.

``corpus.json`` says by hand which roads work with which. Commits that it does not know are counted,
and nothing is said of them.
"""

import json
import subprocess
from pathlib import Path

import pytest

from prime_composer.upstream.versions.capabilities import ROADS
from prime_composer.upstream.versions.doctor import examine_sources
from tests.prime_rl_checkout import NO_CHECKOUT
from tests.upstream.signatures import TREES, Blobs, record, recorded

SAMPLE = 12
GROUPS = json.loads(Path(__file__).with_name("corpus.json").read_text())["groups"]
EXPECTED = {
    commit: (group["fails"], group["version"])
    for group in GROUPS
    for words in group["commits"]
    for commit in words.split()
}
"""Commit -> the roads that do not work with it, and the version whose configs it has."""


@pytest.fixture(scope="module")
def blobs(checkout):
    if checkout is None:
        pytest.skip(NO_CHECKOUT)
    reader = Blobs(checkout)
    yield reader
    reader.close()


def check(blobs, commits):
    """Compare the doctor's verdicts with those of ``corpus.json``."""
    wrong = []
    for commit in commits:
        report = examine_sources(blobs.sources(commit))
        fails = [road for road in ROADS if road not in report.working]
        found = fails, report.findings[-1].note.removeprefix("as ")
        if found != EXPECTED[commit[:12]]:
            lines = [str(finding) for finding in report.misfits()]
            wrong.append(f"{commit}: {found}, not {EXPECTED[commit[:12]]}; {lines}")
    assert not wrong, "\n".join(wrong)


def test_doctor_is_right_on_a_sample_of_real_commits(blobs):
    """Each group's first commit, and others evenly."""
    there = blobs.existing(EXPECTED)
    if not there:
        pytest.skip("this clone has none of the commits of corpus.json")
    firsts = [group["commits"][0].split()[0] for group in GROUPS]
    rest = [commit for commit in there if commit not in firsts]
    more = rest[:: max(1, len(rest) // (SAMPLE - len(firsts)))]
    chosen = [*(commit for commit in firsts if commit in there), *more][:SAMPLE]
    check(blobs, chosen)


@pytest.mark.slow
def test_doctor_is_right_on_every_commit_since_july(blobs, checkout, capsys):
    """The number of refs is a clone's own, so that it is printed and not asserted."""
    command = ["git", "-C", str(checkout), "for-each-ref", "--format=%(objectname) %(*objectname)"]
    refs = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    named = {line.split()[-1] for line in refs.splitlines()}
    known = sorted(commit for commit in named if commit[:12] in EXPECTED)
    with capsys.disabled():
        print(f"\ncorpus: {len(known)} of {len(EXPECTED)} commits of corpus.json are refs here")
    if not known:
        pytest.skip("this clone has none of the commits of corpus.json")
    check(blobs, known)


@pytest.mark.parametrize("tree", TREES)
def test_recorded_signatures_are_those_of_the_commit(blobs, tree):
    """`python -m tests.upstream.signatures` writes them again."""
    if not blobs.existing([TREES[tree]]):
        pytest.skip(f"this clone lacks {TREES[tree][:8]} ({tree})")
    assert record(blobs.sources(TREES[tree])) == recorded(tree)
