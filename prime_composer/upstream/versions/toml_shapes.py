"""How prime-rl writes teachers, environments, directories and resume in TOML.

Plain tables go in and out, and what is read may be its config object too. Nothing of the package is
imported.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Table = dict[str, Any]  # A TOML table

Mixtures = Mapping[str, Sequence[Mapping[str, Any]]]
"""Environment -> its teachers: tables of ``url``, ``model``, ``weight``, maybe ``api_key_var``."""

ENVIRONMENTS = "source"  # Key of the environments in [orchestrator.train] and [orchestrator.eval]

WANDB = ("monitors", "wandb")  # Path of the W&B table

# Header of a teacher's client, with the teachers that score instead. Its value is JSON: a list of
# {url, model, weight}, and api_key_var where that is not prime-rl's default.
HEADER = "X-Prime-Composer-Teachers"

# Hint of a [teacher.policy] -> ``demo_key`` of prime-rl's algorithm ``opsd``, which looks it up in
# the rollout's ``info`` and in its task. Our environment's tasks have the solution as "answer". The
# adapter writes the other two into ``info``. Without it prime-rl ends the run at the first rollout
# and names the key.
HINT_KEYS = {
    "reference": "answer",
    "sibling": "prime_composer:sibling",
    "feedback": "prime_composer:feedback",
}

API_KEY_VAR = "VLLM_API_KEY"  # prime-rl's default for ``api_key_var`` of a client


class Places(NamedTuple):
    """Where [orchestrator] has four keys: dotted paths below it."""

    algo: str  # the algorithm of all environments
    group_size: str  # rollouts of one prompt
    eval_size: str  # problems that are evaluated, of each environment
    top_p: str  # top-p of the rollouts


PLACES = Places("algo", "group_size", "eval.num_examples", "train.sampling.extra_body.top_p")
"""head and v0.9. prime-rl sends top_p = 1 itself, and the request body overrides it."""

PLACES_OF_MAIN = Places(
    "train.algo", "train.group_size", "eval.select.limit", "train.sampling.top_p"
)


def at(config: Any, path: str) -> Any:
    """Return a value at a dotted path of keys or attributes, None where there is none."""
    for key in path.split("."):
        config = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
    return config


def put(table: Table, path: str, value: Any) -> None:
    """Write a value at a dotted path. Tables on the way that are missing are made."""
    *parents, name = path.split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
    table[name] = value


def write_teachers(
    orchestrator: Table, environments: list[Table], mixtures: Mixtures, algo: str
) -> None:
    """Write ``algo.teacher``, for the run (at ``algo`` in [orchestrator]) or each environment."""
    algorithms = {}
    for name, mixture in mixtures.items():
        first = mixture[0]
        key = {name: value for name, value in first.items() if name == "api_key_var"}
        teacher = {"name": first["model"], "base_url": first["url"], **key}
        if len(mixture) > 1:
            teacher["headers"] = {HEADER: json.dumps(mixture)}
        algorithms[name] = {"type": "opd", "teacher": teacher}
    first_algorithm, *others = algorithms.values()
    if all(other == first_algorithm for other in others):
        put(orchestrator, algo, first_algorithm)
        return
    for environment in environments:
        environment["algo"] = algorithms[environment["name"]]


def source_of(
    environment_id: str,
    settings: Table,
    entry: Table,
    max_turns: int | None = None,  # of the student
    timeout: float | None = None,  # seconds of a rollout
) -> Table:
    """Write a source: an ``env`` of a taskset and an agent."""
    agent: Table = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    if max_turns is not None:
        agent["max_turns"] = max_turns
    if timeout is not None:
        agent["timeout"] = {"rollout": timeout}
    return {**entry, "env": {"taskset": {"id": environment_id, **settings}, "agent": agent}}


def output_dir_and_name(run_dir: Path) -> Table:
    """Write the run directory as output_dir/run.name. Without a name prime-rl generates one."""
    return {"output_dir": str(run_dir.parent), "run": {"name": run_dir.name}}


def resume_table(table: Table) -> None:
    """Ask for the newest checkpoint by an empty [resume]."""
    table.setdefault("resume", {})
