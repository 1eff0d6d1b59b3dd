"""Whose answers a tape has: what is said of a teacher when it is begun, and who may read it."""

from collections.abc import Mapping
from typing import Any

from prime_composer.backends.model_files import fingerprint, is_without_weights
from prime_composer.backends.protocols import Limits, Scorer
from prime_composer.recipe.teacher import TeacherConfig
from prime_composer.samplers.registry import BackendSpec
from prime_composer.teachers.tape.store import TapeError

FORMAT = 1  # Raise it when answers of the same key are others.

Header = Mapping[str, Any]

SAME = ("format", "tokenizer", "student_tokenizer", "teacher_tokenizer")  # Also without a teacher

SAME_TEACHER = ("dtype", "backend", "vocab_size", "server_max_model_len", "any_ids")
"""What has to be the same where one is. A run of the tape alone asks what its writers asked, and a
server's window and what it can give decide that."""


def header_of(
    scorer: Scorer,
    config: TeacherConfig,
    spec: BackendSpec,
    student_tokenizer: str,
    teacher_tokenizer: str | None,
) -> dict[str, Any]:
    """Return what a tape says of an open teacher. Tokenizers are hashes; None: the student's."""
    served = getattr(scorer, "dtype", None)
    limits = scorer.limits
    return {
        "format": FORMAT,
        **named(config),
        "fingerprint": fingerprint(str(spec.model)),
        "backend": spec.backend,
        "dtype": served if spec.serves and served else spec.dtype,
        "tokenizer": config.tokenizer,
        "student_tokenizer": student_tokenizer,
        "teacher_tokenizer": teacher_tokenizer,
        "vocab_size": limits.vocab_size,
        "server_max_model_len": limits.max_model_len if spec.serves else None,
        "any_ids": scorer.gives_any_ids,
    }


def named(config: TeacherConfig) -> dict[str, Any]:
    """Return how a recipe names a teacher's model."""
    if config.prepare is None:
        return {"model": config.model}
    return {"model": config.prepare.model_dump(mode="json", exclude_none=True)}


def is_same_teacher(one: Header, other: Header) -> bool:
    """Return whether two headers are of one teacher: its weights or its name, and its dtype."""
    return all(one.get(key) == other.get(key) for key in (*_model_keys(one, other), "dtype"))


def check_same(header: Header, now: Header, folder: object, table: str) -> None:
    """Check that an open teacher is that of a tape."""
    _refuse(header, now, (*SAME, *_model_keys(header, now), *SAME_TEACHER), folder, table)


def check_readable(
    header: Header,
    config: TeacherConfig,
    student_tokenizer: str,
    teacher_tokenizer: str | None,
    folder: object,
    table: str,
) -> None:
    """Check that a recipe without an open teacher reads its tape.

    Its model need not be named. Where it is, it has to be that of the tape; of a folder with a
    tokenizer and no weights, the tokenizer has to be.
    """
    now = {
        "format": FORMAT,
        **named(config),
        "fingerprint": None if config.model is None else fingerprint(config.model),
        "tokenizer": config.tokenizer,
        "student_tokenizer": student_tokenizer,
        "teacher_tokenizer": teacher_tokenizer,
    }
    unknown = now["model"] is None or (config.model and is_without_weights(config.model))
    model = () if unknown else _model_keys(header, now)
    _refuse(header, now, (*SAME, *model), folder, table)


def _model_keys(header: Header, now: Header) -> tuple[str, ...]:
    """Return what tells models apart: their content, or their names where a content is unknown."""
    known = header.get("fingerprint") is not None and now.get("fingerprint") is not None
    return ("fingerprint",) if known else ("model",)


def _refuse(header: Header, now: Header, keys: tuple[str, ...], folder: object, table: str) -> None:
    others = [
        f"{key} was {header.get(key)!r} and is {now[key]!r}"
        for key in keys
        if header.get(key) != now[key]
    ]
    if others:
        raise TapeError(
            f"[{table}] the tape {folder} has the answers of another set-up: {', '.join(others)}. "
            "Name another folder in `tape`, or run with the teacher, its server's settings and the "
            "student's tokenizer that it was made with"
        )


def limits_of(header: Header, context: int) -> Limits:
    """Return the sizes of a tape's teacher, which a run of this context does not open."""
    return Limits(header["server_max_model_len"] or context, header["vocab_size"])
