"""A server is asked for the rows that train, and answers with their scores at their places."""

from contextlib import closing

import pytest
import torch
from msgspec.structs import replace

pytest.importorskip("fastapi", reason="vLLM's server is not installed")

from prime_composer.backends.protocols import Rollout  # noqa: E402
from prime_composer.scoring import endpoint  # noqa: E402
from prime_composer.scoring.wire import ENVELOPE_BYTES  # noqa: E402
from prime_composer.teachers.server import ServerScorer  # noqa: E402
from tests.scoring.served_rows import Rows, Served, V  # noqa: E402

K = 3
START, TRAINED = 4, torch.tensor([1, 1, 0, 0, 1, 0, 1, 1, 0], dtype=torch.bool)


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("chosen", [False, True])
def test_scores_are_at_the_places_of_what_trains(
    chosen, limit, monkeypatch, vllm_without_its_libraries
):
    """Also where one request may name ids of two rows alone."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(V, (START + len(TRAINED),), generator=generator)
    mask = torch.cat([torch.zeros(START, dtype=torch.bool), TRAINED])
    rollout = Rollout(ids, mask, torch.full(ids.shape, torch.nan), "length", 0)
    given = torch.rand(len(TRAINED), V, generator=generator).argsort(dim=1)[:, :K]
    monkeypatch.setattr(endpoint, "WINDOW_BYTES", 64)
    rows = Rows(3)
    with Served(rows) as served, closing(ServerScorer(served.url)) as scorer:
        facts = scorer.client.facts
        if limit is not None:
            most = ENVELOPE_BYTES + len(ids) * len(f"{V}, ") + limit * 16 * K // 3
            limits = replace(facts.limits, question_bytes=most)
            monkeypatch.setattr(scorer.client.known, "facts", replace(facts, limits=limits))
        (found,) = scorer.score([rollout], K, candidate_ids=[given] if chosen else None)
    asked = [at for one in rows.asked for both in one.ranges for at in range(*both)]
    assert asked == mask.nonzero()[:, 0].tolist()
    assert len(rows.asked) == (3 if chosen and limit else 1)
    exact = rows.logprobs(ids)[START - 1 : -1][TRAINED]
    expected = given[TRAINED] if chosen else exact.topk(K).indices
    assert torch.equal(found.scored, TRAINED) and found.start == START
    assert torch.equal(found.token_ids[TRAINED], expected)
    logprobs = found.teacher_logprobs[TRAINED].double()
    torch.testing.assert_close(logprobs, exact.gather(1, expected), atol=1e-5, rtol=0)
    own = exact.gather(1, ids[START:][TRAINED][:, None])[:, 0]
    torch.testing.assert_close(found.ref_logprobs[TRAINED].double(), own, atol=1e-5, rtol=0)
