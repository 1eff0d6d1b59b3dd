"""One whole run of an unmodified prime-rl on a CPU: servers, launcher, orchestrator, env server, trainer. Stdlib only."""

import json
import os
import signal
import socket
import stat
import subprocess
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
    """Upstream's console scripts, as its wheel would install them; torchrun is the one of the environment."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, module in SCRIPTS.items():
        script = folder / name
        script.write_text(f"#!/bin/sh\nexec {python} -c 'from {module} import main; main()' \"$@\"\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return folder


def environment(python, tree, folder, **more):
    path = os.pathsep.join(
        str(part) for part in (RIG, HERE, tree / "src", tree / "packages" / "prime-rl-configs" / "src")
    )
    bins = f"{command_folder(python, folder / 'bin')}{os.pathsep}{Path(python).parent}"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PRIME_COMPOSER", "WANDB", "PYTEST"))}
    return {**clean, **CPU, "PYTHONPATH": path, "PATH": f"{bins}{os.pathsep}{os.environ['PATH']}", **more}


class Server:
    def __init__(self, python, model, log):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.log = Path(log)
        command = [python, str(HERE / "server.py"), str(model), str(self.port), str(log)]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        env = {key: value for key, value in env.items() if not key.startswith("PRIME_COMPOSER")}
        self.output = open(self.log.with_suffix(".out"), "w")  # noqa: SIM115
        self.process = subprocess.Popen(command, env=env, stdout=self.output, stderr=self.output, cwd=self.log.parent)

    def wait(self, timeout=60):
        end = time.monotonic() + timeout
        while time.monotonic() < end and self.process.poll() is None:
            try:
                return urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).status
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"the server did not start: {self.output.name}")

    def requests(self):
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def stop(self):
        self.process.terminate()
        self.process.wait(10)
        self.output.close()


def run(command, env, folder, timeout):
    """Runs the launcher in a process group of its own; kills the whole group at the end, whatever happened."""
    log = folder / "launcher.log"
    with open(log, "w") as out:
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=out, stderr=out, start_new_session=True)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            try:
                os.killpg(process.pid, signal.SIGTERM)
                time.sleep(0.5)
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    return code
