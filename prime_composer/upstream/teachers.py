"""The teachers of a run, as settings, headers and prime-rl's own configs describe them."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from prime_composer.upstream.settings import Teacher
from prime_composer.upstream.versions.toml_shapes import HEADER

Entries = Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Mapping[str, Any]]]
"""Tables of ``url``, ``model``, ``weight``, and maybe ``api_key_var``: for all environments, or by
environment."""


def read_entries(entries: Any, environment: str | None = None) -> list[Teacher]:
    """Return the teachers of an environment, with weights that add up to 1."""
    if isinstance(entries, Mapping):
        entries = entries.get(str(environment), [])
    if not isinstance(entries, Sequence) or not entries:
        raise ValueError(f"no list of teachers for the environment {environment!r}")
    teachers = [Teacher.model_validate(entry) for entry in entries]
    total = sum(teacher.weight for teacher in teachers)
    if total == math.inf:
        raise ValueError("the weights add up to more than a number can be")
    return [one.model_copy(update={"weight": one.weight / total}) for one in teachers]


def configured(orchestrator: Any) -> Entries:
    """Return the teachers of the orchestrator's config, for the trainer to ask.

    There is one client per environment (559b4477 configs/algorithm.py:307).
    """
    entries = {}
    for environment in orchestrator.train.source:
        name, algorithm = environment.resolved_name, environment.algo
        if algorithm.type == "opd":
            client = algorithm.teacher
            entries[name] = _entries(client, client.name, f"the teacher of {name!r}")
    return entries


def header_entries(header: str) -> Any:
    """Return the teachers that a client's header names."""
    try:
        entries = json.loads(header)
        read_entries(entries)
    except (ValueError, RecursionError):
        raise ValueError(
            f"The header {HEADER} of the teacher's client must be a JSON list of {{url, model, "
            "weight}. Its value is not shown: it may have passwords."
        ) from None
    return entries


@cache
def teachers_of(header: str) -> tuple[Teacher, ...]:
    """Return the teachers of a client's header, which is the same in each of its requests."""
    return tuple(read_entries(header_entries(header)))


def _entries(client: Any, model: str, place: str) -> Any:
    header = client.headers.get(HEADER)
    if header is not None:
        return header_entries(header)
    others = [*client.headers, *getattr(client, "headers_from_env", {})]
    found = None
    dynamo = getattr(client, "dynamo", None)
    if dynamo is not None and dynamo.enabled:
        found = "dynamo, which finds workers by itself"
    elif others:
        found = f"the headers {', '.join(others)}"
    if found is not None:
        raise ValueError(
            f'asked_by = "trainer": {place} has {found}, and the trainer asks one URL with an API '
            "key alone. Put a router in front of the servers."
        )
    key_var = client.api_key_var
    return [{"url": client.base_url, "model": model, "weight": 1.0, "api_key_var": key_var}]
