"""Both scorers against the plain model, position by position."""

import copy

import pytest
import torch

from prime_composer.backends.alignment import make_rollout, sequences_to_score
from prime_composer.backends.hf_model import token_batches
from prime_composer.backends.protocols import Rollout, Sampler, SamplingParams, Scorer
from prime_composer.teachers import transformers as transformers_backend
from prime_composer.teachers.transformers import TransformersScorer
from prime_composer.teachers.vllm import VLLMScorer
from tests.tiny_qwen import VOCAB

UNTRAINED = Rollout(
    torch.tensor([4, 5]), torch.zeros(2, dtype=torch.bool), torch.full((2,), torch.nan), "stop", 0
)


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


def test_scorer_of_a_live_model_has_no_sampler(tied_model):
    assert TransformersScorer(tied_model).sampler is None


def test_score_is_conditioned_on_the_tokens_before(scorer, rollouts, models, plain_logprobs):
    scores = scorer.score(rollouts, 0)

    def rows_of(rollout):
        return plain_logprobs(models.untied_model, rollout.token_ids)

    assert misalignment(scores, rollouts, rows_of) < 1e-4
    # The mutants: a scorer that looks one token too far, or one too few.
    assert misalignment(scores, rollouts, rows_of, shift=1) > 1
    assert misalignment(scores, rollouts, rows_of, shift=-1) > 1


def test_score_does_not_depend_on_later_tokens(scorer, rollouts):
    whole = rollouts[2]
    short = make_rollout(
        whole.token_ids[: whole.start].tolist(), whole.completion_ids[:5], [0.0] * 5, "length", 0
    )
    a, b = scorer.score([whole, short], 4)
    assert len(b.ref_logprobs) == 5
    torch.testing.assert_close(a.ref_logprobs[:5], b.ref_logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(a.teacher_logprobs[:5], b.teacher_logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("k", [1, 8, "full"])
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


def test_k_zero_gives_a_support_of_width_zero(scorer, rollouts):
    shapes = [s.token_ids.shape for s in scorer.score(rollouts, 0)]
    assert shapes == [(9, 0), (1, 0), (20, 0), (12, 0)]


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


def test_candidate_ids_of_another_width_are_refused(rollouts, models):
    candidates = [torch.zeros(len(r.completion_ids), 5, dtype=torch.long) for r in rollouts]
    with pytest.raises(ValueError, match="widths other than 4"):
        TransformersScorer(models.untied_model).score(rollouts, 4, candidate_ids=candidates)


def test_teacher_given_as_a_model_is_read_live(rollouts, tied_model, plain_logprobs):
    scorer = TransformersScorer(tied_model)
    with torch.no_grad():
        tied_model.get_input_embeddings().weight.mul_(0.7)
    score = scorer.score(rollouts[:1], 0)[0]
    rows = plain_logprobs(tied_model, rollouts[0].token_ids)
    assert float(score.ref_logprobs[1]) == pytest.approx(
        float(rows[5, rollouts[0].token_ids[5]]), abs=1e-4
    )


def test_weights_loaded_through_the_sampler_reach_the_scores(
    scorer, rollouts, models, plain_logprobs
):
    """A scorer's sampler has the scorer's own weights, not a copy of them."""
    moved = copy.deepcopy(models.untied_model)
    with torch.no_grad():
        moved.lm_head.weight.mul_(0.5)
    scorer.sampler.update_weights(moved)
    score = scorer.score(rollouts[:1], 2)[0]
    scorer.sampler.update_weights(models.untied_model)
    rows = plain_logprobs(moved, rollouts[0].token_ids)
    torch.testing.assert_close(score.teacher_logprobs[2], rows[6].topk(2).values, atol=1e-4, rtol=0)


def test_scoring_in_small_blocks_gives_the_same_numbers(rollouts, models, monkeypatch):
    whole = TransformersScorer(models.untied_model).score(rollouts, 6)
    monkeypatch.setattr(transformers_backend, "LOGITS_BUDGET", VOCAB * 3)
    blocks = TransformersScorer(models.untied_model, batch_tokens=1).score(rollouts, 6)
    for a, b in zip(whole, blocks, strict=True):
        torch.testing.assert_close(a.teacher_logprobs, b.teacher_logprobs)
        assert torch.equal(a.token_ids, b.token_ids)


def test_token_batches_stay_within_the_budget():
    assert token_batches([5, 3, 9, 4, 30], budget=12) == [[1, 3], [0], [2], [4]]


def test_k_above_the_vocabulary_is_refused(rollouts, scorer):
    with pytest.raises(
        ValueError, match="support_size is 132 and the teacher's vocabulary has 131"
    ):
        scorer.score(rollouts, 132)


@pytest.mark.vllm
def test_k_above_the_engines_limit_names_the_remedy(models, rollouts):
    small = VLLMScorer(models.untied, max_model_len=64, max_logprobs=8)
    assert small.limits.max_logprobs == 8
    with pytest.raises(ValueError, match="answers at most 8; raise max_logprobs to 9"):
        small.score(rollouts, 9)
    small.close()


@pytest.mark.vllm
def test_head_dtype_override_gives_float32_logits(models, rollouts):
    """vLLM rounds a bfloat16 model's logits, unless the dtype of its head is float32."""
    (sequence,) = sequences_to_score(rollouts[:1])
    logits = {}
    for head_dtype in ("model", "float32"):
        overrides = {"logprobs_mode": "raw_logits", "hf_overrides": {"head_dtype": head_dtype}}
        teacher = VLLMScorer(
            models.untied,
            dtype="bfloat16",
            max_model_len=64,
            max_logprobs="full",
            engine_args=overrides,
        )
        engine = teacher.sampler
        request = engine._vllm.SamplingParams(
            max_tokens=1, prompt_logprobs=VOCAB, flat_logprobs=True, detokenize=False
        )
        (output,) = engine._run([sequence.token_ids], request)
        teacher.close()
        flat = output.prompt_logprobs  # row by row: the token itself, then the whole vocabulary
        ids = torch.tensor(flat.token_ids).view(-1, VOCAB + 1)[:, 1:]
        values = torch.tensor(flat.logprobs).view(-1, VOCAB + 1)[:, 1:]
        logits[head_dtype] = torch.empty(len(ids), VOCAB).scatter_(1, ids, values)
    rounded, exact = logits["model"], logits["float32"]
    assert torch.equal(rounded.bfloat16().float(), rounded)
    assert (exact.bfloat16().float() == exact).float().mean() < 0.01
    # Half a unit in the last place of 8 significant bits
    assert ((rounded - exact).abs() <= exact.abs() * 2**-8).all()


def test_rollout_that_cannot_be_scored_is_refused(scorer, rollouts):
    with pytest.raises(ValueError, match="2 prompts for 4 rollouts"):
        scorer.score(rollouts, 0, prompts=[[1], [2]])
    with pytest.raises(ValueError, match="no prompt"):
        scorer.score(rollouts[:1], 0, prompts=[[]])
    with pytest.raises(ValueError, match="does not fit into max_model_len 320"):
        scorer.score([make_rollout([4], [5] * 320, [0.0] * 320, "length", 0)], 0)
    with pytest.raises(ValueError, match="no token in its loss_mask"):
        scorer.score([UNTRAINED], 0)


def test_start_of_a_rollout_that_trains_nothing_is_its_end():
    assert UNTRAINED.start == 2 and UNTRAINED.completion_ids == []
