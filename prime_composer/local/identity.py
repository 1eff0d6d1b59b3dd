"""What a run reads besides its recipe: a resumed run has to find it as it was."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from prime_composer.problems.loading import ProblemSet
from prime_composer.recipe.routing import TeacherId
from prime_composer.recipe.schema import RecipeError
from prime_composer.samplers.registry import BackendSpec
from prime_composer.teachers.mixture import Teachers
from prime_composer.teachers.tape.opening import header_of, is_same_teacher

WHOSE = ("model", "fingerprint", "dtype")  # Of a tape's header: these name a teacher


def data_digests(problems: ProblemSet) -> dict[str, str]:
    """Return digests of the data, by the words that name them."""
    return {
        "the problems to train on": _digest(problems.practice),
        "the problems to evaluate": _digest(problems.held_out),
    }


def teacher_headers(
    teachers: Teachers | None, specs: Mapping[TeacherId, BackendSpec]
) -> dict[str, dict[str, Any]]:
    """Return whose answers train, by the teachers' tables, as ``is_same_teacher`` compares them."""
    if teachers is None:
        return {}
    headers = {teacher: dict(tape.header) for teacher, tape in teachers.tapes.items()}
    for teacher, scorer in teachers.watched.items():
        config = teachers.routing.teachers[teacher]
        if teacher not in headers and not config.base:
            headers[teacher] = header_of(scorer, specs[teacher], "", None)
    return {
        teacher.table: {key: header[key] for key in WHOSE if key in header}
        for teacher, header in headers.items()
    }


def _digest(items: Iterable[object]) -> str:
    """Return a digest of items with all that belongs to each, in their order."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(f"{item!r}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def check_identity(
    stored: Mapping[str, Any], data: Mapping[str, str], tapes: Mapping[str, Mapping[str, Any]]
) -> None:
    """Refuse to resume with something else than a checkpoint was trained with."""
    before = stored.get("data", {})
    others = [name for name, digest in data.items() if before.get(name, digest) != digest]
    if others:
        raise RecipeError(
            f"--resume: {' and '.join(others)} are not those that the checkpoint was trained with, "
            "or in another order: bring back the files or rows of [data], or start a new run"
        )
    for table, header in tapes.items():
        if not is_same_teacher(stored.get("teachers", {}).get(table, header), header):
            raise RecipeError(
                f"--resume: [{table}] tape has the answers of another teacher than the one that "
                "the checkpoint was trained with: name the folder of that one's tape in `tape`, or "
                "start a new run"
            )
