"""The first meeting with a teacher's server, before it scores a rollout.

A server may score otherwise than it samples, which no later check can see.

A teacher with another tokenizer reads other texts than the student wrote, and its scores look like
any others. So whoever meets a server first, orchestrator or trainer, compares it once with the
student that prime-rl's launcher names. The plugin, K and the served name are the scorer's own
questions.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from prime_composer.backends.hf_model import ModelUnavailable, load_tokenizer
from prime_composer.teachers.compatibility import (
    OwnLogprobs,
    PreflightError,
    TokenizingServer,
    check_own_scores,
    check_served_tokenizer,
)
from prime_composer.upstream.keys import SECTION, TOKENIZERS_KEY
from prime_composer.upstream.log import log
from prime_composer.upstream.settings import AdapterSettings

REMEDY = (
    f'Or name its tokenizer in [{SECTION}.{TOKENIZERS_KEY}] (in a recipe: tokenizer = "own"), to '
    "compare probabilities of the student's own tokens."
)


@cache
def _tokenizer(name: str) -> Any | None:
    try:
        return load_tokenizer(name)
    except ModelUnavailable:
        return None


def compare_with_student(
    origin: str, server: TokenizingServer, window: Callable[[], int | None]
) -> None:
    """Compare a teacher's server with the student; ``ValueError``: it has other tokens.

    What the server does not tell is a line in the log, as is a window that is shorter than the
    run's sequences. ``window`` returns the server's --max-model-len once it has been asked for its
    tokenizer; None: it does not say.
    """
    settings, unknown = AdapterSettings.from_env() or AdapterSettings(), []
    name, longest = settings.student_tokenizer, settings.seq_len
    tokenizer = None if name is None else _tokenizer(name)
    try:
        if tokenizer is None:
            unknown.append(f"its tokenizer (student_tokenizer is {name!r}, which is none)")
        elif not check_served_tokenizer(tokenizer, server):
            unknown.append("its tokenizer (it has no /tokenize)")
    except PreflightError as error:
        raise ValueError(f"{origin}: {error} {REMEDY}") from None
    most = None if longest is None else window()
    if most is None or longest is None:
        unknown.append("its longest sequence")
    elif longest >= most:
        log(
            f"{origin} reads at most {most - 1} tokens, and seq_len = {longest}: a longer rollout "
            f"would end the run. Start it with --max-model-len {longest + 1}, or lower seq_len"
        )
    if unknown:
        log(f"{origin} was not compared with the student by {' and '.join(unknown)}")


def compare_with_itself(origin: str, own: OwnLogprobs | str) -> None:
    """Compare a server's scores with what it samples; ``ValueError``: they differ."""
    try:
        not_compared = check_own_scores(own)
    except PreflightError as error:
        raise ValueError(f"{origin}: {error}") from None
    if not_compared:
        log(f"{origin}: {not_compared}")
