"""A vLLM server that has imported vLLM before it starts, and whose engine is a fork of it.

    ForkServer("tests.vllm_imported").start("-m", "tests.forked_vllm", MODULE, WORDS...)

runs what ``python -m MODULE WORDS`` would, in a process group of its own. On a CPU each process of
a server imports vLLM anew, which takes most of its start.
"""

import multiprocessing
import os
import runpy
import sys
from typing import Any


def main() -> None:
    """Be the server that the words name."""
    module, *sys.argv[1:] = sys.argv[1:]
    os.setsid()
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment, misc]
    os.execve = become
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def become(_: str, words: list[str], env: dict[str, str]) -> Any:
    """Run ``python -m MODULE`` in this process, in the place of a new interpreter."""
    os.environ.update(env)
    sys.argv = words[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    main()
