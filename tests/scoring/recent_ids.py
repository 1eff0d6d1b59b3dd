"""A kind of scores from outside the package: log q of the ids that a sequence has just used.

For each token the caller asks for the token itself and for the K - 1 different ones that came last
before it. Where there are fewer, the places are left empty. The server answers for the token, and
for other ids from a floor on, which is the request's parameter. The rest is not known.
"""

import numpy as np
import torch

from prime_composer.contract import Scores
from prime_composer.scoring.kinds import (
    KindRequest,
    SupportKind,
    id_outside,
    own_logprobs,
    tensor,
)
from prime_composer.scoring.wire import Field
from prime_composer.teachers.server import ServerScorer

FLOOR = -4.0
"""Log-prob below which the server does not answer for an id."""

EMPTY = -1


class RecentIds(SupportKind):
    """Log-probs, float32 [n, K], and which of them are known, int32 [n, K]."""

    name, what = "recent_ids", "log-probs of recent ids"

    def fields(self, k, facts):
        return [Field("recent_logprobs", "float32", k), Field("recent_known", "int32", k)]

    def read(self, question, sequence, facts):
        request = super().read(question, sequence, facts)
        if request is None:
            return None
        ids, floor = request.per_row(sequence.rows), request.shared.get("floor")
        if ids is None or ids.shape[1] != request.k:
            raise ValueError(f"recent ids: not {request.k} for each token")
        wrong = id_outside(int(ids.min()) - EMPTY, int(ids.max()), facts.vocab_size)
        if wrong:
            raise ValueError(f"recent ids: {wrong}")
        if request.shared.keys() != {"floor"} or not isinstance(floor, float):
            raise ValueError(f"recent ids: {request.shared}, where a floor is needed")
        return request

    def arrays(self, rows, request, numbers):
        ids = numbers.long()
        logprobs = rows.logits.gather(-1, ids.clamp(min=0)) - rows.log_normalizer
        known = (ids != EMPTY) & (logprobs >= request.shared["floor"])
        known[:, 0] = True
        return {"recent_logprobs": logprobs, "recent_known": known.int()}

    def request(self, token_ids, start, k):
        ids = np.array([recent(token_ids[: t + 1], k) for t in range(start, len(token_ids))])
        return KindRequest(self.name, k, {"floor": FLOOR}, ids.astype("<i4").tobytes())

    def scores(self, arrays, request, start):
        own = own_logprobs(arrays)
        return Scores(
            own,
            torch.from_numpy(request.per_row(len(own)).astype(np.int64)),
            tensor(arrays["recent_logprobs"]),
            known=torch.from_numpy(arrays["recent_known"] == 1),
            start=start,
        )


RECENT_IDS = RecentIds()


def recent(token_ids, k):
    """Return the last token and the k - 1 different ones that came last before it."""
    ids = list(dict.fromkeys(reversed(token_ids)))[:k]
    return ids + [EMPTY] * (k - len(ids))


def open_teacher(spec, status):
    """Open a served teacher of a recipe, which is asked for this kind."""
    connection = spec.connection(status)
    return ServerScorer(
        spec.url, str(spec.model), section=spec.section, kind=RECENT_IDS, **connection
    )


open_teacher.serves, open_teacher.within_positions = True, False
