"""Responses of a served teacher as ``Scores``: of the scoring plugin, or of vLLM's JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from prime_composer.backends.alignment import SequenceToScore, among, checked, spread
from prime_composer.backends.vllm_logprobs import at_least_one, read_answer, top_k_of
from prime_composer.contract import HiddenStates, InvalidAnswer, Scores, TeacherHead
from prime_composer.scoring.head import DTYPES_BY_NAME
from prime_composer.scoring.kinds import HIDDEN, SAMPLED, Arrays, Kind, KindRequest, SupportKind
from prime_composer.scoring.wire import (
    DTYPES,
    Bytes,
    Facts,
    Field,
    ScoreResponse,
    WireError,
    unpack_arrays,
)

CHECKED_ROWS = 1024  # Rows of hidden states that are looked through at once


@dataclass(frozen=True)
class AskedOfPlugin:
    """What a response of the plugin has to have."""

    kind: SupportKind  # of the support
    request: KindRequest  # what it was asked
    head: TeacherHead | None  # the teacher's output head, where there are hidden states too

    @property
    def of_kinds(self) -> list[tuple[Kind, KindRequest]]:
        """The kinds in order, and what each is asked."""
        hidden = [] if self.head is None else [(HIDDEN, KindRequest(HIDDEN.name))]
        own = (SAMPLED, KindRequest(SAMPLED.name)), (self.kind, self.request)
        return [*own, *hidden]

    def of_rows(self, n: int, rows: slice | NDArray[np.bool_]) -> "AskedOfPlugin":
        """Return what is asked of some of n rows."""
        return replace(self, request=self.request.of_rows(n, rows))


def read_json_response(content: Bytes, sequence: SequenceToScore, k: int, origin: str) -> Scores:
    """Return the scores in vLLM's JSON, of either of its routes, checked. K = 0: no support."""
    rows, asked = read_answer(bytes(content), origin), at_least_one(k)
    scores = top_k_of(sequence.token_ids, rows, asked, origin, sequence.start)
    (scores,) = checked([scores], [sequence], k=asked, origin=origin)
    return scores.top(k)


def read_binary_response(
    response: ScoreResponse,
    sequence: SequenceToScore,
    asked: AskedOfPlugin,
    facts: Facts,
    origin: str,
) -> Scores:
    """Return the scores in a response of the scoring plugin, checked."""
    read, n, k = sequence.read, sequence.count, asked.request.k
    try:
        if len(response.sequences) != 1:
            raise WireError(f"{len(response.sequences)} sequences, where 1 was expected")
        arrays = unpack_arrays(response.sequences[0], n)
        for kind, request in asked.of_kinds:
            for field in kind.fields(request.k, facts):
                arrays[field.name] = expected(arrays, field, n)
    except WireError as error:
        raise wrong_response(origin, sequence, str(error)) from None
    scores = spread(asked.kind.scores(arrays, asked.request, sequence.start), read)
    (scores,) = checked([scores], [sequence], k=k, origin=origin, ranked=asked.kind.ranked)
    if asked.head is None:
        return scores
    states = among(HIDDEN.states(arrays, DTYPES_BY_NAME[facts.dtype]), read, 0.0)
    check_finite_states(states, sequence, origin)
    share = HiddenStates(states, asked.head, ref_logprobs=scores.ref_logprobs)
    return replace(scores, hidden=(share,))


def expected(arrays: Arrays, field: Field, n: int) -> NDArray[Any]:
    """Return an array of a response, at an aligned address."""
    shape = (n, field.columns) if field.columns else (n,)
    dtype, found = np.dtype(DTYPES[field.dtype]), arrays.get(field.name)
    if found is None or found.shape != shape or found.dtype != dtype:
        words = "none" if found is None else f"{found.dtype} {found.shape}"
        raise WireError(f"{words} as {field.name}, where {dtype} {shape} was expected")
    return found if found.flags.aligned else found.copy()


def joined_rows(parts: Sequence[Scores]) -> Scores:
    """Return the scores of adjacent rows of one sequence as one."""
    if len(parts) == 1:
        return parts[0]
    first, known = parts[0], None
    if any(part.known is not None for part in parts):
        known = torch.cat([part.all_known for part in parts])
    own = torch.cat([part.ref_logprobs for part in parts])
    shares = tuple(
        replace(
            share,
            states=torch.cat([part.hidden[index].states for part in parts]),
            ref_logprobs=own,
        )
        for index, share in enumerate(first.hidden)
    )
    return Scores(
        own,
        torch.cat([part.token_ids for part in parts]),
        torch.cat([part.teacher_logprobs for part in parts]),
        shares,
        known,
        first.start,
        None if first.scored is None else torch.cat([part.all_scored for part in parts]),
    )


def check_finite_states(
    states: Float[Tensor, "n d"], sequence: SequenceToScore, origin: str
) -> None:
    """Check that hidden states are finite."""
    for first in range(0, len(states), CHECKED_ROWS):
        wrong = (~states[first : first + CHECKED_ROWS].isfinite()).any(dim=1).nonzero()
        if len(wrong):
            position = sequence.start + first + int(wrong[0])
            raise InvalidAnswer(
                f"{origin} gave hidden states at sequence {sequence.index}, position {position} "
                "that are not finite."
            )


def wrong_response(origin: str, sequence: SequenceToScore, found: str) -> InvalidAnswer:
    """Return the error for a response that is none of the plugin's."""
    place = "" if sequence.index is None else f" for sequence {sequence.index}"
    return InvalidAnswer(f"{origin} gave a wrong answer{place}: {found}.")
