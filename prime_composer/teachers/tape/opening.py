"""Open a teacher's tape, with the teacher or without it: whose answers it has, and who reads it."""

from collections.abc import Callable, Sequence
from typing import Any

from prime_composer.backends.model_files import fingerprint, is_without_weights
from prime_composer.backends.protocols import Scorer
from prime_composer.recipe.teacher import TeacherConfig
from prime_composer.samplers.registry import BackendSpec
from prime_composer.teachers.tape.scorer import Header, TapedScorer
from prime_composer.teachers.tape.store import Store, TapeError
from prime_composer.teachers.tokenizer_pair import ends_of

Tell = Callable[[str], None]  # Shows a text to the user

SAME = ("tokenizer", "student_tokenizer", "teacher_tokenizer")  # Also without a teacher

SAME_TEACHER = ("dtype", "backend", "vocab_size", "server_max_model_len", "any_ids")
"""What has to be the same where one is. A run of the tape alone asks what its writers asked, and a
server's window and what it can give decide that."""


def with_tape(
    scorer: Scorer,
    spec: BackendSpec,
    tokenizers: tuple[str, str | None],
    tolerance: float,
    is_watched: bool,
    tell: Tell,
) -> TapedScorer:
    """Return a teacher that keeps its answers on the tape of its table, if it has made that tape.

    ``tokenizers`` are hashes of the student's tokenizer and of the teacher's own, if it has one.
    Two of its answers to one request may differ by ``tolerance`` nats. Where the run ``is_watched``
    it asks a known request now and then.
    """
    config, table = _teacher_table(spec), spec.section.strip("[]")
    assert config.tape is not None
    store = Store(config.tape, tell, int(config.tape_gb * 1e9))
    now = header_of(scorer, spec, *tokenizers)
    header = store.begin(now | {"ends": ends_of(spec.model)})
    _refuse_others(header, now, (*SAME, *_model_keys(header, now), *SAME_TEACHER), config, table)
    taped = TapedScorer(
        *(scorer, store, header, table, spec.max_model_len),
        limit=tolerance,
        is_fixed=not (spec.serves and is_watched),
        ends=spec.ends,
    )
    taped.verify()
    return taped


def tape_alone(
    config: TeacherConfig,
    table: str,
    tokenizers: tuple[str, str | None],
    context: int,
    tell: Tell,
    ends: Sequence[int] | None = None,
) -> TapedScorer:
    """Return a tape that answers in the place of its teacher, which is not opened.

    Its model need not be named. Where it is, it has to be that of the tape; of a folder with a
    tokenizer and no weights, the tokenizer has to be.
    """
    assert config.tape is not None
    store = Store(config.tape, tell, limit=0)
    header = store.header() or {}
    now = {
        **_named(config),
        "fingerprint": None if config.model is None else fingerprint(config.model),
        "tokenizer": config.tokenizer,
        "student_tokenizer": tokenizers[0],
        "teacher_tokenizer": tokenizers[1],
    }
    unknown = now["model"] is None or (config.model and is_without_weights(config.model))
    model = () if unknown else _model_keys(header, now)
    _refuse_others(header, now, (*SAME, *model), config, table)
    return TapedScorer(None, store, header, table, context, ends=ends)


def header_of(
    scorer: Scorer, spec: BackendSpec, student_tokenizer: str, teacher_tokenizer: str | None
) -> dict[str, Any]:
    """Return what a tape says of an open teacher. Tokenizers are hashes; None: the student's."""
    config, limits = _teacher_table(spec), scorer.limits
    served = getattr(scorer, "dtype", None)
    return {
        **_named(config),
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


def is_same_teacher(one: Header, other: Header) -> bool:
    """Return whether two headers are of one teacher: its weights or its name, and its dtype."""
    return all(one.get(key) == other.get(key) for key in (*_model_keys(one, other), "dtype"))


def _teacher_table(spec: BackendSpec) -> TeacherConfig:
    assert isinstance(spec.table, TeacherConfig)
    return spec.table


def _named(config: TeacherConfig) -> dict[str, Any]:
    """Return how a recipe names a teacher's model."""
    if config.prepare is None:
        return {"model": config.model}
    return {"model": config.prepare.model_dump(mode="json", exclude_none=True)}


def _model_keys(header: Header, now: Header) -> tuple[str, ...]:
    """Return what tells models apart: their content, or their names where a content is unknown."""
    known = header.get("fingerprint") is not None and now.get("fingerprint") is not None
    return ("fingerprint",) if known else ("model",)


def _refuse_others(
    header: Header, now: Header, keys: tuple[str, ...], config: TeacherConfig, table: str
) -> None:
    others = [
        f"{key} was {header.get(key)!r} and is {now[key]!r}"
        for key in keys
        if header.get(key) != now[key]
    ]
    if others:
        raise TapeError(
            f"[{table}] the tape {config.tape} has the answers of another set-up: "
            f"{', '.join(others)}. Name another folder in `tape`, or run with the teacher, its "
            "server's settings and the student's tokenizer that it was made with"
        )
