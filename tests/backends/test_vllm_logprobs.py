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

from prime_composer.backends.answers import InvalidAnswer  # noqa: E402
from prime_composer.backends.vllm_logprobs import read_answer, top_k_of  # noqa: E402
from prime_composer.contract import Scores  # noqa: E402

ROWS = [
    None,
    {
        "7": {"logprob": -3.0, "rank": 5},
        "1": {"logprob": -0.5, "rank": 1},
        "2": {"logprob": -2.0, "rank": 2},
    },
    {"1": {"logprob": -1.5, "rank": 2}, "9": {"logprob": -0.4, "rank": 1}},
]
TOKENS = [4, 7, 1]


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


def test_top_k_is_taken_by_rank_from_k_or_k_plus_one_entries():
    top = parse(TOKENS, answer(ROWS), 2)
    assert top.start == 1 and top.ref_logprobs.tolist() == [-3.0, -1.5]
    assert top.token_ids.tolist() == [[1, 2], [9, 1]]
    assert top.teacher_logprobs.ravel().tolist() == pytest.approx([-0.5, -2.0, -0.4, -1.5])


def test_k_zero_reads_the_own_tokens_only():
    own = [row and {str(token): row[str(token)]} for token, row in zip(TOKENS, ROWS, strict=True)]
    top = parse(TOKENS, answer(own), 0)
    assert top.ref_logprobs.tolist() == [-3.0, -1.5]
    assert top.token_ids.shape == top.teacher_logprobs.shape == (2, 0)


def test_rows_before_the_start_are_left_out():
    top = top_k_of(TOKENS, read_answer(answer(ROWS)), 2, start=2)
    assert top.start == 2 and top.ref_logprobs.tolist() == [-1.5]
    assert top.token_ids.tolist() == [[9, 1]]


def test_completions_answer_has_its_rows_in_the_choice():
    """``/v1/completions`` and ``/inference/v1/generate`` differ only in where the rows are."""
    content = json.dumps({"id": "r", "choices": [{"index": 0, "prompt_logprobs": ROWS}]}).encode()
    generated, completed = parse(TOKENS, answer(ROWS), 2), parse(TOKENS, content, 2)
    assert generated.ref_logprobs.tolist() == completed.ref_logprobs.tolist()
    assert generated.to_bytes() == completed.to_bytes()


@pytest.mark.parametrize(
    "tokens,rows,k,message",
    [
        (TOKENS, ROWS[:2], 2, "scored 2 tokens of 3"),
        ([4, 8, 1], ROWS, 2, "do not hold the token 8"),
        (TOKENS, ROWS, 3, "--max-logprobs 3"),
        (TOKENS, [None, None, ROWS[2]], 2, "left token 1 of 3 without a score"),
        (TOKENS, [None, {**ROWS[1], "3": ROWS[1]["1"]}, ROWS[2]], 2, "returned 4 .* position 1"),
        (TOKENS, [None, {i: ROWS[1][i] for i in "71"}, ROWS[2]], 2, "returned 2 .* own, of rank 5"),
        (
            TOKENS,
            [None, {**ROWS[1], "7": {"logprob": -1.9, "rank": 5}}, ROWS[2]],
            2,
            "id 7 at position 1 below the top 2, with log-prob -1.9, where at most -2 was",
        ),
    ],
)
def test_answer_that_does_not_fit_is_refused(tokens, rows, k, message):
    with pytest.raises(ValueError, match=message):
        parse(tokens, answer(rows), k)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>",
        b"[]",
        b'{"prompt_logprobs": [null, {"7": {"logprob": null, "rank": 1}}]}',
        b'{"prompt_logprobs": [[]]}',
        b'{"prompt_logprobs": [null, {"7": {"logprob": true, "rank": 1}}]}',
        b'{"prompt_logprobs": [null, {"7": {"logprob": "-1", "rank": 1}}]}',
        b'{"prompt_logprobs": [null, {"7": {"logprob": -1, "rank": 1.0}}]}',
        b'{"prompt_logprobs": [null, {"7.0": {"logprob": -1, "rank": 1}}]}',
        b'{"prompt_logprobs": [null, {"-7": {"logprob": -1, "rank": 1}}]}',
        b'{"prompt_logprobs": [null, {"4294967303": {"logprob": -1, "rank": 1}}]}',
        b'{"prompt_logprobs": [null, {"7": {"logprob": -1, "rank": 99999999999999999999}}]}',
        b'{"prompt_logprobs": [null, {"7": {"logprob": -1e999, "rank": 1}}]}',
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\xff\xfe{",
    ],
    ids=str,
)
def test_answer_of_another_kind_is_refused(content):
    """One sentence names the server, what was expected, and the first bytes of what came."""
    message = r"^The server at X answered something else than prompt_logprobs: .* begins with b"
    with pytest.raises(InvalidAnswer, match=message) as caught:
        read_answer(content, "The server at X")
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


def test_answer_without_scores_has_scored_nothing():
    for content in (b'{"choices": []}', b'{"choices": [{}]}', b'{"prompt_logprobs": null}'):
        with pytest.raises(ValueError, match="scored 0 tokens of 3"):
            parse(TOKENS, content, 2)


def test_infinity_of_pythons_json_is_read():
    never = {"logprob": -math.inf, "rank": 3}
    content = answer([None, {**ROWS[1], "7": never}, ROWS[2] | {"8": never}])
    assert b"-Infinity" in content
    top = parse(TOKENS, content, 3)
    assert top.ref_logprobs.tolist() == [-math.inf, -1.5]
    assert top.token_ids.tolist() == [[1, 2, 7], [9, 1, 8]]
    assert top.teacher_logprobs[:, 2].tolist() == [-math.inf] * 2


def test_own_token_that_ties_with_the_kth_stays_outside():
    """vLLM gives it the number of ids at least as probable as its rank: K + 1 or more."""
    row = {
        "8": {"logprob": -2.0, "rank": 4},
        "9": {"logprob": -0.5, "rank": 1},
        "3": {"logprob": -2.0, "rank": 2},
    }
    top = parse([4, 8], answer([None, row]), 2)
    assert top.ref_logprobs.tolist() == [-2.0]
    assert top.token_ids[0].tolist() == [9, 3] and top.teacher_logprobs[0].tolist() == [-0.5, -2.0]


def test_own_token_that_ties_inside_the_top_k_stays_inside():
    """In the top K, vLLM overwrites the own token's rank with its place there."""
    row = {"8": {"logprob": -2.0, "rank": 2}, "9": {"logprob": -0.5, "rank": 1}}
    top = parse([4, 8], answer([None, row]), 2)
    assert top.token_ids[0].tolist() == [9, 8] and top.teacher_logprobs[0].tolist() == [-0.5, -2.0]


def test_equal_ranks_fall_back_to_the_log_prob():
    """Other servers may give a tie one rank: the larger log-prob wins, then the earlier entry."""
    row = {
        "7": {"logprob": -2.0, "rank": 1},
        "8": {"logprob": -2.0, "rank": 1},
        "9": {"logprob": -0.5, "rank": 1},
    }
    top = parse([4, 8], answer([None, row]), 2)
    assert top.token_ids[0].tolist() == [9, 7] and top.teacher_logprobs[0].tolist() == [-0.5, -2.0]


# What float32 makes of a float64, and ties of both kinds
LOGPROBS = st.sampled_from([-0.5, -0.5, -1.25, -0.0, 0.0, -9999.0, -math.inf]) | st.floats(-40, 0)


@st.composite
def scored_sequences(draw):
    """Draw tokens, rows in every order with equal ranks and log-probs, and K.

    The own token is in or out of the top K. Ranks follow the log-probs.
    """
    k = draw(st.integers(1, 4))
    vocabulary = range(0, 150_000, 15_000)
    tokens, rows = [draw(st.sampled_from(vocabulary))], [None]
    for _ in range(draw(st.integers(0, 5))):
        ids = draw(st.permutations(vocabulary))[: draw(st.integers(k, k + 1))]
        tokens.append(draw(st.sampled_from(ids)))
        logprobs = sorted((draw(LOGPROBS) for _ in ids), reverse=True)
        ranks = sorted(draw(st.integers(1, place)) for place in range(1, len(ids) + 1))
        entries = draw(st.permutations(list(zip(ids, logprobs, ranks, strict=True))))
        rows.append({str(i): {"logprob": x, "rank": rank} for i, x, rank in entries})
    return tokens, rows, k


@settings(max_examples=300, deadline=None)
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
