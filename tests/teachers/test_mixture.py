"""Mixtures of teachers: against dense distributions, and who is asked."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_composer.backends.protocols import Limits, Rollout
from prime_composer.contract import InvalidAnswer, Scores
from prime_composer.problems.config import Problem
from prime_composer.recipe.routing import Routing, TeacherId
from prime_composer.teachers.mixture import Teachers, extrapolate, mix

VOCAB = 12
AUTHORS = json.loads((Path(__file__).parents[1] / "golden" / "authors_g_opd.json").read_text())


def dense(count: int, n: int, seed: int) -> torch.Tensor:
    """Distributions of some teachers over the whole vocabulary, [teacher, seq, vocab], float64."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, n, VOCAB, generator=generator, dtype=torch.float64).mul(2.5).softmax(-1)
    )


def scored(q: torch.Tensor, token_ids: torch.Tensor, k: int) -> Scores:
    top = q.log().topk(k, dim=-1)
    return Scores(
        q.log().gather(1, token_ids[:, None])[:, 0].float(), top.indices, top.values.float()
    )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(0, VOCAB),
    st.integers(0, 10**6),
    st.lists(st.floats(0.05, 1), min_size=4, max_size=4),
)
def test_mix_is_a_lower_bound_and_exact_where_it_can_be(count, k, seed, raw):
    weights = torch.tensor(raw[:count], dtype=torch.float64)
    weights /= weights.sum()
    q = dense(count, 5, seed)
    token_ids = torch.randint(VOCAB, (5,), generator=torch.Generator().manual_seed(seed))
    mixed = mix(token_ids, [scored(one, token_ids, k) for one in q], weights.tolist())
    true = torch.einsum("i,inv->nv", weights, q)

    own = true.gather(1, token_ids[:, None])
    torch.testing.assert_close(
        mixed.ref_logprobs.double().exp()[:, None], own, rtol=1e-5, atol=1e-7
    )
    found, at_ids = mixed.teacher_logprobs.double().exp(), true.gather(1, mixed.token_ids)
    # What a teacher may hold on an id outside its own top K is at most its K-th probability.
    unseen = sum(w * one.topk(k, dim=-1).values[:, -1:] for w, one in zip(weights, q, strict=True))
    assert (found <= at_ids * (1 + 1e-5)).all() and (at_ids <= found + unseen + 1e-6).all()
    sampled = mixed.token_ids == token_ids[:, None]
    torch.testing.assert_close(found[sampled], at_ids[sampled], rtol=1e-5, atol=1e-7)
    if k == VOCAB:
        torch.testing.assert_close(found, at_ids, rtol=1e-5, atol=1e-7)
    assert mixed.token_ids.shape == (5, k)
    assert all(len(set(row)) == k for row in mixed.token_ids.tolist())
    assert (mixed.teacher_logprobs.diff(dim=1) <= 0).all()
    assert mixed.teacher_logprobs.dtype == torch.float32


def test_mix_ids_are_distinct_with_zero_probabilities():
    q = dense(3, 5, 7)
    q[:, :, 8:] = 0
    q /= q.sum(-1, keepdim=True)
    token_ids = torch.arange(5)
    for k in (VOCAB, 10):
        mixed = mix(token_ids, [scored(one, token_ids, k) for one in q], [0.25, 0.25, 0.5])
        assert all(len(set(row)) == k for row in mixed.token_ids.tolist())
        expected = torch.einsum(
            "i,inv->nv", torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64), q
        )
        torch.testing.assert_close(
            mixed.teacher_logprobs.double().exp(),
            expected.gather(1, mixed.token_ids),
            rtol=1e-5,
            atol=0,
        )


@pytest.mark.parametrize("same_ids", [True, False])
def test_id_that_no_teacher_knows_is_not_known_of_the_mixture(same_ids):
    """One that some of them know has their share, as if the others did not list it."""
    ids = torch.tensor([[3, 1, 5]])
    own, known = torch.tensor([math.log(0.1)]), torch.tensor([[True, False, True]])
    one = Scores(own, ids, torch.tensor([[0.6, math.nan, 0.1]]).log(), known=known)
    known = torch.tensor([[True, False, False]])
    two = Scores(own, ids, torch.tensor([[0.2, math.inf, math.nan]]).log(), known=known, start=2)
    mixed = mix(torch.tensor([7]), [two, one], [0.75, 0.25], same_ids=same_ids)
    known = mixed.known[0]
    values = mixed.teacher_logprobs[0][known].exp().tolist()
    found = dict(zip(mixed.token_ids[0][known].tolist(), values, strict=True))
    assert found == pytest.approx({3: 0.3, 5: 0.025}) and mixed.start == 2


def test_id_that_is_not_known_may_repeat_one_that_is():
    """Its number may be anything: the known one still has the shares of both teachers."""
    ids = torch.tensor([[3, 3, 5]])
    own, known = torch.tensor([math.log(0.1)]), torch.tensor([[True, False, True]])
    one = Scores(own, ids, torch.tensor([[0.6, 0.3, 0.1]]).log(), known=known)
    two = Scores(own, torch.tensor([[5, 3, 1]]), torch.tensor([[0.3, 0.2, 0.1]]).log())
    mixed = mix(torch.tensor([7]), [one, two], [0.5, 0.5])
    ids = mixed.token_ids[0].tolist()
    found = dict(zip(ids, mixed.teacher_logprobs[0].exp().tolist(), strict=True))
    assert mixed.known.all() and found == pytest.approx({3: 0.4, 5: 0.2, 1: 0.05})


def test_mix_of_a_wrong_score_is_refused_with_its_place():
    """Those of a scorer from outside the package are checked nowhere else."""
    scores = [scored(q, torch.arange(4), 3) for q in dense(2, 4, 1)]
    scores[0].teacher_logprobs[2, 0] = 3.0
    with pytest.raises(InvalidAnswer, match="^The mixture .* sequence 5, position 2"):
        mix(torch.arange(4), scores, [0.25, 0.75], sequence=5)


def rollout(tokens: list[int]) -> Rollout:
    ids = torch.tensor(tokens)
    return Rollout(ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros(len(tokens)), "stop", 0)


class Recorder:
    """A scorer that gives every token one log-prob, and records what it scores."""

    limits = Limits()
    sampler = None
    gives_any_ids = True

    def __init__(self, logprob: float):
        self.logprob, self.scored, self.closed = logprob, [], False

    def score(self, rollouts, support_size, prompts=None, **_):
        self.scored.append([r.token_ids.tolist() for r in rollouts])
        empty = [torch.zeros(len(r.token_ids), 0) for r in rollouts]
        return [Scores(torch.full((len(e),), self.logprob), e.long(), e) for e in empty]

    def close(self):
        self.closed = True


def test_teachers_score_their_own_rollouts_in_order():
    """A teacher without a weight in a rollout is not sent it, and the order of rollouts is kept."""
    x, y, z = (TeacherId(name) for name in "xyz")
    first, second, third = Recorder(-1.0), Recorder(-2.0), Recorder(-3.0)
    shares = {"a": {x: 1.0}, "b": {y: 1.0}, "both": {y: 0.75, x: 0.25}}
    teachers = Teachers({x: first, y: second, z: third}, Routing({}, shares))
    problems = [Problem("?", "#### 1", environment=name) for name in ("b", "both", "a")]
    scores = teachers.score([rollout([1]), rollout([2, 3]), rollout([4])], problems, 0)
    assert first.scored == [[[2, 3], [4]]] and second.scored == [[[1], [2, 3]]]
    assert third.scored == []
    both = math.log(0.25 * math.exp(-1) + 0.75 * math.exp(-2))
    assert [s.ref_logprobs.tolist() for s in scores] == [
        [-2.0],
        pytest.approx([both, both]),
        [-1.0],
    ]
    teachers.close()
    assert first.closed and second.closed and third.closed


def recorded(name: str) -> torch.Tensor:
    return torch.tensor(AUTHORS["inputs"][f"{name}_logprobs"], dtype=torch.float64)


@pytest.mark.parametrize("scale", [1.25, 0.5])
def test_extrapolated_advantage_is_that_of_g_opds_code(scale: float) -> None:
    """With the scores extrapolated, log q - log p is the recorded advantage."""
    expected = AUTHORS[f"g_opd {scale}"]["advantages"]
    for row, (q, r) in enumerate(zip(recorded("teacher"), recorded("reference"), strict=True)):
        ids, logprobs = torch.zeros((len(q), 1), dtype=torch.long), q.unsqueeze(1)
        scores = extrapolate(
            Scores(q, ids, logprobs), Scores(r, ids[:, :0], logprobs[:, :0]), scale
        )
        advantage = scores.ref_logprobs - recorded("student")[row]
        assert advantage.tolist() == pytest.approx(expected[row], rel=1e-12, abs=1e-14)
        assert scores.token_ids is ids and scores.teacher_logprobs is logprobs


def test_extrapolation_of_equal_models_is_the_model() -> None:
    """lambda drops out where q = r, also for a token that both exclude."""
    q = torch.tensor([-0.5, -math.inf])
    scores = Scores(q, torch.zeros((2, 0), dtype=torch.long), torch.zeros((2, 0)))
    assert extrapolate(scores, scores, 3.0).ref_logprobs.tolist() == q.tolist()
