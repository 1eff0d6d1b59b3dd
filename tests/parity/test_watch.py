"""Watch the names of prime-rl that this package touches: one table, and each version's sources.

The table is ``capabilities``. A failure lists what changed, and therefore which hooks of
prime_composer/upstream to look at. The sources are read with ``ast``, so nothing of prime-rl has to
be importable.
"""

import re

import pytest

from prime_composer.upstream import autoload
from prime_composer.upstream.versions.capabilities import CAPABILITIES, PLAIN, find
from prime_composer.upstream.versions.sources import SourceTree, of_checkout, source_texts
from tests.prime_rl_checkout import VERSIONS


def touched(version):
    """The capabilities that we touch in a version: in v0.6 those of the five lines."""
    plain = version == "v0.6"
    return [each for each in CAPABILITIES if not plain or set(each.roads) & set(PLAIN)]


@pytest.mark.parametrize("version", VERSIONS)
def test_names_that_the_hooks_touch_are_unchanged(trees, version):
    sources = SourceTree(source_texts(of_checkout(trees(version))))
    findings = [find(capability, sources.signature) for capability in touched(version)]
    changed = [str(finding) for finding in findings if finding.misfits]
    unused = [
        str(finding.place)
        for finding in findings
        if finding.place is not None
        and not finding.place.attribute.endswith("__")
        and not sources.is_used(finding.place.attribute)
    ]
    assert (changed, unused) == ([], [])


@pytest.mark.parametrize("version", VERSIONS)
def test_names_that_change_in_a_version_are_noticed(trees, version):
    """Each needed name is renamed in the sources, and each function and class, one at a time."""
    texts = source_texts(of_checkout(trees(version)))
    sources = SourceTree(texts)
    missed = []
    for capability in touched(version):
        place = find(capability, sources.signature).place
        if place is None:
            continue
        for name in (*place.needs, *place.attribute.split(".")):
            if name.startswith("__"):
                continue
            other = {
                path: re.sub(rf"\b{name}\b", f"{name}_renamed", text) if name in text else text
                for path, text in texts.items()
            }
            finding = find(capability, SourceTree(other).signature)
            if finding.place == place and not finding.misfits:
                missed.append(f"{place}: {name}")
    assert not missed, "\n".join(missed)


def test_names_of_each_hooked_module_are_in_the_table():
    """A hook on a module that the table does not know would not be watched."""
    known = {place.module for capability in CAPABILITIES for place in capability.places}
    assert set(autoload.HOOKS) - known == set()


def test_names_that_moved_are_hooked_at_each_of_their_places():
    """Else a hook is in place where the name was, and prime-rl calls it where it is now."""
    modules = [{place.module for place in each.places} for each in CAPABILITIES]
    hooked = [each for each in modules if each & set(autoload.HOOKS)]
    assert [each - set(autoload.HOOKS) for each in hooked if each - set(autoload.HOOKS)] == []
