"""Options of vLLM's server on a machine whose PyTorch is built for the CPU."""

import argparse
import os
from collections.abc import Sequence

from prime_composer.backends.hf_model import read_config
from prime_composer.backends.transformers import window_of
from prime_composer.backends.vllm import CPU_BLOCK, USUAL_WINDOW, bytes_of_a_sequence


def cpu_options(options: Sequence[str]) -> list[str]:
    """Return what a server needs besides these options of its command line.

    - chunked prefill off: with it a seed per request crashes the engine ("CPU Generator does not
      use offset")
    - no compilation, which ``set_vllm_environment`` switches off, unless TORCHDYNAMO_DISABLE is 0
    - a key-value cache of 1 GiB, or for one sequence of full length where that is more: vLLM's own
      takes nearly all of the machine's memory, and fills it with zeros at the start
    - one sequence at a time with LoRA adapters: log-probs of several prompts at once end the engine
      (punica_cpu.py of vLLM 0.32 has an index per sequence where one per row is read)

    Where an option or a variable of vLLM says something about the same, nothing is added.
    """
    named = {option.split("=")[0].replace("_", "-") for option in options}
    more = []
    if not any("chunked-prefill" in name for name in named):
        more.append("--no-enable-chunked-prefill")
    if "--enable-lora" in named and "--max-num-seqs" not in named:
        more += ["--max-num-seqs", "1"]
    compiles = os.environ.get("TORCHDYNAMO_DISABLE", "0") == "0"
    if not compiles and not named & {"--enforce-eager", "--no-enforce-eager"}:
        more.append("--enforce-eager")
    memory = {"--kv-cache-memory-bytes", "--gpu-memory-utilization", "--config"}
    if not named & memory and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        size = _kv_cache_bytes(options)
        more += [] if size is None else ["--kv-cache-memory-bytes", str(size)]
    return more


def _kv_cache_bytes(options: Sequence[str]) -> int | None:
    """Return the size for the model of these options; None where vLLM has to say what is wrong."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", "--max_model_len", default="")
    try:
        known, _ = parser.parse_known_args(options)
        if known.model is None:
            return None
        config = read_config(known.model)
        said = known.max_model_len
        length = int(said) if said.isdecimal() else window_of(config) or USUAL_WINDOW
        # Besides the sequence, vLLM keeps one block that nothing is written to.
        size = bytes_of_a_sequence(config, known.dtype, length + CPU_BLOCK)
    except (argparse.ArgumentError, ValueError, AttributeError):
        return None
    return max(size, 2**30)
