"""Processes of one whole run of an unmodified prime-rl on a CPU. Uses the standard library only."""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import threading
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[2]
RIG = HERE.parent / "rig"
SCRIPTS = {
    "orchestrator": "prime_rl.entrypoints.orchestrator",
    "env-server": "prime_rl.entrypoints.env_server",
    "trainer": "prime_rl.entrypoints.trainer",
}
KEPT = "kept_weights"
"""Folder in a run's folder: the weights of each step."""
CPU = {
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "0,1,2",
    "PRIME_CPU_RIG": "1",
}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def command_folder(python, folder):
    """Write prime-rl's console scripts, as its wheel would; torchrun is the environment's own."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, module in SCRIPTS.items():
        script = folder / name
        start = f"exec {python} -c 'from {module} import main; main()' \"$@\"\n"
        script.write_text(f"#!/bin/sh\n{start}")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return folder


def environment(python, tree, folder, **more):
    """Return the environment of the launcher, and write the scripts that it starts."""
    path = os.pathsep.join(
        str(part)
        # This repository comes before the one that make_venvs.py has installed.
        for part in (RIG, HERE, REPO, tree / "src", tree / "packages/prime-rl-configs/src")
    )
    bins = f"{command_folder(python, folder / 'bin')}{os.pathsep}{Path(python).parent}"
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("PRIME_COMPOSER", "WANDB", "PYTEST"))
    }
    return {
        **clean,
        **CPU,
        "PYTHONPATH": path,
        "PATH": f"{bins}{os.pathsep}{os.environ['PATH']}",
        **more,
    }


def without_adapter():
    """Return this process's environment without our variables."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PRIME_COMPOSER")}


class Logged:
    """A server with a log of its requests, which answers once ``process`` is up at ``inner``."""

    def wait(self, timeout=300):
        end = time.monotonic() + timeout
        while time.monotonic() < end and self.process.poll() is None:
            try:
                return urllib.request.urlopen(
                    f"http://127.0.0.1:{self.inner}/health", timeout=2
                ).status
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"the server did not start: {self.output.name}")

    def requests(self):
        return [json.loads(line) for line in self.log.read_text().splitlines()]


class Server(Logged):
    """The stand-in for vLLM (server.py), with its options: a fork that has its libraries."""

    def __init__(self, forks, model, log, *options):
        self.port = self.inner = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.log = Path(log)
        command = [HERE / "server.py", model, self.port, log, *options]
        self.output = open(self.log.with_suffix(".out"), "wb")  # noqa: SIM115
        where = {"cwd": self.log.parent, "output": self.output}
        self.process = forks.start(*command, env=without_adapter(), **where)

    def stop(self):
        self.process.terminate()
        self.process.wait(10)
        self.output.close()


class VllmServer(Logged):
    """Real vLLM on a CPU, behind vllm_proxy.py.

    Args:
        python: an interpreter that has vLLM installed.
        model: the directory.
        log: its requests.
        core: the core of its threads.
        plugin: with the scoring plugin.
    """

    def __init__(self, python, model, log, core, plugin=False):
        self.log = Path(log)
        self.port, self.inner = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        options = (
            f"--model {model} --port {self.inner} --dtype bfloat16 --max-model-len 256 "
            f"--max-logprobs 32 --enable-scale-out --kv-cache-memory-bytes {64 * 2**20} "
            "--max-num-seqs 8 --logprobs-mode processed_logprobs --return-tokens-as-token-ids"
        )
        command = [python, "-m", "prime_composer.backends.vllm_serve", *options.split()]
        env = without_adapter() | {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": core,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "PYTHONPATH": str(REPO),
        }
        if plugin:
            env |= {"VLLM_PLUGINS": "prime_composer", "VLLM_USE_V2_MODEL_RUNNER": "0"}
        self.output = open(self.log.with_suffix(".out"), "w")  # noqa: SIM115
        proxy = [python, str(HERE / "vllm_proxy.py"), str(self.port), str(self.inner), str(log)]
        self.processes = [
            subprocess.Popen(
                each,
                env=env,
                stdout=self.output,
                stderr=self.output,
                cwd=self.log.parent,
                start_new_session=True,
            )
            for each in (command, proxy)
        ]
        self.process = self.processes[0]

    def stop(self):
        for process in self.processes:  # its engine and workers are in its process group
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                    process.wait(10)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue
        self.output.close()


def keep_weights(folder, ended):
    """Link the weights that the trainer sends, until ``ended`` is set.

    It deletes them soon, and on a busy machine the server may skip some.
    """
    while not ended.wait(0.05):
        marks = []
        with contextlib.suppress(OSError):  # a folder is deleted while it is listed: next time
            marks = list((folder / "outputs").rglob("broadcasts/step_*/STABLE"))
        for mark in marks:
            kept = folder / KEPT / mark.parent.name
            with contextlib.suppress(OSError):  # deleted meanwhile
                kept.mkdir(parents=True, exist_ok=True)
                for file in mark.parent.iterdir():
                    if not (kept / file.name).exists():
                        os.link(file, kept / file.name)


def run(command, env, folder, timeout):
    """Run the launcher in a process group of its own, and kill the whole group at the end.

    The weights of every step are kept in ``folder / KEPT``.
    """
    log = folder / "launcher.log"
    ended = threading.Event()
    threading.Thread(target=keep_weights, args=(folder, ended), daemon=True).start()
    with open(log, "w") as out:
        process = subprocess.Popen(
            command, env=env, cwd=folder, stdout=out, stderr=out, start_new_session=True
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            ended.set()
            try:
                os.killpg(process.pid, signal.SIGTERM)
                time.sleep(0.5)
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    return code
