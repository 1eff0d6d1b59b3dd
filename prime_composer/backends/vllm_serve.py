"""``vllm serve`` for a CPU machine: ``python -m prime_composer.backends.vllm_serve --model DIR [vLLM's options]``.

On a GPU machine use ``vllm serve DIR`` itself. The CPU build's own command does not start: its launcher asks for a
distribution named "vllm", and the CUDA torchvision beside it does not load (``cpu_guard``). All options are vLLM's.
Prompts are not prefilled in pieces on a CPU build, unless asked for: a seed per request crashes the engine there
("CPU Generator does not use offset").
"""

import sys

from prime_composer.backends.cpu_guard import built_for_cpu, import_vllm

# At the top level, because vLLM's engine process imports this module again.
import_vllm(multiprocessing=True)


def main() -> None:
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    if built_for_cpu() and not any("chunked-prefill" in argument for argument in sys.argv):
        sys.argv.append("--no-enable-chunked-prefill")
    serve()


if __name__ == "__main__":
    main()
