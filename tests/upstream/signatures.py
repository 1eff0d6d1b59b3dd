"""prime-rl's signatures: read from any commit of a checkout, and recorded for tests without one.

A signature is a line of names, each with ``=`` where it has a default. The record has names alone,
no code. Write it again after a change of ``capabilities`` with

    python -m tests.upstream.signatures

``main`` in the record is October's to November's prime-rl: its files were read one by one, each
from a commit of its own, and nothing of it was run. That part is written by hand.
"""

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

from prime_composer.upstream.versions.capabilities import CAPABILITIES
from prime_composer.upstream.versions.records import CONFIGS
from prime_composer.upstream.versions.sources import SourceTree
from tests.prime_rl_checkout import BRANCHES, COMMITS, find_checkout

FILE = Path(__file__).with_name("signatures.json")
TREES = {
    **COMMITS,
    **BRANCHES,
}
"""Tree -> its commit: versions that we run, and four branches with parts of the next contract."""

MAIN = "main"
PLACES = {
    *CONFIGS.values(),
    *((place.module, place.attribute) for each in CAPABILITIES for place in each.places),
}
TYPED = ("prime_rl.configs.algorithm", "FrozenModelConfig", "base_url")
"""The field whose type tells two versions apart."""


class Blobs:
    """Reads sources of any commit with git, each file once."""

    def __init__(self, checkout: Path):
        self._git = ["git", "-C", str(checkout)]
        command = [*self._git, "cat-file", "--batch"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._texts: dict[str, str] = {}

    def close(self) -> None:
        """End git."""
        self._process.communicate()

    def existing(self, commits: Iterable[str]) -> list[str]:
        """Return those of the commits that the clone has."""
        commits = list(commits)
        command = [*self._git, "cat-file", "--batch-check"]
        asked = "".join(f"{commit}\n" for commit in commits)
        done = subprocess.run(command, check=True, capture_output=True, text=True, input=asked)
        answers = zip(commits, done.stdout.splitlines(), strict=True)
        return [commit for commit, answer in answers if answer.split()[1] == "commit"]

    def sources(self, commit: str) -> SourceTree:
        """Return the sources of a commit, of both folders of its package."""
        command = [*self._git, "ls-tree", "-r", commit, "src/prime_rl", "packages"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        texts = {}
        for line in listed.splitlines():
            meta, path = line.split("\t")
            before, package, rest = path.partition("src/prime_rl/")
            if package and path.endswith(".py"):
                texts[f"prime_rl/{rest}"] = self._text(meta.split()[2])
        return SourceTree(texts)

    def _text(self, blob: str) -> str:
        if blob not in self._texts:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(f"{blob}\n".encode())
            self._process.stdin.flush()
            size = int(self._process.stdout.readline().split()[2])
            self._texts[blob] = self._process.stdout.read(size).decode()
            self._process.stdout.read(1)
        return self._texts[blob]


def record(sources: SourceTree) -> dict[str, str]:
    """Return the signature of every place that a prime-rl has."""
    found = {}
    for module, attribute in sorted(PLACES):
        signature = sources.signature(module, attribute)
        if signature is not None:
            names = [name if required else f"{name}=" for name, required in signature.items()]
            if (module, attribute) == TYPED[:2]:
                kind = sources.annotations(module, attribute)[TYPED[2]]
                index = [name.removesuffix("=") for name in names].index(TYPED[2])
                names[index] = names[index].replace(TYPED[2], f"{TYPED[2]}:{kind}")
            found[f"{module}:{attribute}"] = " ".join(names)
    return found


def read() -> dict[str, dict[str, list[str]]]:
    """Return the record: place -> signature -> the trees that have it."""
    return json.loads(FILE.read_text())


def recorded(tree: str) -> dict[str, str]:
    """Return the recorded signature of each place of a tree."""
    return {
        place: signature
        for place, variants in read().items()
        for signature, trees in variants.items()
        if tree in trees
    }


def stand_in(signatures: dict[str, str], uses: Iterable[str] | None = None) -> SourceTree:
    """Return sources in our own words that have these signatures.

    Args:
        signatures: place -> signature.
        uses: the names that some file reads; None: all of them.
    """
    texts: dict[str, str] = {}
    classes: dict[tuple[str, str], str] = {}
    for place, names in signatures.items():
        module, attribute = place.split(":", 1)
        owner, _, method = attribute.partition(".")
        if not method and owner[0].islower():
            texts[module] = texts.get(module, "") + function(owner, names, "")
        else:
            body = function(method, names, "    ") if method else fields(names)
            classes[module, owner] = classes.get((module, owner), "") + body
    for (module, owner), body in classes.items():
        texts[module] = texts.get(module, "") + f"class {owner}:\n{body or '    pass'}\n"
    if uses is None:
        uses = [place.rpartition(":")[2].rpartition(".")[2] for place in signatures]
    texts["prime_rl.uses"] = "".join(f"{name}\n" for name in uses)
    return SourceTree({f"{module.replace('.', '/')}.py": text for module, text in texts.items()})


def function(name: str, names: str, indent: str) -> str:
    """Return the text of a function; its parameters are keywords, so that any order is right."""
    own = ["self"] if indent else []
    given = [f"{each[:-1]}=None" if each.endswith("=") else each for each in names.split()]
    parameters = ", ".join([*own, *(["*", *given] if given else [])])
    return f"{indent}def {name}({parameters}): ...\n"


def fields(names: str) -> str:
    """Return the fields of a class, each as ``name: type = default``."""
    lines = ""
    for each in names.split():
        name, _, kind = each.removesuffix("=").partition(":")
        lines += f"    {name}: {kind or 'object'}{' = None' if each.endswith('=') else ''}\n"
    return lines


def main() -> None:
    """Write the record again from the checkout; what is written by hand stays."""
    checkout = find_checkout()
    assert checkout is not None, "no checkout of prime-rl"
    signatures = {MAIN: recorded(MAIN)}
    blobs = Blobs(checkout)
    for tree, commit in TREES.items():
        signatures[tree] = record(blobs.sources(commit))
    blobs.close()
    places: dict[str, dict[str, list[str]]] = {}
    for tree in (*TREES, MAIN):
        for place, signature in signatures[tree].items():
            places.setdefault(place, {}).setdefault(signature, []).append(tree)
    FILE.write_text(json.dumps(dict(sorted(places.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
