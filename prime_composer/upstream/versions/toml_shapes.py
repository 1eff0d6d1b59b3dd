"""How prime-rl's versions write teachers, environments, servers, directories and resume in TOML.

Each function is one way that at least one version writes one thing. ``records`` says which
version uses which. Plain tables go in and out; nothing of the package is imported.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Table = dict[str, Any]
"""A TOML table."""

Mixtures = Mapping[str, Sequence[Mapping[str, Any]]]
"""Environment -> its teachers: tables of ``url``, ``model``, ``weight``, maybe ``api_key_var``."""

BaseUrl = Callable[[str], str | list[str]]
"""Turns a URL into the value of ``base_url``."""

HEADER = "X-Prime-Composer-Teachers"
"""Header of a teacher's client, with the teachers that score instead.

Its value is JSON: a list of {url, model, weight}, and api_key_var where that is not prime-rl's
default. For v0.6, which has one teacher for all environments, it is a table of such lists by
environment.
"""

HINT_KEYS = {
    "reference": "answer",
    "sibling": "prime_composer:sibling",
    "feedback": "prime_composer:feedback",
}
"""Hint of a ``[teacher.policy]`` -> ``demo_key`` of prime-rl's algorithm ``opsd``.

prime-rl looks a key up in the rollout's ``info`` and in its task. Our environment's tasks have the
solution as "answer". The adapter writes the other two into ``info``. Without it prime-rl ends the
run at the first rollout and names the key.
"""

API_KEY_VAR = "VLLM_API_KEY"
"""prime-rl's default for ``api_key_var`` of a client."""


class Places(NamedTuple):
    """Where [orchestrator] has four keys: dotted paths below it."""

    algo: str  # the algorithm of all environments
    group_size: str  # rollouts of one prompt
    eval_size: str  # problems that are evaluated, of each environment
    top_p: str  # top-p of the rollouts


PLACES = Places("algo", "group_size", "eval.num_examples", "train.sampling.extra_body.top_p")
"""To v0.9. prime-rl sends top_p = 1 itself, and the request body overrides it."""

PLACES_OF_MAIN = Places(
    "train.algo", "train.group_size", "eval.select.limit", "train.sampling.top_p"
)


def put(table: Table, path: str, value: Any) -> None:
    """Write a value at a dotted path. Tables on the way that are missing are made."""
    *parents, name = path.split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
    table[name] = value


def _endpoint(teacher: Mapping[str, Any], base_url: BaseUrl) -> Table:
    key = {name: value for name, value in teacher.items() if name == "api_key_var"}
    return {"base_url": base_url(teacher["url"])} | key


TeachersWriter = Callable[[Table, list[Table], Mixtures, BaseUrl, str], None]
"""Writes teachers into [orchestrator] or its environments; last, where it has its algorithm."""


def teacher_of_the_run(
    orchestrator: Table,
    environments: list[Table],
    mixtures: Mixtures,
    base_url: BaseUrl,
    algo: str,
) -> None:
    """Write the one teacher's client. Its header has what one client cannot express (v0.6)."""
    first, alike = _common(mixtures)
    client = _endpoint(first[0], base_url)
    if not alike or len(first) > 1:
        client["headers"] = {HEADER: json.dumps(first if alike else mixtures)}
    orchestrator["training_mode"] = "opd"
    orchestrator["teacher"] = {"model": {"name": first[0]["model"]}, "client": client}
    no_advantage_filter(orchestrator)  # distillation learns from groups of equal rewards as well


def teacher_of_each_environment(
    orchestrator: Table,
    environments: list[Table],
    mixtures: Mixtures,
    base_url: BaseUrl,
    algo: str,
) -> None:
    """Write ``algo.teacher``, for the run or for each environment (v0.7 and newer)."""
    algorithms = {}
    for name, mixture in mixtures.items():
        teacher = {"name": mixture[0]["model"], **_endpoint(mixture[0], base_url)}
        if len(mixture) > 1:
            teacher["headers"] = {HEADER: json.dumps(mixture)}
        algorithms[name] = {"type": "opd", "teacher": teacher}
    _, alike = _common(mixtures)
    if alike:
        put(orchestrator, algo, next(iter(algorithms.values())))
        return
    for environment in environments:
        environment["algo"] = algorithms[environment["name"]]


def no_advantage_filter(orchestrator: Table) -> None:
    """Write the default filters without the one that drops rollouts of zero advantage (to v0.8).

    It is the only one of them that drops anything.
    """
    orchestrator["post_batch_filters"] = [{"type": "gibberish"}, {"type": "repetition"}]


def no_advantage_pruning(orchestrator: Table) -> None:
    """Turn the removal of rl tokens of zero advantage off (head and v0.9)."""
    orchestrator["train"]["filter_zero_advantages"] = False


def _common(mixtures: Mixtures) -> tuple[Sequence[Mapping[str, Any]], bool]:
    """Return the first environment's mixture, and whether all others equal it."""
    first = next(iter(mixtures.values()))
    return first, all(mixture == first for mixture in mixtures.values())


class Limits(NamedTuple):
    """Limits of one rollout.

    Attributes:
        max_turns: turns of the student.
        timeout: seconds.
    """

    max_turns: int | None = None
    timeout: float | None = None

    def table(self) -> Table:
        """Return them as verifiers' second API writes them."""
        turns: Table = {} if self.max_turns is None else {"max_turns": self.max_turns}
        return turns if self.timeout is None else {**turns, "timeout": {"rollout": self.timeout}}


NO_LIMITS = Limits()

EnvironmentWriter = Callable[[str, Table, Table, Limits], Table]
"""Writes an environment from its id, its settings, its name and ratio, and its limits.

The first API of verifiers has no limit of turns: an environment has its own.
"""


def environment_with_args(
    environment_id: str, settings: Table, entry: Table, limits: Limits
) -> Table:
    """Write an environment of verifiers' first API (v0.6)."""
    table = {"id": environment_id, "args": settings, **entry}
    return table if limits.timeout is None else {**table, "timeout": limits.timeout}


def environment_of_bridge(
    environment_id: str, settings: Table, entry: Table, limits: Limits
) -> Table:
    """Write an environment of verifiers' first API beside tasksets (v0.7)."""
    return {"id": environment_id, "args": settings, **entry, **limits.table()}


def environment_with_taskset(
    environment_id: str, settings: Table, entry: Table, limits: Limits
) -> Table:
    """Write a taskset and its harness, side by side (v0.7)."""
    harness = {"id": "null", "runtime": {"type": "subprocess"}}
    taskset = {"id": environment_id, **settings}
    return {**entry, "taskset": taskset, "harness": harness, **limits.table()}


def source_of_bridge(environment_id: str, settings: Table, entry: Table, limits: Limits) -> Table:
    """Write a source of verifiers' first API; its time limit is that of an agent (v0.8)."""
    table = {**entry, "legacy": {"id": environment_id, "args": settings}}
    return {**table, "env": {"agent": limits.table()}} if limits != NO_LIMITS else table


def source_with_agent(environment_id: str, settings: Table, entry: Table, limits: Limits) -> Table:
    """Write a source: an ``env`` of a taskset and an agent (v0.8 and newer)."""
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, **limits.table()}
    return {**entry, "env": {"taskset": {"id": environment_id, **settings}, "agent": agent}}


def inference_with_extra(arguments: Table) -> Table:
    """Write vLLM's arguments: those that [inference] has fields for, the rest in vllm_extra."""
    table: Table = {
        key: arguments[key] for key in ("gpu_memory_utilization", "seed") if key in arguments
    }
    model = {key: arguments[key] for key in ("dtype", "tool_call_parser") if key in arguments}
    if model:
        table["model"] = model
    if "max_logprobs" in arguments:
        table["vllm_extra"] = {"max_logprobs": arguments["max_logprobs"]}
    return table


def inference_by_vllm_name(arguments: Table) -> Table:
    """Write vLLM's arguments under [inference.vllm], each by vLLM's own name."""
    return {"vllm": arguments} if arguments else {}


def output_dir_itself(run_dir: Path) -> Table:
    """Write the run directory as output_dir."""
    return {"output_dir": str(run_dir)}


def output_dir_and_name(run_dir: Path) -> Table:
    """Write the run directory as output_dir/run.name. Without a name prime-rl generates one."""
    return {"output_dir": str(run_dir.parent), "run": {"name": run_dir.name}}


def resume_newest_step(table: Table) -> None:
    """Ask for the newest checkpoint in [ckpt]."""
    table.setdefault("ckpt", {})["resume_step"] = -1


def resume_table(table: Table) -> None:
    """Ask for the newest checkpoint by an empty [resume]."""
    table.setdefault("resume", {})
