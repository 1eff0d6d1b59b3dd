"""Open a teacher's tape, with the teacher or without it."""

from collections.abc import Callable, Sequence

from prime_composer.backends.protocols import Scorer
from prime_composer.recipe.teacher import TeacherConfig
from prime_composer.samplers.registry import BackendSpec
from prime_composer.teachers.tape.header import check_readable, check_same, header_of
from prime_composer.teachers.tape.scorer import TapedScorer
from prime_composer.teachers.tape.store import Store
from prime_composer.teachers.tokenizer_pair import ends_of

Tell = Callable[[str], None]  # Shows a text to the user


def with_tape(
    scorer: Scorer,
    config: TeacherConfig,
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
    assert config.tape is not None
    table = spec.section.strip("[]")
    store = Store(config.tape, tell, int(config.tape_gb * 1e9))
    now = header_of(scorer, config, spec, *tokenizers)
    header = store.begin(now | {"ends": ends_of(spec.model)})
    check_same(header, now, config.tape, table)
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
    """Return a tape that answers in the place of its teacher, which is not opened."""
    assert config.tape is not None
    store = Store(config.tape, tell, limit=0)
    header = store.header() or {}
    check_readable(header, config, *tokenizers, config.tape, table)
    return TapedScorer(None, store, header, table, context, ends=ends)
