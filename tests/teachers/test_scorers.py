"""Both scorers against the plain model, position by position."""

import pytest
import torch

from prime_composer.backends.alignment import make_rollout
from prime_composer.backends.protocols import Rollout, Sampler, SamplingParams, Scorer
from prime_composer.teachers import transformers as transformers_backend
from prime_composer.teachers.transformers import TransformersScorer
from tests.tiny_qwen import VOCAB


@pytest.fixture(params=[pytest.param("vllm", marks=pytest.mark.vllm), "transformers"])
def scorer(request, models):
    if request.param == "vllm":
        return request.getfixturevalue("vllm_scorer")
    return TransformersScorer(models.untied, max_model_len=320, batch_tokens=40)


@pytest.fixture
def rollouts():
    g = torch.Generator().manual_seed(5)
    sizes = [(4, 9), (2, 1), (7, 20), (3, 12)]
    draws = [
        (
            torch.randint(2, VOCAB, (n,), generator=g).tolist(),
            torch.randint(2, VOCAB, (m,), generator=g).tolist(),
        )
        for n, m in sizes
    ]
    return [
        make_rollout(prompt, ids, [-1.0] * len(ids), "length", i)
        for i, (prompt, ids) in enumerate(draws)
    ]


def misalignment(scores, rollouts, rows_of, shift=0):
    """Return the largest distance of a score from log q(token t | tokens before t).

    ``rows_of`` is read ``shift`` rows off.
    """
    worst = 0.0
    for score, rollout in zip(scores, rollouts, strict=True):
        rows = rows_of(rollout)
        for t in range(rollout.start, len(rollout.token_ids)):
            if t + shift < len(rows):
                expected = float(rows[t + shift, rollout.token_ids[t]])
                worst = max(worst, abs(float(score.ref_logprobs[t - rollout.start]) - expected))
    return worst


def test_scorer_reports_limits_and_generates(scorer, models):
    """Every scorer fulfils the protocol; its sampler generates with the teacher's weights."""
    assert isinstance(scorer, Scorer) and isinstance(scorer.sampler, Sampler)
    limits = scorer.limits
    assert (limits.max_model_len, limits.vocab_size, limits.max_logprobs) == (320, VOCAB, VOCAB)
    params = SamplingParams(max_tokens=5, temperature=0.0)
    (rollout,) = scorer.sampler.generate([[5, 6, 7]], params, seed=0)
    with torch.no_grad():
        logits = models.untied_model(input_ids=rollout.token_ids[None]).logits[0]
    expected = logits[rollout.start - 1 : -1].argmax(dim=-1)
    assert expected.tolist() == rollout.completion_ids


def test_score_is_conditioned_on_the_tokens_before(scorer, rollouts, models, plain_logprobs):
    scores = scorer.score(rollouts, 0)

    def rows_of(rollout):
        return plain_logprobs(models.untied_model, rollout.token_ids)

    assert misalignment(scores, rollouts, rows_of) < 1e-4
    # The mutants: a scorer that looks one token too far, or one too few.
    assert misalignment(scores, rollouts, rows_of, shift=1) > 1
    assert misalignment(scores, rollouts, rows_of, shift=-1) > 1


@pytest.mark.parametrize("k", [8, "full"])
def test_support_is_the_top_k_of_the_full_vocabulary(scorer, rollouts, models, plain_logprobs, k):
    size = VOCAB if k == "full" else k
    for score, rollout in zip(scorer.score(rollouts, k), rollouts, strict=True):
        n = len(rollout.completion_ids)
        assert score.ref_logprobs.shape == (n,)
        assert score.token_ids.shape == score.teacher_logprobs.shape == (n, size)
        rows = plain_logprobs(models.untied_model, rollout.token_ids)[rollout.start :]
        for row, ids, logprobs in zip(rows, score.token_ids, score.teacher_logprobs, strict=True):
            ranked = torch.tensor(sorted(row.tolist(), reverse=True)[:size])
            torch.testing.assert_close(logprobs, ranked, atol=1e-4, rtol=0)
            torch.testing.assert_close(row[ids], logprobs, atol=1e-4, rtol=0)
            assert len(set(ids.tolist())) == size
    if k == "full":
        torch.testing.assert_close(score.teacher_logprobs.exp().sum(-1), torch.ones(12))


def test_scores_start_at_the_first_trained_token(scorer):
    """Tokens inside the rollout that do not train keep their row, which may have no score."""
    ids = torch.arange(5, 13)
    mask = torch.tensor([False, False, True, True, False, True, True, True])
    gappy = Rollout(ids, mask, torch.where(mask, -1.0, torch.nan), "stop", 0)
    whole = make_rollout(ids[:2].tolist(), ids[2:].tolist(), [-1.0] * 6, "stop", 0)
    a, b = scorer.score([gappy, whole], 3)
    assert gappy.start == 2 and a.token_ids.shape == (6, 3)
    assert a.all_scored[gappy.trained].all() and b.scored is None
    a, b = a.rows(gappy.trained), b.rows(gappy.trained)
    torch.testing.assert_close(a.ref_logprobs, b.ref_logprobs, atol=1e-5, rtol=0)
    assert torch.equal(a.token_ids, b.token_ids)


def test_same_tokens_with_different_prompt_lengths(scorer, rollouts):
    """vLLM's lean path finds sequences by their tokens, so equal ones share the longer span."""
    tokens = rollouts[2].token_ids.tolist()
    cuts = (9, 3, 20)
    together = scorer.score(
        [make_rollout(tokens[:n], tokens[n:], [0.0] * (len(tokens) - n), "stop", 0) for n in cuts],
        4,
    )
    longest = together[1]
    for cut, score in zip(cuts, together, strict=True):
        torch.testing.assert_close(
            score.teacher_logprobs, longest.teacher_logprobs[cut - 3 :], atol=1e-5, rtol=0
        )
        assert torch.equal(score.token_ids, longest.token_ids[cut - 3 :])
        assert (score.teacher_logprobs < 0).all()


def test_no_rollouts_give_no_scores(scorer):
    assert scorer.score([], 4) == []


def test_given_prompts_replace_the_rollouts_own(scorer, rollouts, models, plain_logprobs):
    hints = [[50, 51, 52, 53, 54, 55], [60], [70, 71], [80, 81, 82]]
    for score, rollout, hint in zip(
        scorer.score(rollouts, 3, prompts=hints), rollouts, hints, strict=True
    ):
        rows = plain_logprobs(models.untied_model, hint + rollout.completion_ids)[len(hint) :]
        assert len(score.ref_logprobs) == len(rollout.completion_ids)
        for i, token in enumerate(rollout.completion_ids):
            assert float(score.ref_logprobs[i]) == pytest.approx(float(rows[i, token]), abs=1e-4)
            torch.testing.assert_close(
                score.teacher_logprobs[i], rows[i].topk(3).values, atol=1e-4, rtol=0
            )


def test_hidden_states_and_head_give_the_whole_distribution(
    scorer, rollouts, models, plain_logprobs
):
    """Row i predicts token start + i, and one head serves all rollouts."""
    scores = scorer.score(rollouts, 3, hidden=True)
    for score, rollout in zip(scores, rollouts, strict=True):
        (hidden,) = score.hidden
        assert hidden.head is scores[0].hidden[0].head and hidden.head.tolerance is None
        logits = hidden.head.over(hidden.states)
        found = (logits.hidden @ logits.weight.T).log_softmax(-1)
        rows = plain_logprobs(models.untied_model, rollout.token_ids)[rollout.start :]
        torch.testing.assert_close(found, rows, atol=1e-4, rtol=0)
        assert score.token_ids.shape[1] == 3


def test_candidate_ids_are_scored_in_their_own_order(scorer, rollouts, models, plain_logprobs):
    g = torch.Generator().manual_seed(0)
    candidates = [
        torch.stack([torch.randperm(VOCAB, generator=g)[:5] for _ in r.completion_ids])
        for r in rollouts
    ]
    for score, rollout, ids in zip(
        scorer.score(rollouts, 5, candidate_ids=candidates), rollouts, candidates, strict=True
    ):
        rows = plain_logprobs(models.untied_model, rollout.token_ids)[rollout.start :]
        assert torch.equal(score.token_ids, ids)
        torch.testing.assert_close(score.teacher_logprobs, rows.gather(1, ids), atol=1e-4, rtol=0)


def test_scoring_in_small_blocks_gives_the_same_numbers(rollouts, models, monkeypatch):
    whole = TransformersScorer(models.untied_model).score(rollouts, 6)
    monkeypatch.setattr(transformers_backend, "LOGITS_BUDGET", VOCAB * 3)
    blocks = TransformersScorer(models.untied_model, batch_tokens=1).score(rollouts, 6)
    for a, b in zip(whole, blocks, strict=True):
        torch.testing.assert_close(a.teacher_logprobs, b.teacher_logprobs)
        assert torch.equal(a.token_ids, b.token_ids)
