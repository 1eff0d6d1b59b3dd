"""The reader of a vLLM server's ``prompt_logprobs``: a plain reader, ties, and vLLM's own rows."""

import copy
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from prime_composer.backends.vllm_logprobs import read_answer, top_k_of  # noqa: E402
from prime_composer.contract import Scores  # noqa: E402


def answer(rows):
    """Return an answer of ``/inference/v1/generate``, with fields that the reader skips."""
    decoded = [
        row and {token: {**entry, "decoded_token": ' a\u00e9"'} for token, entry in row.items()}
        for row in rows
    ]
    choice = {"index": 0, "token_ids": [5], "finish_reason": "length", "logprobs": None}
    return json.dumps(
        {
            "request_id": "r",
            "choices": [choice],
            "prompt_logprobs": decoded,
            "usage": {"prompt_tokens": 3},
        }
    ).encode()


def parse(token_ids, content, k):
    return top_k_of(token_ids, read_answer(content), k)


def plain_parse(token_ids, content, k):
    """Return what ``parse`` returns, written the plain way, entry by entry."""
    rows = json.loads(content)["prompt_logprobs"][1:]
    ids, logprobs = torch.zeros(len(rows), k).long(), torch.zeros(len(rows), k)
    values = torch.zeros(len(rows))
    for t, (token, row) in enumerate(zip(token_ids[1:], rows, strict=True)):
        values[t] = row[str(token)]["logprob"]
        best = sorted(row.items(), key=lambda item: (item[1]["rank"], -item[1]["logprob"]))[:k]
        for j, (candidate, entry) in enumerate(best):
            ids[t, j], logprobs[t, j] = int(candidate), entry["logprob"]
    return Scores(values, ids, logprobs, start=1)


# What float32 makes of a float64, and ties of both kinds
LOGPROBS = st.sampled_from([-0.5, -0.5, -1.25, -0.0, 0.0, -9999.0, -math.inf]) | st.floats(-40, 0)


@st.composite
def scored_sequences(draw):
    """Draw tokens, rows in every order with equal ranks and log-probs, and K.

    The own token is in or out of the top K. Ranks follow the log-probs.
    """
    k = draw(st.integers(0, 4))
    vocabulary = range(0, 150_000, 15_000)
    tokens, rows = [draw(st.sampled_from(vocabulary))], [None]
    for _ in range(draw(st.integers(0, 5))):
        ids = draw(st.permutations(vocabulary))[: draw(st.integers(max(k, 1), k + 1))]
        tokens.append(draw(st.sampled_from(ids)))
        logprobs = sorted((draw(LOGPROBS) for _ in ids), reverse=True)
        ranks = sorted(draw(st.integers(1, place)) for place in range(1, len(ids) + 1))
        entries = draw(st.permutations(list(zip(ids, logprobs, ranks, strict=True))))
        rows.append({str(i): {"logprob": x, "rank": rank} for i, x, rank in entries})
    return tokens, rows, k


@settings(max_examples=100, deadline=None)
@given(scored_sequences())
def test_every_bit_is_that_of_the_plain_parser(sequence):
    """Compare to the last bit, signs of zeros included."""
    tokens, rows, k = sequence
    fast, plain = parse(tokens, answer(rows), k), plain_parse(tokens, answer(rows), k)
    for name in ("ref_logprobs", "token_ids", "teacher_logprobs"):
        ours, theirs = getattr(fast, name), getattr(plain, name)
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert ours.numpy().tobytes() == theirs.numpy().tobytes()


@pytest.mark.vllm
def test_ranks_of_vllm_identify_the_top_k_in_a_tie(models, tmp_path):
    """A model with 13 copies of each row of its head ties 13 ids at every position.

    Each own token is one of the most probable 13, so that it ties with the K-th.
    """
    from prime_composer.backends.alignment import make_rollout
    from prime_composer.teachers.vllm import VLLMScorer

    model = copy.deepcopy(models.untied_model)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight[torch.arange(131) % 10])
    model.save_pretrained(tmp_path)
    tokens, copies = [5, 17], [3, 1, 12, 0, 7, 2, 11, 9, 4]
    for copy_index in copies:
        with torch.no_grad():
            best = int(model(input_ids=torch.tensor(tokens)[None]).logits[0, -1].argmax()) % 10
        tokens.append(best + 10 * copy_index)
    k, scorer = 4, VLLMScorer(tmp_path, max_model_len=64, max_logprobs=8)
    try:
        # vLLM's own rows, as its server writes them.
        request = scorer.sampler._vllm.SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=k, detokenize=False
        )
        (output,) = scorer.sampler._run([tokens], request)
        (score,) = scorer.score(
            [make_rollout(tokens[:2], tokens[2:], [0.0] * len(copies), "length", 0)], k
        )
    finally:
        scorer.close()
    rows = [
        row and {str(i): {"logprob": e.logprob, "rank": e.rank} for i, e in row.items()}
        for row in output.prompt_logprobs
    ]
    top = parse(tokens, answer(rows), k)
    outside = 0
    for t in range(2, len(tokens)):
        row, own = rows[t], str(tokens[t])
        listed = {i for i in row if i != own or len(row) == k}
        assert {str(i) for i in top.token_ids[t - 1].tolist()} == listed
        assert sorted(row[i]["rank"] for i in listed) == [1, 2, 3, 4]
        assert len({entry["logprob"] for entry in row.values()}) == 1  # the tie
        if len(row) == k + 1:
            outside += 1
            assert row[own]["rank"] == (13 if tokens[t] % 10 else 14)
    assert outside > 3
    # The engine in this process returns the own token in a column of its own. Which of the tied ids
    # are listed depends on the top-K algorithm; their log-probs do not, up to the rounding of
    # log_softmax and logsumexp in float32.
    assert (score.teacher_logprobs - top.teacher_logprobs[1:]).abs().max() < 2e-6
    assert (score.token_ids.numpy() % 10 == numpy.array(tokens[2:])[:, None] % 10).all()
    assert all(len(set(ids)) == k for ids in score.token_ids.tolist())
