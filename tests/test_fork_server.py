"""A fork has what a new interpreter has, but for the imports."""

import json
import os
import signal
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


@pytest.mark.parametrize("name", ["first", "second"])
def test_fork_sees_what_a_new_process_sees(
    name: str, servers: dict[str, ForkServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a program may ask for; variables and folders of the caller, set after the start."""
    monkeypatch.setenv("PYTHONPATH", f"/one{os.pathsep}/two")
    monkeypatch.setenv("ADDED", "é")
    monkeypatch.delenv("HOME", raising=False)
    words = ("-c", SEEN, "a word", "--option")
    fork, new = (run(*words, cwd=tmp_path) for run in (servers[name].run, new_process))
    assert (fork.returncode, fork.stderr) == (new.returncode, new.stderr) == (3, "from __main__\n")
    expected = json.loads(new.stdout) | {"decimal": name == "second"}
    assert json.loads(fork.stdout) == expected


def test_fork_runs_a_script_beside_its_modules(
    servers: dict[str, ForkServer], tmp_path: Path
) -> None:
    """Its output goes where it is told to."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "beside.py").write_text("import sys\nsaid = sys.argv[1:]\n")
    script = folder / "told.py"
    script.write_text("import sys, beside\nprint(__name__, sys.argv, sys.path[0], beside.said)\n")
    new = new_process(script, 1, cwd=tmp_path)
    with (tmp_path / "output").open("wb") as output:
        assert servers["second"].start(script, 1, cwd=tmp_path, output=output).wait(10) == 0
    assert (tmp_path / "output").read_text() == new.stdout != ""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_fork_ended_by_a_signal_has_its_status(
    signum: signal.Signals, servers: dict[str, ForkServer]
) -> None:
    """Two at once: only one of them gets the signal."""
    code = "import time\nprint(1, flush=True)\ntime.sleep(60)"
    one, other = (servers["second"].start("-c", code) for _ in range(2))
    assert one.pid != other.pid and one.poll() is None
    one.poll(0.2)  # SIGINT before its first line would end the server's code
    one.send_signal(signum)
    assert one.wait(10) == -signum and other.poll() is None
    other.kill()
    assert [process.communicate(10)[0] for process in (one, other)] == ["1\n", "1\n"]
    assert other.returncode == -signal.SIGKILL


def test_variable_that_is_read_once_needs_a_new_process(servers: dict[str, ForkServer]) -> None:
    for name in ("PYTHONWARNINGS", "LC_ALL"):
        with pytest.raises(AssertionError, match="needs a new process"):
            servers["first"].run("-c", "", env=os.environ | {name: "changed"})
