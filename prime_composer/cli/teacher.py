"""``prime-rl teacher``: vLLM's own server with the scoring plugin."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec

from prime_composer.backends.errors import how_to_install
from prime_composer.scoring.wire import FLOAT32_HEAD, NAME, SCORE_PATH

LOADED_UNNAMED = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)
"""Groups of plugins that vLLM loads where VLLM_PLUGINS is unset. Once it is set, it filters all."""

ACCESS_LOG = {
    "--disable-access-log-for-endpoints",
    "--disable-uvicorn-access-log",
    "--no-disable-uvicorn-access-log",
    "--log-config-file",
}
"""Options of vLLM's server with which a user says what its access log has."""


def server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the server needs besides ``environment``, those of this process."""
    if "VLLM_PLUGINS" in environment:
        names = [name for name in environment["VLLM_PLUGINS"].split(",") if name]
    else:
        names = sorted({e.name for group in LOADED_UNNAMED for e in entry_points(group=group)})
    return {"VLLM_PLUGINS": ",".join([NAME, *(name for name in names if name != NAME)])}


def server_command(model: str, host: str, port: int, options: Sequence[str]) -> list[str]:
    """Return the command line of the server. ``options`` are passed on to vLLM."""
    if find_spec("vllm") is None:
        raise ValueError(f"a teacher's server needs vLLM: {how_to_install()}")
    command = [sys.executable, "-m", "prime_composer.backends.vllm_serve"]
    command += ["--model", model, "--host", host, "--port", str(port)]
    named = {option.split("=")[0] for option in options}
    if "--max-logprobs" not in named:
        command += ["--max-logprobs", "-1"]
    if not named & ACCESS_LOG:
        # It would be one line per sequence.
        command += ["--disable-access-log-for-endpoints", SCORE_PATH]
    return [*command, *with_float32_head(options)]


def with_float32_head(options: Sequence[str]) -> list[str]:
    """Return vLLM's options with ``--hf-overrides`` for float32 logits.

    The user's own overrides stay. Beside a ``--config``, which may have any option, nothing is
    added.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--hf-overrides", "--hf_overrides", type=json.loads, default={})
    try:
        known, others = parser.parse_known_args(options)
        overrides = FLOAT32_HEAD | known.hf_overrides
    except (argparse.ArgumentError, TypeError):  # vLLM says what is wrong
        return [*options]
    if any(option.split("=")[0] == "--config" for option in others):
        return [*options]
    if any(option.replace("_", "-").startswith("--hf-overrides.") for option in others):
        # vLLM makes one table of these, which takes the place of the other form.
        ((key, value),) = FLOAT32_HEAD.items()
        return [f"--hf-overrides.{key}", value, *options]
    return ["--hf-overrides", json.dumps(overrides), *others]


def run_teacher(model: str, host: str, port: int, options: Sequence[str]) -> int:
    """Become the server. Returns only where it cannot start."""
    command = server_command(model, host, port, options)
    more = server_environment(os.environ)
    shown = " ".join(f"{name}={value}" for name, value in more.items())
    print(f"{shown} {shlex.join(command[1:])}", flush=True)
    os.execve(command[0], command, {**os.environ, **more})
