"""prime-rl's own Slurm script, with sbatch replaced by bash and uv by one that does the same here.

The script comes from an unmodified prime-rl's dry run. Its `uv sync` removes this package from the
environment of the job, as the real one does. No step may train there without our losses.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import tomli_w

from prime_composer.recipe.loading import parse_recipe
from prime_composer.upstream.export import export_recipe
from tests.prime_rl_checkout import REPO
from tests.upstream.export_recipes import tables
from tests.upstream.in_prime_rl import environment_of
from tests.upstream.make_venvs import python_of

pytestmark = [pytest.mark.upstream, pytest.mark.xdist_group("prime-rl's launcher")]

PTH = REPO / "prime_composer" / "upstream" / "prime_composer.pth"
LOSS = {"type": "topk_reverse_kl", "k": 4}
UV = """#!/bin/sh
echo "uv $*" >> {log}
case "$1" in
sync) rm -f {site}/prime_composer.pth {site}/_prime_composer.pth ;;
pip) {pip} ;;
run) shift; [ "$1" = --no-sync ] && shift; exec "$@" ;;
esac
"""
INSTALL = "cp {pth} {site}/; echo {repo} > {site}/_prime_composer.pth"
RL = """#!{python}
import json
from prime_composer.upstream.settings import AdapterSettings
print("STARTED " + json.dumps(AdapterSettings.from_env().loss), flush=True)
"""
"""In the place of `rl`, which needs servers: what its processes read first of our loss."""


class Job:
    """A project folder of prime-rl with an environment, and the commands of a cluster."""

    def __init__(self, trees, folder):
        self.project = folder / "project"
        venv = self.project / ".venv"
        self.log = folder / "uv.log"
        base = python_of("head")
        self.env = environment_of("head", trees, folder)
        subprocess.run([base, "-m", "venv", "--without-pip", venv], check=True)
        (site,) = (venv / "lib").glob("python*/site-packages")
        # A line with a folder: its packages can be imported, and its own .pth files do not count.
        (own,) = (base.parents[1] / "lib").glob("python*/site-packages")
        (site / "base.pth").write_text(f"{own}\n")
        self.site, self.python = site, venv / "bin" / "python"
        parts = self.env["PYTHONPATH"].split(os.pathsep)
        self.env["PYTHONPATH"] = os.pathsep.join(part for part in parts if part != str(REPO))
        self.env.pop("PRIME_COMPOSER", None)
        self.bin = folder / "cluster"
        self.bin.mkdir()
        self.script("sbatch", '#!/bin/sh\nexec bash "$@"\n')
        self.script("rl", RL.format(python=self.python))
        self.reinstalls(True)
        self.env["PATH"] = f"{self.bin}{os.pathsep}{self.env['PATH']}"
        self.install()

    def script(self, name, text):
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def install(self):
        shutil.copy(PTH, self.site)
        (self.site / "_prime_composer.pth").write_text(f"{REPO}\n")

    def reinstalls(self, works):
        """Write the `uv` of the cluster, whose `uv pip install` works or not."""
        pip = INSTALL.format(pth=PTH, site=self.site, repo=REPO) if works else "true"
        self.script("uv", UV.format(log=self.log, site=self.site, pip=pip))

    def render(self, **more):
        """Have prime-rl's dry run write the script; return what it says, and the script's path."""
        raw = tables(student={"model": "Qwen/Qwen3-0.6B"}, loss=LOSS)
        table = export_recipe(parse_recipe(raw), "head").table
        table["output_dir"] = str(self.project / "outputs")
        table["slurm"] = {
            "project_dir": str(self.project),
            "pre_run_command": "uv pip install PATH",
        }
        table |= more
        file = self.project / "native.toml"
        file.write_text(tomli_w.dumps(table))
        command = [self.python, "-m", "prime_rl.entrypoints.rl", "@", file, "--dry-run"]
        done = subprocess.run(
            command,
            cwd=self.project,
            env=self.env | {"PRIME_COMPOSER": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        (script,) = self.project.rglob("rl.sbatch")
        return done.stderr, script

    def submit(self, script):
        """Run the script as sbatch would, without a variable of the shell that submits it."""
        return subprocess.run(
            ["sbatch", script], cwd=self.project, env=self.env, capture_output=True, text=True
        )

    def started(self, done):
        """Return the loss that the job began with, None where it did not begin."""
        lines = [line for line in done.stdout.splitlines() if line.startswith("STARTED ")]
        return json.loads(lines[0].removeprefix("STARTED ")) if lines else None


@pytest.fixture
def job(trees, tmp_path):
    return Job(trees, tmp_path)


def test_whole_run_slurm_ends_where_the_package_is_gone(job):
    """The command that should install it does not: the job ends before anything of it starts."""
    _, script = job.render()
    job.reinstalls(False)
    ran = job.submit(script)
    assert ran.returncode == 1 and "prime_composer is not installed here" in ran.stderr
    calls = job.log.read_text().splitlines()
    assert calls[0].startswith("uv sync") and calls[1] == "uv pip install PATH"
    assert len(calls) == 3 and "run rl" not in calls[2]
    assert job.started(ran) is None


def test_whole_run_slurm_carries_the_loss_to_the_job(job):
    """Its shell has no variable: the script has it. The dry run has printed the same line."""
    said, script = job.render()
    ran = job.submit(script)
    assert job.started(ran) == LOSS, ran.stdout + ran.stderr
    (line,) = (line for line in script.read_text().splitlines() if "export PRIME_COMPOSER" in line)
    assert line in said


def test_whole_run_slurm_of_nodes_is_guarded_before_srun(job):
    """It is not executed: the script of several nodes kills every prime-rl of its machine."""
    several = {"type": "multi_node", "num_train_nodes": 2, "num_infer_nodes": 1}
    _, script = job.render(deployment=several)
    text = script.read_text()
    parts = ("uv sync", "uv pip install PATH", "export PRIME_COMPOSER=@", "is_prime_composer")
    places = [text.index(part) for part in parts]
    assert places == sorted(places) and places[-1] < text.index("torchrun \\")
    assert Path(text.partition("export PRIME_COMPOSER=@")[2].split()[0]).is_file()
