"""Processes that begin with libraries already imported: forks of a server that imported them once.

A fork has what a new interpreter has: environment, working directory, ``sys.argv``, ``sys.path``,
standard streams, default signal handlers, a main module and an exit status. Only the imports are
there before, and its memory is not freed at its end. So a test of an import, of an option of the
interpreter, or of a variable that a library reads when it is imported needs a new process.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

REPO = Path(__file__).resolve().parents[1]
MOST_SECONDS = 240.0
"""Time for a process that is run to its end."""

READ_ONCE = {
    "python": ("PYTHON", "LC_", "LANG"),
    "torch": ("OMP_", "MKL_", "ATEN_", "TORCH_", "TORCHDYNAMO_"),
    "transformers": ("HF_", "TRANSFORMERS_"),
    "matplotlib": ("MPL",),
}
"""Library: beginnings of the variables that it reads when it is imported."""

ENGINE = (
    "prime_composer.tiny_models.training",  # first: it hides what transformers cannot import
    "prime_composer.cli.runs",
    "prime_composer.cli.report",
    "prime_composer.cli.progress",
    "prime_composer.local.train",
    "prime_composer.local.dry_run",
    "prime_composer.backends.transformers",
    "prime_composer.teachers.server",
    "transformers.models.qwen3.modeling_qwen3",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "httpx",
)
"""What a run of the one-machine engine imports."""


def new_process(
    *words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS`` to its end as ``ForkServer.run`` does, in a new interpreter."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command,
        cwd=cwd,
        env=dict(os.environ if env is None else env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
    )


class Fork:
    """A process that a server started, with methods and attributes of ``subprocess.Popen``."""

    def __init__(self, args: list[str], status: int, out: IO[bytes], err: IO[bytes]):
        self.args = args
        self.returncode: int | None = None
        self._status = os.fdopen(status)
        self._streams = (out, err)
        line = self._status.readline()
        if not line:
            raise RuntimeError(f"the fork server ended before it started {args}")
        self.pid = int(line)

    def poll(self, seconds: float | None = 0.0) -> int | None:
        """Return the exit status, if it ends within these seconds; None: however long it takes."""
        if self.returncode is None and select.select([self._status], [], [], seconds)[0]:
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        """Ask it to end, if it still runs."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it, if it still runs."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return the exit status."""
        status = self.poll(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end, and return what it wrote to standard output and standard error."""
        self.wait(timeout)
        texts = []
        for stream in self._streams:
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
            stream.close()
        return texts[0], texts[1]


class ForkServer:
    """A process that imports modules, those of its parent as well, and forks when it is asked to.

    It starts at once, imports in the background, and ends with ``close`` or with the process that
    made it.
    """

    def __init__(
        self, *modules: str, parent: "ForkServer | None" = None, python: str = sys.executable
    ):
        self._env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._modules: tuple[str, ...] = (*(parent._modules if parent else ()), *modules)
        self._requests, theirs = socket.socketpair()
        words = ["-m", "tests.fork_server", *modules]
        self._process: Any
        if parent is not None:
            self._process = parent.start(*words, cwd=REPO, env=self._env, stdin=theirs)
        else:
            self._process = subprocess.Popen(
                [python, *words],
                cwd=REPO,
                env=self._env,
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        theirs.close()

    def close(self) -> None:
        """End the server. Its forks go on."""
        self._requests.close()
        self._process.communicate(timeout=60)

    def _read_once(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of which a fork has the server's values, whatever it is given."""
        libraries = {"python", *(module.partition(".")[0] for module in self._modules)}
        beginnings = tuple(
            beginning
            for library in libraries & READ_ONCE.keys()
            for beginning in READ_ONCE[library]
        )
        return {
            name: value
            for name, value in env.items()
            if name.startswith(beginnings) and name != "PYTHONPATH"
        }

    def start(
        self,
        *words: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: socket.socket | None = None,
        output: IO[bytes] | None = None,
    ) -> Fork:
        """Start what ``python WORDS`` would: ``-m MODULE``, ``-c CODE`` or ``SCRIPT.py``.

        Directory and environment are this process's by default, and standard input is empty.
        Without ``output`` what it writes is what ``communicate`` returns.
        """
        env = dict(os.environ if env is None else env)
        changed = self._read_once(env).items() ^ self._read_once(self._env).items()
        assert not changed, f"this needs a new process: {changed}"
        args = [str(word) for word in words]
        request = json.dumps({"args": args, "cwd": str(cwd or Path.cwd()), "env": env})
        out = tempfile.TemporaryFile() if output is None else output
        err = tempfile.TemporaryFile() if output is None else output
        status, theirs = os.pipe()
        with tempfile.TemporaryFile() as told, open(os.devnull, "rb") as nothing:
            told.write(request.encode())
            told.seek(0)
            files = [file.fileno() for file in (stdin or nothing, out, err, told)]
            socket.send_fds(self._requests, [b"\0"], [*files, theirs])
        os.close(theirs)
        return Fork(args, status, out, err)

    def run(
        self,
        *words: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python WORDS`` to its end, or kill it when its time is over."""
        process = self.start(*words, cwd=cwd, env=env)
        try:
            out, err = process.communicate(MOST_SECONDS)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, process.wait(), out, err)


def serve() -> tuple[dict[str, Any], list[int]]:
    """Answer requests until nobody can ask any more; return in every fork, with its request.

    A watcher between server and fork says its process id and its exit status.
    """
    requests = socket.socket(fileno=0)
    watchers: list[int] = []
    while True:
        message, files, *_ = socket.recv_fds(requests, 1, 5)
        if not message:
            os._exit(0)
        watchers = [pid for pid in watchers if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        watcher = os.fork()
        if watcher:
            watchers.append(watcher)
            for file in files:
                os.close(file)
            continue
        *streams, told, status = files
        pid = os.fork()
        if pid:
            os.write(status, f"{pid}\n".encode())
            ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(status, f"{ended}\n".encode())
            os._exit(0)
        os.close(status)
        requests.detach()
        with os.fdopen(told) as file:
            return json.load(file), streams


def become(request: dict[str, Any], streams: list[int]) -> Callable[[], object]:
    """Be the process that was asked for, and return what it has to run."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # The interpreter itself may have set this one, with the locale C.
    locale = {name: value for name, value in os.environ.items() if name == "LC_CTYPE"}
    os.environ.clear()
    os.environ.update(request["env"] | locale)
    os.chdir(request["cwd"])
    option, *words = request["args"]
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if option.endswith(".py"):
        sys.path[0], sys.argv = str(Path(option).parent), [option, *words]
        return lambda: runpy.run_path(option, run_name="__main__")
    code, *words = words
    sys.path[0] = request["cwd"] if option == "-m" else ""
    sys.argv = [option, *words]
    if option == "-m":
        return lambda: runpy.run_module(code, run_name="__main__", alter_sys=True)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    return lambda: exec(code, vars(main))


def run_to_the_end(code: Callable[[], object]) -> None:
    """Run code, and end this process as the interpreter does, but for freeing its memory."""
    status, interrupted = 0, False
    try:
        code()
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status, interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


if __name__ == "__main__":
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # or the garbage collector of every fork would copy all of the memory
    run_to_the_end(become(*serve()))
