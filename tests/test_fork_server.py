"""A fork has what a new interpreter has, but for the imports."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fork_server import ForkServer, new_process

SEEN = """
import json, os, signal, sys, warnings
print("from", __name__, file=sys.stderr)
streams = (sys.stdin, sys.stdout, sys.stderr)
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "env": dict(os.environ),
    "flags": list(sys.flags), "filters": list(map(str, warnings.filters)), "umask": os.umask(0),
    "handlers": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "read": sys.stdin.read(),
    "streams": [[s.encoding, s.errors, s.isatty(), s.line_buffering, s.fileno()] for s in streams],
    "main": sys.modules["__main__"].__name__, "decimal": "decimal" in sys.modules,
}))
sys.exit(3)
"""


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, ForkServer]]:
    """Return a server, and a server that was forked from it."""
    first = ForkServer("json")
    second = ForkServer("decimal", parent=first)
    yield {"first": first, "second": second}
    second.close()
    first.close()


def test_fork_sees_what_a_new_process_sees(
    servers: dict[str, ForkServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a program may ask for; variables and folders of the caller, set after the start."""
    monkeypatch.setenv("PYTHONPATH", f"/one{os.pathsep}/two")
    monkeypatch.setenv("ADDED", "é")
    monkeypatch.delenv("HOME", raising=False)
    words = ("-c", SEEN, "a word", "--option")
    fork, new = (run(*words, cwd=tmp_path) for run in (servers["second"].run, new_process))
    assert (fork.returncode, fork.stderr) == (new.returncode, new.stderr) == (3, "from __main__\n")
    expected = json.loads(new.stdout) | {"decimal": True}
    assert json.loads(fork.stdout) == expected


def test_variable_that_is_read_once_needs_a_new_process(servers: dict[str, ForkServer]) -> None:
    for name in ("PYTHONWARNINGS", "LC_ALL"):
        with pytest.raises(AssertionError, match="needs a new process"):
            servers["first"].run("-c", "", env=os.environ | {name: "changed"})
