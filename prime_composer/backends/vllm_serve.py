"""``vllm serve`` for a CPU machine: ``python -m prime_composer.backends.vllm_serve --model DIR``.

All options are vLLM's, and ``cpu_server`` adds some. The CPU build's own command does not start:
its launcher asks for a distribution named "vllm", and the CUDA torchvision beside it does not load
(``cpu_guard``).

TODO(vllm): remove once the CPU build's ``vllm serve`` starts.
"""

import runpy
import sys
from importlib.util import find_spec

from prime_composer.backends.cpu_guard import built_for_cpu, import_vllm

# At the top level, because vLLM's engine process imports this module again.
import_vllm(multiprocessing=True)


def serve_on_cpu() -> None:
    """Start the server with the options of the command line."""
    if built_for_cpu():
        from prime_composer.backends.cpu_server import cpu_options

        sys.argv += cpu_options(sys.argv[1:])
    if find_spec("vllm.entrypoints.launchers") is None:  # before vLLM 0.30
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
        return
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":
    serve_on_cpu()
