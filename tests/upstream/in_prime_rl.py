"""Run Python beside an unmodified prime-rl, in the environment of its version."""

import contextlib
import json
import subprocess

import pytest

from tests.upstream.e2e import launch_run
from tests.upstream.make_venvs import NO_VENV, is_ready, python_of

MARK = "RESULT "
LOOP = """
import json, os, sys, traceback
for line in sys.stdin:
    code, names, fork = json.loads(line)
    child = os.fork() if fork else None
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            print("RESULT " + json.dumps({"error": f"exit status {status}"}), flush=True)
        continue
    try:
        exec(code, names)
        answer = names["result"]
    except BaseException:
        answer = {"error": traceback.format_exc()}
    print("RESULT " + json.dumps(answer), flush=True)
    if fork:
        os._exit(0)
"""


def environment_of(version, trees, folder, rig=False, **more):
    """Return the variables of a process that imports a version's tree.

    Skips where the version's environment or the checkout is absent.

    Args:
        version: the version's name.
        trees: the fixture that extracts a version.
        folder: where scripts for PATH go.
        rig: make the parts importable as well that need a GPU.
        more: further variables.
    """
    tree = trees(version)
    if not is_ready(version):
        pytest.skip(NO_VENV)
    env = launch_run.environment(str(python_of(version)), tree, folder, **more)
    if not rig:
        del env["PRIME_CPU_RIG"]
    return env


class Interpreter:
    """One process that imports a version of prime-rl once and runs code for several tests.

    ``more`` are variables of its environment.
    """

    def __init__(self, version, trees, folder, **more):
        env = environment_of(version, trees, folder, rig=True, **more)
        self.log = folder / f"{version}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(python_of(version)), "-c", LOOP],
                env=env,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def run(self, code, fork=False, **names):
        """Run code, which uses ``names`` and assigns ``result``; both are passed as JSON.

        With ``fork`` it runs in a process of its own, which has the modules imported so far.
        """
        self.process.stdin.write(json.dumps([code, names, fork]) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(MARK):
                result = json.loads(line.removeprefix(MARK))
                if isinstance(result, dict) and "error" in result:
                    raise AssertionError(result["error"][-3000:])
                return result
        raise AssertionError(self.log.read_text()[-3000:])

    def close(self):
        """End the process."""
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(120)  # of a busy machine


@contextlib.contextmanager
def interpreters(trees, tmp_path_factory, imports="", **more):
    """Give a function that returns one interpreter per version, and end all of them.

    Args:
        imports: modules that each of them has imported, with commas between them.
        more: variables of their environments.
    """
    started = {}

    def get(version):
        if version not in started:
            folder = tmp_path_factory.mktemp(version)
            started[version] = Interpreter(version, trees, folder, **more)
            if imports:
                started[version].run(f"import {imports}\nresult = None")
        return started[version]

    try:
        yield get
    finally:
        for interpreter in started.values():
            interpreter.close()
