"""Both scorers against the plain model, position by position."""

import pytest
import torch

from prime_composer.backends import transformers as transformers_backend
from prime_composer.backends.alignment import make_rollout, sequences_to_score
from prime_composer.backends.hf_model import token_batches
from prime_composer.backends.transformers import TransformersScorer
from prime_composer.backends.vllm import VLLMScorer


@pytest.fixture(params=["vllm", "transformers"])
def scorer(request, models, vllm_scorer):
    if request.param == "vllm":
        return vllm_scorer
    return TransformersScorer(models.untied, max_model_len=320, batch_tokens=40)


@pytest.fixture
def rollouts():
    g = torch.Generator().manual_seed(5)
    sizes = [(4, 9), (2, 1), (7, 20), (3, 12)]
    draws = [
        (
            torch.randint(2, 131, (n,), generator=g).tolist(),
            torch.randint(2, 131, (m,), generator=g).tolist(),
        )
        for n, m in sizes
    ]
    return [
        make_rollout(prompt, ids, [-1.0] * len(ids), "length", i)
        for i, (prompt, ids) in enumerate(draws)
    ]


def misalignment(scores, rollouts, rows_of, shift=0):
    """The largest distance of a score from log q(token t | tokens before t), ``rows_of`` read ``shift`` rows off."""
    worst = 0.0
    for score, rollout in zip(scores, rollouts, strict=True):
        rows = rows_of(rollout)
        for t in rollout.loss_mask.nonzero()[:, 0].tolist():
            if t + shift < len(rows):
                worst = max(
                    worst,
                    abs(
                        float(score.ref_logprobs[t]) - float(rows[t + shift, rollout.token_ids[t]])
                    ),
                )
    return worst


def test_a_score_is_conditioned_on_the_tokens_before_and_an_off_by_one_would_show(
    scorer, rollouts, models, plain_logprobs
):
    scores = scorer.score(rollouts, 0)

    def rows_of(rollout):
        return plain_logprobs(models.untied_model, rollout.token_ids)

    assert misalignment(scores, rollouts, rows_of) < 1e-4
    # the mutants: a scorer that looks one token too far, or one too few
    assert misalignment(scores, rollouts, rows_of, shift=1) > 1
    assert misalignment(scores, rollouts, rows_of, shift=-1) > 1


def test_a_score_does_not_change_with_the_tokens_that_follow(scorer, rollouts):
    whole = rollouts[2]
    n = int((~whole.loss_mask).sum())
    short = make_rollout(
        whole.token_ids[:n].tolist(), whole.completion_ids[:5], [0.0] * 5, "length", 0
    )
    a, b = scorer.score([whole, short], 4)
    torch.testing.assert_close(a.ref_logprobs[n : n + 5], b.ref_logprobs[n:], atol=1e-5, rtol=0)
    torch.testing.assert_close(
        a.teacher_logprobs[n : n + 5], b.teacher_logprobs[n:], atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("k", [1, 8, "full"])
def test_the_support_is_the_top_k_of_the_full_vocabulary_distribution(
    scorer, rollouts, models, plain_logprobs, k
):
    size = 131 if k == "full" else k
    for score, rollout in zip(scorer.score(rollouts, k), rollouts, strict=True):
        assert (
            score.token_ids.shape == score.teacher_logprobs.shape == (len(rollout.token_ids), size)
        )
        rows = plain_logprobs(models.untied_model, rollout.token_ids)
        for t, trained in enumerate(rollout.loss_mask.tolist()):
            if not trained:
                assert score.ref_logprobs[t].isnan() and score.token_ids[t].tolist() == [-1] * size
                continue
            ranked = sorted(rows[t].tolist(), reverse=True)[:size]
            torch.testing.assert_close(
                score.teacher_logprobs[t], torch.tensor(ranked), atol=1e-4, rtol=0
            )
            torch.testing.assert_close(
                rows[t][score.token_ids[t]], score.teacher_logprobs[t], atol=1e-4, rtol=0
            )
            assert len(set(score.token_ids[t].tolist())) == size
    if k == "full":
        torch.testing.assert_close(
            score.teacher_logprobs[rollout.loss_mask].exp().sum(-1), torch.ones(12)
        )


def test_the_same_tokens_with_a_longer_and_a_shorter_prompt_are_scored_side_by_side(
    scorer, rollouts
):
    tokens = rollouts[2].token_ids.tolist()
    cuts = (9, 3, 20)
    together = scorer.score(
        [make_rollout(tokens[:n], tokens[n:], [0.0] * (len(tokens) - n), "stop", 0) for n in cuts],
        4,
    )
    for n, score in zip(cuts, together, strict=True):
        torch.testing.assert_close(
            score.teacher_logprobs[n:], together[1].teacher_logprobs[n:], atol=1e-5, rtol=0
        )
        assert torch.equal(score.token_ids[n:], together[1].token_ids[n:])
        assert (score.teacher_logprobs[n:] < 0).all()


def test_nothing_to_score_is_no_score(scorer):
    assert scorer.score([], 4) == []


def test_no_support_is_a_support_of_width_zero(scorer, rollouts):
    assert [s.token_ids.shape for s in scorer.score(rollouts, 0)] == [
        (13, 0),
        (3, 0),
        (27, 0),
        (15, 0),
    ]


def test_another_prompt_in_front_of_the_same_tokens(scorer, rollouts, models, plain_logprobs):
    hints = [[50, 51, 52, 53, 54, 55], [60], [70, 71], [80, 81, 82]]
    for score, rollout, hint in zip(
        scorer.score(rollouts, 3, prompts=hints), rollouts, hints, strict=True
    ):
        rows = plain_logprobs(models.untied_model, hint + rollout.completion_ids)
        n = int((~rollout.loss_mask).sum())
        assert score.ref_logprobs.shape == rollout.token_ids.shape
        for i, token in enumerate(rollout.completion_ids):
            assert float(score.ref_logprobs[n + i]) == pytest.approx(
                float(rows[len(hint) + i, token]), abs=1e-4
            )
            torch.testing.assert_close(
                score.teacher_logprobs[n + i], rows[len(hint) + i].topk(3).values, atol=1e-4, rtol=0
            )


def test_given_candidates_are_scored_in_their_own_order(rollouts, models, plain_logprobs):
    scorer = TransformersScorer(models.untied_model)
    g = torch.Generator().manual_seed(0)
    candidates = [torch.randint(0, 131, (len(r.token_ids), 5), generator=g) for r in rollouts]
    for ids, rollout in zip(candidates, rollouts, strict=True):
        ids[~rollout.loss_mask] = -1
    for score, rollout, ids in zip(
        scorer.score(rollouts, 5, candidate_ids=candidates), rollouts, candidates, strict=True
    ):
        mask = rollout.loss_mask
        rows = plain_logprobs(models.untied_model, rollout.token_ids)
        assert torch.equal(score.token_ids, ids)
        expected = torch.stack([rows[t][ids[t]] for t in mask.nonzero()[:, 0].tolist()])
        torch.testing.assert_close(score.teacher_logprobs[mask], expected, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="widths other than 4"):
        scorer.score(rollouts, 4, candidate_ids=candidates)


def test_a_teacher_given_as_a_model_is_read_live(rollouts, tied_model, plain_logprobs):
    scorer = TransformersScorer(tied_model)
    with torch.no_grad():
        tied_model.get_input_embeddings().weight.mul_(0.7)
    score = scorer.score(rollouts[:1], 0)[0]
    rows = plain_logprobs(tied_model, rollouts[0].token_ids)
    assert float(score.ref_logprobs[5]) == pytest.approx(
        float(rows[5, rollouts[0].token_ids[5]]), abs=1e-4
    )


def test_new_weights_reach_the_scores(scorer, rollouts, models, plain_logprobs):
    import copy

    moved = copy.deepcopy(models.untied_model)
    with torch.no_grad():
        moved.lm_head.weight.mul_(0.5)
    scorer.update_weights(moved)
    score = scorer.score(rollouts[:1], 2)[0]
    scorer.update_weights(models.untied_model)
    rows = plain_logprobs(moved, rollouts[0].token_ids)
    torch.testing.assert_close(score.teacher_logprobs[6], rows[6].topk(2).values, atol=1e-4, rtol=0)


def test_scoring_in_small_blocks_gives_the_same_numbers(rollouts, models, monkeypatch):
    whole = TransformersScorer(models.untied_model).score(rollouts, 6)
    monkeypatch.setattr(transformers_backend, "LOGITS_BUDGET", 131 * 3)
    blocks = TransformersScorer(models.untied_model, batch_tokens=1).score(rollouts, 6)
    for a, b, rollout in zip(whole, blocks, rollouts, strict=True):
        torch.testing.assert_close(
            a.teacher_logprobs[rollout.loss_mask], b.teacher_logprobs[rollout.loss_mask]
        )
        assert torch.equal(a.token_ids, b.token_ids)


def test_batches_stay_within_the_token_budget():
    assert token_batches([5, 3, 9, 4, 30], budget=12) == [[1, 3], [0], [2], [4]]


def test_k_above_the_engines_limit_or_the_vocabulary_names_the_remedy(models, rollouts, scorer):
    with pytest.raises(
        ValueError, match="support_size is 132 and the teacher's vocabulary has 131"
    ):
        scorer.score(rollouts, 132)
    small = VLLMScorer(models.untied, max_model_len=64, max_logprobs=8)
    with pytest.raises(ValueError, match="answers at most 8; raise max_logprobs to 9"):
        small.score(rollouts, 9)
    small.close()


def test_a_rollout_that_cannot_be_scored_says_why(scorer, rollouts):
    with pytest.raises(ValueError, match="2 prompts for 4 rollouts"):
        scorer.score(rollouts, 0, prompts=[[1], [2]])
    with pytest.raises(ValueError, match="no prompt"):
        scorer.score(rollouts[:1], 0, prompts=[[]])
    with pytest.raises(ValueError, match="does not fit into max_model_len 320"):
        scorer.score([make_rollout([4], [5] * 320, [0.0] * 320, "length", 0)], 0)
    with pytest.raises(ValueError, match="no token in its loss_mask"):
        scorer.score([make_rollout([4], [], [], "length", 0)], 0)


def test_the_teacher_reads_everything_from_the_first_trained_token_on():
    rollout = make_rollout([1, 2, 3], [4, 5], [0.0, 0.0], "stop", 0)
    own, hinted = sequences_to_score([rollout])[0], sequences_to_score([rollout], [[7, 8]])[0]
    assert (own.token_ids, own.start, own.rollout_start) == ([1, 2, 3, 4, 5], 3, 3)
    assert (hinted.token_ids, hinted.start, hinted.rollout_start) == ([7, 8, 4, 5], 2, 3)
